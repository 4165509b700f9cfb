"""Run the steps of a plan on the local array, inside a `shard_map` whose axes are all manual.

Every step is plain `lax` on the local array. A step over several dims goes through a leading dim:
the pieces are brought to the front, one collective exchanges them, and they are put back where
they belong. Axes in a collective's tuple are major to minor, as in a sharding.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import Reduction, local_shape
from meshwise.reshard.exchange import Parcel, apply_rounds
from meshwise.reshard.permute import permute_pairs
from meshwise.reshard.plan import Part, ReshardPlan, Step, StepKind
from meshwise.reshard.tiles import tiles_over
from meshwise.rules.halo import fetch_rows, realignment
from meshwise.rules.identity import nothing_like
from meshwise.rules.ordered import extreme_as_integers


def apply_steps(
    x: jax.Array, plan: ReshardPlan, mesh: Mesh, keeps_padding: bool = False
) -> jax.Array:  # fmt: skip
    """The local array under the target sharding, from the local array under the source's.

    The axes of the mesh must be bound (`shard_map`, or `vmap` with `axis_name`). Typed PRNG keys
    go through their key data, whose trailing dims belong to the element. Where it `keeps_padding`,
    what was gathered last is not copied to be cut, but has its padding behind it.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(x)
        data = apply_steps(jax.random.key_data(x), plan, mesh, keeps_padding)
        return jax.random.wrap_key_data(data, impl=impl)
    if 0 in plan.shape:
        rest = x.shape[len(plan.shape) :]
        return jnp.zeros(local_shape(plan.shape, plan.target, mesh) + rest, x.dtype)
    is_apart = plan.view != plan.shape
    element = x.shape[len(plan.shape) :]
    if is_apart:
        x = x.reshape((*plan.steps[0].source_shape, *element))
    for step in plan.steps:
        x = _EMIT[step.kind](x, step, plan, mesh)
        is_last = step is plan.steps[-1] and not is_apart
        x = x if keeps_padding and is_last and _is_as_gathered(step) else _cut(x, step)
    if is_apart:
        x = x.reshape((*local_shape(plan.shape, plan.target, mesh), *element))
    return x


def _slice(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    """Keep this device's part; of a dim that was whole perhaps with padding."""
    wanted = _whole_pieces(x, step, mesh)
    starts: list[Any] = [np.int32(0)] * x.ndim
    sizes = list(x.shape)
    for part in step.parts:
        dim = _gaining(part)
        sizes[dim] = step.target_shape[dim]
        starts[dim] = lax.axis_index(part.axes) * np.int32(sizes[dim])
    uneven = [dim for dim, size in enumerate(x.shape) if wanted[dim] != size]
    if uneven and all(sizes[dim] <= x.shape[dim] for dim in uneven):
        return _cut_to_the_end(x, starts, sizes, uneven)
    padded = _pad_gaining(x, step, mesh)
    return lax.dynamic_slice(padded, starts, sizes, allow_negative_indices=False)


def _cut_to_the_end(
    x: jax.Array, starts: Sequence[Any], sizes: Sequence[int], uneven: Sequence[int]
) -> jax.Array:
    """A slice that may reach, or begin, behind the end of some dims.

    There it is one that ends with the dim, with padding after what is wanted of it: only what is
    kept is padded, not all of the array.
    """
    last = [np.int32(size - own) for size, own in zip(x.shape, sizes, strict=True)]
    cut = [lax.min(at, last[d]) if d in uneven else at for d, at in enumerate(starts)]
    kept = lax.dynamic_slice(x, cut, sizes, allow_negative_indices=False)
    ends = [(0, own if d in uneven else 0, 0) for d, own in enumerate(sizes)]
    padded = lax.pad(kept, jnp.zeros((), x.dtype), ends)
    moved = [
        lax.min(starts[d] - cut[d], np.int32(own)) if d in uneven else np.int32(0)
        for d, own in enumerate(sizes)
    ]
    return lax.dynamic_slice(padded, moved, sizes, allow_negative_indices=False)


def _all_gather(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    if len(step.parts) == 1:
        x = _gather(x, step.axes, _losing(step.parts[0]))
    else:
        x = _merge_front(lax.all_gather(x, step.axes, axis=0, tiled=False), step, mesh)
    return x


def _gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """An all_gather of one dim; as of the leading one, which needs no copy after it, if it is."""
    before = x.shape[:dim]
    if not dim or math.prod(before) != 1:
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    x = lax.all_gather(x.reshape(x.shape[dim:]), axes, axis=0, tiled=True)
    return x.reshape((*before, *x.shape))


def _is_as_gathered(step: Step) -> bool:
    """Whether an all_gather makes what is wanted, and not a copy after it, which cuts as well."""
    if step.kind is StepKind.ALL_GATHER and len(step.parts) == 1:
        return math.prod(step.target_shape[: _losing(step.parts[0])]) == 1
    return False


def _all_to_all(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    x = _pad_gaining(x, step, mesh)
    if len(step.parts) == 1:
        return _exchange(x, step.parts[0], mesh)
    x = lax.all_to_all(_split_front(x, step, mesh), step.axes, 0, 0, tiled=True)
    return _merge_front(x, step, mesh)


def _exchange(x: jax.Array, part: Part, mesh: Mesh) -> jax.Array:
    """An all_to_all between two dims.

    Pieces of a later dim are put where they belong after it: then the compiler neither cuts
    columns out before it nor joins what came before the last turn.
    """
    gaining, losing = _gaining(part), _losing(part)
    if gaining < losing:
        return lax.all_to_all(x, part.axes, gaining, losing, tiled=True)
    group = mesh.size(part.axes)
    shape = (*x.shape[:gaining], group, x.shape[gaining] // group, *x.shape[gaining + 1 :])
    x = lax.all_to_all(x.reshape(shape), part.axes, gaining, gaining, tiled=True)
    order = [d for d in range(x.ndim) if d != gaining]
    order.insert(losing, gaining)
    merged = [n for d, n in enumerate(shape) if d != gaining]
    merged[losing] *= group
    return x.transpose(order).reshape(merged)


def _permute(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    axes = mesh.permute_order(step.axes)
    return lax.ppermute(x, axes, permute_pairs(step.source, step.target, axes, mesh))


def _rounds(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    ends = (step.source, step.source_shape), (step.target, step.target_shape)
    source, target = (tiles_over(step.axes, plan.view, block, s, mesh) for s, block in ends)
    return apply_rounds([Parcel(x, step.rounds, source, target)], step.axes, mesh)[0]


def _realign(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    dim = _losing(step.parts[0])
    axes = step.source.dims[dim]
    before, after = step.source_shape[dim], step.target_shape[dim]
    fetch = realignment(plan.view[dim], mesh.size(axes), before, after)
    return fetch_rows(x, dim, axes, mesh, fetch)


def _reduce_scatter(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    """A sum by `psum_scatter`; another operator by an exchange of pieces and a local reduction."""
    x = _pad_gaining(x, step, mesh)
    is_sum = _is_sum(x, plan.source.reduction)
    if is_sum and len(step.parts) == 1:
        dim = _gaining(step.parts[0])
        return lax.psum_scatter(x, step.axes, scatter_dimension=dim, tiled=True)
    x = _split_front(x, step, mesh)
    if is_sum:
        return lax.psum_scatter(x, step.axes, scatter_dimension=0, tiled=True)[0]
    x = lax.all_to_all(x, step.axes, 0, 0, tiled=True)
    return _LOCAL_REDUCE[plan.source.reduction](x)


def _all_reduce(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    return all_reduce(x, step.axes, plan.source.reduction)


def all_reduce(x: jax.Array, axes: Axes, reduction: Reduction) -> jax.Array:
    """Join the terms that devices hold along some axes; the same local array on all of them.

    Integers are joined bit by bit by AND and OR, for which there is no collective: their terms are
    gathered, as those of a product are.
    """
    is_bool = x.dtype == jnp.bool_
    if _is_sum(x, reduction):
        return lax.psum(x, axes)
    bitwise = reduction in (Reduction.AND, Reduction.OR) and not is_bool
    if reduction is Reduction.PROD or bitwise:
        return _LOCAL_REDUCE[reduction](lax.all_gather(x, axes, axis=0, tiled=False))
    is_least = reduction in (Reduction.MIN, Reduction.AND)
    reduce = lax.pmin if is_least else lax.pmax
    if is_bool:
        return reduce(x.astype(jnp.uint8), axes).astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.floating):
        extreme = Reduction.MIN if is_least else Reduction.MAX
        return extreme_as_integers(extreme, lambda ordered: reduce(ordered, axes), x)
    return reduce(x, axes)


def _is_sum(x: jax.Array, reduction: Reduction) -> bool:
    """Whether terms are added up; those of booleans never are, of which JAX makes a count."""
    is_sum = reduction is Reduction.SUM
    assert not is_sum or x.dtype != jnp.bool_, "booleans are joined by `or`"
    return is_sum


def _split_front(x: jax.Array, step: Step, mesh: Mesh) -> jax.Array:
    """Bring the pieces that leave to a leading dim, in the order of the step's axes."""
    shape: list[int] = []
    front: dict[Part, int] = {}
    kept: list[int] = []
    for dim, size in enumerate(x.shape):
        pieces = 1
        for part in step.parts:
            if part.to_dim == dim:
                front[part] = len(shape)
                shape.append(mesh.size(part.axes))
                pieces *= shape[-1]
        kept.append(len(shape))
        shape.append(size // pieces)
    order = [front[part] for part in step.parts] + kept
    group = mesh.size(step.axes)
    return x.reshape(shape).transpose(order).reshape((group, *(shape[i] for i in kept)))


def _merge_front(x: jax.Array, step: Step, mesh: Mesh) -> jax.Array:
    """Put received pieces, a leading dim in the order of the step's axes, into the losing dims."""
    sizes = [mesh.size(part.axes) for part in step.parts]
    local = x.shape[1:]
    x = x.reshape((*sizes, *local))
    order: list[int] = []
    shape: list[int] = []
    for dim, size in enumerate(local):
        parts = [i for i, part in enumerate(step.parts) if part.dim == dim]
        if parts:
            axes = step.source.dims[dim]
            parts.sort(key=lambda i: axes.index(step.parts[i].axes[0]))
        order += [*parts, len(sizes) + dim]
        shape.append(size * math.prod(sizes[i] for i in parts))
    return x.transpose(order).reshape(shape)


def _whole_pieces(x: jax.Array, step: Step, mesh: Mesh) -> dict[int, int]:
    """The size of each dim in whole pieces; only a dim that was whole can lack some."""
    wanted = dict(enumerate(x.shape))
    for dim in {_gaining(part) for part in step.parts}:
        wanted[dim] = step.target_shape[dim]
    for part in step.parts:
        wanted[_gaining(part)] *= mesh.size(part.axes)
    return wanted


def _pad_gaining(x: jax.Array, step: Step, mesh: Mesh) -> jax.Array:
    """Pad each dim that gains axes to whole pieces."""
    wanted = _whole_pieces(x, step, mesh)
    missing = [(0, wanted[dim] - size, 0) for dim, size in enumerate(x.shape)]
    if not any(high for _, high, _ in missing):
        return x
    gaining = {_gaining(part) for part in step.parts}
    padded = lax.pad(x, jnp.zeros((), x.dtype), missing)
    # XLA on CPU gives a piece that is nothing but padding another layout than the others have,
    # and then refuses its own all_to_all.
    hollow = any(missing[dim][1] >= step.target_shape[dim] for dim in gaining)
    return lax.optimization_barrier(padded) if hollow else padded


def _cut(x: jax.Array, step: Step) -> jax.Array:
    """Cut the padding of dims that have become whole."""
    sizes = (*step.target_shape, *x.shape[len(step.target_shape) :])
    return x if x.shape == sizes else lax.slice(x, [0] * x.ndim, sizes)


def _gaining(part: Part) -> int:
    assert part.to_dim is not None, part
    return part.to_dim


def _losing(part: Part) -> int:
    assert part.dim is not None, part
    return part.dim


def _term(x: jax.Array, step: Step, plan: ReshardPlan, mesh: Mesh) -> jax.Array:
    return as_term(x, step.axes)


def as_term(x: Any, axes: Axes) -> jax.Array:
    """A value as a sum over axes: one device's term is the value, the others' are nothing."""
    is_first = lax.eq(lax.axis_index(axes), np.int32(0))
    return jnp.where(is_first, x, nothing_like(jnp.asarray(x)))


_EMIT: Mapping[StepKind, Callable[[jax.Array, Step, ReshardPlan, Mesh], jax.Array]] = {
    StepKind.SLICE: _slice,
    StepKind.ALL_GATHER: _all_gather,
    StepKind.ALL_TO_ALL: _all_to_all,
    StepKind.PERMUTE: _permute,
    StepKind.ROUNDS: _rounds,
    StepKind.REALIGN: _realign,
    StepKind.REDUCE_SCATTER: _reduce_scatter,
    StepKind.ALL_REDUCE: _all_reduce,
    StepKind.TERM: _term,
}

_LOCAL_REDUCE: Mapping[Reduction, Callable[[jax.Array], jax.Array]] = {
    Reduction.MAX: lambda x: lax.reduce_max(x, (0,)),
    Reduction.MIN: lambda x: lax.reduce_min(x, (0,)),
    Reduction.PROD: lambda x: lax.reduce_prod(x, (0,)),
    Reduction.AND: lambda x: lax.reduce_and(x, (0,)),
    Reduction.OR: lambda x: lax.reduce_or(x, (0,)),
}
