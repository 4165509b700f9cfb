"""How many steps a `while` takes that counts: it is a loop of so many, whatever its data says.

`while_loop(lambda c: c[1] < 50, ...)` with a counter from nought takes 50 steps. As a loop that
ends when its data says so, what it sends would be counted once, and planned for a few steps.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from meshwise._jax import ClosedJaxpr, JaxprEqn, Literal, LoopParts, Primitive
from meshwise.ir.program import shape_of, type_of
from meshwise.simplify.numbers import Numbers

_TESTS: Mapping[Primitive, Callable[[int, int], bool]] = {
    lax.lt_p: operator.lt,
    lax.le_p: operator.le,
    lax.gt_p: operator.gt,
    lax.ge_p: operator.ge,
    lax.ne_p: operator.ne,
}
_TURNED = {
    lax.lt_p: lax.gt_p,
    lax.le_p: lax.ge_p,
    lax.gt_p: lax.lt_p,
    lax.ge_p: lax.le_p,
    lax.ne_p: lax.ne_p,
}
MOST_STEPS = np.iinfo(np.int32).max  # what a loop of a known length may count


def known_steps(
    loop: LoopParts, known: Callable[[Any], Any], inlined: Callable[[ClosedJaxpr], ClosedJaxpr]
) -> int | None:
    """The steps of a while loop that compares a counter with a number; None for any other.

    `known` gives the numbers around it that are known, `inlined` a body without calls in it.
    """
    if loop.test is None:
        return None
    tested = inlined(loop.test)
    (result,) = tested.jaxpr.outvars
    compared = None if isinstance(result, Literal) else _makers(tested).get(result)
    if compared is None or compared.primitive not in _TESTS:
        return None
    if not all(map(_is_integer, compared.invars)):
        return None

    def integers(atoms: Sequence[Any]) -> list[Any]:
        return [known(a) if _is_integer(a) else None for a in atoms]

    starts = integers(loop.carried)
    made = inlined(loop.body)
    old, new = made.jaxpr.invars[len(loop.body_consts) :], made.jaxpr.outvars
    steady = [x if a is b else None for x, a, b in zip(starts, old, new, strict=True)]
    test = _Body(tested, integers(loop.test_consts), steady)
    body = _Body(made, integers(loop.body_consts), steady)
    for primitive, (counter, limit) in (
        (compared.primitive, compared.invars),
        (_TURNED[compared.primitive], compared.invars[::-1]),
    ):
        place, end = test.carried_as(counter), test.number(limit)
        if place is not None and end is not None and starts[place] is not None:
            added, bounds = body.added_to(place), np.iinfo(type_of(old[place]).dtype)
            return _steps(int(starts[place]), added, end, primitive, bounds)
    return None


def _steps(
    start: int, added: int | None, end: int, primitive: Primitive, bounds: np.iinfo
) -> int | None:
    """How often a counter passes a test; None where it may not end, or leaves its integers."""
    if not _TESTS[primitive](start, end):
        return 0
    way = end - start
    is_up = way > 0 if primitive is lax.ne_p else primitive in (lax.lt_p, lax.le_p)
    if not added or (added > 0) != is_up:
        return None
    if primitive is lax.ne_p and way % added:
        return None  # it steps over the end
    count = way // added + 1 if primitive in (lax.le_p, lax.ge_p) else -(-way // added)
    last = start + count * added
    return count if bounds.min <= last <= bounds.max and count <= MOST_STEPS else None


class _Body:
    """A body of a loop that reads constants, then what is carried, and what is known in it."""

    def __init__(self, closed: ClosedJaxpr, consts: Sequence[Any], steady: Sequence[Any]) -> None:
        """Numbers of what it reads, the same in each step; None for those not known."""
        self._jaxpr, self._first, self._makers = closed.jaxpr, len(consts), _makers(closed)
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        read = zip(closed.jaxpr.invars, [*consts, *steady], strict=True)
        constants |= {var: number for var, number in read if number is not None}
        self._numbers = Numbers(self._makers, constants)

    def number(self, atom: Any) -> int | None:
        """An integer that is the same in each step."""
        found = self._numbers.of(atom) if _is_integer(atom) else None
        return None if found is None else int(found)

    def carried_as(self, atom: Any) -> int | None:
        """Where an integer is carried that this is, maybe cast to another that holds it."""
        atom = self._uncast(atom)
        own = self._jaxpr.invars[self._first :]
        return next((place for place, var in enumerate(own) if var is atom), None)

    def added_to(self, place: int) -> int | None:
        """What each step adds to an integer that is carried."""
        eqn = self._maker(self._uncast(self._jaxpr.outvars[place]))
        if eqn is None or eqn.primitive not in (lax.add_p, lax.sub_p):
            return None
        left, right = eqn.invars
        if eqn.primitive is lax.add_p and self.carried_as(right) == place:
            left, right = right, left
        number = self.number(right)
        if number is None or self.carried_as(left) != place:
            return None
        return -number if eqn.primitive is lax.sub_p else number

    def _uncast(self, atom: Any) -> Any:
        while (eqn := self._maker(atom)) is not None and _holds_all(eqn):
            (atom,) = eqn.invars
        return atom

    def _maker(self, atom: Any) -> JaxprEqn | None:
        return None if isinstance(atom, Literal) else self._makers.get(atom)


def _makers(closed: ClosedJaxpr) -> dict[Any, JaxprEqn]:
    return {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}


def _is_integer(atom: Any) -> bool:
    dtype = getattr(type_of(atom), "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu" and shape_of(atom) == ()


def _holds_all(eqn: JaxprEqn) -> bool:
    """Whether an equation casts an integer to one that holds all that it may be."""
    if eqn.primitive is not lax.convert_element_type_p:
        return False
    before, after = eqn.invars[0], eqn.outvars[0]
    both = _is_integer(before) and _is_integer(after)
    return both and np.can_cast(type_of(before).dtype, type_of(after).dtype)
