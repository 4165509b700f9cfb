"""Sorts, largest values, and prefix sums along sharded dims."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
    reduced,
)

row = partial(Program, "ordering")

ROWS = Array((1024, 64), X)
WIDE = Array((64, 8192), SECOND)
TOTALS = Best(2 * exchanged(64, 8), "a row of totals to columns and back")
ONE_OF_ROWS = Best(
    2 * exchanged(64, 8) + gathered(64, 8), "each device's largest and where, to rows; gathered"
)
BOTH_WAYS = Best(2 * exchanged(1024 * 64 / 8, 8), "to columns and back, each by an all_to_all")


def recurrence(a: Any, b: Any) -> Any:
    """`h = a h + b` for every row, by an associative scan."""

    def join(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(join, (a, b))[1]


def sample(logits: Any, noise: Any) -> Any:
    """A token of the 20 likeliest, by Gumbel's trick."""
    values, which = lax.top_k(logits, 20)
    pick = jnp.argmax(values + noise, -1)
    return jnp.take_along_axis(which, pick[:, None], 1)[:, 0]


def nucleus(logits: Any) -> Any:
    """Probabilities of the likeliest tokens that have 90% together."""
    order = jnp.sort(jax.nn.softmax(logits), axis=-1)[:, ::-1]
    return jnp.where(jnp.cumsum(order, -1) < 0.9, order, 0)


TABLE = [
    row("sort along the sharded dim", lambda x: jnp.sort(x, 0), (ROWS,), X, best=BOTH_WAYS),
    row("sort along another dim", lambda x: jnp.sort(x, 1), (ROWS,), X, best=LOCAL,
        reason="nothing is sent in any: where it is slower, calls differ between runs"),
    row("sort along the sharded dim, uneven", lambda x: jnp.sort(x, 0),
        (Array((1021, 61), X),), X),
    row("sort of a vector", jnp.sort, (Array((1 << 16,), X),), X),
    row("argsort of a vector", jnp.argsort, (Array((1 << 14,), X),), X),
    row("sort of keys with values", lambda k, v: lax.sort((k, v), num_keys=1),
        (Array((1 << 14,), X), Array((1 << 14,), X)), (X, X)),
    row("sort of blocks, 2x4", lambda x: jnp.sort(x, 0), (Array((256, 256), GRID),), GRID, (2, 4),
        Best(2 * exchanged(256 * 256 / 8, 2), "to columns and back over x")),
    row("median of rows", lambda x: jnp.median(x, axis=1), (ROWS,), X, best=LOCAL),
    row("top_k of 8", lambda x: lax.top_k(x, 8)[0], (WIDE,), NONE,
        best=Best(exchanged(64 * 8, 8) + gathered(64 * 8, 8),
                  "the eight best of each device, to rows; the result gathered")),
    row("top_k of 8 and where", lambda x: tuple(lax.top_k(x, 8)), (WIDE,), (NONE, NONE),
        best=Best(2 * exchanged(64 * 8, 8) + 2 * gathered(64 * 8, 8),
                  "the eight best of each device and where, to rows; both results gathered")),
    row("top_k, rows sharded", lambda x: tuple(lax.top_k(x, 8)), (Array((1024, 64), X),), (X, X),
        best=LOCAL),
    row("sampling from the 20 likeliest", sample, (WIDE, Array((64, 20))), NONE),
    row("nucleus, vocabulary sharded", nucleus, (Array((64, 1024), SECOND),), SECOND),
    row("argmax", lambda x: jnp.argmax(x, 1), (WIDE,), NONE, best=ONE_OF_ROWS),
    row("argmax, uneven", lambda x: jnp.argmax(x, 1), (Array((61, 8191), SECOND),), NONE,
        best=ONE_OF_ROWS),
    row("largest of each row and where", lambda x: (x.max(1), jnp.argmax(x, 1)), (WIDE,),
        (NONE, NONE), best=Best(2 * exchanged(64, 8) + 2 * gathered(64, 8),
                                "each device's largest and where, to rows; both gathered")),
    row("smallest of all", jnp.min, (Array((256, 256), GRID),), NONE, (2, 4),
        Best(reduced(1, 8), "an all-reduce of one number")),
    row("cumsum", lambda x: jnp.cumsum(x, 0), (ROWS,), X,
        best=TOTALS),
    row("cumsum, uneven", lambda x: jnp.cumsum(x, 0), (Array((1021, 61), X),), X,
        best=TOTALS),
    row("cumsum backwards", lambda x: lax.cumsum(x, 0, reverse=True), (ROWS,), X,
        best=TOTALS),
    row("cumulative maximum", lambda x: lax.cummax(x, 0), (ROWS,), X,
        best=TOTALS),
    row("cumsum of blocks, 2x4", lambda x: jnp.cumsum(x, 1), (Array((256, 256), GRID),), GRID,
        (2, 4), Best(2 * exchanged(128, 4), "totals to rows and back")),
    row("log of cumulative sums of exponents", lambda x: lax.cumlogsumexp(x, 0), (ROWS,), X,
        best=TOTALS),
    row("associative scan, a sum", lambda x: lax.associative_scan(jnp.add, x), (ROWS,), X,
        best=TOTALS),
    row("associative scan, a recurrence", recurrence,
        (Array((512, 32), X, scale=0.5), Array((512, 32), X)), X,
        best=Best(3 * exchanged(32, 8), "two rows of totals to columns, one back")),
    row("differences of neighbours", lambda x: jnp.diff(x, axis=0, prepend=0), (ROWS,), X,
        best=Best(64 * 4, "a row to the next")),
]  # fmt: skip
