"""The most that XLA sets aside for temporaries, where another plan of the same bytes needs more.

Figures are of XLA:CPU on eight devices; a newer one may need less.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.end_to_end.sent import Row, around, check_numbers, names, program_of, reals

XY, YX = P(("x", "y")), P(("y", "x"))
SHARD = 64 * 256 * 4  # of what is resharded here, on each device


def steps(a: Any, b: Any) -> Any:
    """Conjugate gradient's product, also taken before the loop: one transpose serves neither."""
    return lax.fori_loop(0, 3, lambda _, v: a @ (a.T @ v) / 99, a @ (a.T @ b))


def nearest(points: Any, centres: Any) -> Any:
    def step(_: Any, centres: Any) -> Any:
        distance = ((points[:, None] - centres[None]) ** 2).sum(-1)
        near = (jnp.argmin(distance, 1)[:, None] == jnp.arange(4)).astype(jnp.float32)
        return near.T @ points / 64

    return lax.fori_loop(0, 2, step, centres)


def late(x: Any, first: Any, second: Any) -> Any:
    hidden = jnp.tanh(x @ first / 8)
    return jnp.cos(jnp.tanh(hidden @ hidden.T) @ x @ second / 999)


def normed(x: Any, w: Any) -> Any:
    """A norm over the batch: the variance and the result both read the difference from the mean."""
    hidden = x @ w
    return (hidden - hidden.mean(0)) * lax.rsqrt(hidden.var(0) + 1e-5)


class Held(NamedTuple):
    """A program, and the bytes of its temporaries on each device."""

    row: Row
    most: int


def resharded(
    name: str, source: Any, target: Any, most: int, function: Callable[..., Any] = lambda x: x + 1
) -> Held:
    args = (reals(512, 256),)
    return Held(Row(name, function, args, (2, 4), (source,), target), most)


TABLE = [
    # An argument's copy is added to in place; a sum before the exchange would need room.
    resharded("shards change places", XY, YX, 4096),
    # What an all_to_all brings needs no room beside that of its pieces.
    resharded("rows to columns", XY, P(None, ("x", "y")), 2 * SHARD - 4096),
    resharded("rows to blocks", XY, P("x", "y"), 2 * SHARD - 4096),
    # Of two gathers the second brings rows where they belong.
    resharded("blocks to everywhere", P("x", "y"), P(), 4 * SHARD),
    Held(Row("a transpose inside a loop", steps, (reals(128, 128), reals(128)), (8,),
        (P("x"), P("x")), P("x"), tolerance=1e-4), 4096),
    Held(Row("points inside a loop", nearest, (reals(4096, 8), reals(4, 8)), (8,),
        (P("x"), P()), P(), tolerance=1e-4), 4096 * 8 // 8 * 4),
    # Terms of maxima are found as the integers as which they are joined.
    Held(Row("largest at places", lambda x, i, u: x.at[i].max(u),
        (reals(64, 32), around(64, 512), reals(512, 32)), (8,), (P(), P("x"), P("x")), P()),
        64 * 32 * 4 + 1024),
    # What is read in the end is not made at once.
    Held(Row("a weight that is read late", late, (reals(256, 128), reals(128, 64), reals(128, 512)),
        (8,), (P("x"), P("x"), P("x")), P("x"), tolerance=1e-4), 210_000),
    # What differs from a mean is made in the kernels that read it.
    Held(Row("a norm over the batch", normed, (reals(1024, 64), reals(64, 32)), (8,),
        (P("x"), P()), P("x"), tolerance=1e-4), 4096),
]  # fmt: skip


@pytest.mark.parametrize("held", TABLE, ids=names(h.row for h in TABLE))
def test_temporaries(held: Held):
    step = program_of(held.row, real=True).partition(*held.row.args)
    assert step.compile().memory_analysis().temp_size_in_bytes <= held.most


@pytest.mark.parametrize("row", [h.row for h in TABLE], ids=names(h.row for h in TABLE))
def test_numbers(row: Row):
    check_numbers(row, real=True)


def test_the_figures_are_of_this_size():
    assert SHARD == np.zeros((512, 256), np.float32).nbytes // 8
