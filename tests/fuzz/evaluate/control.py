"""Loops and branches on pretended devices: they go on, or choose, together or each by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshwise._jax import scan_counts
from meshwise.errors import ReplicationError
from tests.fuzz.evaluate.collectives import COLLECTIVES, Arrays, Grid

Run = Callable[[Any, Sequence[Any], Sequence[Arrays], Grid], list[Arrays]]
MOST_TRIPS = 1000  # of a program that never ends, which is no good program


def apply_control(run: Run, eqn: Any, values: Sequence[Arrays], grid: Grid) -> list[Arrays]:
    """The results of a scan, a while loop or a conditional on every device."""
    return CONTROLS[eqn.primitive.name](run, eqn, values, grid)


def _scan(run: Run, eqn: Any, values: Sequence[Arrays], grid: Grid) -> list[Arrays]:
    params = eqn.params
    body, length = params["jaxpr"], params["length"]
    first, carried = scan_counts(eqn)
    last = first + carried
    consts, carry, stacks = values[:first], values[first:last], values[last:]
    order = range(length - 1, -1, -1) if params["reverse"] else range(length)
    rows: dict[int, list[Arrays]] = {}
    for trip in order:
        own = [_each(lambda x, t=trip: x[t], stack) for stack in stacks]
        made = run(body.jaxpr, body.consts, [*consts, *carry, *own], grid)
        carry, rows[trip] = made[: len(carry)], made[len(carry) :]
    if not length:
        empty = [np.zeros(v.aval.shape, _dtype(v.aval)) for v in eqn.outvars[len(carry) :]]
        return [*carry, *([x] * grid.count for x in empty)]
    columns = zip(*(rows[trip] for trip in range(length)), strict=True)
    return [*carry, *(_stacked(column) for column in columns)]


def _dtype(aval: Any) -> Any:
    return aval.dtype if isinstance(aval.dtype, np.dtype) else np.uint64  # a key is 64 bits


def _each(function: Callable[[np.ndarray], np.ndarray], arrays: Arrays) -> Arrays:
    """A function of every device's array, once for devices that hold the same."""
    known = {id(a): np.asarray(function(a)) for a in {id(a): a for a in arrays}.values()}
    return [known[id(a)] for a in arrays]


def _stacked(rows: Sequence[Arrays]) -> Arrays:
    found: dict[tuple[int, ...], np.ndarray] = {}
    parts = list(zip(*rows, strict=True))
    for part in parts:
        key = tuple(map(id, part))
        if key not in found:
            found[key] = np.stack(part)
    return [found[tuple(map(id, part))] for part in parts]


def _while(run: Run, eqn: Any, values: Sequence[Arrays], grid: Grid) -> list[Arrays]:
    params = eqn.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    tested, known, carry = values[:first], values[first:last], list(values[last:])
    for _ in range(MOST_TRIPS):
        (goes_on,) = run(test.jaxpr, test.consts, [*tested, *carry], grid)
        agreed = _agreed(goes_on, eqn, (test, body))
        if agreed is not None and not agreed.any():
            return carry
        new = run(body.jaxpr, body.consts, [*known, *carry], grid)
        carry = [
            [_where(go, a, b) for go, a, b in zip(goes_on, *both, strict=True)]
            for both in zip(new, carry, strict=True)
        ]
        if agreed is None and not any(go.any() for go in goes_on):
            return carry
    raise RecursionError("a loop that does not end")


def _where(go: np.ndarray, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """What is carried on; of many loops at once, what those carry on that have not ended."""
    if go.all():
        return new
    if not go.any():
        return old
    return np.where(go.reshape(*go.shape, *(1,) * (new.ndim - go.ndim)), new, old)


def _cond(run: Run, eqn: Any, values: Sequence[Arrays], grid: Grid) -> list[Arrays]:
    chosen, *operands = values
    branches = eqn.params["branches"]
    index = [np.clip(int(i), 0, len(branches) - 1) for i in chosen]
    agreed = _agreed([np.asarray(i) for i in index], eqn, branches)
    if agreed is not None:
        branch = branches[int(agreed)]
        return run(branch.jaxpr, branch.consts, operands, grid)
    made = [run(b.jaxpr, b.consts, operands, grid) for b in branches]
    return [[made[i][k][device] for device, i in enumerate(index)] for k in range(len(eqn.outvars))]


def _agreed(arrays: Arrays, eqn: Any, bodies: Sequence[Any]) -> np.ndarray | None:
    """What all devices say; None where they differ, which they may if nothing is sent."""
    if all(np.array_equal(a, arrays[0]) for a in arrays):
        return arrays[0]
    if any(_sends(body.jaxpr) for body in bodies):
        raise ReplicationError(f"devices disagree on the way that {eqn.primitive.name} goes on")
    return None


def _sends(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        inner = [x for p in eqn.params.values() for x in (p if isinstance(p, tuple) else (p,))]
        bodies = [
            getattr(x, "jaxpr", x) for x in inner if hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ]
        if eqn.primitive.name in COLLECTIVES or any(map(_sends, bodies)):
            return True
    return False


CONTROLS = {"scan": _scan, "while": _while, "cond": _cond}
