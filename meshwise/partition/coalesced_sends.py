"""Rows that travel in one collective: what different equations fetch of the same devices.

Each local rule fetches the rows that its equation needs. In a per-device program

- rows of one array that go the same way, and overlap or lie side by side, go once (two rolls of one
  array by one row and by two; what is above and below a stencil's inner part);
- arrays of one shape that go different ways, where no device sends or receives twice, are one
  exchange (a border to the left and one to the right, between two devices).

Who receives nothing has zeros, as after each collective alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import ShapeDtypeStruct, lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, Var
from meshwise.ir.mesh import Mesh
from meshwise.ir.program import shape_of, type_of

Bounds = tuple[int, ...]


@dataclass(frozen=True)
class _Cut:
    """A part of an array, without steps: the array, and where each dim begins and ends."""

    whole: Var
    starts: Bounds
    limits: Bounds

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(b - a for a, b in zip(self.starts, self.limits, strict=True))

    def around(self, other: "_Cut") -> "_Cut":
        """The smallest part with both in it."""
        return _Cut(
            self.whole,
            tuple(map(min, self.starts, other.starts)),
            tuple(map(max, self.limits, other.limits)),
        )

    def within(self, starts: Bounds, limits: Bounds) -> "_Cut":
        """A part of this part."""
        return _Cut(
            self.whole,
            tuple(a + b for a, b in zip(self.starts, starts, strict=True)),
            tuple(a + b for a, b in zip(self.starts, limits, strict=True)),
        )


def send_together(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """A per-device program with fewer exchanges, bodies of loops and branches included."""

    def change(jaxpr: Any) -> Any:
        before = list(_jax.opened(jaxpr).eqns)
        eqns = [_jax.with_bodies(eqn, change) for eqn in before]
        eqns = _both_ways(_same_way(eqns), mesh)
        if _jax.are_same(eqns, before):
            return jaxpr
        return _jax.rewritten(jaxpr, eqns=_without_idle_cuts(eqns, _jax.opened(jaxpr).outvars))

    return change(closed)


def _cuts(eqns: Sequence[JaxprEqn]) -> dict[Var, _Cut]:
    """What slices make; a slice of a slice is one of the whole."""
    found: dict[Var, _Cut] = {}
    for eqn in eqns:
        if _jax.is_plain_slice(eqn) and not isinstance(eqn.invars[0], Literal):
            bounds = eqn.params["start_indices"], eqn.params["limit_indices"]
            found[eqn.outvars[0]] = _cut_of(found, eqn.invars[0]).within(*bounds)
    return found


def _cut_of(cuts: dict[Var, _Cut], var: Any) -> _Cut:
    shape = shape_of(var)
    return cuts.get(var, _Cut(var, (0,) * len(shape), shape))


def _same_way(eqns: list[JaxprEqn]) -> list[JaxprEqn]:
    """Parts of one array that go the same way as one, if they have no more elements together."""
    cuts = _cuts(eqns)
    groups: dict[Any, list[tuple[_Cut, list[int]]]] = {}
    for index, eqn in enumerate(eqns):
        if eqn.primitive is not lax.ppermute_p or isinstance(eqn.invars[0], Literal):
            continue
        cut = _cut_of(cuts, eqn.invars[0])
        axes, pairs = eqn.params["axis_name"], eqn.params["perm"]
        group = groups.setdefault((cut.whole, str(axes), tuple(map(tuple, pairs))), [])
        for place, (other, members) in enumerate(group):
            both = other.around(cut)
            if both.size <= other.size + cut.size:
                group[place] = both, [*members, index]
                break
        else:
            group.append((cut, [index]))
    replaced: dict[int, list[JaxprEqn]] = {}
    for group in groups.values():
        for both, members in group:
            if len(members) > 1:
                replaced.update(_sent_once(eqns, cuts, both, members))
    return [e for index, eqn in enumerate(eqns) for e in replaced.get(index, [eqn])]


def _sent_once(
    eqns: Sequence[JaxprEqn], cuts: dict[Var, _Cut], both: _Cut, members: Sequence[int]
) -> dict[int, list[JaxprEqn]]:
    """The equations in place of each of several exchanges: one of all, then parts of that."""
    first = eqns[members[0]]
    shape = tuple(b - a for a, b in zip(both.starts, both.limits, strict=True))
    aval = first.outvars[0].aval.update(shape=shape)
    sent, received = _jax.new_var(aval), _jax.new_var(aval)
    found: dict[int, list[JaxprEqn]] = {}
    for index in members:
        eqn = eqns[index]
        cut = _cut_of(cuts, eqn.invars[0])
        starts, limits = (
            tuple(n - a for n, a in zip(ends, both.starts, strict=True))
            for ends in (cut.starts, cut.limits)
        )
        found[index] = [_slice(received, starts, limits, eqn.outvars[0], eqn)]
    found[members[0]] = [
        _slice(both.whole, both.starts, both.limits, sent, first),
        first.replace(invars=[sent], outvars=[received]),
        *found[members[0]],
    ]
    return found


def _slice(x: Var, starts: Bounds, limits: Bounds, out: Var, like: JaxprEqn) -> JaxprEqn:
    params = {"start_indices": starts, "limit_indices": limits, "strides": None}
    return _jax.new_eqn(lax.slice_p, [x], [out], params, like)


def _both_ways(eqns: list[JaxprEqn], mesh: Mesh) -> list[JaxprEqn]:
    """Exchanges with one pair of devices, each with one that goes another way, as one."""
    cuts = _cuts(eqns)
    made = {v: index for index, eqn in enumerate(eqns) for v in eqn.outvars}
    waiting: dict[Any, list[int]] = {}
    replaced: dict[int, list[JaxprEqn]] = {}
    for index, eqn in enumerate(eqns):
        if eqn.primitive is not lax.ppermute_p or isinstance(eqn.invars[0], Literal):
            continue
        axes = _jax.named_axes(eqn)
        if len(axes) > 1:
            continue
        own = type_of(eqn.outvars[0])
        queue = waiting.setdefault((axes, own.shape, str(own.dtype)), [])
        cut = _cut_of(cuts, eqn.invars[0])
        partner = next(
            (i for i in queue if made.get(cut.whole, -1) < i and _are_apart(eqns[i], eqn)), None
        )
        if partner is not None:
            queue.remove(partner)
            replaced[partner] = _one_exchange(eqns[partner], eqn, cut, mesh)
            replaced[index] = []
        elif len(eqn.params["perm"]) == 1:
            queue.append(index)
    return [e for index, eqn in enumerate(eqns) for e in replaced.get(index, [eqn])]


def _are_apart(one: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether no device sends in both, and none receives in both."""
    ((sender, receiver),) = one.params["perm"]
    return all(a != sender and b != receiver for a, b in other.params["perm"])


def _one_exchange(one: JaxprEqn, other: JaxprEqn, cut: _Cut, mesh: Mesh) -> list[JaxprEqn]:
    """The equations of two exchanges as one; `one` has a single pair, `other` sends a part."""
    ((sender, receiver),) = one.params["perm"]
    axes = one.params["axis_name"]
    pairs = [*one.params["perm"], *other.params["perm"]]

    def exchange(mine: Any, theirs: Any) -> list[Any]:
        theirs = lax.slice(theirs, cut.starts, cut.limits)
        here = lax.axis_index(axes)
        found = lax.ppermute(lax.select(here == sender, mine, theirs), axes, pairs)
        nothing = lax.full_like(found, 0)
        is_mine = here == receiver
        return [lax.select(is_mine, found, nothing), lax.select(is_mine, nothing, found)]

    operands = [one.invars[0], cut.whole]
    types = [ShapeDtypeStruct(shape_of(a), type_of(a).dtype) for a in operands]
    traced = _jax.make_jaxpr_over_axes(exchange, mesh.named_sizes, types)
    both = one.replace(outvars=[one.outvars[0], other.outvars[0]])
    return _jax.in_place_of(both, traced, operands)


def _without_idle_cuts(eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations less the slices that nothing reads any more."""
    read = {a for a in outputs if not isinstance(a, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.primitive is lax.slice_p and read.isdisjoint(eqn.outvars):
            continue
        read.update(a for a in eqn.invars if not isinstance(a, Literal))
        kept.append(eqn)
    return kept[::-1]
