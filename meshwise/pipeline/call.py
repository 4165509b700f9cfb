"""A pipelined loss and its gradients as one operator: what it computes, and its rule.

Its operands are the parameters, the values that the loss function closes over, and the
microbatches; its results the mean loss and the gradients of the parameters. Parameters are the
leaves of a tree, which each device has all of, or rows of which each device has its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr
from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.pipeline.execute import Loop, sum_dtype
from meshwise.pipeline.local import LocalStage, local_stage
from meshwise.pipeline.packing import Buffers, size_in_bytes
from meshwise.pipeline.parameters import Rows
from meshwise.pipeline.schedules import Schedule
from meshwise.pipeline.stages import Cut
from meshwise.rules.factoring import Dim, Factoring
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register


@dataclass(frozen=True, eq=False)
class PipelineCall:
    """What an equation of a pipeline computes, and in which stages.

    `loss` maps (parameter leaves, closed-over values, leaves of a microbatch) to the loss.
    """

    loss: ClosedJaxpr
    cut: Cut
    rows: Rows
    schedule: Schedule
    axis: str
    is_packed: bool
    held: int
    name: str

    @property
    def params(self) -> int:
        """How many operands are parameters: leaves, or rows by dtype."""
        return len(self.rows.lengths) if self.is_packed else len(self.rows.types)

    @cached_property
    def result_types(self) -> list[Any]:
        """Types of the loss and of the gradients, as of the loss function and of the parameters."""
        (loss,) = self.loss.out_avals
        types: list[Any] = list(self.rows.types)
        if self.is_packed:
            lead = self.rows.devices, self.schedule.chunks
            types = [jax.ShapeDtypeStruct((*lead, n), d) for d, n in self.rows.lengths.items()]
        return [_jax.array_type(jax.ShapeDtypeStruct(t.shape, t.dtype)) for t in (loss, *types)]

    @cached_property
    def stages(self) -> list[LocalStage]:
        """The stages, each computed whole by the devices that have it."""
        last = len(self.cut.stages) - 1
        return [local_stage(stage, k == last) for k, stage in enumerate(self.cut.stages)]

    def parted(self, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Operands as parameters, closed-over values, microbatches."""
        first, last = self.params, self.params + self.held
        return list(args[:first]), list(args[first:last]), list(args[last:])

    def reference(self, *args: Any) -> list[Any]:
        """The same on one device: one microbatch after the other through the whole model."""
        params, held, fed = self.parted(args)
        leaves = self.rows.unpack(self._buffers(params)) if self.is_packed else params
        loss = jax.value_and_grad(self._loss)

        def step(sums: Any, microbatch: Sequence[Any]) -> tuple[Any, None]:
            found = loss(leaves, held, microbatch)
            return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, found), None

        types = (self.result_types[0], list(self.rows.types))
        start = jax.tree.map(lambda t: jnp.zeros(t.shape, sum_dtype(t.dtype)), types)
        sums, _ = lax.scan(step, start, fed, length=self.schedule.microbatches)
        scale = 1 / self.schedule.microbatches
        mean = jax.tree.map(lambda total, t: (total * scale).astype(t.dtype), sums, types)
        value, gradients = mean
        return [value, *(self.rows.pack(gradients).values() if self.is_packed else gradients)]

    def _loss(self, leaves: Sequence[Any], held: Sequence[Any], fed: Sequence[Any]) -> Any:
        return _jax.jaxpr_as_fun(self.loss)(*leaves, *held, *fed)[0]

    def _buffers(self, params: Sequence[Any]) -> Buffers:
        return dict(zip(self.rows.lengths, params, strict=True))

    def loop(self, context: LocalContext) -> Loop:
        """The loop over the ticks on the mesh of a program."""
        axes = context.mesh.sub_axes[self.axis]
        return Loop(self.stages, self.schedule, axes, context.mesh)

    def local(self, context: LocalContext, *args: Any) -> list[Any]:
        """What a device computes."""
        loop = self.loop(context)
        params, held, fed = self.parted(args)
        if not self.is_packed:
            loss, sums = loop.run(self._own_rows(loop, params), held, fed)
            return [loss, *self.rows.unpack_sums(_gathered(loop, sums))]
        own = self._buffers(params)
        is_split = self._is_split(context)
        rows = {d: x[0] if is_split else _at(x, loop.device) for d, x in own.items()}
        loss, sums = loop.run(rows, held, fed)
        sums = self._with_ties(loop, sums)
        whole = {d: x[None] for d, x in sums.items()} if is_split else _gathered(loop, sums)
        return [loss, *whole.values()]

    def _own_rows(self, loop: Loop, leaves: Sequence[Any]) -> Buffers:
        """This device's rows of what all devices have."""
        packs = [lambda d=d: self.rows.pack_device(leaves, d) for d in range(self.rows.devices)]
        return lax.switch(loop.device, packs)

    def _with_ties(self, loop: Loop, sums: Buffers) -> Buffers:
        """Gradients of rows, where the leaves that several stages read have the sum of all."""
        if not self.rows.tied:
            return sums
        devices = range(self.rows.devices)
        parts = lax.switch(
            loop.device, [lambda d=d: self.rows.tied_parts(sums, d) for d in devices]
        )
        tied = [lax.psum(x, loop.axes) if loop.axes else x for x in parts]
        return lax.switch(
            loop.device, [lambda d=d: self.rows.with_tied(sums, tied, d) for d in devices]
        )

    def _is_split(self, context: LocalContext) -> bool:
        """Whether each device has its own rows alone."""
        if not self.is_packed or not self.params:
            return False
        return bool(context.operand_axes(0, 0)) or self.rows.devices == 1

    def exchanges(self, context: LocalContext) -> list[Exchange] | None:
        """What the loop sends, and what is sent once after it."""
        axes = context.mesh.sub_axes[self.axis]
        if any(own not in ((), axes) for own in context.strategy.axes):
            return None
        loop, ticks = self.loop(context), len(self.schedule.ticks)
        devices = self.schedule.devices
        if devices == 1:
            return []
        found = [
            Exchange(CollectiveKind.PERMUTE, ticks * size_in_bytes(lengths), ticks * len(lengths))
            for lengths in (loop.activations, loop.gradients)
        ]
        loss = float(jnp.dtype(sum_dtype(self.result_types[0].dtype)).itemsize)
        sums = [loss]
        if self.is_packed:
            tied = [self.rows.types[i] for i in self.rows.tied]
            sums += [float(t.size * t.dtype.itemsize) for t in tied]
        kind = CollectiveKind.ALL_REDUCE
        found += [Exchange(kind, wire_bytes(kind, n, n, devices)) for n in sums]
        if not self._is_split(context):
            own = size_in_bytes(loop.rows) * self.schedule.chunks
            kind = CollectiveKind.ALL_GATHER
            sent = wire_bytes(kind, own, own * devices, devices)
            found.append(Exchange(kind, sent, len(loop.rows)))
        return found


def _at(array: Any, device: Any) -> Any:
    return lax.dynamic_index_in_dim(array, device, 0, keepdims=False)


def _gathered(loop: Loop, buffers: Buffers) -> Buffers:
    """`[V, length]` of each device to `[S, V, length]`."""
    if not loop.axes:
        return {dtype: x[None] for dtype, x in buffers.items()}
    return {dtype: lax.all_gather(x, loop.axes) for dtype, x in buffers.items()}


@register("mw_pipeline")
def _pipeline_rule(application: Application) -> OpRule:
    """Everything whole, but rows: each device along the pipeline's axis has its own."""
    call: PipelineCall = application.params["call"]
    factoring = Factoring()
    devices = factoring.new(call.rows.devices, "permute")

    def dims(index: int, aval: Any) -> list[Dim]:
        if call.is_packed and index < call.params:
            return [devices, *factoring.dims(aval.shape[1:], "whole")]
        return factoring.dims(aval.shape, "whole")

    operands = [dims(i, aval) for i, aval in enumerate(application.operands)]
    results: list[list[Dim]] = [[], *operands[: call.params]]
    return OpRule(
        factoring.rule(operands, results), local=call.local, exchanges=call.exchanges, masked=()
    )
