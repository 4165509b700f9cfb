"""The bodies of loops and branches in a flat program, as a tree.

A flat program tells them by marks (`_jax/control.py`). Here the marks are read: which equations
stand in which body, how often each runs, and which values each body can see.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from meshwise import _jax
from meshwise._jax import Control, JaxprEqn

Scope = tuple[int, ...]  # positions of the marks around an equation, outermost first
OUTERMOST: Scope = ()


@dataclass(frozen=True, eq=False)
class Nested:
    """One loop or conditional: its marks by primitive, and its bodies by number.

    All are positions in the program; a body's items are such positions, or nested in turn.
    """

    control: Control
    marks: dict[_jax.Primitive, list[int]] = field(default_factory=dict)
    bodies: dict[int, list["Item"]] = field(default_factory=dict)

    def of(self, primitive: _jax.Primitive) -> list[int]:
        """Where the marks of one kind stand."""
        return self.marks.get(primitive, [])

    def positions(self) -> Iterator[int]:
        """Every equation inside, marks included."""
        for found in self.marks.values():
            yield from found
        for items in self.bodies.values():
            for item in items:
                if isinstance(item, int):
                    yield item
                else:
                    yield from item.positions()


Item = int | Nested


def nest(eqns: Sequence[JaxprEqn]) -> list[Item]:
    """The equations of a flat program by their positions, bodies within their loops."""
    top: list[Item] = []
    within: list[list[Item] | None] = [top]  # None before, between and after bodies
    opened: list[Nested] = []
    for index, eqn in enumerate(eqns):
        primitive = eqn.primitive
        if primitive is _jax.open_p or not _jax.is_mark(eqn):
            items = within[-1]
            assert items is not None, f"{eqn} stands in no body"
            if primitive is _jax.open_p:
                opened.append(Nested(eqn.params["control"]))
                within.append(None)
            items.append(opened[-1] if primitive is _jax.open_p else index)
        if primitive is _jax.body_p:
            within[-1] = opened[-1].bodies.setdefault(eqn.params["number"], [])
        elif primitive is _jax.end_p:
            within[-1] = None
        if _jax.is_mark(eqn):
            opened[-1].marks.setdefault(primitive, []).append(index)
        if primitive is _jax.close_p:
            opened.pop()
            within.pop()
    assert not opened, "every loop and choice is closed"
    return top


def scopes(eqns: Sequence[JaxprEqn]) -> list[Scope]:
    """For each equation the scope of its results: what begins with it can see them."""
    found: list[Scope] = []
    around: list[Scope] = [OUTERMOST]
    opened: list[Scope] = []
    for index, eqn in enumerate(eqns):
        primitive = eqn.primitive
        if primitive is _jax.open_p:
            opened.append(around[-1])
            around.append((*around[-1], index))
        elif primitive is _jax.body_p:
            around.append((*around[-1], index))
        found.append(opened[-1] if primitive in _LEAVING else around[-1])
        if primitive in (_jax.end_p, _jax.close_p):
            around.pop()
        if primitive is _jax.close_p:
            opened.pop()
    return found


_ENTERING = frozenset({_jax.carry_p, _jax.step_p, _jax.branch_index_p})
_LEAVING = frozenset({_jax.next_p, _jax.stack_p, _jax.join_p, _jax.close_p})


def places_to_read(eqns: Sequence[JaxprEqn]) -> dict[tuple[int, int], int]:
    """Before which equation an operand of a mark can be made, where that is not the mark itself.

    What enters a loop or choice is made before it, what leaves a body in that body. Keys are
    equations and positions of operands.
    """
    found: dict[tuple[int, int], int] = {}
    starts: list[int] = []
    ends: list[dict[int, int]] = []
    for index, eqn in enumerate(eqns):
        primitive = eqn.primitive
        if primitive is _jax.open_p:
            starts.append(index)
            ends.append({})
        elif primitive is _jax.end_p:
            ends[-1][eqn.params["number"]] = index
        elif primitive in _ENTERING:
            found[index, 0] = starts[-1]
        elif primitive is _jax.join_p:
            found.update({(index, branch): end for branch, end in ends[-1].items()})
        elif primitive is _jax.close_p:
            starts.pop()
            ends.pop()
        elif primitive in _LEAVING:
            found.update({(index, k): ends[-1][1] for k in range(len(eqn.invars))})
    return found


def read_in(eqns: Sequence[JaxprEqn]) -> Callable[[int, int], Scope]:
    """In which scope a copy of an operand of an equation can be made last, by both positions."""
    found, places = scopes(eqns), places_to_read(eqns)

    def scope(equation: int, operand: int) -> Scope:
        place = places.get((equation, operand), equation)
        return found[place][:-1] if eqns[place].primitive is _jax.open_p else found[place]

    return scope


def never_both(eqns: Sequence[JaxprEqn], one: Scope, other: Scope) -> bool:
    """Whether of what stands in two scopes a step runs one: in two branches of a conditional."""
    apart = next((pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]), ())
    marks = [eqns[position] for position in apart if eqns[position].primitive is _jax.body_p]
    return len(marks) == 2 and all(mark.params["control"].is_choice for mark in marks)


def is_visible(made: Scope, reader: Scope) -> bool:
    """Whether what is made in one scope can be read in another."""
    return reader[: len(made)] == made


def trips(eqns: Sequence[JaxprEqn]) -> list[int]:
    """How often each equation runs in one call of the program."""
    found = []
    for scope in scopes(eqns):
        times = 1
        for position in scope:
            if eqns[position].primitive is _jax.open_p:
                times *= max(eqns[position].params["control"].trips, 1)
        found.append(times)
    return found


def runs(eqns: Sequence[JaxprEqn]) -> list[float]:
    """How often each equation runs in one call where every branch is as probable as others."""
    around = paths(eqns)
    return [n * share(path) for n, path in zip(trips(eqns), around, strict=True)]


@dataclass(frozen=True)
class Inside:
    """A body around an equation: where it begins, one of how many branches it is, its trips."""

    position: int
    branches: int
    trips: int


Path = tuple[Inside, ...]  # outermost first


def paths(eqns: Sequence[JaxprEqn]) -> list[Path]:
    """For each equation the bodies that it stands in."""

    def inside(position: int) -> Inside:
        control = eqns[position].params["control"]
        return Inside(position, control.branches, max(control.trips, 1))

    return [
        tuple(inside(position) for position in scope if eqns[position].primitive is _jax.body_p)
        for scope in scopes(eqns)
    ]


def share(path: Path) -> float:
    """How probable it is that some branches are taken, each as probable as those beside it."""
    return 1 / math.prod(body.branches for body in path)


def times_made(read: Sequence[Path]) -> float:
    """How often a copy of a value is made that is read in some bodies around which it stands.

    It is made before a loop, but in a branch, unless all branches read it.
    """
    ends = [[k + 1 for k, body in enumerate(path) if body.branches > 1] for path in read]
    distinct = {path[: max(end, default=0)] for path, end in zip(read, ends, strict=True)}
    outer = [p for p in distinct if not any(p[:k] in distinct for k in range(len(p)))]
    if sum(map(share, outer)) > 1 - 1e-9:
        return 1.0
    return sum(share(path) * math.prod(body.trips for body in path) for path in outer)
