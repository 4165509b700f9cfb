"""A per-device program on pretended devices: cut, run, compare copies, join."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshwise.errors import ReplicationError
from tests.fuzz.evaluate.collectives import Arrays, Grid
from tests.fuzz.evaluate.run import on_host, run


def simulate(program: Any, args: Sequence[Any], cuts_inside: bool = False) -> list[np.ndarray]:
    """Global results of a `PerDeviceProgram`; an error where copies of one differ."""
    grid = Grid(program.mesh.names, program.mesh.sizes, cuts_inside=cuts_inside)
    with np.errstate(all="ignore"):
        cut_up = [
            cut(on_host(a), sharding.dims, aval, grid)
            for a, sharding, aval in zip(
                args, program.in_shardings, program.jaxpr.in_avals, strict=True
            )
        ]
        results = run(program.jaxpr.jaxpr, program.jaxpr.consts, cut_up, grid)
        outs = zip(results, program.out_shardings, program.out_types, strict=True)
        return [joined(k, *out, grid) for k, out in enumerate(outs)]


def _corners(dims: Sequence[tuple[str, ...]], local: Sequence[int], grid: Grid) -> list[Any]:
    """For every device, where in the padded array its part begins."""
    places = [grid.index(axes) if axes else [0] * grid.count for axes in dims]
    return [
        tuple(p[device] * n for p, n in zip(places, local, strict=True))
        for device in range(grid.count)
    ]


def cut(x: np.ndarray, dims: Sequence[tuple[str, ...]], aval: Any, grid: Grid) -> Arrays:
    """Every device's part; padding is what should never be seen."""
    local = tuple(aval.shape)
    found: dict[Any, np.ndarray] = {}
    parts = []
    for corner in _corners(dims, local, grid):
        if corner not in found:
            part = x[tuple(slice(c, c + n) for c, n in zip(corner, local, strict=True))]
            if part.shape != local:
                whole = np.full(local, _garbage(x.dtype), x.dtype)
                whole[tuple(map(slice, part.shape))] = part
                part = whole
            found[corner] = part
        parts.append(found[corner])
    return parts


def _garbage(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max
    return np.nan


def joined(number: int, parts: Arrays, sharding: Any, aval: Any, grid: Grid) -> np.ndarray:
    """The global array of every device's part."""
    local = parts[0].shape
    sizes = [len(set(grid.index(axes))) if axes else 1 for axes in sharding.dims]
    shape = tuple(n * k for n, k in zip(local, sizes, strict=True))
    logical = tuple(aval.shape)
    whole = np.zeros(shape, parts[0].dtype)
    seen: dict[Any, int] = {}
    for device, corner in enumerate(_corners(sharding.dims, local, grid)):
        box = tuple(slice(c, c + n) for c, n in zip(corner, local, strict=True))
        if corner not in seen:
            seen[corner] = device
            whole[box] = parts[device]
        elif parts[device] is not parts[seen[corner]]:
            inside = tuple(
                slice(0, max(0, min(n, end - c)))
                for c, n, end in zip(corner, local, logical, strict=True)
            )
            one, other = parts[device][inside], parts[seen[corner]][inside]
            if not _same(one, other):
                names = itertools.chain(grid.names)
                raise ReplicationError(
                    f"result {number} {logical}, sharded {sharding}, is not the same on devices "
                    f"{seen[corner]} and {device} of {dict(zip(names, grid.sizes, strict=True))}"
                )
    return whole[tuple(map(slice, logical))]


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    if np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes():
        return True
    if jnp.issubdtype(one.dtype, jnp.inexact):
        kind = np.complex128 if one.dtype.kind == "c" else np.float64
        one, other = one.astype(kind), other.astype(kind)
        same = (one == other) & (np.signbit(one.real) == np.signbit(other.real))
        return bool((same | (np.isnan(one) & np.isnan(other))).all())
    return False
