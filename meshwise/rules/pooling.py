"""Reductions over windows and their gradients: pooling.

A dim passes through where its windows hold one element each and nothing is left out or added. A
sharded one that is windowed is read with the rows that the windows of a shard need; what lies
outside is what the operator itself pads with.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from meshwise.ir.sharding import Reduction
from meshwise.rules.factoring import Dim, Factoring, Kind, shapes, total_size
from meshwise.rules.halo import Fetch, fetch_filled, shard_entry
from meshwise.rules.identity import reduction_identity
from meshwise.rules.initial import counting_once, may_count_again
from meshwise.rules.registry import (
    Application,
    Exchange,
    Exchanges,
    LocalContext,
    OpRule,
    register,
)
from meshwise.rules.window import (
    Reading,
    Window,
    all_exchanges,
    dilate,
    exchanges,
    laid_around,
    read_exchanges,
    read_rows,
)

Shape = tuple[int, ...]


def _windowed(
    factoring: Factoring,
    params: dict[str, Any],
    large: Shape,
    small: Shape,
    pads: bool = True,
    exchanges: bool = True,
) -> tuple[list[Dim], list[Dim]]:
    """Dims of the windowed tensor, and of that with an element a window.

    Where the operator has nothing to pad with (not `pads`), a padded dim is whole; where its local
    rule `exchanges` nothing, every windowed one is.
    """
    before: list[Dim] = []
    after: list[Dim] = []
    for d, (n, m) in enumerate(zip(large, small, strict=True)):
        window = (params["window_dimensions"][d], params["window_strides"][d])
        untouched = tuple(params["padding"][d]) == (0, 0)
        dilated = params.get("base_dilation", (1,) * len(large))[d] != 1
        trivial = window == (1, 1) and untouched and n == m
        fetched = exchanges and m > 0 and (pads or (untouched and not dilated))
        shared = trivial or fetched
        kind: Kind = None if trivial else "permute" if shared else "whole"
        before.append(factoring.new(n, kind))
        after.append(before[-1] if shared else factoring.new(m, kind))
    return before, after


def _window_flops(application: Application, tensor: Any) -> float:
    return float(math.prod(tensor.shape) * math.prod(application.params["window_dimensions"]))


def _readings(context: LocalContext) -> list[Reading]:
    """The sharded dims of the first operand that the result's shards read through windows."""
    params = context.params
    ones = (1,) * len(params["window_dimensions"])
    dilations = params.get("window_dilation", ones)
    found = []
    for d, dim in enumerate(context.rule.operands[0]):
        if not context.is_split(dim) or dim[0] not in context.rule.permuted:
            continue
        window = Window(
            params["window_strides"][d],
            -params["padding"][d][0],
            (params["window_dimensions"][d] - 1) * dilations[d] + 1,
            params.get("base_dilation", ones)[d],
        )
        size, rows = context.global_shape(0)[d], context.result_shape(0)[d]
        shards = context.shards(dim[0])
        border = context.border(d)
        found.append(Reading(d, context.axes(dim[0]), window, size, rows, shards, border))
    return found


def _read_exchanges(operands: int) -> Exchanges:
    """What reading the first operands sends."""

    def of(context: LocalContext) -> list[Exchange] | None:
        readings = _readings(context)
        return all_exchanges(
            read_exchanges(readings, context.local_shape(i), context.itemsize(i))
            for i in range(operands)
        )

    return of


def _read(context: LocalContext, operand: Any, fill: Any) -> tuple[Any, dict[str, Any]]:
    """An operand with the rows that windows need, and the parameters for it."""
    params = context.params
    padding = list(params["padding"])
    dilations = list(params.get("base_dilation", (1,) * operand.ndim))
    readings = _readings(context)
    for reading in readings:
        operand = read_rows(operand, reading, context.mesh, fill)
    operand, around = laid_around(context, operand, readings)
    for dim in around:
        padding[dim] = (0, 0)
    for reading in readings:
        operand = dilate(operand, reading, context.mesh, fill)
        padding[reading.dim], dilations[reading.dim] = (0, 0), 1
    changed: dict[str, Any] = {"padding": tuple(padding)}
    if "base_dilation" in params:
        changed["base_dilation"] = tuple(dilations)
    return operand, changed


_REDUCTIONS = {
    "reduce_window_sum": Reduction.SUM,
    "reduce_window_max": Reduction.MAX,
    "reduce_window_min": Reduction.MIN,
}


@register(*_REDUCTIONS)
def _reduce_window_rule(application: Application) -> OpRule:
    (operand,), (result,) = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    before, after = _windowed(factoring, application.params, operand, result)
    sums = application.eqn.primitive.name == "reduce_window_sum"
    return OpRule(
        factoring.rule([before], [after]),
        linear=((0,),) if sums else (),
        local=_reduce_window_local,
        exchanges=_read_exchanges(1),
        flops=_window_flops(application, application.results[0]),
    )


def _reduce_window_local(context: LocalContext, operand: Any) -> list[Any]:
    reduction = _REDUCTIONS[context.eqn.primitive.name]
    operand, changed = _read(context, operand, reduction_identity(reduction, operand.dtype))
    return context.bind(operand, **changed)


@register("reduce_window")
def _reduce_window_function_rule(application: Application) -> OpRule:
    """A reduction by a function: operands and then their initial values, which are scalars.

    What lies outside is padded with these, where they may count again. How often others count is
    the backend's affair.
    """
    count = len(application.operands) // 2
    again = may_count_again(application)
    factoring = Factoring()
    before, after = _windowed(
        factoring,
        application.params,
        application.operands[0].shape,
        application.results[0].shape,
        pads=again,
    )

    def local(context: LocalContext, *operands: Any) -> list[Any]:
        initial = operands[count:]
        read = [_read(context, x, fill) for x, fill in zip(operands[:count], initial, strict=True)]
        return context.bind(*(x for x, _ in read), *initial, **read[0][1])

    return OpRule(
        factoring.rule([before] * count + [[]] * count, [after] * count),
        local=local if again else counting_once(local),
        exchanges=_read_exchanges(count),
        flops=_window_flops(application, application.results[0]) * count,
    )


@register("select_and_gather_add")
def _select_and_gather_rule(application: Application) -> OpRule:
    """Of each window of the second operand, one position is selected in the first."""
    factoring = Factoring()
    before, after = _windowed(
        factoring,
        application.params,
        application.operands[0].shape,
        application.results[0].shape,
    )
    return OpRule(
        factoring.rule([before, before], [after]),
        linear=((0,),),
        local=_select_and_gather_local,
        exchanges=_read_exchanges(2),
        flops=_window_flops(application, application.results[0]),
    )


def _select_and_gather_local(context: LocalContext, tangents: Any, operand: Any) -> list[Any]:
    tangents, changed = _read(context, tangents, np.zeros((), tangents.dtype))
    operand, _ = _read(context, operand, _never_selected(context, operand.dtype))
    return context.bind(tangents, operand, **changed)


def _never_selected(context: LocalContext, dtype: Any) -> Any:
    largest = context.params["select_prim"].name == "ge"
    return reduction_identity(Reduction.MAX if largest else Reduction.MIN, dtype)


@register("select_and_scatter_add")
def _select_and_scatter_add_rule(application: Application) -> OpRule:
    """Of each window of the second operand, one position gets an element of the first added."""
    source, operand = shapes(application.operands)
    factoring = Factoring()
    large, small = _windowed(factoring, application.params, operand, source)
    return OpRule(
        factoring.rule([small, large], [large]),
        linear=((0,),),
        local=_select_and_scatter_add_local,
        exchanges=_scatter_exchanges,
        flops=_window_flops(application, application.operands[0]),
    )


class _Scatter:
    """A sharded dim whose shards add into their rows what the windows over them select.

    A shard needs every window that touches its rows, `windows` of them from number `firsts[r]`
    on, and all rows of those.
    """

    def __init__(self, context: LocalContext, d: int, shards: int) -> None:
        window, stride = (context.params[f"window_{k}"][d] for k in ("dimensions", "strides"))
        low = context.params["padding"][d][0]
        small, large = context.global_shape(0)[d], context.global_shape(1)[d]
        self.rows = -(-large // shards)
        # Windows that leave rows out between them: one more, so that what they cover has no holes.
        wider = max(stride - window, 0)
        starts = [shard * self.rows for shard in range(shards)]
        firsts = [-(-(start + low - window + 1 - wider) // stride) for start in starts]
        lasts = [(start + self.rows - 1 + low + wider) // stride for start in starts]
        self.windows = max(b - a for a, b in zip(firsts, lasts, strict=True)) + 1
        covered = [first * stride - low for first in firsts]
        self.skipped = tuple(a - b for a, b in zip(starts, covered, strict=True))
        length = (self.windows - 1) * stride + window
        self.source = Fetch(small, -(-small // shards), tuple(firsts), self.windows)
        self.operand = Fetch(large, self.rows, tuple(covered), length)


def _scatters(context: LocalContext) -> list[tuple[int, _Scatter]]:
    return [
        (d, _Scatter(context, d, context.shards(dim[0])))
        for d, dim in enumerate(context.rule.operands[1])
        if context.is_split(dim) and dim[0] in context.rule.permuted
    ]


def _scatter_exchanges(context: LocalContext) -> list[Exchange] | None:
    scatters = _scatters(context)
    fetches = [(d, s.source) for d, s in scatters], [(d, s.operand) for d, s in scatters]
    return all_exchanges(
        exchanges(own, context.local_shape(i), context.itemsize(i)) for i, own in enumerate(fetches)
    )


def _select_and_scatter_add_local(context: LocalContext, source: Any, operand: Any) -> list[Any]:
    scatters = _scatters(context)
    padding = list(context.params["padding"])
    worst, zero = _never_selected(context, operand.dtype), np.zeros((), source.dtype)
    for d, scatter in scatters:
        axes = context.operand_axes(1, d)
        source = _fetched(context, source, d, axes, scatter.source, zero)
        operand = _fetched(context, operand, d, axes, scatter.operand, worst)
        padding[d] = (0, 0)
    (result,) = context.bind(source, operand, padding=tuple(padding))
    for d, scatter in scatters:
        start = shard_entry(scatter.skipped, context.operand_axes(1, d), context.mesh)
        result = lax.dynamic_slice_in_dim(
            result, start, scatter.rows, d, allow_negative_indices=False
        )
    return [result]


def _fetched(
    context: LocalContext, x: Any, d: int, axes: Sequence[str], fetch: Fetch, fill: Any
) -> Any:
    return fetch_filled(x, d, tuple(axes), context.mesh, fetch, fetch.size, fill)


@register("select_and_scatter")
def _select_and_scatter_rule(application: Application) -> OpRule:
    """As above, with functions: operand, source and initial value. Windowed dims are whole."""
    factoring = Factoring()
    operand, source = shapes(application.operands[:2])
    large, small = _windowed(factoring, application.params, operand, source, exchanges=False)
    flops = total_size(application.operands) * math.prod(application.params["window_dimensions"])
    return OpRule(factoring.rule([large, small, []], [large]), flops=flops)
