"""Laws that every schedule keeps, looked at on values: layouts are true, results are the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshwise as mw
from meshwise import _jax
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.schedule.view import View
from tests.fuzz.evaluate.collectives import Arrays, Grid
from tests.fuzz.evaluate.run import on_host, run
from tests.fuzz.evaluate.simulate import cut, simulate


def misstated(program: PerDeviceProgram, args: Sequence[Any]) -> list[str]:
    """Values that are said to be replicated along an axis along which devices differ."""
    view, mesh = View(program), program.mesh
    wrong = []
    for value, parts in every_value(program, args).items():
        said = view.layouts[value]
        assert len(said.dims) == len(value.aval.shape), (view.text(value), str(said))
        if all(part is parts[0] for part in parts):
            continue
        grid = np.stack([_plain(p).reshape(-1) for p in parts]).reshape(*mesh.sizes, -1)
        for i, axis in enumerate(mesh.names):
            first = np.broadcast_to(grid.take([0], i), grid.shape)
            is_same = np.array_equal(grid, first, equal_nan=_may_be_nan(grid))
            if axis not in said.varying and not is_same:
                wrong.append(f"{view.text(value)} is said to be {said}, and differs along {axis}")
    return wrong


def every_value(program: PerDeviceProgram, args: Sequence[Any]) -> dict[Any, Arrays]:
    """What each equation makes, on every pretended device in the mesh's order."""
    jaxpr = program.jaxpr.jaxpr
    values = [v for e in jaxpr.eqns for v in e.outvars if not isinstance(v, _jax.DropVar)]
    closed = _jax.close_jaxpr(
        jaxpr.constvars, jaxpr.invars, values, jaxpr.eqns, program.jaxpr.consts
    )
    grid = Grid(program.mesh.names, program.mesh.sizes)
    given = [
        cut(on_host(a), sharding.dims, aval, grid)
        for a, sharding, aval in zip(args, program.in_shardings, closed.in_avals, strict=True)
    ]
    with np.errstate(all="ignore"):
        found = run(closed.jaxpr, closed.consts, given, grid)
    return dict(zip(values, found, strict=True))


def _plain(host: np.ndarray) -> np.ndarray:
    return host.astype(np.float32) if host.dtype == jnp.bfloat16 else host


def _may_be_nan(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.inexact)


def results(program: mw.SpmdProgram, args: Sequence[Any]) -> list[np.ndarray]:
    """What a program computes, on pretended devices."""
    given = [*program.held, *jax.tree.leaves(tuple(args))]
    return [_plain(value) for value in simulate(program.per_device, given)]


def difference(got: Sequence[Any], want: Sequence[Any], is_exact: bool) -> str:
    """Where results differ, in words; nothing where they do not."""
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"result {number} is {one.dtype}{one.shape}, not {other.dtype}{other.shape}"
        if is_exact or not _may_be_nan(one):
            same = np.array_equal(one, other, equal_nan=_may_be_nan(one))
        else:
            scale = float(np.max(np.abs(other), initial=1.0, where=np.isfinite(other)))
            same = np.allclose(one, other, rtol=1e-4, atol=1e-4 * scale, equal_nan=True)
        if not same:
            return f"result {number} is\n{one}\nnot\n{other}"
    return ""


def check_moves(
    program: mw.SpmdProgram,
    args: Sequence[Any],
    moves: Callable[[mw.Schedule], object],
    is_exact: bool = True,
) -> mw.Schedule:
    """The schedule after some moves, every law looked at."""
    schedule = mw.Schedule(program)
    moves(schedule)
    check(program, args, schedule, results(program, args), is_exact)
    return schedule


def check(
    program: mw.SpmdProgram,
    args: Sequence[Any],
    schedule: mw.Schedule,
    want: Sequence[Any],
    is_exact: bool,
    states: Mapping[str, int] | None = None,
) -> None:
    """Layouts are true, results the same, the script makes the same program again.

    `states` are names of arguments with the positions of their next values.
    """
    moved = schedule.program
    known = moved.per_device
    wrong = misstated(known, [*moved.held, *jax.tree.leaves(tuple(args))])
    assert not wrong, "\n".join([*wrong, schedule.script(), str(known.jaxpr)])
    worst = difference(results(moved, args), want, is_exact)
    assert not worst, f"{worst}\n{schedule.script()}\n{known.jaxpr}"
    again = mw.Schedule(program).run(schedule.script())
    assert str(again.view.program.jaxpr) == str(known.jaxpr), schedule.script()
    for name, result in (states or {}).items():
        argument = program.in_paths.index(name)
        assert known.in_shardings[argument] == known.out_shardings[result]
