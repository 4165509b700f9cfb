"""Programs with the exact collectives that they run, and their numbers beside one device."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

import meshwise as mw
from tests.fuzz.evaluate.run import evaluate
from tests.meshes import mesh_of_sizes

Sent = dict[str, tuple[int, int]]  # of each kind of collective: how many, and their wire bytes
NOTHING: Sent = {}


def mesh_of(*sizes: int, real: bool = False) -> Any:
    """A mesh of axes x, y, z."""
    names = ("x", "y", "z")[: len(sizes)]
    if real:
        return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    return mesh_of_sizes(*sizes)


class Row(NamedTuple):
    """A program, its arguments and their shardings, and what it sends.

    tolerance: relative to the largest number; 0 for the same bits.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: tuple[int, ...]
    ins: tuple[Any, ...]
    out: Any
    sent: Sent = NOTHING
    tolerance: float = 0.0


def reals(*shape: int) -> np.ndarray:
    """Numbers of both signs, the same in every run."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def below(bound: int, *shape: int) -> np.ndarray:
    """Integers in 0..bound-1."""
    return np.random.default_rng(bound).integers(0, bound, shape).astype(np.int32)


def around(bound: int, *shape: int) -> np.ndarray:
    """Integers of which a third are not in 0..bound-1."""
    return below(bound * 3 // 2, *shape) - bound // 4


def reduced(elements: int, shards: int = 8, times: int = 1) -> Sent:
    """All_reduces of 32-bit elements."""
    return {"all_reduce": (times, round(2 * (shards - 1) / shards * elements * 4) * times)}


def program_of(row: Row, real: bool = False) -> Any:
    mesh = mesh_of(*row.mesh, real=real)
    return mw.jit(row.function, mesh=mesh, in_shardings=row.ins, out_shardings=row.out)


def sent_by(row: Row) -> Sent:
    """What a row's program sends, traced alone."""
    found: dict[str, tuple[int, int]] = {}
    for c in program_of(row).partition(*row.args).collectives:
        count, total = found.get(str(c.kind), (0, 0))
        found[str(c.kind)] = (count + c.count, total + c.wire_bytes)
    return found


def assert_same(found: Any, wanted: Any, tolerance: float) -> None:
    """Trees of arrays, of the same bits or to a tolerance."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for value, want in ((np.asarray(a), np.asarray(b)) for a, b in leaves):
        assert (value.shape, value.dtype) == (want.shape, want.dtype)
        if tolerance == 0:
            np.testing.assert_array_equal(value, want)
        else:
            limit = tolerance * max(1.0, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(value, want, rtol=tolerance, atol=limit)


def check_numbers(row: Row, real: bool) -> None:
    """A row on eight devices, or simulated, against one device, which numpy is."""
    flat, tree = jax.make_jaxpr(row.function, return_shape=True)(*row.args)
    wanted = evaluate(flat, jax.tree.leaves(row.args))
    wanted = jax.tree.unflatten(jax.tree.structure(tree), wanted)
    step = program_of(row, real)
    found = step(*row.args) if real else step.partition(*row.args).simulate(*row.args)
    assert_same(found, wanted, row.tolerance)


def names(rows: Iterable[Row]) -> Sequence[str]:
    """A name for each row, given once."""
    found = [row.name for row in rows]
    assert len(found) == len(set(found)), "two rows of one name"
    return found
