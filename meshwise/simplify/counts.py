"""Integers of a flat program that count: they grow by a fixed step along each dim.

Positions in arrays are mostly such: `arange(n)`, `2 * arange(n) + 1`, and what is asked about them
before they are used (are they negative, are they too large), which is then known while tracing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.dtypes import extended
from jax.numpy import issubdtype

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import shape_of, type_of
from meshwise.simplify.numbers import as_positions

MOST_CONSTANTS = 1 << 22  # elements of a constant that is looked at


@dataclass(frozen=True)
class Count:
    """Integers that are `offset`, and `strides[d]` more with each step along dim `d`."""

    offset: int
    strides: tuple[int, ...]

    def bounds(self, shape: Sequence[int]) -> tuple[int, int]:
        """The smallest and the largest."""
        ends = [s * (n - 1) for s, n in zip(self.strides, shape, strict=True)]
        low = self.offset + sum(min(e, 0) for e in ends)
        return low, self.offset + sum(max(e, 0) for e in ends)


class Counts:
    """Which integers of a flat program are counts; asked for, not looked for."""

    def __init__(self, eqns: Sequence[JaxprEqn], constants: Mapping[Var, Any]) -> None:
        self._makers = {v: eqn for eqn in eqns for v in eqn.outvars}
        self._constants = constants
        self._known: dict[Var, Count | None] = {}

    def maker(self, atom: Any) -> JaxprEqn | None:
        """The equation that makes a value."""
        return None if isinstance(atom, Literal) else self._makers.get(atom)

    def of(self, atom: Any) -> Count | None:
        """What an integer or a boolean value counts; None where that is not known."""
        dtype = type_of(atom).dtype
        if issubdtype(dtype, extended) or np.dtype(dtype).kind not in "iub" or 0 in shape_of(atom):
            return None
        if isinstance(atom, Literal):
            return _fitted(np.asarray(atom.val))
        if atom not in self._known:
            self._known[atom] = None
            self._known[atom] = self._checked(atom)
        return self._known[atom]

    def _checked(self, var: Var) -> Count | None:
        """The count, where its type holds all of its numbers."""
        found = self._found(var)
        if found is None:
            return None
        low, high = found.bounds(shape_of(var))
        if type_of(var).dtype == np.bool_:
            return found if low == high and low in (0, 1) else None
        info = np.iinfo(type_of(var).dtype)
        return found if info.min <= low and high <= info.max else None

    def _found(self, var: Var) -> Count | None:
        if var in self._constants:
            return _fitted(self._constants[var])
        eqn = self._makers.get(var)
        if eqn is None:
            return None
        if eqn.primitive.name == "iota":
            dim = eqn.params["dimension"]
            return Count(0, tuple(int(d == dim) for d in range(len(shape_of(var)))))
        rule = _RULES.get(eqn.primitive.name)
        if rule is None:
            return None
        if eqn.primitive.name == "optimization_barrier":
            return self.of(eqn.invars[eqn.outvars.index(var)])
        counts = [self.of(a) for a in eqn.invars]
        return rule(eqn, counts)


def _fitted(array: Any) -> Count | None:
    """A constant as a count."""
    if array.size > MOST_CONSTANTS or not getattr(array, "is_fully_addressable", True):
        return None
    array = as_positions(array)
    if array is None:
        return None
    first = int(array.flat[0])
    starts = [(0,) * d + (1,) + (0,) * (array.ndim - d - 1) for d in range(array.ndim)]
    strides = [
        int(array[s]) - first if n > 1 else 0 for s, n in zip(starts, array.shape, strict=True)
    ]
    steps = [s * np.arange(n) for s, n in zip(strides, array.shape, strict=True)]
    total = sum(np.ix_(*steps), np.int64(first)) if steps else array
    return Count(first, tuple(strides)) if np.array_equal(total, array) else None


Rule = Callable[[JaxprEqn, Sequence[Count | None]], Count | None]


def _same(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
    return counts[0]


def _broadcast(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
    if counts[0] is None:
        return None
    strides = [0] * len(shape_of(eqn.outvars[0]))
    before = shape_of(eqn.invars[0])
    for d, stride, n in zip(
        eqn.params["broadcast_dimensions"], counts[0].strides, before, strict=True
    ):
        strides[d] = stride if n > 1 else 0
    return Count(counts[0].offset, tuple(strides))


def _reshape(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
    """Only dims of size one may come and go."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if counts[0] is None or [n for n in before if n > 1] != [n for n in after if n > 1]:
        return None
    strides = iter([s for s, n in zip(counts[0].strides, before, strict=True) if n > 1])
    return Count(counts[0].offset, tuple(next(strides) if n > 1 else 0 for n in after))


def _sum(sign: int) -> Rule:
    def rule(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
        x, y = counts
        if x is None or y is None:
            return None
        rank = max(len(x.strides), len(y.strides))
        strides = [c.strides or (0,) * rank for c in (x, y)]
        total = tuple(a + sign * b for a, b in zip(*strides, strict=True))
        return Count(x.offset + sign * y.offset, total)

    return rule


def _product(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
    x, y = counts
    if x is None or y is None:
        return None
    if any(x.strides):
        x, y = y, x
    if any(x.strides):
        return None
    strides = y.strides or x.strides
    return Count(x.offset * y.offset, tuple(x.offset * s for s in strides))


def _comparison(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
    """True or false for all elements, where that is certain."""
    x, y = counts
    if x is None or y is None:
        return None
    name, shapes = eqn.primitive.name, [shape_of(a) for a in eqn.invars]
    if name in ("gt", "le"):
        x, y, shapes = y, x, shapes[::-1]
    (low, high), (lower, upper) = x.bounds(shapes[0]), y.bounds(shapes[1])
    if not (high < lower or low >= upper):
        return None
    less = high < lower
    value = less if name in ("lt", "gt") else not less
    return Count(int(value), (0,) * len(shape_of(eqn.outvars[0])))


def _select(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
    which, *cases = counts
    if which is None or any(which.strides) or not 0 <= which.offset < len(cases):
        return None
    return cases[which.offset]


def _extreme(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
    """The larger or the smaller of two, where it is the same one everywhere."""
    x, y = counts
    if x is None or y is None:
        return None
    rank = len(shape_of(eqn.outvars[0]))
    (low, high), (lower, upper) = (
        c.bounds(shape_of(a)) for c, a in zip((x, y), eqn.invars, strict=True)
    )
    if high > lower and upper > low:
        return None
    first_is_larger = low >= upper
    found = x if first_is_larger == (eqn.primitive.name == "max") else y
    return Count(found.offset, found.strides or (0,) * rank)


def _clamp(eqn: JaxprEqn, counts: Sequence[Count | None]) -> Count | None:
    least, x, most = counts
    if least is None or x is None or most is None:
        return None
    low, high = x.bounds(shape_of(eqn.invars[1]))
    bottom = least.bounds(shape_of(eqn.invars[0]))[1]
    top = most.bounds(shape_of(eqn.invars[2]))[0]
    return x if bottom <= low and high <= top else None


_RULES: Mapping[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "convert_element_type": _same,
    "copy": _same,
    "hint": _same,
    "optimization_barrier": _same,
    "add": _sum(1),
    "sub": _sum(-1),
    "mul": _product,
    "lt": _comparison,
    "ge": _comparison,
    "gt": _comparison,
    "le": _comparison,
    "max": _extreme,
    "min": _extreme,
    "select_n": _select,
    "clamp": _clamp,
}
