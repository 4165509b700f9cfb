"""Gathers and dynamic slices: reading at positions that are data.

A dim of which positions or windows are read may be sharded although every device may want any of
them: each device reads what it owns and leaves nothing elsewhere, so the result is a sum of which
one term counts at each position.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.dtypes import extended
from jax.numpy import issubdtype

from meshwise.rules.factoring import Dim, Factoring
from meshwise.rules.identity import nothing_like
from meshwise.rules.picked import kind_of_picks
from meshwise.rules.positions import (
    CLIP,
    FILL,
    IndexVectors,
    all_of,
    dims_of_windows,
    inside_starts,
    is_first_shard,
    local_start,
    local_window,
)
from meshwise.rules.registry import Application, LocalContext, OpRule, register


@register("gather")
def _gather_rule(application: Application) -> OpRule:
    operand, indices = application.operands
    numbers = application.params["dimension_numbers"]
    sizes = application.params["slice_sizes"]
    factoring = Factoring()
    at = [*factoring.dims(indices.shape[:-1]), factoring.new(indices.shape[-1], "whole")]
    result: list[Dim] = [()] * len(application.results[0].shape)
    batch = [d for d in range(len(result)) if d not in numbers.offset_dims]
    for place, dim in zip(batch, at, strict=False):
        result[place] = dim
    paired = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    offsets = iter(numbers.offset_dims)
    dims: list[Dim] = []
    for d, (n, size) in enumerate(zip(operand.shape, sizes, strict=True)):
        if d in paired:
            dims.append(at[paired[d]])
            continue
        moves = d in numbers.start_index_map
        kind = None if size == n else kind_of_picks(operand.dtype) if moves else "whole"
        dims.append(factoring.new(n, kind))
        if d not in numbers.collapsed_slice_dims:
            result[next(offsets)] = dims[-1] if size == n else factoring.new(size, "whole")
    adds = not issubdtype(operand.dtype, extended)
    return OpRule(
        factoring.rule([dims, at], [result]),
        linear=((0,),) if adds else (),
        linear_in_local=adds and _fills_in(application.params),
        local=_gather_local,
        masked=(),
        moves=True,
    )


def _fills_in(params: dict[str, Any]) -> bool:
    """Whether a number is filled in that is another one when each of many devices adds it."""
    fill = params["fill_value"]
    return params["mode"] is FILL and fill != 0 and bool(np.isfinite(fill))


def _gather_local(context: LocalContext, operand: Any, indices: Any) -> list[Any]:
    params = context.params
    numbers, windows = params["dimension_numbers"], params["slice_sizes"]
    sizes = _local_sizes(context, operand, windows)
    rank = len(context.result_shape(0))
    single = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = dims_of_windows(operand.ndim, single, numbers.offset_dims)
    vectors = IndexVectors(context, indices, numbers.start_index_map, windows, kept, rank)
    fills = params["mode"] is FILL
    if not vectors.factors and not (fills and context.strategy.carried):
        return context.bind(operand, indices, slice_sizes=sizes)
    inside = vectors.local(lambda p, n: lax.clamp(p.dtype.type(0), p, p.dtype.type(n - 1)))
    (taken,) = context.bind(
        operand,
        inside,
        dimension_numbers=_spread_numbers(numbers, vectors),
        slice_sizes=tuple(1 if d in vectors.spread_dims else n for d, n in enumerate(sizes)),
        mode=CLIP,
        fill_value=None,
        indices_are_sorted=False,
    )

    def where(mask: Any, value: Any, other: Any) -> Any:
        return lax.select(lax.broadcast_in_dim(mask, taken.shape, vectors.places), value, other)

    nothing = nothing_like(taken)
    if vectors.factors:
        taken = where(vectors.owned(), taken, nothing)
    if not fills:
        return [taken]
    first = all_of(_are_first(context, vectors))
    filled = lax.select(
        lax.broadcast(first, taken.shape), lax.full_like(taken, params["fill_value"]), nothing
    )
    return [where(vectors.in_range(), taken, filled)]


def _are_first(context: LocalContext, vectors: IndexVectors) -> list[Any]:
    """Whether this device is the first along factors, and along axes whose terms it carries."""
    carried = context.strategy.carried
    found = [is_first_shard(context, list(vectors.factors.values()))] if vectors.factors else []
    return [*found, lax.eq(lax.axis_index(carried), np.int32(0))] if carried else found


def _spread_numbers(numbers: Any, vectors: IndexVectors) -> Any:
    """The dimension numbers of a gather some of whose windows are spread."""
    collapsed = sorted([*numbers.collapsed_slice_dims, *vectors.spread_dims])
    return numbers._replace(
        offset_dims=tuple(p for p in numbers.offset_dims if p not in vectors.places),
        collapsed_slice_dims=tuple(collapsed),
        start_indices_batching_dims=tuple(
            vectors.batch[d] for d in numbers.start_indices_batching_dims
        ),
    )


def _local_sizes(context: LocalContext, operand: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Slice sizes for a local operand: its own where a dim is taken in full."""
    shape = context.global_shape(0)
    return tuple(
        local if size == n else size
        for local, n, size in zip(operand.shape, shape, sizes, strict=True)
    )


@register("dynamic_slice")
def _dynamic_slice_rule(application: Application) -> OpRule:
    """A dim taken in full passes through; of another one, each device takes what it owns."""
    operand = application.operands[0]
    starts: list[list[Dim]] = [[]] * (len(application.operands) - 1)
    factoring = Factoring()
    before: list[Dim] = []
    after: list[Dim] = []
    for n, size in zip(operand.shape, application.params["slice_sizes"], strict=True):
        kind = None if size == n else kind_of_picks(operand.dtype)
        before.append(factoring.new(n, kind))
        after.append(before[-1] if size == n else factoring.new(size, "whole"))
    return OpRule(
        factoring.rule([before, *starts], [after]),
        linear=((0,),),
        local=_dynamic_slice_local,
        masked=(),
        moves=True,
    )


def _dynamic_slice_local(context: LocalContext, operand: Any, *starts: Any) -> list[Any]:
    windows = context.params["slice_sizes"]
    sizes = list(_local_sizes(context, operand, windows))
    begins = inside_starts(context, starts, windows)
    owned: list[Any] = []
    shifts: dict[int, Any] = {}
    for d, (dim, window) in enumerate(zip(context.rule.operands[0], windows, strict=True)):
        if not context.is_split(dim) or dim == context.rule.results[0][d]:
            continue
        if window == 1:
            begins[d], here = local_start(context, dim[0], begins[d])
            owned.append(here)
        else:
            begins[d], shifts[d] = local_window(context, dim[0], begins[d], window)
            sizes[d] = min(window, operand.shape[d])
    (taken,) = context.bind(operand, *begins, slice_sizes=tuple(sizes))
    if owned:
        mask = lax.broadcast(all_of(owned), taken.shape)
        taken = lax.select(mask, taken, nothing_like(taken))
    return [_shifted(taken, shifts, windows) if shifts else taken]


def _shifted(taken: Any, shifts: dict[int, Any], windows: Sequence[int]) -> Any:
    """Windows that begin some rows after those taken, or before; elsewhere nothing."""
    around, sizes = [(0, 0, 0)] * taken.ndim, list(taken.shape)
    begins: list[Any] = [np.int32(0)] * taken.ndim
    for d, shift in shifts.items():
        around[d], sizes[d] = (windows[d], windows[d], 0), windows[d]
        begins[d] = lax.convert_element_type(shift, np.int32) + np.int32(windows[d])
    padded = lax.pad(taken, nothing_like(lax.full((), 0, taken.dtype)), around)
    return lax.dynamic_slice(padded, begins, sizes, allow_negative_indices=False)
