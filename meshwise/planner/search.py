"""The search for hints: which axes of the mesh go to which dims of which arguments.

One axis of the mesh after the other is given to the dim of the group that gains most, where groups
that nothing was decided of lie as completion has them, as in Automap (Schaarschmidt and others
2021); a weight by columns leads to the next one by rows. Then each group in turn takes the layout
that is best as the others lie, until none gains. Where groups are few, such descents begin where
nothing is hinted, and where all axes went together first, too. What a choice is worth the compiler
itself says: each is completed, planned and emitted, so that what is searched and what is run is one
thing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import DimAxes
from meshwise.planner.groups import Group

# Without a limit a tenth more time is worth a third less memory (design note 10).
MEMORY_WEIGHT = 0.235
GAIN = 1e-3  # a layout is taken for another if it is better by this part
CLOSED = 3  # of the best actions so many are looked at closely
FEW = 12  # where groups times axes are no more, descents begin elsewhere, too

# Of each group; None where completion is to decide, or decided otherwise than a hint can say.
Layouts = tuple[DimAxes | None, ...]


@dataclass(frozen=True)
class Outcome:
    """What hints come to: how all groups lie, seconds of a call, bytes on a device.

    `layouts` are None of a group whose arguments lie over parts of axes, or not alike. `peak_bytes`
    are the most that a device holds at once, arguments included.
    """

    hints: Layouts
    layouts: Layouts
    seconds: float
    peak_bytes: int
    wire_bytes: float


Action = dict[int, DimAxes]  # of some groups
Evaluate = Callable[[Layouts], Outcome | None]  # None for what cannot be planned


@dataclass(frozen=True, eq=False)
class Searched:
    """The best that was found, how many plans were compared, and whether there were more."""

    best: Outcome
    tried: int
    was_ended: bool


@dataclass(frozen=True, eq=False)
class Until:
    """When a search ends: after so many plans, or when somebody says that time is over."""

    most_tried: int
    is_late: Callable[[], bool] = lambda: False


@dataclass(eq=False)
class _Search:
    """Layouts tried, each once, and what the best of them is."""

    groups: Sequence[Group]
    axis_sizes: Mapping[str, int]
    evaluate: Evaluate
    max_bytes: int | None
    until: Until
    uneven: bool
    tell: Callable[[Outcome], None]
    known: dict[Layouts, Outcome | None] = field(default_factory=dict)
    best: Outcome | None = None
    was_ended: bool = False

    @property
    def is_over(self) -> bool:
        """Whether no more is to be tried."""
        most = self.until.most_tried
        return len(self.known) >= most or (bool(self.known) and self.until.is_late())

    def outcome(self, layouts: Layouts) -> Outcome | None:
        """What layouts come to; None where they cannot be planned, or no more is to be tried."""
        if layouts not in self.known:
            if self.is_over:
                self.was_ended = True
                return None
            found = self.known[layouts] = self.evaluate(layouts)
            if found is not None and (self.best is None or self.is_better(found, self.best)):
                self.best = found
                self.tell(found)
        return self.known[layouts]

    def score(self, outcome: Outcome) -> tuple[float, float]:
        """What is over the limit, then the time; without a limit memory weighs a little."""
        if self.max_bytes is None:
            return 0.0, outcome.seconds * max(outcome.peak_bytes, 1) ** MEMORY_WEIGHT
        return max(0.0, outcome.peak_bytes / self.max_bytes - 1), outcome.seconds

    @cached_property
    def planned(self) -> list[tuple[int, Group]]:
        """The groups that are decided of, with their positions."""
        return [(i, group) for i, group in enumerate(self.groups) if not group.follows]

    def with_axes(self, dims: DimAxes, dim: int, more: Axes) -> DimAxes:
        """A layout with more axes on a dim, in the order of the mesh."""
        axes = tuple([a for a in self.axis_sizes if a in more or a in dims[dim]])
        return (*dims[:dim], axes, *dims[dim + 1 :])

    def fits(self, group: Group, layout: DimAxes) -> bool:
        """Whether a group may lie so: no axis is used twice, and dims are cut as they may be.

        In equal parts; or, if they may be uneven, so that no device has nothing.
        """
        used = [axis for axes in layout for axis in axes]
        shards = [prod(self.axis_sizes[axis] for axis in axes) for axes in layout]
        return len(used) == len(set(used)) and all(
            size % n == 0 or (self.uneven and -(-size // -(-size // n)) == n)
            for size, n in zip(group.shape, shards, strict=True)
        )

    def better(self, one: Outcome, other: Outcome) -> Outcome:
        """The other one where that is better."""
        return other if self.is_better(other, one) else one

    def is_better(self, one: Outcome, other: Outcome) -> bool:
        """Whether one is better by more than nothing, or better in some way and worse in none."""
        (over, score), (other_over, other_score) = self.score(one), self.score(other)
        if over != other_over:
            return over < other_over
        figures = one.seconds, one.peak_bytes, one.wire_bytes
        others = other.seconds, other.peak_bytes, other.wire_bytes
        no_worse = all(a <= b for a, b in zip(figures, others, strict=True))
        return score < other_score * (1 - GAIN) or (no_worse and figures != others)


def search(
    groups: Sequence[Group],
    axis_sizes: Mapping[str, int],
    evaluate: Evaluate,
    *,
    max_bytes: int | None = None,
    until: Until,
    uneven: bool = False,
    tell: Callable[[Outcome], None] = lambda better: None,
) -> Searched:
    """The best layouts of some groups, of those that are looked at `until` it ends.

    `evaluate` gives an outcome where nothing is decided, and None for what it cannot; `tell` is
    told of each that is better than all before.
    """
    state = _Search(groups, axis_sizes, evaluate, max_bytes, until, uneven, tell)
    nothing: Layouts = (None,) * len(groups)
    opened = state.outcome(nothing)
    assert opened is not None, "what nobody hinted can be planned"
    start = best = state.outcome(opened.layouts) or opened
    each = [(axis,) for axis in axis_sizes]
    best = _settled(state, _axes_in_turn(state, each, start))
    if len(state.planned) * len(each) <= FEW:
        together = _axes_in_turn(state, [tuple(axis_sizes), *each], start)
        for other in start, together:
            best = state.better(best, _settled(state, other))
    best = state.better(best, state.best or best)
    return Searched(best, len(state.known), state.was_ended)


def _axes_in_turn(state: _Search, order: Sequence[Axes], best: Outcome) -> Outcome:
    """Some axes after others to where they gain most, then to where they gain yet more."""
    decided: Layouts = (None,) * len(state.groups)
    for axes in order:
        actions = list(_actions(state, decided, axes))
        while actions:
            found = [(state.outcome(_with(decided, action)), action) for action in actions]
            tried = [(outcome, action) for outcome, action in found if outcome is not None]
            tried.sort(key=lambda one: state.score(one[0]))
            taken = None
            for opened, action in tried[:CLOSED]:
                closed = state.outcome(opened.layouts)
                if closed is not None and state.is_better(closed, best):
                    best, taken = closed, action
            if taken is None:
                break
            decided = _with(decided, taken)
            hopeful = [action for _, action in tried[: len(tried) // 2]]
            actions = [action for action in hopeful if taken.keys().isdisjoint(action)]
    return best


def _actions(state: _Search, decided: Layouts, axes: Axes) -> Iterator[Action]:
    """Each group with some axes on one more dim; all that is kept, each on its largest dim."""
    together: dict[int, DimAxes] = {}
    for index, group in state.planned:
        own = decided[index] or ((),) * len(group.shape)
        found = {
            dim: layout
            for dim in range(len(own))
            if (layout := state.with_axes(own, dim, axes)) != own and state.fits(group, layout)
        }
        yield from ({index: layout} for layout in found.values())
        if group.is_kept and found:
            together[index] = found[max(found, key=lambda dim: group.shape[dim])]
    if len(together) > 1:
        yield together


def _with(layouts: Layouts, action: Action) -> Layouts:
    return tuple([action.get(index, layout) for index, layout in enumerate(layouts)])


def _settled(state: _Search, best: Outcome) -> Outcome:
    """Each group in turn takes the layout that is best as the others lie, until none gains."""
    every = [index for index, _ in state.planned]
    waiting = list(every)
    while waiting and not state.is_over:
        index = waiting.pop(0)
        before = best
        for layout in _near(state, state.groups[index], before.layouts[index]):
            one = state.outcome(_with(best.layouts, {index: layout}))
            if one is not None and state.is_better(one, best):
                best = one
        if best is not before:
            waiting += [i for i in every if i not in waiting]
    return best


def _near(state: _Search, group: Group, layout: DimAxes | None) -> Iterator[DimAxes]:
    """The layouts of a group in which one axis more, or less, or of another dim is."""
    dims = layout or ((),) * len(group.shape)
    if layout is None:
        yield dims
    for axis in state.axis_sizes:
        without = tuple([tuple([a for a in axes if a != axis]) for axes in dims])
        for dim in range(len(dims)):
            moved = state.with_axes(without, dim, (axis,))
            if moved != dims and state.fits(group, moved):
                yield moved
        if without != dims:
            yield without
