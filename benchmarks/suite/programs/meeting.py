"""Arrays that meet and lie otherwise, rows moved round after others, norms over a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    GRID,
    LOCAL,
    SECOND,
    XY,
    Array,
    Best,
    Program,
    X,
    exchanged,
    integers,
    passed,
    scattered,
)

matmul = partial(Program, "matmul")
transformer = partial(Program, "transformer")
conv = partial(Program, "conv")
indexing = partial(Program, "indexing")
control = partial(Program, "control flow")
reshape = partial(Program, "reshape")
reshard = partial(Program, "reshard")
science = partial(Program, "science", tolerance=1e-3)

ROWS, COLUMNS, BLOCKS = (Array((128, 128), spec) for spec in (X, SECOND, GRID))
PART = 128 * 128 / 8  # of a matrix on each of eight devices
TWICE = "each device makes its rows and its columns; XLA makes rows, and exchanges them"
BATCH, INTO, OUT_OF = P(("x", "z")), P("z", "y"), P("y", "z")


def masked(x: Any, m: Any, n: Any) -> Any:
    return jnp.where((m > 0) & (n > 0), x, 0)


def updated(p: Any, m: Any, v: Any) -> Any:
    """An optimiser's step, its moments in other shards than the weights."""
    return p - 0.1 * m / (jnp.sqrt(jnp.abs(v)) + 1e-3)


def weighted_both_ways(x: Any, y: Any, places: Any) -> Any:
    """By rows and by columns what falls off with a distance."""
    weights = jnp.exp(-jnp.abs(places[:, None] - places))
    return x * weights, y * weights


def table_both_ways(x: Any, y: Any, table: Any) -> Any:
    """A table in another form is added to rows, and to columns."""
    form = 2 * table + 1
    return x + form, y + form


def symmetric(x: Any) -> Any:
    return lax.fori_loop(0, 4, lambda _, c: (jnp.sin(c.T) + c) / 2, x)


def lifted(x: Any) -> Any:
    """One level of a wavelet by lifting: differences of odd rows, means of even ones."""
    even, odd = x[::2], x[1::2]
    difference = odd - 0.5 * (even + jnp.roll(even, -1, 0))
    return even + 0.25 * (difference + jnp.roll(difference, 1, 0)), difference


def normed(x: Any, w: Any) -> Any:
    """A layer and a norm over the batch, as in training."""
    h = x @ w
    return jax.nn.relu((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5))


def logits(table: Any, tokens: Any, q: Any, k: Any, v: Any, o: Any, last: Any) -> Any:
    """Embedding, a layer of attention, logits."""
    x = table[tokens]

    def heads(w: Any) -> Any:
        return (x @ w).reshape(*tokens.shape, 4, -1)

    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, heads(v)).reshape(x.shape)
    return (x + mixed @ o) @ last.T


def reached(seen: Any, source: Any, target: Any) -> Any:
    """Nodes that four steps along edges lead to."""

    def step(_: Any, seen: Any) -> Any:
        return seen | jnp.zeros(512, bool).at[target].max(seen[source])

    return lax.fori_loop(0, 4, step, seen > 1.5)


def convolved(dilation: int = 1, groups: int = 1) -> Any:
    return lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), "SAME", rhs_dilation=(dilation, dilation), feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip


EDGES = integers((2048,), 512, X)
IMAGES, TILED = Array((4, 32, 32, 8), P(None, "x", "y")), P(None, "x", "y")
SQUARE = Array((64, 64), INTO, scale=0.1)
TABLE = [
    reshard("a product moves to columns", lambda x, m, n: x + m * n, (COLUMNS, ROWS, ROWS), SECOND,
        best=Best(exchanged(PART, 8), "an all_to_all of the product")),
    reshard("a mask moves to columns", masked, (COLUMNS, ROWS, ROWS), SECOND,
        best=Best(exchanged(PART, 8, 1), "an all_to_all of booleans")),
    reshard("an update moves to blocks, 2x4", updated,
        (BLOCKS, Array((128, 128), XY), Array((128, 128), XY)), GRID, (2, 4)),
    reshard("a table in another form, to rows and to columns", table_both_ways,
        (ROWS, COLUMNS, Array((128, 128))), (X, SECOND), best=LOCAL, reason=TWICE),
    science("what falls off with distance, by rows and by columns", weighted_both_ways,
        (ROWS, COLUMNS, Array((128,))), (X, SECOND), best=LOCAL, reason=TWICE),
    matmul("a matrix and its transpose, 4 steps", symmetric, (ROWS,), X,
        best=Best(4 * exchanged(PART, 8), "an all_to_all in each")),
    matmul("blocks and their transposes, 4 steps, 2x4", symmetric, (BLOCKS,), GRID, (2, 4)),
    reshape("every second row, moved round", lambda x: jnp.roll(x[::2], -1, 0),
        (Array((1024, 32), X),), X, best=Best(passed(1, 32), "a row to the neighbour")),
    science("wavelet by lifting", lifted, (Array((1024, 32), X),), (X, X),
        best=Best(2 * passed(1, 32), "a row to each neighbour")),
    science("wavelet by lifting, 2x4", lifted, (BLOCKS,), (GRID, GRID), (2, 4)),
    matmul("a layer and a norm over the batch", normed,
        (Array((4096, 64), X), Array((64, 64), scale=0.1)), X),
    transformer("logits, batch and weights share an axis, 2x2x2", logits,
        (Array((128, 64), OUT_OF), integers((16, 32), 128, BATCH), SQUARE, SQUARE, SQUARE,
         Array((64, 64), OUT_OF, scale=0.1), Array((128, 64), OUT_OF)), P(("x", "z"), None, "y"),
        (2, 2, 2), tolerance=1e-3),
    indexing("nodes with any edge", lambda v, i: jnp.zeros(512, bool).at[i].max(v > 1),
        (Array((2048,), X), EDGES), X,
        best=Best(scattered(512, 8, 1), "booleans of all nodes to theirs")),
    control("nodes reached in four steps", reached, (Array((512,), X), EDGES, EDGES), X),
    conv("dilated kernel, 2x4", convolved(dilation=2),
        (IMAGES, Array((3, 3, 8, 8), scale=0.1)), TILED, (2, 4),
        reason="CPU figures choose channels in shards, of which one takes as long as eight"),
    conv("seven by seven of each channel, 2x4", convolved(groups=8),
        (IMAGES, Array((7, 7, 1, 8), scale=0.1)), TILED, (2, 4)),
]  # fmt: skip
