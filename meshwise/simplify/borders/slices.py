"""What is moved of a slice: merged with it along the dims that are moved, but not along others.

What is cut of a slice is one slice of what that is of, which sends what it needs and no more. But
several that read one slice, as the taps of a filter do, would each cut it anew: where they move
rows and it leaves out columns, columns were sent for each of them. So along dims that are not moved
the slice is left as it is, a value that all of them read; and so it is along a dim of which it
leaves out much, where together they read more than there is of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from math import inf, prod
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import Makers, one_equation
from meshwise.simplify.borders.shifts import MOST_PART

_MOVES = lax.slice_p, lax.pad_p


def slice_equation(
    eqn: JaxprEqn, x: Any, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]
) -> list[JaxprEqn]:
    """A slice in the place of another equation."""
    return one_equation(
        eqn,
        lax.slice_p,
        [x],
        start_indices=tuple(starts),
        limit_indices=tuple(limits),
        strides=None if all(s == 1 for s in strides) else tuple(strides),
    )


def times_read(eqns: Sequence[JaxprEqn]) -> dict[Var, float]:
    """How many times over each value is read, by all readers: by moves as often as these are.

    Of a part of it, which a slice reads, a part of a time.
    """
    times: dict[Var, float] = defaultdict(float)
    for eqn in reversed(eqns):
        again = max(1.0, times.get(eqn.outvars[0], 0)) if eqn.primitive in _MOVES else 1.0
        share = part_read(eqn)
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                times[atom] += share * again
    return times


def part_read(eqn: JaxprEqn) -> float:
    """The part of its operand that a slice takes; any other equation reads all of it."""
    if eqn.primitive is not lax.slice_p:
        return 1.0
    return prod(shape_of(eqn.outvars[0])) / max(1, prod(shape_of(eqn.invars[0])))


def is_read_again(eqn: JaxprEqn, makers: Makers) -> bool:
    """Whether what it makes is read more than once over."""
    return makers.times_read.get(eqn.outvars[0], 0) > 1


def cut_padding(
    config: Sequence[Sequence[int]], shape: Sequence[int], window: Iterable[tuple[int, int]]
) -> list[tuple[int, int, int]] | None:
    """How a window of a pad is padded itself; None where it cuts a dim with rows between."""
    found = []
    for (low, high, between), n, (first, limit) in zip(config, shape, window, strict=True):
        if between and (first, limit) != (0, n):
            return None
        found.append((low - first, high - (n - limit), between))
    return found


def to_merge(
    inner: JaxprEqn, moved: Set[int], makers: Makers
) -> tuple[list[JaxprEqn], JaxprEqn] | None:
    """What a move along some dims of a slice is merged with: it, or its part along dims of these.

    That part is of a slice along the other dims, which comes with it where it is not there yet.
    None where there is nothing to merge with.
    """
    cut, shape = _jax.cut_dims(inner), shape_of(inner.outvars[0])
    if not is_read_again(inner, makers) or any(shape[d] == 1 for d in cut):
        return [], inner
    return along(inner, {d for d in moved if not _leaves_much(inner, d)}, makers)


def along(
    inner: JaxprEqn, moved: Set[int], makers: Makers
) -> tuple[list[JaxprEqn], JaxprEqn] | None:
    """A slice along some dims only, of one along all others that it cuts; None of none of these.

    Others read what this makes, so whoever asks has to write it.
    """
    cut = _jax.cut_dims(inner)
    if cut <= moved:
        return [], inner
    return _apart(inner, cut & moved, makers) if cut & moved else None


def _leaves_much(eqn: JaxprEqn, dim: int) -> bool:
    size = shape_of(eqn.invars[0])[dim]
    return (size - shape_of(eqn.outvars[0])[dim]) * MOST_PART > size


def _apart(inner: JaxprEqn, own: Set[int], makers: Makers) -> tuple[list[JaxprEqn], JaxprEqn]:
    """A slice along some dims, of one along the others."""
    source, shape = inner.invars[0], shape_of(inner.outvars[0])
    sizes, params = shape_of(source), inner.params
    starts, limits = params["start_indices"], params["limit_indices"]
    ranges = [*zip(starts, limits, _jax.strides_of(inner), strict=True)]
    others = [(0, sizes[d], 1) if d in own else cut for d, cut in enumerate(ranges)]
    rest = [cut if d in own else (0, shape[d], 1) for d, cut in enumerate(ranges)]
    key = (source, tuple(others))
    made: list[JaxprEqn] = []
    if key not in makers.kept or not makers.is_made_here(makers.kept[key]):
        aval: Any = inner.outvars[0].aval
        kept = tuple(sizes[d] if d in own else shape[d] for d in range(len(shape)))
        var = makers.kept[key] = _jax.new_var(aval.update(shape=kept))
        makers.times_read[var] = inf
        made = slice_equation(inner.replace(outvars=[var]), source, *zip(*others, strict=True))
    (part,) = slice_equation(inner, makers.kept[key], *zip(*rest, strict=True))
    return made, part
