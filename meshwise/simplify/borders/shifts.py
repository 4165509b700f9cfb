"""Rows of one value that are laid side by side near where they were: a choice between shifts of it.

So are a value's neighbours where a border is repeated or mirrored: `concatenate([u[:1], u[:-1]])`,
`jnp.pad(u, 1, mode="edge")`, `u[clip(i + 1, 0, n - 1)]`. Laid side by side, the row at the border
would go to every device. Of a shift each device sends the rows that cross its own borders. What
reads all of it in memory, as a convolution does, would have each shift there: for such, rows stay
side by side.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import Makers, any_maker, equations_of, maker_of

# Rows that are not a part as it was, runs of rows, and what part of a dim a shift may be.
MOST_ROWS, MOST_RUNS, MOST_PART = 4, 6, 8


def choose_shifts(eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations, with rows side by side that are near where they were as shifts.

    But for rows that something reads in memory: otherwise than element by element, as its readers'
    shapes tell, or a loop. What only shifts take the place of reads nothing any more.
    """
    makers = Makers({v: eqn for eqn in eqns for v in eqn.outvars}, frozenset())
    times = Counter(a for eqn in eqns for a in _read(eqn))
    times.update(a for a in outputs if not isinstance(a, Literal))
    in_memory: set[Var] = set()
    found: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        is_read = bool(eqn.effects) or any(times[v] for v in eqn.outvars)
        is_apart = eqn.primitive is lax.concatenate_p and eqn.outvars[0] not in in_memory
        made = near_shifts(eqn, makers) if is_apart and is_read else None
        found += reversed(made or [eqn])
        if made is None and is_read:
            in_memory.update(_read_in_memory(eqn))
            continue
        times.subtract(_read(eqn))
        times.update(a for one in made or () for a in _read(one))
    return found[::-1]


def _read(eqn: JaxprEqn) -> list[Var]:
    return [a for a in eqn.invars if not isinstance(a, Literal)]


def _read_in_memory(eqn: JaxprEqn) -> list[Var]:
    shapes = {shape_of(v) for v in eqn.outvars}
    is_mark = eqn.primitive is _jax.close_p
    return [a for a in _read(eqn) if {shape_of(a)} != shapes and not is_mark]


def near_shifts(eqn: JaxprEqn, makers: Makers) -> list[JaxprEqn] | None:
    """Rows of one value side by side, each a few places from where it was."""
    dim, shape = eqn.params["dimension"], shape_of(eqn.outvars[0])
    found = near_runs(eqn, makers)
    if found is None:
        return None
    source, runs = found

    def near(x: Any) -> Any:
        row = lax.broadcasted_iota(np.int32, shape, dim)
        at, first, _ = most = max(runs, key=lambda run: run[2])
        found = _shifted(x, dim, at - first, shape[dim])
        for at, first, count in (run for run in runs if run is not most):
            behind = lax.ge(row, lax.full_like(row, at))
            before = lax.lt(row, lax.full_like(row, at + count))
            is_end = at + count == shape[dim]
            inside = before if at == 0 else behind if is_end else lax.bitwise_and(behind, before)
            found = lax.select(inside, _shifted(x, dim, at - first, shape[dim]), found)
        return found

    return equations_of(eqn, [source], near)


def one_source(eqn: JaxprEqn, makers: Makers) -> Any | None:
    """The one value whose rows a join has."""
    source, _ = rows_of(eqn.outvars[0], eqn.params["dimension"], makers.beside([eqn]))
    return None if source is eqn.outvars[0] else source


def near_runs(eqn: JaxprEqn, makers: Makers) -> tuple[Any, list[tuple[int, int, int]]] | None:
    """The one value whose rows a join has, and these as runs (place, first, count), if all near."""
    dim = eqn.params["dimension"]
    source, rows = rows_of(eqn.outvars[0], dim, makers.beside([eqn]))
    runs = _runs(rows)
    if source is eqn.outvars[0] or not 1 < len(runs) <= MOST_RUNS:
        return None
    most = shape_of(source)[dim] // MOST_PART
    return None if any(abs(at - first) > most for at, first, _ in runs) else (source, runs)


def goes_round(eqn: JaxprEqn, count: int, makers: Makers) -> bool:
    """Whether a join has so many rows of one value, on from the last of them at the first again."""
    source, rows = rows_of(eqn.outvars[0], eqn.params["dimension"], makers.beside([eqn]))
    runs = _runs(rows)
    if source is eqn.outvars[0]:
        return False
    ends = max(first + n for _, first, n in runs) - min(first for _, first, _ in runs)
    return ends <= count and len({(at - first) % count for at, first, _ in runs}) == 1


def _shifted(x: Any, dim: int, places: int, size: int) -> Any:
    """So many rows, of which each was some places before; the others are zero."""
    amounts = (places, size - places - x.shape[dim], 0)
    config = [amounts if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, np.zeros((), x.dtype), config) if any(amounts) else x


def rows_of(atom: Any, dim: int, makers: Makers) -> tuple[Any, list[tuple[int, int]]]:
    """Of which value something has rows of a dim, as runs (first, count); maybe of itself."""
    whole = atom, [(0, shape_of(atom)[dim])]
    cut, turned = _jax.rows_cut(any_maker(atom, makers), dim), maker_of(atom, makers, "rev")
    joined = maker_of(atom, makers, "concatenate")
    if joined is not None and joined.params["dimension"] == dim:
        parts = [rows_of(part, dim, makers) for part in joined.invars]
        source = parts[0][0]
        if all(own is source for own, _ in parts):
            return source, [run for _, runs in parts for run in runs if run[1]]
    elif cut is not None:
        source, start, limit = cut
        behind, runs = rows_of(source, dim, makers)
        return behind, _runs_between(runs, start, limit)
    elif turned is not None and tuple(turned.params["dimensions"]) == (dim,):
        source, runs = rows_of(turned.invars[0], dim, makers)
        if sum(count for _, count in runs) <= MOST_ROWS:
            rows = [first + k for first, count in runs for k in range(count)]
            return source, [(row, 1) for row in reversed(rows)]
    else:
        times, single = shape_of(atom)[dim], single_row(atom, dim, makers)
        if single is not None and times <= MOST_ROWS:
            source, runs = rows_of(single, dim, makers)
            return source, runs * times
    return whole


def _runs_between(runs: Sequence[tuple[int, int]], start: int, limit: int) -> list[tuple[int, int]]:
    """Of the rows in some runs (first, count) those from one on, before another."""
    found: list[tuple[int, int]] = []
    at = 0
    for first, count in runs:
        begin, end = max(start - at, 0), min(limit - at, count)
        at += count
        if begin < end:
            found.append((first + begin, end - begin))
    return found


def single_row(atom: Any, dim: int, makers: Makers) -> Any:
    """The single row that a value has again and again."""
    flat = maker_of(atom, makers, "reshape")
    spread = maker_of(flat.invars[0] if flat else atom, makers, "broadcast_in_dim")
    if spread is None or len(spread.invars) != 1:
        return None
    before, after = shape_of(spread.invars[0]), shape_of(atom)
    dims, shape = spread.params["broadcast_dimensions"], spread.params["shape"]
    is_row = len(before) == len(after) and before[dim] == 1
    if not is_row or [*before[:dim], *before[dim + 1 :]] != [*after[:dim], *after[dim + 1 :]]:
        return None
    added = [d for d in range(len(shape)) if d not in dims]
    is_in_place = added in ([dim], [dim + 1]) if flat else not added
    return spread.invars[0] if is_in_place else None


def _runs(rows: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Runs (place, first, count) one after the other, those that are one run joined."""
    found: list[tuple[int, int, int]] = []
    place = 0
    for first, count in rows:
        last = found[-1] if found else None
        if last is not None and last[1] + last[2] == first:
            found[-1] = (*last[:2], last[2] + count)
        else:
            found.append((place, first, count))
        place += count
    return [run for run in found if run[2]]
