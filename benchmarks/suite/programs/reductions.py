"""Means, medians, windows and products whose sums, extremes and orders are of sharded dims."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import sparse
from jax.scipy.sparse import linalg

from benchmarks.suite.program import (
    GRID,
    NONE,
    SECOND,
    Array,
    Best,
    Program,
    X,
    gathered,
    integers,
    passed,
    reduced,
    scattered,
)

matmul = partial(Program, "matmul")
transformer = partial(Program, "transformer")
conv = partial(Program, "conv")
indexing = partial(Program, "indexing")
ordering = partial(Program, "ordering")
science = partial(Program, "science", tolerance=1e-3)

VECTOR, WHOLE = Array((4096,), X), Best(gathered(4096, 8), "all numbers to all devices")


def masked_mean(x: Any, mask: Any) -> Any:
    """The mean of those positions of each sequence that are no padding."""
    return (x * mask[..., None]).sum(1) / (1 + mask.sum(1))[:, None]


def by_edges(h: Any, weights: Any, source: Any, target: Any) -> Any:
    """What a node reads of its neighbours, weighted by what the edges say."""
    total = jax.ops.segment_sum(weights[:, None] * h[source], target, 256)
    return total / (jax.ops.segment_sum(weights**2, target, 256)[:, None] + 1)


def larger_in_size(a: Any, b: Any) -> Any:
    return jnp.where(jnp.abs(a) > jnp.abs(b), a, b)


def sums(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1]


def spread(x: Any) -> Any:
    """Numbers and their squares, added up together."""
    return lax.reduce((x, x * x), (0.0, 0.0), sums, (0,))


def product(values: Any, places: Any, x: Any) -> Any:
    return sparse.BCOO((values, places), shape=(256, 256)) @ x


def diffused(u: Any) -> Any:
    p = jnp.pad(u, 1)
    return 5 * u - p[:-2, 1:-1] - p[2:, 1:-1] - p[1:-1, :-2] - p[1:-1, 2:]


def adjoint(u: Any) -> Any:
    """The gradient of steps of diffusion."""

    def step(u: Any, _: Any) -> Any:
        return u - 0.1 * diffused(u), None

    return jax.grad(lambda u: (lax.scan(step, u, None, length=10)[0] ** 2).sum())(u)


TABLE = [
    transformer("softmax of short floats, columns sharded", jax.nn.softmax,
        (Array((128, 512), SECOND, "bfloat16"),), SECOND, tolerance=2e-2,
        best=Best(reduced(128, 8, 2) + reduced(128, 8), "the largest, two bytes a row, and sums")),
    transformer("mean of positions that are no padding", masked_mean,
        (Array((16, 256, 32), SECOND), integers((16, 256), 2, SECOND)), X,
        best=Best(scattered(16 * 33, 8), "sums of both to their rows")),
    indexing("weighted neighbours, edges sharded", by_edges,
        (Array((256, 16)), Array((2048,), X), integers((2048,), 256, X),
         integers((2048,), 256, X)), X,
        best=Best(scattered(256 * 17, 8), "sums of both to their nodes")),
    indexing("sparse product, elements sharded", product,
        (Array((2048,), X), integers((2048, 2), 256, X), Array((256, 16))), X,
        best=Best(scattered(256 * 16, 8), "terms of rows to their devices")),
    conv("largest of windows, none below zero, 2x4",
        lambda x: lax.reduce_window(x, 0.0, lax.max, (3, 3), (2, 2), "SAME"),
        (Array((128, 128), GRID),), GRID, (2, 4)),
    conv("largest in size of windows",
        lambda x: lax.reduce_window(x, 0.0, larger_in_size, (3, 1), (1, 1), "SAME"),
        (Array((512, 64), X),), X, best=Best(2 * passed(1, 64), "a row to each neighbour")),
    conv("correlation of an image", lambda a, k: jax.scipy.signal.correlate2d(a, k, "same"),
        (Array((128, 128), X), Array((5, 5))), X,
        best=Best(2 * passed(2, 128), "two rows to each neighbour")),
    ordering("median", jnp.median, (VECTOR,), NONE),
    ordering("order of all numbers", jnp.argsort, (VECTOR,), NONE, best=WHOLE),
    ordering("places among sorted numbers", lambda a, q: jnp.searchsorted(jnp.sort(a), q),
        (VECTOR, Array((512,))), NONE, best=WHOLE),
    matmul("inner product of blocks, flattened", jnp.vdot,
        (Array((128, 128), GRID), Array((128, 128), GRID)), NONE, (2, 4),
        Best(reduced(1, 8), "an all-reduce of one number")),
    science("conjugate gradient of a field, 2x4",
        lambda b: linalg.cg(diffused, b, maxiter=8)[0], (Array((128, 128), GRID),), GRID, (2, 4)),
    science("numbers and squares by one function", spread, (Array((512, 128), X),), NONE),
    science("adjoint of diffusion, rows sharded", adjoint, (Array((128, 128), X),), X),
    science("sums of rows from the last", lambda x: jnp.flip(jnp.cumsum(jnp.flip(x, 0), 0), 0),
        (Array((1024, 64), X),), X),
]  # fmt: skip
