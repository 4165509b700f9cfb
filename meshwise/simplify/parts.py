"""Rows of one of several arrays that were joined are read from that array.

`stack([u, roll(u, 1)])[0]` is `u`, and a split where arrays were joined gives them back. Of a join
all parts are made, and sent to where they are joined, also those that nobody reads. Joins are still
as they were written here: what merges moves (`borders/`) writes some as rows that are set.

A join that is moved itself stays one value. In `roll(roll(u, 1), 1)` the outer roll has the last
row of the inner one, which is of one part, beside the others, which are of both: as rows of one
value they are a roll, as rows of two they are a join.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from jax import lax

from meshwise._jax import DropVar, JaxprEqn, Literal, Var, is_plain_slice
from meshwise.ir.operators import RESHAPES, SPREADS, TURNS, is_among
from meshwise.ir.program import are_alike, shape_of
from meshwise.simplify.borders.equations import equations_of

# Where a result begins and ends along each dim of what it is read from.
_Window = tuple[tuple[int, int], ...]


def read_parts(
    eqns: Sequence[JaxprEqn], outputs: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and outputs of a flat program, in which parts of joins are read as these.

    An equation of which some result is of several parts is left as it is.
    """
    same: dict[Var, Any] = {}
    joins: dict[Any, JaxprEqn] = {}
    kept: list[JaxprEqn] = []
    moved = _moved_as_one(eqns)

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    def place(original: JaxprEqn) -> None:
        eqn = original.replace(invars=[read(a) for a in original.invars])
        join = joins.get(eqn.invars[0]) if _reads_windows(eqn) else None
        join = None if moved.issuperset(eqn.outvars) else join
        made = None if join is None else _of_parts(eqn, join, joins, same)
        if made is not None:
            for part in made:
                place(part)  # which may be of a join as well
            return
        kept.append(eqn)
        if _is_join(eqn):
            joins[eqn.outvars[0]] = eqn

    for eqn in eqns:
        place(eqn)
    return kept, [read(a) for a in outputs]


def _moved_as_one(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Rows of joins that are laid beside others of the same join, which are of several parts."""
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    found: set[Var] = set()
    for eqn in eqns:
        if eqn.primitive is not lax.concatenate_p:
            continue
        rows: dict[Var, list[Var]] = {}
        moved: set[Var] = set()
        for own in (_rows_of_a_join(atom, makers) for atom in eqn.invars):
            if own is None:
                continue
            row, join, is_of_several = own
            rows.setdefault(join, []).append(row)
            moved |= {join} if is_of_several else set()
        found.update(row for join in moved for row in rows[join])
    return found


def _rows_of_a_join(atom: Any, makers: Mapping[Var, JaxprEqn]) -> tuple[Var, Var, bool] | None:
    """What is cut of a join, maybe turned or repeated then; of which, and if of several parts."""
    while not isinstance(atom, Literal) and (eqn := makers.get(atom)) is not None:
        if _is_join(eqn):
            return atom, atom, True
        cut_of = eqn.invars[0] if eqn.invars else None
        join = makers.get(cut_of) if isinstance(cut_of, Var) else None
        if join is not None and _is_join(join) and _reads_windows(eqn):
            window = _windows(eqn)[eqn.outvars.index(atom)]
            return atom, join.outvars[0], _part_with(join, window) is None
        if not is_among(eqn, TURNS | SPREADS | RESHAPES):
            return None
        atom = cut_of
    return None


def _is_join(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("concatenate", "stack")


def _reads_windows(eqn: JaxprEqn) -> bool:
    """Whether each result is rows of the one operand that follow each other."""
    is_window = eqn.primitive.name in ("split", "unstack") or is_plain_slice(eqn)
    return is_window and not isinstance(eqn.invars[0], Literal)


def _of_parts(
    eqn: JaxprEqn, join: JaxprEqn, joins: Mapping[Any, JaxprEqn], same: dict[Var, Any]
) -> list[JaxprEqn] | None:
    """Equations that read the parts; results that are all of a part are put among the same."""
    found: list[JaxprEqn] = []
    alike: dict[Var, Any] = {}
    for result, window in zip(eqn.outvars, _windows(eqn), strict=True):
        if isinstance(result, DropVar):
            continue
        part = _innermost(join, window, joins)
        if part is None or isinstance(part[0], Literal):
            return None
        atom, inside = part
        adds = join.params["axis"] if join.primitive.name == "stack" else None
        drops = eqn.params["axis"] if eqn.primitive.name == "unstack" else None
        if adds == drops and inside == tuple((0, n) for n in shape_of(atom)):
            if not are_alike(atom, result):
                return None  # one of both has a weak type
            alike[result] = atom
            continue
        made = equations_of(eqn.replace(outvars=[result]), [atom], _reading(inside, adds, drops))
        if made is None:
            return None
        found += made
    same.update(alike)
    return found


def _windows(eqn: JaxprEqn) -> list[_Window]:
    """For each result where it lies in the operand."""
    whole = [(0, n) for n in shape_of(eqn.invars[0])]
    if eqn.primitive is lax.slice_p:
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        return [tuple(zip(starts, limits, strict=True))]
    axis = eqn.params["axis"]
    sizes = eqn.params.get("sizes", (1,) * len(eqn.outvars))
    return [
        tuple(own if d == axis else all_ for d, all_ in enumerate(whole)) for own in _ranges(sizes)
    ]


def _ranges(sizes: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Where each of several that lie side by side begins and ends."""
    return pairwise(accumulate(sizes, initial=0))


def _innermost(
    join: JaxprEqn, window: _Window, joins: Mapping[Any, JaxprEqn]
) -> tuple[Any, _Window] | None:
    """The same of what was joined of joined arrays: rows of a cache that has grown in steps."""
    part = _part_with(join, window)
    while part is not None:
        atom, inside = part
        inner = None if isinstance(atom, Literal) else joins.get(atom)
        if inner is None or inner.primitive is not lax.concatenate_p:
            break
        deeper = _part_with(inner, inside)
        if deeper is None:
            break
        part = deeper
    return part


def _part_with(join: JaxprEqn, window: _Window) -> tuple[Any, _Window] | None:
    """The one part that a window lies in, and where in that; None if it is of several or empty."""
    is_stack = join.primitive.name == "stack"
    dim = join.params["axis" if is_stack else "dimension"]
    sizes = [1 if is_stack else shape_of(a)[dim] for a in join.invars]
    begin, end = window[dim]
    for atom, (low, high) in zip(join.invars, _ranges(sizes), strict=True):
        if low <= begin < end <= high:
            own = () if is_stack else ((begin - low, end - low),)
            return atom, (*window[:dim], *own, *window[dim + 1 :])
    return None


def _reading(inside: _Window, adds: int | None, drops: int | None) -> Callable[[Any], Any]:
    """The function that reads a window of a part, with the dim of a stack, without that split."""

    def read(x: Any) -> Any:
        x = lax.slice(x, [b for b, _ in inside], [e for _, e in inside])
        if adds == drops:  # also none
            return x
        x = x if adds is None else lax.expand_dims(x, (adds,))
        return x if drops is None else lax.squeeze(x, (drops,))

    return read
