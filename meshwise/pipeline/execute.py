"""The loop over the ticks of a schedule: the one program that every device runs.

In a tick a device passes at most one microbatch forward through a stage of its own, and one
backward; which ones, a `lax.switch` on the numbers of its column of the schedule's table decides.
Then one `ppermute` sends activations on to the next device, and one sends gradients back (one for
each dtype there is; both run in every tick, used or not). Ticks are trips of the loop: the
size of the program does not depend on the number of microbatches.

Devices differ in their stage, and so in the branch they take. Collectives inside of a branch are
over other axes than the pipeline's, along which all devices take the same branch; and none is a
permute, for which XLA on CPU lets all devices meet (`_jax/branches.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax.pipelines import same_place
from meshwise.ir.mesh import Axes, Mesh
from meshwise.pipeline.local import LocalStage, distinct
from meshwise.pipeline.packing import Buffers, Lengths, longest, sum_dtype, zeros
from meshwise.pipeline.schedules import Schedule
from meshwise.pipeline.table import NONE, Table, make_table
from meshwise.rules.registry import shard_index


@dataclass(frozen=True, eq=False)
class Loop:
    """The pipelined loop of some stages over some axes of a mesh.

    `axes` are those that the user's pipeline axis became, in the mesh's order. Over the axes
    `deferred` the loss and the gradients of all parameters are unreduced in the loop.
    """

    stages: Sequence[LocalStage]
    schedule: Schedule
    axes: Axes
    mesh: Mesh
    deferred: Axes = ()

    @cached_property
    def table(self) -> Table:
        """What each device does in each tick."""
        return make_table(self.schedule)

    @cached_property
    def activations(self) -> Lengths:
        """The buffer that carries what goes from stage to stage."""
        return longest(stage.leaving for stage in self.stages)

    @cached_property
    def gradients(self) -> Lengths:
        """The buffer that carries gradients back."""
        return longest(stage.leaving_gradients for stage in self.stages)

    @cached_property
    def rows(self) -> Lengths:
        """The buffer of one stage's parameters."""
        return longest(stage.row for stage in self.stages)

    @cached_property
    def sums(self) -> dict[str, str]:
        """The dtype in which the gradients of parameters of each dtype are added up."""
        return {dtype: sum_dtype(dtype) for dtype in self.rows}

    @property
    def device(self) -> Any:
        """Where this device is along the pipeline (int32 scalar)."""
        return shard_index(self.axes, self.mesh)

    def run(
        self, rows: Buffers, held: Sequence[Any], fed: Sequence[Any], unreduced: Axes = ()
    ) -> tuple[list[Any], Buffers]:
        """The mean over the microbatches of the loss function's results, and the gradients.

        `rows` are the parameters of the device's stages, `[V, length]` for each dtype, `held` what
        the function closes over, and `fed` the leaves of all microbatches, `[b, M, ...]`. The
        gradients are like `rows`, in the dtypes of `sums`; the results are the same along the
        pipeline. Over the axes `unreduced` both are left so.
        """
        chunks = self.schedule.chunks
        columns = {
            name: lax.dynamic_index_in_dim(jnp.asarray(x), self.device, 0, keepdims=False)
            for name, x in self._columns().items()
        }
        passes = _Passes(self, rows, held, fed, same_place())
        results = self.stages[-1].results
        start = (
            zeros(self.activations, (self.table.inputs,)),
            zeros(self.gradients, (self.table.gradients,)),
            {dtype: jnp.zeros((chunks, n), self.sums[dtype]) for dtype, n in self.rows.items()},
            [jnp.zeros(t.shape, sum_dtype(t.dtype)) for t in results],
        )
        (_, _, sums, totals), _ = lax.scan(passes.tick, start, columns)
        scale = 1 / self.schedule.microbatches
        over = tuple(a for a in self.deferred if a not in unreduced)
        totals = [_sum(x, (*self.axes, *over)) * scale for x in totals]
        gradients = {d: _sum(x, over) * scale for d, x in sums.items()}
        return [x.astype(t.dtype) for x, t in zip(totals, results, strict=True)], gradients

    def _columns(self) -> dict[str, np.ndarray]:
        """The table with branches and chunks for stages, and a slot to read in every tick."""
        found = {name: x.copy() for name, x in self.table.columns.items()}
        for name, branches in (("forward", self.forward_branches), ("backward", self.branches)):
            stages = found[name]
            found[f"{name}_chunk"] = np.maximum(stages, 0) // np.int32(self.schedule.devices)
            numbers = np.array([*branches, NONE], np.int32) + 1
            found[name] = numbers[stages]
        for name in ("input", "microbatch"):
            for way in ("forward", "backward"):
                found[f"{way}_{name}"] = np.maximum(found[f"{way}_{name}"], 0)
        found["gradient"] = np.maximum(found["gradient"], 0)
        return found

    @cached_property
    def distinct(self) -> list[LocalStage]:
        """The stages that run different code."""
        return distinct(self.stages)[0]

    @cached_property
    def branches(self) -> list[int]:
        """For each stage which of the distinct ones it is."""
        return distinct(self.stages)[1]

    @property
    def forward_branches(self) -> list[int]:
        """The same; the last stage does its forward along with its backward."""
        return [NONE if stage.is_last else n for stage, n in self._numbered()]

    def _numbered(self) -> Sequence[tuple[LocalStage, int]]:
        return list(zip(self.stages, self.branches, strict=True))


@dataclass(frozen=True, eq=False)
class _Passes:
    """One tick of a loop, with what does not change between ticks."""

    loop: Loop
    rows: Buffers
    held: Sequence[Any]
    fed: Sequence[Any]
    place: Callable[[], Any]

    def tick(self, carry: Any, at: dict[str, Any]) -> tuple[Any, None]:
        """Forward, backward, send, keep."""
        inputs, gradients, sums, totals = carry
        made = self._switch("forward", at, _slot(inputs, at["forward_input"]))
        saved = _slot(inputs, at["backward_input"]), _slot(gradients, at["gradient"])
        results, own, back = self._switch("backward", at, saved)
        with self.place():
            inputs = _keep(inputs, self._sent(made, 1), at["keep_input"])
            gradients = _keep(gradients, self._sent(back, -1), at["keep_gradient"])
        sums = {dtype: _add(sums[dtype], own[dtype], at["backward_chunk"]) for dtype in sums}
        totals = [total + x for total, x in zip(totals, results, strict=True)]
        return (inputs, gradients, sums, totals), None

    def _switch(self, way: str, at: dict[str, Any], given: Any) -> Any:
        """Nothing, or one of the stages, whichever this tick is for."""
        one = self._forward if way == "forward" else self._backward
        passed = [stage for stage in self.loop.distinct if way == "backward" or not stage.is_last]
        branches: list[Callable[..., Any]] = [_bound(one, stage) for stage in passed]
        if not branches:  # there is one stage alone
            return zeros(self.loop.activations)
        like = jax.eval_shape(branches[0], at, given)

        def nothing(*_: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        return lax.switch(at[way], [nothing, *branches], at, given)

    def _forward(self, stage: LocalStage, at: dict[str, Any], arrived: Buffers) -> Buffers:
        values = self._values(stage, at, "forward", arrived)
        assert stage.forward is not None, "the last stage has no forward of its own"
        made = _jax.jaxpr_as_fun(stage.forward)(*values)
        return stage.leaving.pack(made, self.loop.activations)

    def _backward(self, stage: LocalStage, at: dict[str, Any], given: Any) -> Any:
        """The function's results, gradients of the parameters, and gradients of what arrived."""
        arrived, gradients = given
        values = self._values(stage, at, "backward", arrived)
        values += stage.arriving_gradients.unpack(gradients)
        found = list(_jax.jaxpr_as_fun(stage.backward)(*values))
        types = [(t.shape, sum_dtype(t.dtype)) for t in self.loop.stages[-1].results]
        results = [jnp.zeros(*t) for t in types]
        if stage.is_last:
            results = [jnp.asarray(x, d) for x, (_, d) in zip(found, types, strict=False)]
            del found[: len(results)]
        count = len(stage.params)
        own = stage.row.pack(found[:count], self.loop.rows, self.loop.sums)
        back = stage.leaving_gradients.pack(found[count:], self.loop.gradients)
        return results, own, back

    def _values(
        self, stage: LocalStage, at: dict[str, Any], way: str, arrived: Buffers
    ) -> list[Any]:
        """What a stage takes: parameters, held values, a microbatch, what arrived."""
        microbatch = at[f"{way}_microbatch"]
        fed = [
            lax.dynamic_index_in_dim(self.fed[i], microbatch, 1, keepdims=False) for i in stage.fed
        ]
        held = [self.held[i] for i in stage.held]
        if self.loop.schedule.chunks > 1:
            params = stage.row.unpack(self.rows, at[f"{way}_chunk"])
        else:
            params = stage.row.unpack({d: lax.squeeze(x, (0,)) for d, x in self.rows.items()})
        return [*params, *held, *fed, *stage.arriving.unpack(arrived)]

    def _sent(self, buffers: Buffers, step: int) -> Buffers:
        """What the device before (after, for a step of -1) has sent."""
        count, ring = self.loop.schedule.devices, self.loop.schedule.chunks > 1
        pairs = [(i, (i + step) % count) for i in range(count)]
        pairs = [pair for pair in pairs if ring or pair[1] - pair[0] == step]
        if not pairs or not self.loop.axes:
            return buffers
        return {dtype: lax.ppermute(x, self.loop.axes, pairs) for dtype, x in buffers.items()}


def _sum(value: Any, axes: Axes) -> Any:
    return lax.psum(value, axes) if axes else value


def _bound(function: Callable[..., Any], stage: LocalStage) -> Callable[..., Any]:
    return lambda *args: function(stage, *args)


def _slot(buffers: Buffers, slot: Any) -> Buffers:
    """`[slots, length]` to `[length]`."""
    return {d: lax.dynamic_index_in_dim(x, slot, 0, keepdims=False) for d, x in buffers.items()}


def _keep(buffers: Buffers, arrived: Buffers, slot: Any) -> Buffers:
    """The buffers with what has arrived in a slot; unchanged where that is `NONE`."""

    def kept(buffer: Any, new: Any) -> Any:
        place = lax.max(slot, np.int32(0))
        old = lax.dynamic_index_in_dim(buffer, place, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(buffer, jnp.where(slot == NONE, old, new), place, 0)

    return {dtype: kept(buffers[dtype], arrived[dtype]) for dtype in buffers}


def _add(sums: Any, more: Any, row: Any) -> Any:
    """`[rows, length]` with `[length]` added to one row."""
    if sums.shape[0] == 1:
        return sums + more[None]
    return lax.dynamic_update_index_in_dim(
        sums, lax.dynamic_index_in_dim(sums, row, 0, keepdims=False) + more, row, 0
    )
