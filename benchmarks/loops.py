"""One loop a row: the bytes each device sends, beside XLA's two partitioners, in one run.

    python -m benchmarks.loops [NAME ...] [--markdown]

How it is measured is said in `beside.py`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.beside import Row, main  # first: it sets JAX up for eight devices

# isort: split
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.programs.control_flow import (
    accumulated,
    attention,
    gradient,
    layer,
    layers,
    recomputed,
    recurrent,
    switched,
)
from benchmarks.suite.programs.science import conjugate_gradient, largest_eigenvector


def jacobi(u: Any) -> Any:
    """Fifty steps of a five-point stencil."""

    def step(_: Any, u: Any) -> Any:
        around = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
        return u.at[1:-1, 1:-1].set(around / 4)

    return lax.fori_loop(0, 50, step, u)


def shifted_stages(weights: Any, batches: Any) -> Any:
    """A pipeline: a row of stages, each at work on another microbatch (GSPMD section 3.3)."""
    stages, count = weights.shape[0], batches.shape[0]

    def step(state: Any, x: Any) -> Any:
        state = jnp.roll(state, 1, axis=0).at[0].set(x)
        state = jax.vmap(layer)(state, weights / 8)
        return state, state[-1]

    idle = jnp.zeros((stages - 1, *batches.shape[1:]))
    start = jnp.zeros((stages, *batches.shape[1:]))
    _, outs = lax.scan(step, start, jnp.concatenate([batches, idle]))
    return outs[stages - 1 : stages - 1 + count]


X, SECOND, GRID, NONE = P("x"), P(None, "x"), P("x", "y"), P()
STACK, BATCH, STEPS = (12, 64, 64), (512, 64), (16, 128, 64)
KEYS = (8, 4, 8, 8, 8)

TABLE = [
    Row("layers, weights sharded", layers, (STACK, BATCH), (SECOND, X), X),
    Row("layers, weights in shards of layers", layers, ((8, 64, 64), BATCH), (X, X), X),
    Row("gradient of layers, weights sharded", gradient(layers), (STACK, BATCH), (SECOND, X),
        SECOND),
    Row("the same, recomputed", gradient(recomputed), (STACK, BATCH), (SECOND, X), SECOND),
    Row("gradient of layers, data parallel", gradient(layers), (STACK, BATCH), (NONE, X), NONE),
    Row("gradient of layers, tensor parallel", gradient(layers), (STACK, BATCH),
        (P(None, None, "y"), X), P(None, None, "y"), (2, 4)),
    Row("gradient over microbatches", accumulated, ((64, 64), STEPS), (NONE, SECOND), NONE),
    Row("gradient over microbatches, scattered", accumulated, ((64, 64), STEPS), (NONE, SECOND),
        X),
    Row("recurrent, time sharded", recurrent, ((64, 64), STEPS, (128, 64)), (NONE, X, NONE), X),
    Row("recurrent, weight sharded", recurrent, ((64, 64), STEPS, (128, 64)), (X, SECOND, X), X),
    Row("gradient of it", gradient(recurrent), ((64, 64), STEPS, (128, 64)), (X, SECOND, X), X),
    Row("map over a sharded dim", lambda x: lax.map(lambda r: lax.top_k(r, 3)[0], x), ((64, 32),),
        (X,), X),
    Row("Jacobi, 50 steps", jacobi, ((64, 64),), (GRID,), GRID, (2, 4)),
    Row("power method, 20 steps", largest_eigenvector, ((128, 128), (128,)), (X, NONE), X),
    Row("power method, rows and columns", largest_eigenvector, ((128, 128), (128,)),
        (GRID, NONE), X, (2, 4)),
    Row("conjugate gradient, 10 steps", conjugate_gradient, ((128, 128), (128,)), (X, X), X),
    Row("attention by blocks, heads sharded", attention, ((4, 32, 8, 8), KEYS, KEYS),
        (P("x", None, "y"), P(None, "x", None, "y"), P(None, "x", None, "y")), P("x", "y"), (2, 4)),
    Row("attention by blocks, blocks sharded", attention, ((4, 32, 8, 8), KEYS, KEYS),
        (P(None, "x"), X, X), P(None, None, "x")),
    Row("pipeline", shifted_stages, ((8, 64, 64), (12, 16, 64)), (X, NONE), NONE),
    Row("gradient of a pipeline", gradient(shifted_stages), ((8, 64, 64), (12, 16, 64)),
        (X, NONE), X),
    Row("a branch", switched, ((64, 64),), (X,), X),
]  # fmt: skip


if __name__ == "__main__":
    main(TABLE, __doc__ or "")
