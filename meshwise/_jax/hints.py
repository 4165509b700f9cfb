"""The hint primitive: what `mw.shard` binds."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.named_sharding import DuplicateSpecError
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshwise._jax.jaxprs import Primitive
from meshwise.errors import MemoryLimitError, message

hint_p = Primitive("hint")


@hint_p.def_impl
def _hint_impl(x: Any, *, sharding: Any, reshards: bool = False, **_: Any) -> Any:
    """Outside a program a hint says nothing, and where a value is resharded JAX moves it."""
    if not reshards:
        return x
    if not isinstance(sharding, NamedSharding):
        lies = getattr(x, "sharding", None)
        if not isinstance(lies, NamedSharding):
            return x
        sharding = NamedSharding(lies.mesh, sharding)
    closed = [None if e is PartitionSpec.UNCONSTRAINED else e for e in sharding.spec]
    return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec(*closed)))


hint_p.def_abstract_eval(lambda x, **params: x)


_ad.deflinear2(hint_p, lambda ct, _, **params: (hint_p.bind(ct, **params),))


def batched_spec(spec: Any, dim: Any, axis_name: Any) -> Any:
    """A hint on a value that gained a dim: sharded over `axis_name`, open where there is none."""
    if spec is None or not isinstance(dim, int):
        return spec
    entries = list((spec.spec if isinstance(spec, NamedSharding) else spec).partitions)
    entries += [None] * (dim - len(entries))
    entries.insert(dim, axis_name or PartitionSpec.UNCONSTRAINED)
    batched = PartitionSpec(*entries)
    return on_mesh(batched, spec.mesh) if isinstance(spec, NamedSharding) else batched


def on_mesh(spec: PartitionSpec, mesh: Any) -> Any:
    """A hint that names its mesh, for where it may end up in a program for another one.

    A spec that does not fit the mesh stays as it is; that is found out with all other mistakes.
    """
    try:
        return NamedSharding(auto_twin(mesh), spec)
    except (ValueError, DuplicateSpecError):
        return spec


def auto_twin(mesh: Any) -> Any:
    """The same mesh with all axes Auto; over others a sharding cannot be open."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_types=auto)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)


def _hint_batcher(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int], *, sharding: Any, **rest: Any
) -> tuple[Any, int]:
    """A mapped dim is sharded over vmap's `spmd_axis_name`, or left open where it has none."""
    batched = batched_spec(sharding, dims[0], axis_data.spmd_name)
    return hint_p.bind(values[0], sharding=batched, **rest), dims[0]


_batching.fancy_primitive_batchers[hint_p] = _hint_batcher


def _hint_lowering(x: Any, *, sharding: Any, max_bytes: int | None = None, **_: Any) -> Any:
    """Outside meshwise a hint is a constraint where a mesh is known, and nothing elsewhere."""
    if max_bytes is not None:
        raise MemoryLimitError(
            message(
                f"mw.reshard to {sharding} in at most {max_bytes:,} bytes a device",
                ["it is in a function under jax.jit, where XLA moves the value"],
                "A bound on memory holds under mw.jit, and for arrays outside of functions.",
                "Use mw.jit, or leave max_bytes out.",
            )
        )
    mesh = jax.sharding.get_abstract_mesh()
    is_automatic = not mesh.empty and all(t == AxisType.Auto for t in mesh.axis_types)
    if isinstance(sharding, NamedSharding) or is_automatic:
        return jax.lax.with_sharding_constraint(x, sharding)
    return x


_mlir.register_lowering(hint_p, _mlir.lower_fun(_hint_lowering, multiple_results=False))
