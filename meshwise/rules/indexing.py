"""Gathers and dynamic slices: reading at positions that are data.

A dim that is read one position at a time may be sharded although every device may want any
position: each device reads what it owns and leaves nothing elsewhere, so the result is a sum of
which one term counts.
"""

from typing import Any

import numpy as np
from jax import lax
from jax.dtypes import extended
from jax.numpy import issubdtype

from meshwise.rules.contraction import sum_of
from meshwise.rules.factoring import Dim, Factoring, Kind
from meshwise.rules.identity import nothing_like
from meshwise.rules.positions import (
    IndexVectors,
    all_of,
    inside_starts,
    is_first_shard,
    local_start,
)
from meshwise.rules.registry import Application, LocalContext, OpRule, register

FILL = lax.GatherScatterMode.FILL_OR_DROP
CLIP = lax.GatherScatterMode.CLIP


def _picked(dtype: Any) -> Kind:
    """The kind of a dim of which single positions are read: a reduction, but keys do not add."""
    return "whole" if issubdtype(dtype, extended) else sum_of(dtype)


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
        single = size == 1 and d in numbers.start_index_map
        kind = None if size == n else _picked(operand.dtype) if single else "whole"
        dims.append(factoring.new(n, kind))
        if d not in numbers.collapsed_slice_dims:
            result[next(offsets)] = dims[-1] if size == n else factoring.new(size, "whole")
    return OpRule(
        factoring.rule([dims, at], [result]),
        linear=((0,),) if _fills_terms(application) else (),
        local=_gather_local,
        masked=(),
    )


def _fills_terms(application: Application) -> bool:
    """Whether what a gather fills in may be filled in each term of a sum: zero, or NaN."""
    if issubdtype(application.operands[0].dtype, extended):
        return False
    fill = application.params["fill_value"]
    return application.params["mode"] is not FILL or fill == 0 or bool(np.isnan(fill))


def _gather_local(context: LocalContext, operand: Any, indices: Any) -> list[Any]:
    params = context.params
    numbers, windows = params["dimension_numbers"], params["slice_sizes"]
    sizes = _local_sizes(context, operand, windows)
    vectors = IndexVectors(context, indices, numbers.start_index_map, windows)
    if not vectors.factors:
        return context.bind(operand, indices, slice_sizes=sizes)
    inside = vectors.local(lambda p, n: lax.clamp(p.dtype.type(0), p, p.dtype.type(n - 1)))
    (taken,) = context.bind(
        operand, inside, slice_sizes=sizes, mode=CLIP, fill_value=None, indices_are_sorted=False
    )
    places = [d for d in range(taken.ndim) if d not in numbers.offset_dims]

    def where(mask: Any, value: Any, other: Any) -> Any:
        return lax.select(lax.broadcast_in_dim(mask, taken.shape, places), value, other)

    nothing = nothing_like(taken)
    taken = where(vectors.owned(), taken, nothing)
    if params["mode"] is not FILL:
        return [taken]
    first = is_first_shard(context, list(vectors.factors.values()))
    filled = lax.select(
        lax.broadcast(first, taken.shape), lax.full_like(taken, params["fill_value"]), nothing
    )
    return [where(vectors.in_range(), taken, filled)]


def _local_sizes(context: LocalContext, operand: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Slice sizes for a local operand: its own where a dim is taken in full."""
    shape = context.global_shape(0)
    return tuple(
        local if size == n else size
        for local, n, size in zip(operand.shape, shape, sizes, strict=True)
    )


@register("dynamic_slice")
def _dynamic_slice_rule(application: Application) -> OpRule:
    """A dim taken in full passes through; one taken at a single position may be sharded."""
    operand = application.operands[0]
    starts: list[list[Dim]] = [[]] * (len(application.operands) - 1)
    factoring = Factoring()
    before: list[Dim] = []
    after: list[Dim] = []
    for n, size in zip(operand.shape, application.params["slice_sizes"], strict=True):
        kind = None if size == n else _picked(operand.dtype) if size == 1 else "whole"
        before.append(factoring.new(n, kind))
        after.append(before[-1] if size == n else factoring.new(size, "whole"))
    return OpRule(
        factoring.rule([before, *starts], [after]),
        linear=((0,),),
        local=_dynamic_slice_local,
        masked=(),
    )


def _dynamic_slice_local(context: LocalContext, operand: Any, *starts: Any) -> list[Any]:
    windows = context.params["slice_sizes"]
    sizes = _local_sizes(context, operand, windows)
    begins, owned = inside_starts(context, starts, windows), []
    for d, dim in enumerate(context.rule.operands[0]):
        if windows[d] == 1 and dim and context.axes(dim[0]):
            begins[d], here = local_start(context, dim[0], begins[d])
            owned.append(here)
    (taken,) = context.bind(operand, *begins, slice_sizes=sizes)
    if not owned:
        return [taken]
    mask = lax.broadcast(all_of(owned), taken.shape)
    return [lax.select(mask, taken, nothing_like(taken))]
