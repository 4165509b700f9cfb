"""`mw.plan`: shardings for arguments where nobody gives any.

The automatic planner: Alpa (arXiv 2201.12023, section 4) decides the same on a graph of costs.
Here hints are what is searched, by `planner/search.py`, and what each is worth the compiler says,
which completes, chooses and emits a program for it. Nothing is run.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwise import _jax
from meshwise.api.arguments import Arguments, take_apart
from meshwise.api.build import Resolved, TracedCall, donated_inputs, partition_call
from meshwise.api.calibrate import figures_of
from meshwise.api.jit import JitFunction
from meshwise.api.options import Options
from meshwise.api.plan_inputs import (
    as_jit,
    check_budget,
    check_call,
    check_trees,
    no_room,
    plan_limits,
)
from meshwise.api.spmd_program import SpmdProgram
from meshwise.api.states import kept_trees
from meshwise.api.typed import Placements, specs_of_types
from meshwise.choose.plan import Plan
from meshwise.cost.kernels import kernels_of
from meshwise.cost.memory import memory_of_kernels
from meshwise.cost.timeline import timeline_of_kernels
from meshwise.errors import MeshwiseError
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.sharding import DimAxes, Sharding
from meshwise.planner.groups import Group, groups_of
from meshwise.planner.next_values import next_values
from meshwise.planner.search import Layouts, Outcome, search
from meshwise.report.planned import planned_figures, planned_text
from meshwise.report.progress import Progress
from meshwise.run.placement import partition_spec
from meshwise.schedule.handles import next_values as named_alike

MOST_TRIED = 400


@dataclass(frozen=True, eq=False, repr=False)
class Planned:
    """What `mw.plan` found: a function under `mw.jit` with the shardings, and what it comes to.

    `in_shardings`, of arguments that are not static, and `out_shardings` are trees of
    `NamedSharding` as `mw.jit` and `jax.jit` take them; results that are left to completion, as
    those that nobody hinted and that are no next value of an argument, are None there. The
    `groups` of arguments lie as `best.layouts` say, None over parts of axes; `unplanned` are the
    figures without them, `tried` counts the plans that were compared.
    """

    function: JitFunction
    program: SpmdProgram
    in_shardings: Any
    out_shardings: Any
    groups: tuple[Group, ...]
    best: Outcome
    unplanned: Outcome
    tried: int

    def __repr__(self) -> str:
        """What it is of, and what a call takes; as text it says more."""
        return f"<Planned of {self.program.name}: {planned_figures(self.best)} on each device>"

    def __str__(self) -> str:
        """The shardings of the arguments that were planned, and the figures of a device."""
        name, paths = self.program.name, self.program.in_paths
        return planned_text(name, paths, self.groups, self.best, self.unplanned, self.tried)


@_jax.hides_frames
def plan(
    fun: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    max_bytes: int | None = None,
    most_tried: int = MOST_TRIED,
    budget_s: float | None = None,
    uneven: bool = False,
    progress: bool = False,
) -> Planned:
    """Shardings for the arguments of a function by which a call takes least time on a mesh.

    Args:
        fun: a function, or one under `mw.jit` where more is to be said: arguments and values that
            have a hint there keep it, and figures (`hardware=`), static and donated arguments are
            as given. Arguments that lie on the mesh already keep their sharding.
        args: the arguments, which may be `jax.ShapeDtypeStruct`s.
        mesh: `jax.sharding.Mesh` or `AbstractMesh`, of a function that is not under `mw.jit`.
        max_bytes: the most that a device may hold at once, arguments included. Without it a tenth
            more time is worth a third less memory.
        most_tried: so many plans are compared at most.
        budget_s: the search of one process ends after so many seconds, with the best found.
        uneven: also cut dims that no axis divides, where every device has some rows. What lies so
            comes back as `mw.UnevenArray`, and no sharding of `jax.jit` says it.
        progress: show how many were, and each that is better than those before.

    A result that is an argument's next value, as the state of a training step is, is laid as that,
    or left to completion as that: one of its type that it meets element by element, or that trees,
    names or a type of which there is one alone suggest. Give `out_shardings` for one that is not.
    The time is predicted of what is emitted, without overlap. Arguments go by position.

    Raises MemoryLimitError where nothing within `max_bytes` is found, else what `mw.jit` raises.

    >>> from jax.sharding import AbstractMesh
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    >>> mesh = AbstractMesh((8,), ("devices",))
    >>> found = plan(lambda x, w: jax.numpy.tanh(x @ w), f32(4096, 64), f32(64, 64), mesh=mesh)
    >>> found.best.layouts
    ((('devices',), ()), ((), ()))
    """
    most_bytes, until = plan_limits(max_bytes, most_tried, budget_s, uneven=uneven)
    function = as_jit(fun, mesh)
    check_call(function.name, function.options, take_apart(function.options, args, {}))
    arguments, resolved, call = function.calls.read(*args)
    check_budget(budget_s, resolved.mesh)
    check_trees(function.name, resolved.mesh, arguments.tree, call.out_tree)
    with Progress(progress) as display:
        pricing = _Pricing.of(function.options, arguments, resolved, call, function.name, display)
        limits: Any = {"max_bytes": most_bytes, "until": until, "uneven": uneven}
        found = search(pricing.groups, pricing.axes, pricing.outcome, **limits, tell=pricing.tell)
    ins, outs = pricing.specs(found.best.hints)
    planned = JitFunction(function.fn, pricing.options_with(ins, outs))
    program = planned.partition(*args)
    assert pricing.unplanned is not None, "it is priced before the search"
    best = pricing.priced(found.best.hints, program.per_device, program.placements)
    if most_bytes is not None and best.peak_bytes > most_bytes:
        raise no_room(function.name, most_bytes, best, found)
    figures = best, pricing.unplanned, found.tried
    return Planned(planned, program, *_shardings(program, outs), pricing.groups, *figures)


def _shardings(program: SpmdProgram, said: Sequence[Any]) -> tuple[Any, Any]:
    """How arguments lie, and results of which it was `said`, as trees of shardings."""
    outs = [o if s is not None else None for o, s in zip(program.placements[1], said, strict=True)]
    return program.in_shardings, jax.tree.unflatten(program.out_tree, outs)


@dataclass(frozen=True, eq=False)
class _Pricing:
    """A traced call, and what shardings of its arguments come to.

    `donated` are inputs whose buffers results may reuse, `states` those that it makes anew, with
    the results that they become, and `groups` those that are laid alike. `unplanned` is what the
    call comes to as it is given.
    """

    call: TracedCall
    options: Options
    arguments: Arguments
    mesh: Any
    name: str
    donated: tuple[int, ...]
    states: dict[int, int]
    display: Progress
    groups: tuple[Group, ...] = ()
    unplanned: Outcome | None = None

    @property
    def axes(self) -> dict[Any, int]:
        """The axes of the mesh, those of one device left out."""
        return {axis: size for axis, size in self.mesh.shape.items() if size > 1}

    @classmethod
    def of(
        cls,
        options: Options,
        arguments: Arguments,
        resolved: Resolved,
        call: TracedCall,
        name: str,
        display: Progress,
    ) -> "_Pricing":
        """Of the arguments that nobody gave a sharding. Raises what `mw.jit` does for the call."""
        donated = donated_inputs(options, arguments, call)
        call = replace(call, out_specs=specs_of_types(call.out_avals, call.out_specs))
        pricing = cls(call, options, arguments, resolved.mesh, name, donated, {}, display)
        per_device, plan, places = pricing.partitioned(call.in_specs, call.out_specs)
        program, rules = plan.program, plan.rules
        likely = _likely_states(arguments, call)
        states = next_values(program, rules, likely, first=len(call.held))
        free = [i for i, spec in enumerate(call.in_specs) if spec is None]
        groups = groups_of(program, rules, free, states)
        pricing = replace(pricing, states=states, groups=groups)
        nothing: Layouts = (None,) * len(groups)
        return replace(pricing, unplanned=pricing.priced(nothing, per_device, places))

    def partitioned(
        self, in_specs: list[Any], out_specs: list[Any]
    ) -> tuple[PerDeviceProgram, Plan, Placements]:
        """The program with some hints for arguments and results."""
        call = replace(self.call, in_specs=in_specs, out_specs=out_specs)
        return partition_call(self.name, self.options, call, self.mesh)

    def outcome(self, layouts: Layouts) -> Outcome | None:
        """What layouts of the groups come to; None where that cannot be planned."""
        self.display.count("plans compared")
        try:
            per_device, _, places = self.partitioned(*self.specs(layouts))
        except MeshwiseError:
            return None
        return self.priced(layouts, per_device, places)

    def tell(self, better: Outcome) -> None:
        """Show a plan that is better than all before."""
        self.display.note(f"{planned_figures(better)} on each device")

    def priced(self, hints: Layouts, per_device: PerDeviceProgram, places: Placements) -> Outcome:
        """What a program of some hints comes to, and how the groups lie in it."""
        sizes = per_device.mesh.axis_size
        figures = figures_of(self.options.choices.hardware, self.mesh)
        kernels = kernels_of(per_device.jaxpr, sizes)
        seconds = timeline_of_kernels(kernels, sizes, figures, overlaps=False).seconds
        memory = memory_of_kernels(kernels, self.donated)
        lie = tuple([self._layout(places[0], group) for group in self.groups])
        return Outcome(hints, lie, seconds, memory.peak_bytes, per_device.wire_bytes)

    def specs(self, layouts: Layouts) -> tuple[list[Any], list[Any]]:
        """Hints for all arguments and results, by layouts of the groups."""
        in_specs, out_specs = list(self.call.in_specs), list(self.call.out_specs)
        for group, layout in zip(self.groups, layouts, strict=True):
            if layout is not None:
                for argument in group.arguments:
                    in_specs[argument] = partition_spec(Sharding(layout))
        for argument, result in self.states.items():
            if out_specs[result] is None:
                out_specs[result] = in_specs[argument]
        return in_specs, out_specs

    def _layout(self, placed: Sequence[NamedSharding], group: Group) -> DimAxes | None:
        """How a group lies, in the user's axes; None over parts of these, and if not alike."""
        found = {self._axes_of(placed[argument], len(group.shape)) for argument in group.arguments}
        return found.pop() if len(found) == 1 else None

    def _axes_of(self, found: NamedSharding, rank: int) -> DimAxes | None:
        """A sharding in the user's axes; None where it is over parts of these."""
        if found.mesh.axis_names != self.mesh.axis_names:
            return None
        dims: Any = found.spec
        axes = [e if isinstance(e, tuple) else (e,) if e else () for e in dims]
        return (*axes, *[()] * (rank - len(axes)))

    def options_with(self, ins: Sequence[Any], outs: Sequence[Any]) -> Options:
        """The options with hints of all inputs and results; None of those that are completed."""
        args, _ = jax.tree.unflatten(self.arguments.tree, ins[len(self.call.held) :])
        results = jax.tree.unflatten(self.call.out_tree, outs)
        return replace(self.options, mesh=self.mesh, in_shardings=args, out_shardings=results)


def _likely_states(arguments: Arguments, call: TracedCall) -> dict[int, list[int]]:
    """For each result the inputs whose next value it may be, by equal trees and by names."""
    first, (args, _) = len(call.held), arguments.tree.children()
    ins, outs = call.closed.in_avals[first:], call.out_avals
    found: dict[int, list[int]] = defaultdict(list)
    for tied in (
        kept_trees(args, call.out_tree, ins, outs),
        named_alike(call.in_paths[first:], call.out_paths, ins, outs),
    ):
        for argument, result in tied.items():
            found[result].append(first + argument)
    return found
