"""Sub-axes that a plan never takes apart become one axis again.

Planning splits every mesh axis in prime factors; few programs need it. Where neighbouring
sub-axes stand side by side in every sharding of the plan, and in every step of its reshards, the
emitted program uses one axis for them: a program that splits nothing speaks of the user's own
axes, and its size does not depend on how many prime factors their sizes have.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

from meshwise.choose.plan import EquationPlan, Plan
from meshwise.ir.factors import Strategy
from meshwise.ir.mesh import Axes, Mesh, sub_names
from meshwise.ir.program import Hint, Program
from meshwise.ir.sharding import DimAxes, Sharding, unreduced
from meshwise.partition.reshards import plan_of_edge
from meshwise.propagate.completion import Completion


def coarsen(plan: Plan) -> Plan:
    """The same plan over the coarsest mesh that can express it."""
    mesh = plan.program.mesh
    apart: set[tuple[str, str]] = set()
    pairs = [pair for _, subs in mesh.user_axes for pair in pairwise(subs)]
    for ordered, together in set(_every_use(plan)):
        apart.update(p for p in pairs if p not in apart and _takes_apart(p, ordered, together))
    runs = _runs(mesh, apart)
    joined = _joined_mesh(mesh, runs)
    firsts = [run[0] for own in runs.values() for run in own]
    return _Renaming(dict(zip(firsts, joined.names, strict=True))).plan(plan, joined)


Use = tuple[DimAxes, Axes]  # axes of dims, in order; and axes used as a set


def _every_use(plan: Plan) -> Iterable[Use]:
    """How axes stand in every sharding and strategy of a plan, reshards' steps included."""
    for sharding in (*plan.in_shardings, *plan.out_shardings):
        yield sharding.dims, sharding.unreduced
    for dims in plan.completion.dims.values():
        yield dims, ()
    for equation in plan.equations:
        for sharding in (*equation.operands, *equation.results):
            yield sharding.dims, sharding.unreduced
        yield equation.strategy.axes, equation.strategy.carried
    for cause in plan.completion.causes.values():
        yield from (((axes,), ()) for axes in cause.beaten)
    for var, edges in plan.copies.items():
        for edge in edges:
            for step in plan_of_edge(plan, var, edge).steps:
                yield step.source.dims, step.source.unreduced
                yield step.target.dims, step.target.unreduced


def _takes_apart(pair: tuple[str, str], ordered: DimAxes, together: Axes) -> bool:
    """Whether a use has one of two neighbours without the other right beside it."""
    first, second = pair
    if (first in together) != (second in together):
        return True
    for axes in ordered:
        if first in axes or second in axes:
            place = axes.index(first) if first in axes else -1
            if place < 0 or axes[place + 1 : place + 2] != (second,):
                return True
    return False


def _runs(mesh: Mesh, apart: Set[tuple[str, str]]) -> dict[str, list[Axes]]:
    """Runs of sub-axes that stay together, for each of the user's axes."""
    found: dict[str, list[Axes]] = {}
    for user, subs in mesh.user_axes:
        runs: list[Axes] = []
        for sub in subs:
            if runs and (runs[-1][-1], sub) not in apart:
                runs[-1] = (*runs[-1], sub)
            else:
                runs.append((sub,))
        found[user] = runs
    return found


def _joined_mesh(mesh: Mesh, runs: dict[str, list[Axes]]) -> Mesh:
    """The mesh with one axis for each run."""
    user_axes = []
    sizes: list[int] = []
    for user, own in runs.items():
        names = sub_names(str(user), len(own), list(runs))
        user_axes.append((user, names))
        sizes += [mesh.size(run) for run in own]
    names = tuple(name for _, own_names in user_axes for name in own_names)
    return Mesh(names, tuple(sizes), tuple(user_axes))


@dataclass(frozen=True)
class _Renaming:
    """Axes by their new names: a run is known by its first sub-axis."""

    name_of: dict[str, str]
    known: dict[Sharding, Sharding] = field(default_factory=dict)

    def axes(self, old: Axes) -> Axes:
        return tuple(self.name_of[a] for a in old if a in self.name_of)

    def dims(self, old: DimAxes) -> DimAxes:
        return tuple(self.axes(own) for own in old)

    def sharding(self, old: Sharding) -> Sharding:
        new = self.known.get(old)
        if new is None:
            sums, turned = self.axes(old.unreduced), self.axes(old.turned)
            new = unreduced(self.dims(old.dims), sums, old.reduction, turned)
            self.known[old] = new
        return new

    def strategy(self, old: Strategy) -> Strategy:
        return Strategy(self.dims(old.axes), self.axes(old.carried))

    def hint(self, old: Hint) -> Hint:
        dims = tuple(None if d is None else self.axes(d) for d in old.dims)
        return replace(old, dims=dims, unreduced=self.axes(old.unreduced))

    def equation(self, old: EquationPlan) -> EquationPlan:
        return EquationPlan(
            self.strategy(old.strategy),
            tuple(self.sharding(s) for s in old.operands),
            tuple(self.sharding(s) for s in old.results),
            old.remade,
        )

    def completion(self, old: Completion) -> Completion:
        return Completion(
            {var: self.dims(own) for var, own in old.dims.items()},
            {key: replace(c, beaten=self.dims(c.beaten)) for key, c in old.causes.items()},
        )

    def program(self, old: Program, mesh: Mesh) -> Program:
        return replace(
            old,
            mesh=mesh,
            in_hints=tuple(h and self.hint(h) for h in old.in_hints),
            out_hints=tuple(h and self.hint(h) for h in old.out_hints),
            hints={i: self.hint(h) for i, h in old.hints.items()},
        )

    def plan(self, old: Plan, mesh: Mesh) -> Plan:
        return replace(
            old,
            program=self.program(old.program, mesh),
            completion=self.completion(old.completion),
            equations=tuple(self.equation(e) for e in old.equations),
            in_shardings=tuple(self.sharding(s) for s in old.in_shardings),
            out_shardings=tuple(self.sharding(s) for s in old.out_shardings),
            copies={
                var: tuple((self.sharding(a), self.sharding(b)) for a, b in edges)
                for var, edges in old.copies.items()
            },
        )
