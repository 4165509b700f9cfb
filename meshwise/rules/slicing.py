"""Operators that pick rows or lay them side by side: slices, pads, joins, reversals.

A dim that is taken in full passes through. Of another one, the shards of the result read the rows
they need from the shards of the operand: the border. That is so where both sides are of like
size; where a few rows are taken of many, or added to many, their border would be all they are:

- of a slice that takes a few rows, the devices that hold some contribute them, and the result is
  unreduced;
- an operand with a few rows, to be padded or joined to many, is wanted whole, and each device
  takes from it what it needs.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from meshwise._jax import strides_of
from meshwise.ir.collectives import CollectiveKind
from meshwise.ir.mesh import Axes
from meshwise.rules.factoring import Dim, Factoring, Kind, shapes
from meshwise.rules.halo import Fetch, fetch_rows, take_rows, turn_blocks
from meshwise.rules.identity import nothing_like
from meshwise.rules.picked import kind_of_picks
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.window import Reading, Window, all_exchanges, dilate, exchanges, read_rows

# Up to this ratio of sizes the rows of two dims go from shard to shard.
MOST_RATIO = 4


def _reading(context: LocalContext, operand: int, dim: int, window: Window) -> Reading:
    """How the shards of the first result read a dim of an operand."""
    axes = context.operand_axes(operand, dim)
    size, rows = context.global_shape(operand)[dim], context.result_shape(0)[dim]
    return Reading(dim, axes, window, size, rows, context.mesh.size(axes))


def _is_fetched(context: LocalContext, operand: int, dim: int) -> bool:
    """Whether a dim of an operand is sharded and its rows go from shard to shard."""
    factors = context.rule.operands[operand][dim]
    return bool(factors) and factors[0] in context.rule.permuted and bool(context.axes(factors[0]))


@register("rev")
def _rev_rule(application: Application) -> OpRule:
    reversed_dims = application.params["dimensions"]
    factoring = Factoring()
    dims = [
        factoring.new(n, "permute" if d in reversed_dims else None)
        for d, n in enumerate(application.operands[0].shape)
    ]
    return OpRule(
        factoring.rule([dims], [dims]),
        linear=((0,),),
        local=_rev_local,
        exchanges=_rev_exchanges,
        turned=_turned_axes,
        moves=True,
    )


def _turned_axes(context: LocalContext) -> Axes:
    """The axes of dims whose blocks change places whole: device k's go to the k-th from behind."""
    return tuple(
        axis
        for d in context.params["dimensions"]
        if _is_fetched(context, 0, d) and not _is_uneven(context, d)
        for axis in context.operand_axes(0, d)
    )


def _is_uneven(context: LocalContext, dim: int) -> bool:
    return bool(context.global_shape(0)[dim] % context.mesh.size(context.operand_axes(0, dim)))


def _rev_fetches(context: LocalContext) -> list[tuple[int, Fetch]]:
    """For each uneven dim that is reversed, the rows that are a shard's when they are."""
    found = []
    for d in context.params["dimensions"]:
        if _is_fetched(context, 0, d) and _is_uneven(context, d):
            size, block = context.global_shape(0)[d], context.local_shape(0)[d]
            shards = context.mesh.size(context.operand_axes(0, d))
            starts = tuple(size - (shard + 1) * block for shard in range(shards))
            found.append((d, Fetch(size, block, starts, block)))
    return found


def _rev_exchanges(context: LocalContext) -> list[Exchange] | None:
    shape, itemsize = context.local_shape(0), context.itemsize(0)
    found = exchanges(_rev_fetches(context), shape, itemsize)
    if found is None or context.leaves_turned or not _turned_axes(context):
        return found
    return [Exchange(CollectiveKind.PERMUTE, math.prod(shape) * itemsize), *found]


def _rev_local(context: LocalContext, operand: Any) -> list[Any]:
    axes = _turned_axes(context)
    if axes and not context.leaves_turned:
        operand = turn_blocks(operand, axes, context.mesh)
    for d, fetch in _rev_fetches(context):
        operand = fetch_rows(operand, d, context.operand_axes(0, d), context.mesh, fetch)
    return context.bind(operand)


@register("slice")
def _slice_rule(application: Application) -> OpRule:
    operand, (result,) = application.operands[0], shapes(application.results)
    strides = strides_of(application)
    factoring = Factoring()
    before: list[Dim] = []
    after: list[Dim] = []
    for n, m, stride in zip(operand.shape, result, strides, strict=True):
        follows = 1 < m and m * stride * MOST_RATIO >= n
        kind: Kind = None if n == m else "permute" if follows else kind_of_picks(operand.dtype)
        before.append(factoring.new(n, kind))
        after.append(before[-1] if n == m or follows else factoring.new(m, "whole"))
    return OpRule(
        factoring.rule([before], [after]),
        linear=((0,),),
        local=_slice_local,
        exchanges=_slice_exchanges,
        masked=(),
        moves=True,
    )


def _slice_readings(context: LocalContext) -> list[Reading]:
    starts = context.params["start_indices"]
    strides = strides_of(context)
    return [
        _reading(context, 0, d, Window(strides[d], starts[d]))
        for d in range(len(starts))
        if _is_fetched(context, 0, d)
    ]


def _slice_exchanges(context: LocalContext) -> list[Exchange] | None:
    fetches = [(reading.dim, reading.fetch) for reading in _slice_readings(context)]
    return exchanges(fetches, context.local_shape(0), context.itemsize(0))


def _slice_local(context: LocalContext, operand: Any) -> list[Any]:
    """Rows that are fetched begin at the first; the rows that a device picks are its terms."""
    starts, limits = (list(context.params[k]) for k in ("start_indices", "limit_indices"))
    strides = list(strides_of(context))
    for reading in _slice_readings(context):
        operand = read_rows(operand, reading, context.mesh, None)
        starts[reading.dim], limits[reading.dim] = 0, reading.span
    for d, dim in enumerate(context.rule.operands[0]):
        if dim == context.rule.results[0][d]:
            starts[d] = 0 if context.is_split(dim) else starts[d]
            limits[d] = operand.shape[d] if context.is_split(dim) else limits[d]
        elif context.is_split(dim):
            operand = _picked_rows(context, operand, d, starts[d], strides[d])
            starts[d], limits[d], strides[d] = 0, operand.shape[d], 1
    stride = None if context.params["strides"] is None else tuple(strides)
    return context.bind(
        operand, start_indices=tuple(starts), limit_indices=tuple(limits), strides=stride
    )


def _picked_rows(context: LocalContext, x: Any, dim: int, start: int, stride: int) -> Any:
    """The rows of a slice that this device holds, and nothing in the place of the others."""
    factor = context.rule.operands[0][dim][0]
    rows = np.asarray(start + stride * np.arange(context.result_shape(0)[dim]), np.int32)
    places = lax.sub(rows, lax.broadcast(context.offset(factor), rows.shape))
    taken = take_rows(x, places, dim)
    places = lax.broadcast_in_dim(places, taken.shape, (dim,))
    after, before = lax.full_like(places, -1), lax.full_like(places, x.shape[dim])
    held = lax.bitwise_and(lax.gt(places, after), lax.lt(places, before))
    return lax.select(held, taken, nothing_like(taken))


@register("pad")
def _pad_rule(application: Application) -> OpRule:
    operand, result = application.operands[0].shape, application.results[0].shape
    config = application.params["padding_config"]
    factoring = Factoring()
    before: list[Dim] = []
    after: list[Dim] = []
    for n, m, amounts in zip(operand, result, config, strict=True):
        untouched, rows = tuple(amounts) == (0, 0, 0), n * (amounts[2] + 1)
        follows = untouched or (n > 1 < m and rows * MOST_RATIO >= m and m * MOST_RATIO >= rows)
        kind: Kind = None if untouched else "permute" if follows else "whole"
        before.append(factoring.new(n, kind))
        after.append(before[-1] if follows else factoring.new(m))
    linear = ((0, 1), (0,)) if application.is_zero(1) else ((0, 1),)
    return OpRule(
        factoring.rule([before, []], [after]),
        linear=linear,
        local=_pad_local,
        exchanges=_pad_exchanges,
    )


def _pad_window(amounts: Sequence[int]) -> Window:
    low, _, interior = amounts
    return Window(first=-low, dilation=interior + 1)


def _pad_readings(context: LocalContext) -> list[Reading]:
    return [
        _reading(context, 0, d, _pad_window(amounts))
        for d, amounts in enumerate(context.params["padding_config"])
        if _is_fetched(context, 0, d)
    ]


def _pad_exchanges(context: LocalContext) -> list[Exchange] | None:
    fetches = [(reading.dim, reading.fetch) for reading in _pad_readings(context)]
    return exchanges(fetches, context.local_shape(0), context.itemsize(0))


def _pad_local(context: LocalContext, operand: Any, value: Any) -> list[Any]:
    """Dims that are sharded on either side get their own part; the others are padded as usual."""
    config = [tuple(amounts) for amounts in context.params["padding_config"]]
    readings = _pad_readings(context)
    for reading in readings:
        operand = read_rows(operand, reading, context.mesh, value)
    for reading in readings:
        operand = dilate(operand, reading, context.mesh, value)
        config[reading.dim] = (0, 0, 0)
    for d, dim in enumerate(context.rule.results[0]):
        if context.is_split(dim) and dim != context.rule.operands[0][d]:
            operand = _own_rows(context, operand, d, _pad_window(config[d]), value)
            config[d] = (0, 0, 0)
    if not any(any(amounts) for amounts in config):
        return [operand]
    return context.bind(operand, value, padding_config=tuple(config))


def _own_rows(context: LocalContext, x: Any, dim: int, window: Window, fill: Any) -> Any:
    """Of a whole operand, the rows that this device's shard of the result has; else `fill`."""
    factor = context.rule.results[0][dim][0]
    local = context.local_result_shape(0)[dim]
    offset = lax.add(context.offset(factor), np.int32(window.first))
    dilated = lax.add(lax.iota(np.int32, local), lax.broadcast(offset, (local,)))
    step = lax.full_like(dilated, window.dilation)
    places = lax.div(dilated, step)
    zero = lax.full_like(dilated, 0)
    # A remainder has the sign of the dividend, so what lies before the first row has none of zero
    # or a row that is negative.
    inside = lax.bitwise_and(lax.ge(dilated, zero), lax.eq(lax.rem(dilated, step), zero))
    inside = lax.bitwise_and(inside, lax.lt(places, lax.full_like(places, x.shape[dim])))
    shape = (*x.shape[:dim], local, *x.shape[dim + 1 :])
    filled = lax.full(shape, fill, x.dtype)
    if not x.shape[dim]:
        return filled
    taken = take_rows(x, places, dim)
    return lax.select(lax.broadcast_in_dim(inside, taken.shape, (dim,)), taken, filled)


@register("concatenate")
def _concatenate_rule(application: Application) -> OpRule:
    joined = application.params["dimension"]
    operands, (result,) = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    shared = factoring.dims(operands[0])
    shared[joined] = factoring.new(result[joined], "permute")
    tensors = []
    for shape in operands:
        dims = list(shared)
        if shape[joined] * MOST_RATIO < result[joined] or shape[joined] == 1:
            dims[joined] = factoring.new(shape[joined], "whole")
        tensors.append(dims)
    return OpRule(
        factoring.rule(tensors, [shared]),
        linear=(tuple(range(len(operands))),),
        local=_concatenate_local,
        exchanges=_concatenate_exchanges,
        moves=True,
    )


def _parts(context: LocalContext) -> list[tuple[Window, Reading | None]]:
    """How the rows of each operand lie in the result, and how they are fetched if they are."""
    dim = context.params["dimension"]
    first = 0
    found = []
    for i in range(len(context.eqn.invars)):
        window = Window(first=-first)
        fetched = _is_fetched(context, i, dim)
        found.append((window, _reading(context, i, dim, window) if fetched else None))
        first += context.global_shape(i)[dim]
    return found


def _concatenate_exchanges(context: LocalContext) -> list[Exchange] | None:
    dim = context.params["dimension"]
    return all_exchanges(
        exchanges([(dim, reading.fetch)], context.local_shape(i), context.itemsize(i))
        for i, (_, reading) in enumerate(_parts(context))
        if reading is not None
    )


def _concatenate_local(context: LocalContext, *operands: Any) -> list[Any]:
    """Each operand's rows, where a device has any, in the place of those of the ones before."""
    dim = context.params["dimension"]
    factors = context.rule.results[0][dim]
    if not factors or not context.axes(factors[0]):
        return context.bind(*operands)
    local = context.local_result_shape(0)[dim]
    row = lax.add(lax.iota(np.int32, local), lax.broadcast(context.offset(factors[0]), (local,)))
    joined: Any = None
    for operand, (window, reading) in zip(operands, _parts(context), strict=True):
        if not operand.shape[dim]:
            continue
        if reading is not None:
            part = fetch_rows(operand, dim, reading.axes, context.mesh, reading.fetch)
        else:
            part = take_rows(operand, lax.add(row, lax.full_like(row, window.first)), dim)
        from_here = lax.ge(row, lax.full_like(row, -window.first))
        mask = lax.broadcast_in_dim(from_here, part.shape, (dim,))
        joined = part if joined is None else lax.select(mask, part, joined)
    return context.bind(*operands) if joined is None else [joined]  # of nothing, nothing


@register("split")
def _split_rule(application: Application) -> OpRule:
    axis = application.params["axis"]
    (operand,) = shapes(application.operands)
    factoring = Factoring()
    follow = all(n * MOST_RATIO >= operand[axis] for n in application.params["sizes"] if n > 1)
    kind: Kind = "permute" if follow and 1 not in application.params["sizes"] else "whole"
    dims = [factoring.new(n, kind if d == axis else None) for d, n in enumerate(operand)]
    results = []
    for shape in shapes(application.results):
        part = list(dims)
        part[axis] = dims[axis] if kind == "permute" else factoring.new(shape[axis], "whole")
        results.append(part)
    return OpRule(
        factoring.rule([dims], results),
        linear=((0,),),
        local=_split_local,
        exchanges=_split_exchanges,
        moves=True,
    )


def _split_fetches(context: LocalContext) -> list[Fetch]:
    """The rows of the operand that each result's shards are made of."""
    axis = context.params["axis"]
    size, axes = context.global_shape(0)[axis], context.operand_axes(0, axis)
    if not _is_fetched(context, 0, axis):
        return []
    found, first = [], 0
    for rows in context.params["sizes"]:
        window = Window(first=first)
        found.append(Reading(axis, axes, window, size, rows, context.mesh.size(axes)).fetch)
        first += rows
    return found


def _split_exchanges(context: LocalContext) -> list[Exchange] | None:
    axis = context.params["axis"]
    return all_exchanges(
        exchanges([(axis, fetch)], context.local_shape(0), context.itemsize(0))
        for fetch in _split_fetches(context)
    )


def _split_local(context: LocalContext, operand: Any) -> list[Any]:
    axis = context.params["axis"]
    fetches, axes = _split_fetches(context), context.operand_axes(0, axis)
    if not fetches:
        return context.bind(operand)
    return [fetch_rows(operand, axis, axes, context.mesh, fetch) for fetch in fetches]
