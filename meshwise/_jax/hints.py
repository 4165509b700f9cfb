"""The hint primitive: what `mw.shard` binds."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_util as _ad_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.named_sharding import DuplicateSpecError
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from meshwise._jax.jaxprs import Primitive, Tracer
from meshwise.errors import MemoryLimitError, message

hint_p = Primitive("hint")


def def_eager_reshard(reshard: Callable[..., Any]) -> None:
    """What a reshard does outside of programs, for an array and a closed sharding on a mesh."""

    def impl(x: Any, *, sharding: Any, reshards: bool = False, **params: Any) -> Any:
        if not reshards:
            return x  # there a hint says nothing
        if not isinstance(sharding, NamedSharding):
            lies = getattr(x, "sharding", None)
            if not isinstance(lies, NamedSharding):
                return x
            sharding = NamedSharding(lies.mesh, sharding)
        closed = [None if e is PartitionSpec.UNCONSTRAINED else e for e in sharding.spec]
        return reshard(
            x, NamedSharding(sharding.mesh, PartitionSpec(*closed)), params.get("max_bytes")
        )

    hint_p.def_impl(impl)


hint_p.def_abstract_eval(lambda x, **params: x)


def _hint_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """A tangent lies as the value does, which nobody stated of it: it is `derived`.

    Of an array that is resharded outside of programs it knows where it came from.
    """
    (x,), (tangent,) = primals, tangents
    out = hint_p.bind(x, **params)
    if type(tangent) is _ad_util.Zero:
        return out, tangent
    lies = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if params.get("reshards") and isinstance(lies, NamedSharding):
        params = {**params, "back": lies}
    return out, hint_p.bind(tangent, **{**params, "derived": True})


def _hint_transpose(cotangent: Any, _: Any, *, back: Any = None, **params: Any) -> tuple[Any]:
    """A cotangent lies as the value does; where that came from a mesh, it goes back there."""
    if back is not None:
        params = {**params, "sharding": back, "back": params["sharding"]}
    return (hint_p.bind(cotangent, **{**params, "derived": True}),)


_ad.deflinear2(hint_p, _hint_transpose)
_ad.primitive_jvps[hint_p] = _hint_jvp


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
    """A mapped dim is sharded over vmap's `spmd_axis_name`, or left open where it has none.

    What was said of one of the batch is kept for messages, with its shape: `written`.
    """
    (x,), (dim,) = values, dims
    batched = batched_spec(sharding, dim, axis_data.spmd_name)
    if isinstance(dim, int) and sharding is not None:
        rest.setdefault("written", (None, sharding, (*x.shape[:dim], *x.shape[dim + 1 :])))
    return hint_p.bind(x, sharding=batched, **rest), dim


_batching.fancy_primitive_batchers[hint_p] = _hint_batcher


def _hint_lowering(x: Any, *, sharding: Any, max_bytes: int | None = None, **_: Any) -> Any:
    """Outside meshwise a hint is a constraint where a mesh is known, and nothing elsewhere.

    Nor where a type says how the value lies.
    """
    if max_bytes is not None:
        raise MemoryLimitError(
            message(
                f"mw.reshard to {sharding} in at most {max_bytes:,} bytes a device",
                ["it is in a function under jax.jit, where XLA moves the value"],
                "A bound on memory holds under mw.jit, and for arrays outside of functions.",
                "Use mw.jit, or leave max_bytes out.",
            )
        )
    if AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    is_automatic = not mesh.empty and all(t == AxisType.Auto for t in mesh.axis_types)
    if isinstance(sharding, NamedSharding) or is_automatic:
        return jax.lax.with_sharding_constraint(x, sharding)
    return x


_mlir.register_lowering(hint_p, _mlir.lower_fun(_hint_lowering, multiple_results=False))
