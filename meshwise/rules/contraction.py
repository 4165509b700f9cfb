"""Matrix products: `dot_general` in all its forms, and its ragged cousin.

The terms of a product whose contracted dim is sharded have the result's dtype: a bfloat16 product
is rounded on each device before the terms are summed. Ask for float32 with
`preferred_element_type` where that matters, as one does on one device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise.ir.sharding import Reduction
from meshwise.rules.elementwise import keeps_sums
from meshwise.rules.factoring import Dim, Factoring, shapes
from meshwise.rules.identity import nothing_like
from meshwise.rules.positions import start_dtype
from meshwise.rules.registry import Application, LocalContext, OpRule, register


def sum_of(dtype: Any) -> Reduction:
    """How products are joined: booleans by `or`, numbers by `sum`."""
    return Reduction.OR if dtype == np.bool_ else Reduction.SUM


@register("dot_general")
def _dot_general_rule(application: Application) -> OpRule:
    (contract_l, contract_r), (batch_l, batch_r) = application.params["dimension_numbers"]
    left, right = shapes(application.operands)
    factoring = Factoring()
    reduction = sum_of(application.results[0].dtype)
    lhs: list[Dim] = [
        factoring.new(n, reduction if d in contract_l else None) for d, n in enumerate(left)
    ]
    paired = dict(zip((*contract_r, *batch_r), (*contract_l, *batch_l), strict=True))
    rhs = [lhs[paired[d]] if d in paired else factoring.new(n) for d, n in enumerate(right)]
    result = [lhs[d] for d in batch_l]
    result += [dim for d, dim in enumerate(lhs) if d not in batch_l and d not in contract_l]
    result += [dim for d, dim in enumerate(rhs) if d not in paired]
    contracted = math.prod(left[d] for d in contract_l)
    return OpRule(
        factoring.rule([lhs, rhs], [result]),
        linear=((0,), (1,)) if keeps_sums(application) else (),
        flops=2.0 * contracted * math.prod(application.results[0].shape),
    )


@register("scaled_dot")
def _scaled_dot_rule(application: Application) -> OpRule:
    """A product of operands whose contracted dims have one scale a block: blocks are summed."""
    (contract_l, contract_r), (batch_l, batch_r) = application.params["dimension_numbers"]
    left, right, left_scale, right_scale = shapes(application.operands)
    factoring = Factoring()
    lhs, rhs = factoring.dims(left), factoring.dims(right)
    lhs_scale, rhs_scale = list(lhs), list(rhs)
    for d, e in zip(batch_l, batch_r, strict=True):
        rhs[e] = rhs_scale[e] = lhs[d]
    for d, e in zip(contract_l, contract_r, strict=True):
        blocks = math.gcd(left_scale[d], right_scale[e])
        outer = factoring.new(blocks, Reduction.SUM)
        lhs[d] = rhs[e] = outer + factoring.new(left[d] // blocks, "whole")
        lhs_scale[d] = outer + factoring.new(left_scale[d] // blocks, "whole")
        rhs_scale[e] = outer + factoring.new(right_scale[e] // blocks, "whole")
    result = [lhs[d] for d in batch_l]
    result += [dim for d, dim in enumerate(lhs) if d not in (*batch_l, *contract_l)]
    result += [dim for d, dim in enumerate(rhs) if d not in (*batch_r, *contract_r)]
    contracted = math.prod(left[d] for d in contract_l)
    return OpRule(
        factoring.rule([lhs, rhs, lhs_scale, rhs_scale], [result]),
        linear=((0,), (1,)),
        flops=2.0 * contracted * math.prod(application.results[0].shape),
    )


@register("ragged_dot_general")
def _ragged_dot_general_rule(application: Application) -> OpRule:
    """As `dot_general`, with groups of rows: rows and groups may be sharded too.

    A device finds in the sizes of all groups which of its rows are in which of its groups. Where
    sizes differ along a batch, groups begin at other rows in each element of it.
    """
    numbers = application.params["ragged_dot_dimension_numbers"]
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    ragged, group_dims = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    left, right, sizes = shapes(application.operands)
    groups = sizes[len(sizes) - 1]
    factoring, reduction = Factoring(), sum_of(application.results[0].dtype)
    lhs = [factoring.new(n, reduction if d in contract_l else None) for d, n in enumerate(left)]
    paired = dict(zip((*contract_r, *batch_r), (*contract_l, *batch_l), strict=True))
    rhs = []
    for d, n in enumerate(right):
        kind = reduction if d in group_dims else None
        rhs.append(lhs[paired[d]] if d in paired else factoring.new(n, kind))
    result = [lhs[d] for d in batch_l]
    result += [dim for d, dim in enumerate(lhs) if d not in batch_l and d not in contract_l]
    result += [dim for d, dim in enumerate(rhs) if d not in paired and d not in group_dims]
    if set(ragged) & set(contract_l):  # a group of the contracted dim each: groups lead the result
        result.insert(0, factoring.new(groups))
    before = [lhs[d] for d in _dims_before(numbers, len(left))] if len(sizes) > 1 else []
    contracted = math.prod(left[d] for d in contract_l)
    return OpRule(
        factoring.rule([lhs, rhs, [*before, factoring.new(groups, "whole")]], [result]),
        linear=((0,), (1,)) if keeps_sums_of_two(application) else (),
        local=_ragged_dot_local,
        masked=(0, 1),
        flops=2.0 * contracted * math.prod(application.results[0].shape),
    )


def _dims_before(numbers: Any, rank: int) -> list[int]:
    """The dims of the left operand for each of whose elements groups may have sizes of their own.

    They are those of the batch, and those of the ragged dim's kind that stand before it.
    """
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    if ragged in batch:
        return list(batch[: batch.index(ragged)])
    free = [d for d in range(rank) if d not in batch and d not in contract]
    alike = list(contract) if ragged in contract else free
    return [*batch, *alike[: alike.index(ragged)]]


def keeps_sums_of_two(application: Application) -> bool:
    """Whether both factors of a ragged product are floats, so that sums may be taken later."""
    return all(issubdtype(o.dtype, np.inexact) for o in application.operands[:2])


def _ragged_dot_local(context: LocalContext, lhs: Any, rhs: Any, sizes: Any) -> list[Any]:
    numbers = context.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    rows, groups = context.rule.operands[0][ragged], _groups(context, numbers)
    sizes = lax.convert_element_type(sizes, start_dtype(sizes.dtype))  # differences have signs
    if rows and context.axes(rows[0]):
        sizes = _sizes_here(context, sizes, rows[0], lhs.shape[ragged])
    if not groups or not context.axes(groups[0]):
        return context.bind(lhs, rhs, sizes)
    sizes, first = _own_sizes(context, sizes, groups[0])
    before = _dims_before(numbers, lhs.ndim) if sizes.ndim > 1 else []
    lhs = _each(_rows_from, before, ragged, lhs, first)
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    if ragged in contract_l:
        paired = dict(zip((*contract_l, *batch_l), (*contract_r, *batch_r), strict=True))
        rhs = _each(_rows_from, [paired[d] for d in before], paired[ragged], rhs, first)
        return context.bind(lhs, rhs, sizes)
    (found,) = context.bind(lhs, rhs, sizes)
    count = lax.reduce_sum(sizes, (sizes.ndim - 1,))
    free = _order_of_dims(numbers, lhs.ndim)
    return [
        _each(_rows_back, [free.index(d) for d in before], free.index(ragged), found, first, count)
    ]


def _each(function: Callable[..., Any], dims: Sequence[int], dim: int, x: Any, *starts: Any) -> Any:
    """A function of rows along a dim, for each element of other dims, which has its own starts."""
    if not dims:
        return function(x, *starts, dim)
    first, *others = dims

    def inner(x: Any, *starts: Any) -> Any:
        rest = [d - (d > first) for d in others]
        return _each(function, rest, dim - (dim > first), x, *starts)

    return jax.vmap(inner, (first, *(0 for _ in starts)), first)(x, *starts)


def _groups(context: LocalContext, numbers: Any) -> Dim:
    """The factor of the groups that an operand or the result has, if any."""
    if numbers.rhs_group_dimensions:
        return context.rule.operands[1][numbers.rhs_group_dimensions[0]]
    (ragged,) = numbers.lhs_ragged_dimensions
    (contract, _), _ = numbers.dot_dimension_numbers
    return context.rule.results[0][0] if ragged in contract else ()


def _order_of_dims(numbers: Any, rank: int) -> list[int]:
    """The dims of the left operand in the order in which they stand in the result."""
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    return [*batch, *(d for d in range(rank) if d not in batch and d not in contract)]


def _sizes_here(context: LocalContext, sizes: Any, factor: int, local: int) -> Any:
    """How many of a device's rows are in each group."""
    ends = lax.cumsum(sizes, sizes.ndim - 1)
    offset = lax.convert_element_type(context.offset(factor), sizes.dtype)
    zero, rows = sizes.dtype.type(0), sizes.dtype.type(local)

    def here(position: Any) -> Any:
        return lax.clamp(zero, lax.sub(position, lax.broadcast(offset, position.shape)), rows)

    return lax.sub(here(ends), here(lax.sub(ends, sizes)))


def _own_sizes(context: LocalContext, sizes: Any, factor: int) -> tuple[Any, Any]:
    """The sizes of the groups that a device has, and at which row the first of them begins."""
    local, last = context.local_size(factor), sizes.ndim - 1
    missing = local * context.shards(factor) - sizes.shape[last]
    padded = lax.pad(sizes, sizes.dtype.type(0), [(0, 0, 0)] * last + [(0, missing, 0)])
    starts = lax.sub(lax.cumsum(padded, last), padded)
    place = [np.int32(0)] * last + [context.offset(factor)]

    def from_offset(x: Any, count: int) -> Any:
        return lax.dynamic_slice(x, place, (*x.shape[:last], count), allow_negative_indices=False)

    first = lax.squeeze(from_offset(starts, 1), (last,))
    return from_offset(padded, local), lax.convert_element_type(first, np.int32)


def _rows_from(x: Any, first: Any, dim: int) -> Any:
    """An array whose rows begin at another one, with zeros after the last."""
    return _slid(x, first, dim, (0, x.shape[dim], 0))


def _rows_back(x: Any, first: Any, count: Any, dim: int) -> Any:
    """Some rows moved to where the first of them belongs, and nothing in the other places."""
    moved = _slid(x, lax.sub(np.int32(x.shape[dim]), first), dim, (x.shape[dim], 0, 0))
    row = lax.sub(lax.broadcasted_iota(np.int32, x.shape, dim), lax.broadcast(first, x.shape))
    last = lax.sub(lax.convert_element_type(count, np.int32), np.int32(1))
    inside = lax.bitwise_and(
        lax.ge(row, lax.full_like(row, 0)), lax.le(row, lax.broadcast(last, x.shape))
    )
    return lax.select(inside, moved, nothing_like(moved))


def _slid(x: Any, start: Any, dim: int, around: tuple[int, int, int]) -> Any:
    # Sizes of groups may add up to more than there are rows.
    start = lax.clamp(np.int32(0), start, np.int32(x.shape[dim]))
    pads = [around if d == dim else (0, 0, 0) for d in range(x.ndim)]
    padded = lax.pad(x, lax.full((), 0, x.dtype), pads)
    starts = [start if d == dim else np.int32(0) for d in range(x.ndim)]
    return lax.dynamic_slice(padded, starts, x.shape, allow_negative_indices=False)
