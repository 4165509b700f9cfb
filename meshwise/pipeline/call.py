"""A pipelined loss and its gradients as one operator: what it computes, and how a device does.

Its operands are the parameters, the values that the loss function closes over, and the
microbatches; its results the mean loss and the gradients of the parameters. Parameters are the
leaves of a tree, which each device along the pipeline has all of, or rows of which each device has
its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr
from meshwise.ir.mesh import Axes, Mesh
from meshwise.pipeline.execute import Loop
from meshwise.pipeline.inner import Placement, partitioned_stage, stage_key, without_axis
from meshwise.pipeline.local import (
    Crossing,
    LocalStage,
    crossing_of_loss,
    crossings,
    local_stage,
    make_backward,
)
from meshwise.pipeline.packing import Buffers, cast, sum_dtype
from meshwise.pipeline.parameters import Packing, Rows
from meshwise.pipeline.schedules import Schedule
from meshwise.pipeline.stages import Cut
from meshwise.pipeline.tiles import Tiling
from meshwise.rules.registry import LocalContext, shard_index

Lead = tuple[str | None, ...]  # of each dim the axis of the mesh that it is, None for others


@dataclass(frozen=True, eq=False)
class PipelineCall:
    """What an equation of a pipeline computes, and in which stages.

    `loss` maps (parameter leaves, closed-over values, leaves of a microbatch) to the loss, and
    perhaps more values, of all of which the mean over the microbatches is taken.
    `placement` is how all lies over the other axes of the mesh; its axes are leading dims of the
    operands and results (see `tiles.py`).
    """

    loss: ClosedJaxpr
    cut: Cut
    packing: Packing
    placement: Placement
    schedule: Schedule
    axis: str
    is_packed: bool

    @property
    def rows(self) -> Rows:
        """How parameters lie in rows, of each device its part."""
        return self.packing.rows

    @property
    def means(self) -> int:
        """How many results are means: the loss, and whatever comes with it."""
        return len(self.loss.out_avals)

    @property
    def params(self) -> int:
        """How many operands are parameters: leaves, or rows by dtype."""
        return len(self.rows.lengths) if self.is_packed else len(self.rows.types)

    @cached_property
    def crossings(self) -> list[Crossing]:
        """For each stage what gradients cross its boundaries."""
        return crossings(self.cut.stages)

    @cached_property
    def fed(self) -> list[Tiling]:
        """How all microbatches together lie, `[b, M, ...]`: as one does, with a dim more."""
        count = self.schedule.microbatches
        return [
            replace(t, shape=(t.shape[0], count, *t.shape[1:]), dims=(t.dims[0], (), *t.dims[1:]))
            for t in self.placement.fed
        ]

    @cached_property
    def result_types(self) -> list[Any]:
        """Types of the means and of the gradients."""
        types: list[Any] = list(self.loss.out_avals)
        if self.is_packed:
            lead = self.rows.devices, self.schedule.chunks, *(n for _, n in self.packing.others)
            types += [jax.ShapeDtypeStruct((*lead, n), d) for d, n in self.rows.lengths.items()]
        else:
            types += [
                jax.ShapeDtypeStruct((*t.lead, *t.local.shape), t.dtype)
                for t in self.packing.tilings
            ]
        return [_jax.array_type(jax.ShapeDtypeStruct(t.shape, t.dtype)) for t in types]

    @cached_property
    def leads(self) -> list[Lead]:
        """For each operand which of its dims are axes of the mesh."""
        if self.is_packed:
            others = tuple(a for a, _ in self.packing.others)
            params: list[Lead] = [(self.axis, None, *others, None)] * self.params
        else:
            params = [(*t.axes, *[None] * len(t.shape)) for t in self.packing.tilings]
        held: list[Lead] = [
            (None,) * len(t.shape) for t in self.loss.in_avals[self.cut.params :][: self.cut.held]
        ]
        return [*params, *held, *((*t.axes, *[None] * len(t.shape)) for t in self.fed)]

    def operands(self, params: Sequence[Any], held: Sequence[Any], fed: Sequence[Any]) -> list[Any]:
        """The operands of the equation, of parameters, closed-over values and microbatches.

        Parameters are whole leaves, or rows; microbatches lie side by side, `[b, M, ...]`.
        """
        if not self.is_packed:
            params = [t.split(x) for t, x in zip(self.packing.tilings, params, strict=True)]
        return [*params, *held, *(t.split(x) for t, x in zip(self.fed, fed, strict=True))]

    def gradients(self, results: Sequence[Any]) -> list[Any]:
        """The gradients among the equation's results, like the parameters given."""
        found = list(results[self.means :])
        if self.is_packed:
            return found
        return [t.join(x) for t, x in zip(self.packing.tilings, found, strict=True)]

    def parted(self, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Operands as parameters, closed-over values, microbatches."""
        first, last = self.params, self.params + self.cut.held
        return list(args[:first]), list(args[first:last]), list(args[last:])

    def reference(self, *args: Any) -> list[Any]:
        """The same on one device: one microbatch after the other through the whole model."""
        params, held, split = self.parted(args)
        tilings = self.packing.tilings
        if self.is_packed:
            leaves = self.packing.unpack(dict(zip(self.rows.lengths, params, strict=True)))
        else:
            leaves = [t.join(x) for t, x in zip(tilings, params, strict=True)]
        whole = make_backward(self.loss, len(leaves), crossing_of_loss(self.loss, ()), is_last=True)
        run = _jax.jaxpr_as_fun(whole)

        def step(sums: list[Any], microbatch: Sequence[Any]) -> tuple[Any, None]:
            more = zip(sums, run(*leaves, *held, *microbatch), strict=True)
            return [total + jnp.asarray(x, total.dtype) for total, x in more], None

        count = self.schedule.microbatches
        types = [*self.result_types[: self.means], *tilings]
        start = [jnp.zeros(t.shape, sum_dtype(t.dtype)) for t in types]
        fed = [jnp.swapaxes(t.join(x), 0, 1) for t, x in zip(self.fed, split, strict=True)]
        sums, _ = lax.scan(step, start, fed, length=count)
        found = [(total / count).astype(t.dtype) for t, total in zip(types, sums, strict=True)]
        means, gradients = found[: self.means], found[self.means :]
        if self.is_packed:
            return [*means, *self.packing.pack(gradients).values()]
        return [*means, *(t.split(x) for t, x in zip(tilings, gradients, strict=True))]


def loop_of(call: PipelineCall, mesh: Mesh) -> Loop:
    """The loop over the ticks on a mesh."""
    deferred = mesh.refine(call.placement.deferred)
    return Loop(local_stages(call, mesh), call.schedule, mesh.sub_axes[call.axis], mesh, deferred)


@lru_cache(maxsize=16)
def local_stages(call: PipelineCall, mesh: Mesh) -> list[LocalStage]:
    """The stages as devices run them; equal ones are partitioned once."""
    stages, last = call.cut.stages, len(call.cut.stages) - 1
    if not call.placement.is_split:
        return [local_stage(stage, k == last, call.crossings[k]) for k, stage in enumerate(stages)]
    known: dict[Any, LocalStage] = {}
    found = []
    for k, stage in enumerate(stages):
        key = stage_key(call.cut, k, call.placement, call.crossings[k])
        if key not in known:
            others = without_axis(mesh, call.axis)
            known[key] = partitioned_stage(call.cut, k, call.placement, call.crossings[k], others)
        found.append(replace(known[key], params=stage.params))
    return found


def local(call: PipelineCall, context: LocalContext, *args: Any) -> list[Any]:
    """What a device computes."""
    own = [_own(x, lead, context) for x, lead in zip(args, call.leads, strict=True)]
    params, held, fed = call.parted(own)
    loop = loop_of(call, context.mesh)
    if not call.is_packed:
        rows = _switch(loop, lambda device: call.rows.pack_device(params, device))
        means, sums = loop.run(rows, held, fed)
        results = call.rows.unpack_sums(_gathered(loop, cast(sums)))
    else:
        rows = dict(zip(call.rows.lengths, params, strict=True))
        means, sums = loop.run(rows, held, fed, left_unreduced(context))
        results = list(cast(_with_ties(call.rows, loop, sums)).values())
    given = zip(results, call.leads, strict=False)
    return [*means, *(_given(x, lead, context, call) for x, lead in given)]


def _own(array: Any, lead: Lead, context: LocalContext) -> Any:
    """This device's part of an operand, of which it has some part along each axis."""
    for dim in reversed([d for d, axis in enumerate(lead) if axis is not None]):
        if array.shape[dim] == 1:
            array = lax.squeeze(array, (dim,))
        else:
            index = shard_index(context.mesh.sub_axes[str(lead[dim])], context.mesh)
            array = lax.dynamic_index_in_dim(array, index, dim, keepdims=False)
    return array


def _given(array: Any, lead: Lead, context: LocalContext, call: PipelineCall) -> Any:
    """The part of a result that this device is to have along each axis."""
    for dim in [d for d, axis in enumerate(lead) if axis is not None]:
        axes = context.mesh.sub_axes[str(lead[dim])]
        array = lax.expand_dims(array, (dim,))
        if axes and not is_sharded(str(lead[dim]), context, call):
            array = lax.all_gather(array, axes, axis=dim, tiled=True)
    return array


def is_sharded(axis: str, context: LocalContext, call: PipelineCall) -> bool:
    """Whether a strategy shards the dims that are an axis of the mesh."""
    for operand, lead in enumerate(call.leads):
        if axis in lead:
            return bool(context.operand_axes(operand, lead.index(axis)))
    return False


def left_unreduced(context: LocalContext) -> Axes:
    """Axes over which results are to be unreduced: those of the rule's sums."""
    factors = context.rule.reduction_of
    return tuple(a for factor in factors for a in context.axes(factor))


def _switch(loop: Loop, function: Callable[[int], Any]) -> Any:
    """A function of the number of this device along the pipeline."""
    return lax.switch(loop.device, [partial(function, d) for d in range(loop.schedule.devices)])


def _with_ties(rows: Rows, loop: Loop, sums: Buffers) -> Buffers:
    """Gradients of rows, where the leaves that several stages read have the sum of all."""
    if not rows.tied:
        return sums
    parts = _switch(loop, lambda device: rows.tied_parts(sums, device))
    tied = [lax.psum(x, loop.axes) if loop.axes else x for x in parts]
    return _switch(loop, lambda device: rows.with_tied(sums, tied, device))


def _gathered(loop: Loop, buffers: Buffers) -> Buffers:
    """`[V, length]` of each device to `[S, V, length]`."""
    if not loop.axes:
        return {dtype: x[None] for dtype, x in buffers.items()}
    return {dtype: lax.all_gather(x, loop.axes) for dtype, x in buffers.items()}
