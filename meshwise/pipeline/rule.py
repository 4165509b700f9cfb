"""The rule of a pipeline: its leading dims lie on the axes that they are, all others are whole.

In rows, gradients and loss are sums over the axes that cut the batch and no parameter: they are
left unreduced, so that the program around decides how they are summed.
"""

from functools import partial
from itertools import compress
from typing import Any

from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.ir.sharding import Reduction
from meshwise.pipeline.call import PipelineCall, is_sharded, left_unreduced, local
from meshwise.pipeline.packing import Layout, Lengths, longest, size_in_bytes, sum_dtype
from meshwise.rules.factoring import Dim, Factoring
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register

_FORWARDS = 4  # what a microbatch takes, in forwards: one, one again, and a backward of two


@register("mw_pipeline")
def _pipeline_rule(application: Application) -> OpRule:
    call: PipelineCall = application.params["call"]
    factoring = Factoring()
    # Terms are added up by the program around, in the dtype that they have.
    are_long = all(sum_dtype(d) == d for d in call.rows.lengths)
    summed = call.placement.deferred if call.is_packed and are_long else ()
    factors: dict[str, Dim] = {}

    def dims(lead: Any, shape: tuple[int, ...]) -> list[Dim]:
        found = []
        for axis, size in zip(lead, shape, strict=True):
            if axis is None:
                found.append(factoring.new(size, "whole"))
                continue
            if axis not in factors:
                kind = Reduction.SUM if axis in summed else "permute"
                factors[axis] = factoring.new(size, kind)
            found.append(factors[axis])
        return found

    shapes = [aval.shape for aval in application.operands]
    operands = [dims(lead, shape) for lead, shape in zip(call.leads, shapes, strict=True)]
    results = [aval.shape for aval in application.results]
    means = [factoring.dims(shape, "whole") for shape in results[: call.means]]
    gradients = [dims(*each) for each in zip(call.leads, results[call.means :], strict=False)]
    return OpRule(
        factoring.rule(operands, [*means, *gradients]),
        local=partial(local, call),
        exchanges=partial(_exchanges, call),
        masked=(),
        flops=_FORWARDS * call.placement.flops * call.schedule.microbatches,
    )


def _exchanges(call: PipelineCall, context: LocalContext) -> list[Exchange] | None:
    """What the loop sends along the pipeline, and what is sent once after it.

    What stages send over other axes is the same under every strategy, and left out.
    """
    mesh, devices = context.mesh, call.schedule.devices
    places = {context.rule.operands[i][d]: axis for i, d, axis in _leading(call)}
    for dim, axis in places.items():
        if dim and context.axes(dim[0]) not in ((), mesh.sub_axes[axis]):
            return None
    ticks, layouts = (
        len(call.schedule.ticks),
        [Layout(tuple(t.local for t in boundary)) for boundary in call.placement.boundaries],
    )
    floats = [
        Layout(tuple(compress(layout.types, crossing.leaving)))
        for layout, crossing in zip(layouts, call.crossings[:-1], strict=True)
    ]
    found = [
        Exchange(CollectiveKind.PERMUTE, ticks * size_in_bytes(lengths), ticks * len(lengths))
        for lengths in (longest(layouts), longest(floats))
        if devices > 1 and lengths
    ]
    row = size_in_bytes(call.rows.lengths) * call.schedule.chunks
    means = [_sum_bytes({t.dtype: t.size}) for t in call.result_types[: call.means]]
    tied = [call.rows.types[i] for i in call.rows.tied] if call.is_packed else []
    left = left_unreduced(context)
    over = mesh.size(a for a in mesh.refine(call.placement.deferred) if a not in left)
    sums = [(_sum_bytes(Layout((t,)).lengths), devices) for t in tied]
    sums += [(n, devices * over) for n in means]
    sums += [(_sum_bytes(call.rows.lengths) * call.schedule.chunks, over)]
    kind = CollectiveKind.ALL_REDUCE
    found += [Exchange(kind, wire_bytes(kind, n, n, group)) for n, group in sums if group > 1]
    gathers = [] if call.is_packed else [(row, devices)]
    for operand, lead in enumerate(call.leads[: call.params]):
        size, axes = _local_bytes(call, operand), [a for a in lead if a is not None]
        gathers += [
            (size, mesh.size(mesh.sub_axes[a])) for a in axes if not is_sharded(a, context, call)
        ]
    kind = CollectiveKind.ALL_GATHER
    found += [Exchange(kind, wire_bytes(kind, n, n * group, group)) for n, group in gathers]
    return found


def _sum_bytes(lengths: Lengths) -> float:
    """Bytes of buffers in the dtypes in which they are added up."""
    return float(sum(size_in_bytes({sum_dtype(d): n}) for d, n in lengths.items()))


def _leading(call: PipelineCall) -> list[tuple[int, int, str]]:
    """(operand, dim, axis) of all dims that are axes of the mesh."""
    leads = enumerate(call.leads)
    return [(i, d, axis) for i, lead in leads for d, axis in enumerate(lead) if axis is not None]


def _local_bytes(call: PipelineCall, operand: int) -> int:
    if not call.is_packed:
        return size_in_bytes(Layout((call.packing.tilings[operand].local,)).lengths)
    dtype, length = list(call.rows.lengths.items())[operand]
    return size_in_bytes({dtype: length}) * call.schedule.chunks
