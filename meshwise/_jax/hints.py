"""The hint primitive: what `mw.shard` binds."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from meshwise._jax.jaxprs import Primitive


hint_p = Primitive("hint")


hint_p.def_impl(lambda x, **params: x)


hint_p.def_abstract_eval(lambda x, **params: x)


_ad.deflinear2(hint_p, lambda ct, _, **params: (hint_p.bind(ct, **params),))


def _hint_batcher(
    axis_data: Any, values: Sequence[Any], dims: Sequence[int], *, sharding: Any, **rest: Any
) -> tuple[Any, int]:
    """A mapped dim is sharded over vmap's `spmd_axis_name`, or left open where it has none."""
    entry = axis_data.spmd_name or jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else sharding
    entries = list(spec) + [None] * (dims[0] - len(spec))
    entries.insert(dims[0], entry)
    batched = jax.sharding.PartitionSpec(*entries)
    if isinstance(sharding, jax.sharding.NamedSharding):
        batched = jax.sharding.NamedSharding(sharding.mesh, batched)
    return hint_p.bind(values[0], sharding=batched, **rest), dims[0]


_batching.fancy_primitive_batchers[hint_p] = _hint_batcher


def _hint_lowering(x: Any, *, sharding: Any, **_: Any) -> Any:
    """Outside meshwise a hint is a constraint where a mesh is known, and nothing elsewhere."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else sharding
    automatic = all(t == jax.sharding.AxisType.Auto for t in mesh.axis_types)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.lax.with_sharding_constraint(x, sharding)
    if mesh.empty or not automatic:
        return x
    return jax.lax.with_sharding_constraint(x, spec)


_mlir.register_lowering(hint_p, _mlir.lower_fun(_hint_lowering, multiple_results=False))
