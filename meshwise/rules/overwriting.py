"""Scatters that overwrite, with their updates sharded: the last update of a position wins.

Updates are numbered as one device takes them. Each device notes for every position of the operand
the number of its own last update; the largest over all devices is the one that counts. The device
that has it contributes what it wrote, the first device what was there and nobody wrote, and the
sum of these terms is the result.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from meshwise.ir.mesh import Axes
from meshwise.rules.identity import nothing_like
from meshwise.rules.positions import CLIP, FILL, IndexVectors, is_first_shard
from meshwise.rules.registry import Exchange, LocalContext, all_reduce_of


def joined_factors(context: LocalContext) -> list[int]:
    """The factors of a scatter's index vectors that are sharded and whose updates are joined."""
    return [
        f
        for dim in context.rule.operands[1][:-1]
        for f in dim
        if context.axes(f) and f in context.rule.reduction_of
    ]


def overwriting_exchanges(context: LocalContext, windows: Sequence[int]) -> list[Exchange]:
    """What it sends to find the last update of each position of the local operand."""
    axes = _joined_axes(context)
    if not axes:
        return []
    shape = _noted_shape(context, context.local_shape(0), windows)
    noted = math.prod(shape) * _number_dtype(context).itemsize
    return [all_reduce_of(noted, context.mesh.size(axes))]


def overwritten_terms(
    context: LocalContext,
    operand: Any,
    vectors: IndexVectors,
    updates: Any,
    windows: Sequence[int],
    numbers: Any,
) -> Any:
    """This device's term of the operand with the updates of all devices written.

    `numbers` are the scatter's dimension numbers, with `vectors` spread.
    """
    order, kept = _numbered(context, vectors)
    if context.params["mode"] is not CLIP:
        kept = lax.bitwise_and(kept, vectors.in_range())
    if vectors.factors:
        kept = lax.bitwise_and(kept, vectors.owned())
    indices = _indices(vectors, kept, operand.shape)
    changed = {"indices_are_sorted": False, "unique_indices": False, "mode": FILL}
    zeros = lax.full(operand.shape, 0, operand.dtype)
    (written,) = context.bind(zeros, indices, updates, dimension_numbers=numbers, **changed)

    order = lax.select(kept, order, lax.full_like(order, 0))
    once = {vectors.kept[d] for d in _dims_in_full(context, windows) if d in vectors.kept}
    shape = [1 if p in once else n for p, n in enumerate(updates.shape)]
    order = lax.broadcast_in_dim(order, shape, vectors.places)
    nobody = lax.full(_noted_shape(context, operand.shape, windows), 0, order.dtype)
    own = lax.scatter_max(nobody, indices, order, numbers, mode=FILL)
    last = lax.pmax(own, _joined_axes(context))

    def where(mask: Any, value: Any, other: Any) -> Any:
        mask = lax.broadcast_in_dim(mask, operand.shape, range(operand.ndim))
        return lax.select(mask, value, other)

    is_written = lax.gt(last, nobody)
    first = lax.broadcast(is_first_shard(context, joined_factors(context)), nobody.shape)
    stays = lax.bitwise_and(lax.bitwise_not(is_written), first)
    before = where(stays, operand, nothing_like(operand))
    return where(lax.bitwise_and(is_written, lax.eq(own, last)), written, before)


def _numbered(context: LocalContext, vectors: IndexVectors) -> tuple[Any, Any]:
    """The number of each index vector, from one on, and which of them are no padding."""
    sizes, local = context.global_shape(1)[:-1], vectors.indices.shape[:-1]
    order, inside = lax.full(local, 0, np.int32), lax.full(local, True)
    for d, (n, dim) in enumerate(zip(sizes, context.rule.operands[1][:-1], strict=True)):
        position = lax.broadcasted_iota(np.int32, local, d)
        if context.is_split(dim):
            position = lax.add(position, lax.broadcast(context.offset(dim[0]), local))
            inside = lax.bitwise_and(inside, lax.lt(position, lax.full_like(position, n)))
        order = lax.add(lax.mul(order, lax.full_like(order, n)), position)
    order = lax.add(order, lax.full_like(order, 1))
    if context.params["unique_indices"]:
        order = lax.full_like(order, 1, _number_dtype(context))
    return vectors.widened(order), vectors.widened(inside)


def _number_dtype(context: LocalContext) -> np.dtype:
    """Numbers of updates; where no position is met twice, only whether there is one."""
    return np.dtype(np.int8 if context.params["unique_indices"] else np.int32)


def _indices(vectors: IndexVectors, kept: Any, shape: Sequence[int]) -> Any:
    """Index vectors for the local operand, outside of it where they are not kept.

    A single one stays inside: of a scatter at one position XLA makes a slice and an update, and
    reads the wrong element where the position is outside (openxla/xla#49121).
    """
    last = len(vectors.sizes)
    columns = []
    for c, d in enumerate(vectors.dims):
        position = vectors.shifted(c)
        if math.prod(vectors.sizes) == 1:
            zero, most = position.dtype.type(0), position.dtype.type(shape[d] - 1)
            position = lax.clamp(zero, position, most) if c in vectors.factors else position
        else:
            position = lax.select(kept, position, lax.full_like(position, shape[d]))
        columns.append(lax.expand_dims(position, (last,)))
    return vectors.joined(columns)


def _joined_axes(context: LocalContext) -> Axes:
    return tuple(a for f in joined_factors(context) for a in context.axes(f))


def _dims_in_full(context: LocalContext, windows: Sequence[int]) -> list[int]:
    """The operand's dims that every update writes from end to end."""
    return [d for d, n in enumerate(context.global_shape(0)) if windows[d] == n]


def _noted_shape(
    context: LocalContext, local: Sequence[int], windows: Sequence[int]
) -> tuple[int, ...]:
    """The positions of the local operand that updates may write apart from each other."""
    full = _dims_in_full(context, windows)
    return tuple(1 if d in full else n for d, n in enumerate(local))
