"""Dims split, joined, turned, padded, shifted and put together."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    GRID,
    LOCAL,
    NONE,
    SECOND,
    XY,
    Array,
    Best,
    Program,
    X,
    exchanged,
    passed,
)

row = partial(Program, "reshape")
ROWS = Array((1024, 64), X)
ONE_ROW = Best(passed(64), "a row to the next")


def rotated(x: Any) -> Any:
    """Halves of every row changed places."""
    a, b = jnp.split(x, 2, axis=1)
    return jnp.concatenate([-b, a], 1)


def patches(x: Any) -> Any:
    """Images cut in squares of eight, a row of numbers each."""
    n, h, w, c = x.shape
    x = x.reshape(n, h // 8, 8, w // 8, 8, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, (h // 8) * (w // 8), 64 * c)


TABLE = [
    row("8 heads over 8 devices", lambda x: x.reshape(64, 8, 128),
        (Array((64, 1024), SECOND),), SECOND, best=LOCAL),
    row("12 heads over 8 devices", lambda x: x.reshape(64, 12, 128),
        (Array((64, 1536), SECOND),), SECOND,
        reason="two permutes of whole shards; XLA gathers pairs of shards, and permutes these"),
    row("heads joined", lambda x: x.reshape(64, 1024), (Array((64, 8, 128), SECOND),), SECOND,
        best=LOCAL),
    row("heads joined, 12 of them", lambda x: x.reshape(64, 1536),
        (Array((64, 12, 128), SECOND),), SECOND),
    row("split over both axes, 2x4", lambda x: x.reshape(8, 8, 64), (Array((64, 64), XY),), GRID,
        (2, 4)),
    row("joined from both axes, 2x4", lambda x: x.reshape(64, 64),
        (Array((2, 32, 64), GRID),), XY, (2, 4), LOCAL),
    row("minor dim sharded, joined", lambda x: x.reshape(1024), (Array((16, 64), SECOND),), X),
    row("flat to other rows", lambda x: x.reshape(64, 96), (Array((96, 64), X),), X,
        best=LOCAL),
    row("batch and time swapped", lambda x: x.transpose(1, 0, 2),
        (Array((64, 32, 16), X),), SECOND, best=LOCAL),
    row("transpose, rows to rows", jnp.transpose, (Array((512, 512), X),), X,
        best=Best(exchanged(512 * 512 / 8, 8), "an all_to_all"),
        reason="what an all_to_all brings is joined, then transposed, in two passes on XLA:CPU"),
    row("transpose of blocks, 2x4", jnp.transpose, (Array((512, 512), GRID),), GRID, (2, 4)),
    row("images cut in squares", patches, (Array((4, 64, 64, 3), SECOND),), SECOND, best=LOCAL,
        reason="XLA's own program: 70 microseconds, which differ so between runs"),
    row("two joined along the sharded dim", lambda x, y: jnp.concatenate([x, y]),
        (ROWS, ROWS), X,
        reason="CPU figures choose four rounds of permutes; without them as fast as XLA"),
    row("two joined along another dim", lambda x, y: jnp.concatenate([x, y], 1),
        (ROWS, ROWS), X, best=LOCAL),
    row("three of different size joined", lambda *xs: jnp.concatenate(xs),
        (Array((512, 64), X), Array((256, 64), X), Array((128, 64), X)), X),
    row("halves apart", lambda x: tuple(jnp.split(x, 2)), (ROWS,), (X, X)),
    row("stacked along a new dim", lambda x, y: jnp.stack([x, y]), (ROWS, ROWS), SECOND,
        best=LOCAL),
    row("halves of rows changed places", rotated, (ROWS,), X, best=LOCAL),
    row("halves of rows changed places, columns sharded", rotated,
        (Array((1024, 64), SECOND),), SECOND,
        best=Best(passed(1024, 8), "its columns to the one half a row away")),
    row("padded by one row in front", lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1], (ROWS,), X,
        best=ONE_ROW),
    row("padded to twice the rows", lambda x: jnp.pad(x, ((0, 1024), (0, 0))), (ROWS,), X),
    row("padded, uneven", lambda x: jnp.pad(x, ((3, 2), (0, 0))), (ROWS,), X),
    row("rows without the first and the last", lambda x: x[1:-1], (ROWS,), X),
    row("roll by one", lambda x: jnp.roll(x, 1, 0), (ROWS,), X, best=ONE_ROW),
    row("roll by a shard", lambda x: jnp.roll(x, 128, 0), (ROWS,), X,
        best=Best(passed(128, 64), "each shard to the next")),
    row("roll by one, uneven", lambda x: jnp.roll(x, 1, 0), (Array((1021, 64), X),), X),
    row("roll of blocks along both dims, 2x4", lambda x: jnp.roll(x, (1, 1), (0, 1)),
        (Array((256, 256), GRID),), GRID, (2, 4),
        Best(passed(64) + passed(128), "a row to the next, then a column")),
    row("reversed", lambda x: x[::-1], (ROWS,), X,
        best=Best(passed(128, 64), "each shard to its mirror image")),
    row("repeated", lambda x: jnp.repeat(x, 2, 0), (ROWS,), X, best=LOCAL),
    row("tiled", lambda x: jnp.tile(x, (2, 1)), (ROWS,), X),
    row("broadcast and added", lambda x, y: x[:, None] + y[None], (Array((256,), X),
        Array((256,), P("y"))), GRID, (2, 4), LOCAL),
    row("diagonal", jnp.diagonal, (Array((512, 512), X),), X, best=LOCAL),
    row("trace", jnp.trace, (Array((512, 512), GRID),), NONE, (2, 4),
        Best(2 * 7 / 8 * 4, "an all-reduce of one number")),
    row("lower triangle", jnp.tril, (Array((512, 512), GRID),), GRID, (2, 4), LOCAL),
    row("bits as another type", lambda x: lax.bitcast_convert_type(x, jnp.int32), (ROWS,), X,
        best=LOCAL),
]  # fmt: skip
