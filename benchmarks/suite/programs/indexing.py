"""Rows by number: gathers, scatters, embeddings, slices at places known when the program runs."""

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
    NONE,
    SECOND,
    Array,
    Best,
    Program,
    X,
    exchanged,
    gathered,
    integers,
    reduced,
    scattered,
)

row = partial(Program, "indexing")


def embed(table: Any, ids: Any) -> Any:
    return table[ids]


def table_gradient(table: Any, ids: Any) -> Any:
    return jax.grad(lambda t: (t[ids] ** 2).sum())(table)


def added(x: Any, ids: Any, updates: Any) -> Any:
    return x.at[ids].add(updates)


def window(x: Any, start: Any) -> Any:
    return lax.dynamic_slice(x, (start[0], 0), (8, x.shape[1]))


def one_row(x: Any, start: Any) -> Any:
    return lax.dynamic_index_in_dim(x, start[0], keepdims=False)


def written(x: Any, update: Any, start: Any) -> Any:
    return lax.dynamic_update_slice(x, update, (start[0], 0))


def border_set(x: Any) -> Any:
    """A step in the middle, and what its border is then set to."""
    return x.at[1:-1].add(x[2:]).at[0].set(x[1])


def segments(values: Any, ids: Any) -> Any:
    return jax.ops.segment_sum(values, ids, 1024)


def messages(nodes: Any, source: Any, target: Any, w: Any) -> Any:
    """A layer of a graph network: rows of neighbours added up."""
    return jnp.tanh(jnp.zeros_like(nodes).at[target].add(nodes[source]) @ w)


def picked(logits: Any, labels: Any) -> Any:
    return jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]


TABLE_OF = Array((1024, 64), X)
PART = 8 * 64

TABLE = [
    row("embedding, table by rows, ids everywhere", embed,
        (TABLE_OF, integers((128,), 1024)), NONE,
        best=Best(reduced(128 * 64, 8), "an all-reduce of rows, of which one device has each")),
    row("embedding, table by rows, ids sharded", embed,
        (TABLE_OF, integers((128,), 1024, X)), X),
    row("embedding, table by columns", embed,
        (Array((1024, 64), SECOND), integers((128,), 1024)), SECOND, best=LOCAL),
    row("embedding, ids sharded, table whole", embed,
        (Array((1024, 64)), integers((128,), 1024, X)), X, best=LOCAL),
    row("embedding, uneven vocabulary", embed,
        (Array((1003, 64), X), integers((128,), 1003)), NONE,
        best=Best(reduced(128 * 64, 8), "an all-reduce of rows, of which one device has each"),
        reason="an uneven argument is unwrapped in Python: 15 microseconds of 150"),
    row("embedding, vocabulary and batch, 2x4", embed,
        (Array((1024, 64), P("y")), integers((16, 32), 1024, X)), X, (2, 4)),
    row("embedding, result by features", embed,
        (TABLE_OF, integers((128,), 1024)), SECOND,
        best=Best(scattered(128 * 64, 8), "a reduce-scatter of rows")),
    row("gradient of a table, ids sharded", table_gradient,
        (TABLE_OF, integers((256,), 1024, X)), X),
    row("gradient of a table, all whole", table_gradient,
        (Array((1024, 64)), integers((256,), 1024, X)), NONE,
        best=Best(gathered(256, 8), "an all-gather of ids; every device adds up all updates")),
    row("scatter-add, ids and updates sharded", added,
        (TABLE_OF, integers((256,), 1024, X), Array((256, 64), X)), X),
    row("scatter-add, updates everywhere", added,
        (TABLE_OF, integers((256,), 1024), Array((256, 64))), X, best=LOCAL),
    row("scatter-add by columns", added,
        (Array((1024, 64), SECOND), integers((256,), 1024), Array((256, 64), SECOND)), SECOND,
        best=LOCAL),
    row("scatter-max, updates sharded", lambda x, i, u: x.at[i].max(u),
        (Array((64, 32)), integers((512,), 64, X), Array((512, 32), X)), NONE,
        best=Best(reduced(64 * 32, 8), "an all-reduce of maxima"),
        reason="XLA's older maker of kernels holds 288 bytes more for a scatter"),
    row("segment_sum, edges sharded", segments,
        (Array((4096, 16), X), integers((4096,), 1024, X)), X,
        best=Best(gathered(4096, 8) + exchanged(4096 * 16 / 8, 8) + exchanged(1024 * 16 / 8, 8),
                  "updates to columns, their numbers gathered, sums to rows")),
    row("histogram", lambda i: jnp.zeros((256,)).at[i].add(1.0), (integers((8192,), 256, X),), NONE,
        best=Best(reduced(256, 8), "an all-reduce of counts")),
    row("graph layer, nodes and edges sharded", messages,
        (Array((512, 32), X), integers((2048,), 512, X), integers((2048,), 512, X),
         Array((32, 32))), X),
    row("eight rows at a place, result whole", window,
        (TABLE_OF, integers((1,), 2000)), NONE,
        best=Best(reduced(PART, 8), "an all-reduce of the rows, each from its owner")),
    row("eight rows at a place, result sharded", window,
        (TABLE_OF, integers((1,), 2000)), X,
        best=Best(scattered(PART, 8), "a reduce-scatter of the rows")),
    row("one row at a place", one_row, (TABLE_OF, integers((1,), 1024)), NONE,
        best=Best(reduced(64, 8), "an all-reduce of one row")),
    row("rows at a place past the end", lambda x, i: window(x, i + 5000),
        (TABLE_OF, integers((1,), 9)), X,
        best=Best(scattered(PART, 8), "a reduce-scatter of the rows")),
    row("eight rows written", written, (TABLE_OF, Array((8, 64)), integers((1,), 1024)), X,
        best=LOCAL),
    row("one row written past the end", lambda x, u, i: written(x, u, i + 5000),
        (TABLE_OF, Array((1, 64)), integers((1,), 9)), X, best=LOCAL),
    row("written along both dims, 2x4",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0], i[1])),
        (Array((64, 64), GRID), Array((8, 8)), integers((2,), 60)), GRID, (2, 4), LOCAL),
    row("first three rows set", lambda x, u: x.at[0:3].set(u),
        (TABLE_OF, Array((3, 64))), X, best=LOCAL),
    row("first row set after a step", border_set, (TABLE_OF,), X),
    row("a row of a sharded dim, by a constant", lambda x: x[5], (TABLE_OF,), NONE,
        best=Best(reduced(64, 8), "an all-reduce of one row")),
    row("every second row", lambda x: x[::2], (TABLE_OF,), X, best=LOCAL),
    row("a label's logit, classes sharded", picked,
        (Array((256, 1024), SECOND), integers((256,), 1024)), NONE,
        best=Best(reduced(256, 8), "an all-reduce of one number a row")),
    row("a batch of lookups", jax.vmap(embed),
        (Array((16, 64, 8), X), integers((16, 32), 64, X)), X, best=LOCAL),
    row("nonzero mask to rows", lambda x, m: jnp.where(m[:, None] > 0, x, 0).sum(0),
        (TABLE_OF, integers((1024,), 2, X)), NONE,
        best=Best(reduced(64, 8), "an all-reduce of one row")),
]  # fmt: skip
