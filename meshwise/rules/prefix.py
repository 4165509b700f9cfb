"""Running sums, products, maxima along a dim.

The dim may be sharded: each device runs along its own rows, the totals of all shards are
exchanged, and what comes before a shard is added to all of its elements (Blelloch 1990). An
element a shard and row is sent, not the rows.
"""

from typing import Any

import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise.ir.collectives import CollectiveKind
from meshwise.ir.program import type_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.factoring import Factoring, total_size
from meshwise.rules.identity import mask_padding, nothing_like, reduction_identity
from meshwise.rules.registry import (
    Application,
    Exchange,
    LocalContext,
    OpRule,
    register,
    shard_index,
)
from meshwise.rules.small_exchanges import (
    Sends,
    exchange,
    gather_together,
    own_part,
    pad_rows,
    row_count,
    rows_back,
    rows_last,
)

_COMBINE = {"cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min}
_REDUCE = {
    "cumsum": lax.reduce_sum,
    "cumprod": lax.reduce_prod,
    "cummax": lax.reduce_max,
    "cummin": lax.reduce_min,
}
_REDUCTIONS = {
    "cumprod": Reduction.PROD,
    "cummax": Reduction.MAX,
    "cummin": Reduction.MIN,
    "cumlogsumexp": Reduction.MAX,
}


@register(*_COMBINE, "cumlogsumexp")
def _cumulative_rule(application: Application) -> OpRule:
    name, axis = application.eqn.primitive.name, application.params["axis"]
    (operand,) = application.operands
    factoring = Factoring()
    # Complex numbers with a NaN in them have no order, so that their order of comparison counts.
    ordered = name in ("cummax", "cummin") and issubdtype(operand.dtype, np.complexfloating)
    along = "whole" if ordered else "permute"
    dims = [factoring.new(n, along if d == axis else None) for d, n in enumerate(operand.shape)]
    return OpRule(
        factoring.rule([dims], [dims]),
        linear=((0,),) if name == "cumsum" else (),
        local=_cumulative_local,
        exchanges=_cumulative_exchanges,
        flops=total_size(application.operands),
    )


def _factor(context: LocalContext) -> int | None:
    """The factor of the dim, if it is sharded."""
    dim = context.rule.operands[0][context.params["axis"]]
    return dim[0] if context.is_split(dim) else None


def _is_dealt(rows: int, shards: int, dtype: Any) -> bool:
    """Whether two all_to_alls of the totals cost less than an all_gather of them."""
    return _dealt(rows, shards, dtype).cost < _gathered(rows, shards, dtype).cost


def _gathered(rows: int, shards: int, dtype: Any) -> Sends:
    sends = Sends(shards)
    sends.add(CollectiveKind.ALL_GATHER, [dtype], rows)
    return sends


def _dealt(rows: int, shards: int, dtype: Any) -> Sends:
    sends = Sends(shards)
    sends.add(CollectiveKind.ALL_TO_ALL, [dtype], -(-rows // shards) * shards, times=2)
    return sends


def _cumulative_exchanges(context: LocalContext) -> list[Exchange]:
    factor, shape = _factor(context), context.local_shape(0)
    rows = row_count(shape, context.params["axis"])
    if factor is None or 0 in shape:
        return []
    shards, dtype = context.shards(factor), type_of(context.eqn.outvars[0]).dtype
    way = _dealt if _is_dealt(rows, shards, dtype) else _gathered
    return way(rows, shards, dtype).found


def _cumulative_local(context: LocalContext, operand: Any) -> list[Any]:
    factor = _factor(context)
    if factor is None or 0 in operand.shape:
        return context.bind(operand)
    axis, reverse = context.params["axis"], context.params["reverse"]
    if reverse:  # what lies behind the last row comes before it
        operand = mask_padding(context, operand, axis, factor, _identity(context, operand.dtype))
    (own,) = context.bind(operand)
    last = 0 if reverse else own.shape[axis] - 1
    total = rows_last(lax.slice_in_dim(own, last, last + 1, axis=axis), axis)
    carry = rows_back(_before(context, factor, total), axis, own.shape)
    carry = lax.broadcast_in_dim(carry, own.shape, range(own.ndim))
    combined = _combined(context, carry, own)
    has_carry = lax.broadcast(_has_carry(context, factor, reverse), own.shape)
    return [lax.select(has_carry, combined, own)]


def _combined(context: LocalContext, a: Any, b: Any) -> Any:
    combine = _COMBINE.get(context.eqn.primitive.name)
    if combine is not None:
        return combine(a, b)
    pair = lax.concatenate([lax.expand_dims(a, (0,)), lax.expand_dims(b, (0,))], 0)
    (running,) = context.bind(pair, axis=0, reverse=False)
    return lax.index_in_dim(running, 1, 0, keepdims=False)


def _identity(context: LocalContext, dtype: Any) -> Any:
    """What changes nothing that comes after it."""
    reduction = _REDUCTIONS.get(context.eqn.primitive.name)
    if reduction is None:
        return nothing_like(np.zeros((), dtype))
    identity = reduction_identity(reduction, dtype)
    if reduction is Reduction.PROD or not issubdtype(dtype, np.complexfloating):
        return identity
    if context.eqn.primitive.name in _COMBINE:
        return complex(identity.real, identity.real)  # extremes compare real parts and then others
    # Of complex exponents JAX subtracts the largest, and of infinities that is no number.
    return complex(np.finfo(dtype).min / 2, 0)


def _has_carry(context: LocalContext, factor: int, reverse: bool) -> Any:
    """Whether any row comes before this shard's, in the order of the operator."""
    index = shard_index(context.axes(factor), context.mesh)
    if not reverse:
        return lax.gt(index, np.int32(0))
    last = -(-context.rule.sizes[factor] // context.local_size(factor)) - 1
    return lax.lt(index, np.int32(last))


def _before(context: LocalContext, factor: int, total: Any) -> Any:
    """What the rows before this shard's come to, `[1, rows]`, from each shard's total."""
    axes, mesh = context.axes(factor), context.mesh
    rows, shards = total.shape[1], context.shards(factor)
    if not _is_dealt(rows, shards, total.dtype):
        (totals,) = gather_together([total], axes)
        reduce = _REDUCE.get(context.eqn.primitive.name)
        if reduce is not None:  # one kernel, where running totals of all shards are five
            return lax.expand_dims(reduce(_those_before(context, factor, totals), (0,)), (0,))
        return own_part(_exclusive(context, totals), axes, mesh, 1)
    padded = pad_rows(total, -(-rows // shards) * shards)
    totals = exchange(padded, axes, cut=1, join=0)
    carry = exchange(_exclusive(context, totals), axes, cut=0, join=1)
    return lax.slice_in_dim(carry, 0, rows, axis=1)


def _those_before(context: LocalContext, factor: int, totals: Any) -> Any:
    """The totals of the shards that come before this one, in the place of others nothing."""
    index = lax.broadcast(shard_index(context.axes(factor), context.mesh), totals.shape)
    shard = lax.broadcasted_iota(np.int32, totals.shape, 0)
    comes_before = lax.gt if context.params["reverse"] else lax.lt
    nothing = lax.full_like(totals, _identity(context, totals.dtype))
    return lax.select(comes_before(shard, index), totals, nothing)


def _exclusive(context: LocalContext, totals: Any) -> Any:
    """What comes before each of the shards; of the first, anything."""
    (running,) = context.bind(totals, axis=0)
    count = totals.shape[0]
    if context.params["reverse"]:
        parts = lax.slice_in_dim(running, 1, count), lax.slice_in_dim(running, 0, 1)
    else:
        parts = lax.slice_in_dim(running, count - 1, count), lax.slice_in_dim(running, 0, count - 1)
    return lax.concatenate(parts, 0)
