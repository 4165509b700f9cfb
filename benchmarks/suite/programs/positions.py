"""Rows at positions that are known, as people write neighbours, borders, frames and free places."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suite.program import (
    GRID,
    LOCAL,
    NONE,
    Array,
    Best,
    Program,
    X,
    integers,
    passed,
)

indexing = partial(Program, "indexing")
science = partial(Program, "science")

FIELD, BLOCKS = Array((64, 64), X), Array((64, 64), GRID)
BORDERS = Best(2 * passed(1, 64), "a border row each way")
HELD = "two permutes; XLA gathers once, and every device holds all rows"


def second_difference(u: Any) -> Any:
    """Of a ring of rows."""
    i = jnp.arange(u.shape[0])
    return u[(i + 1) % u.shape[0]] + u[(i - 1) % u.shape[0]] - 2 * u


def with_walls(u: Any) -> Any:
    """A second difference whose first and last rows have themselves for a neighbour."""
    i = jnp.arange(u.shape[0])
    last = u.shape[0] - 1
    return u[jnp.clip(i + 1, 0, last)] + u[jnp.clip(i - 1, 0, last)] - 2 * u


def laplacian(u: Any, mode: str) -> Any:
    p = jnp.pad(u, 1, mode=mode)
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u


def red_and_black(u: Any) -> Any:
    """A step of Gauss and Seidel for the points of one colour."""
    n = jnp.pad(u, 1)
    mean = (n[:-2, 1:-1] + n[2:, 1:-1] + n[1:-1, :-2] + n[1:-1, 2:]) / 4
    return u.at[::2, ::2].set(mean[::2, ::2]).at[1::2, 1::2].set(mean[1::2, 1::2])


def larger(x: Any) -> Any:
    return jax.image.resize(x, (2 * x.shape[0], 2 * x.shape[1]), "nearest")


def every_other(u: Any) -> Any:
    """Spread out over an array of twice the rows and columns."""
    return jnp.zeros((2 * u.shape[0], 2 * u.shape[1])).at[1::2, ::2].set(u)


def spectra(x: Any) -> Any:
    """Of frames of a signal that overlap."""
    starts = 16 * np.arange((x.shape[0] - 64) // 16 + 1)
    return jnp.abs(jnp.fft.rfft(x[starts[:, None] + np.arange(64)] * np.hanning(64)))


def placed(tokens: Any, places: Any) -> Any:
    """Tokens at their places, those that find none in a row that is cut off."""
    return jnp.zeros((385, 32)).at[places].add(tokens)[:-1]


TABLE = (
    science("neighbours by number, rows sharded", second_difference, (FIELD,), X, best=BORDERS,
        reason=HELD),
    science("neighbours by number, gradient",
        jax.grad(lambda u: (second_difference(u) ** 2).sum()), (FIELD,), X),
    science("neighbours by number, with walls", with_walls, (FIELD,), X, best=BORDERS,
        reason=HELD),
    science("Laplacian, borders repeated, 2x4", partial(laplacian, mode="edge"), (BLOCKS,), GRID,
        (2, 4), best=Best(2 * passed(32) + passed(16), "columns both ways, rows exchanged")),
    science("Laplacian, borders mirrored, rows sharded", partial(laplacian, mode="reflect"),
        (FIELD,), X, best=BORDERS),
    science("red and black points, 2x4", red_and_black, (BLOCKS,), GRID, (2, 4),
        best=Best(2 * passed(32) + passed(16), "columns both ways, rows exchanged")),
    science("spectra of frames, samples sharded", spectra, (Array((4096,), X),), X),
    indexing("an image twice as large, 2x4", larger, (BLOCKS,), GRID, (2, 4), best=LOCAL),
    indexing("an image twice as large, gradient", jax.grad(lambda x: (larger(x) ** 2).sum()),
        (FIELD,), X, best=LOCAL),
    indexing("every other row and column set, 2x4",
        every_other, (BLOCKS,), GRID, (2, 4), best=LOCAL),
    indexing("tokens at places, a row cut off", placed,
        (Array((256, 32), NONE), integers((256,), 385)), X, best=LOCAL),
)  # fmt: skip
