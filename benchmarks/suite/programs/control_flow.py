"""Loops and branches: what stays sharded in a carry, and what moves once instead of every step."""

from __future__ import annotations

from collections.abc import Callable
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
    gathered,
    integers,
    reduced,
    scattered,
)

row = partial(Program, "control flow")


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of the mean square, with respect to the first operand."""
    return jax.grad(lambda *args: (function(*args) ** 2).mean())


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w)


def layers(weights: Any, x: Any) -> Any:
    return lax.scan(lambda h, w: (layer(h, w / 8), None), x, weights)[0]


def recomputed(weights: Any, x: Any) -> Any:
    step = jax.checkpoint(layer)
    return lax.scan(lambda h, w: (step(h, w / 8), None), x, weights)[0]


def accumulated(w: Any, batches: Any) -> Any:
    """A gradient added up over microbatches."""

    def step(total: Any, x: Any) -> Any:
        return total + jax.grad(lambda w: (layer(x, w) ** 2).mean())(w), None

    return lax.scan(step, jnp.zeros_like(w), batches)[0]


def recurrent(w: Any, rows: Any, h: Any) -> Any:
    return lax.scan(lambda h, row: (jnp.tanh(h @ w / 8 + row), None), h, rows)[0]


def lstm(w: Any, rows: Any) -> Any:
    """A gated recurrence, [T, B, D] by [D + H, 4 H]."""
    start = jnp.zeros((rows.shape[1], w.shape[1] // 4))

    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], 1) @ w / 8, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (start, start), rows)[1]


def newton(a: Any, x: Any) -> Any:
    """The inverse of a matrix by Newton's steps, until it is one or 30 steps are over."""

    def go_on(state: Any) -> Any:
        step, _, error = state
        return (error > 1e-3) & (step < 30)

    def improve(state: Any) -> Any:
        step, x, _ = state
        residue = jnp.eye(a.shape[0]) - a @ x
        return step + 1, x + x @ residue, jnp.abs(residue).max()

    scale = jnp.abs(a).sum(0).max() * jnp.abs(a).sum(1).max()
    return lax.while_loop(go_on, improve, (0, (a + 0 * x).T / scale, jnp.inf))[1]


def attention(q: Any, keys: Any, values: Any) -> Any:
    """Attention a block of keys at a time, [B, Q, H, D] by [N, B, K, H, D]."""

    def step(carry: Any, block: Any) -> Any:
        most, total, out = carry
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, block[0])
        new = jnp.maximum(most, scores.max(-1))
        p, scale = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
        out = out * scale[..., None] + jnp.einsum("bhqk,bkhd->bhqd", p, block[1])
        return (new, total * scale + p.sum(-1), out), None

    batch, rows, heads, width = q.shape
    start = jnp.full((batch, heads, rows), -1e30), jnp.zeros((batch, heads, rows))
    start = (*start, jnp.zeros((batch, heads, rows, width)))
    (_, total, out), _ = lax.scan(step, start, (keys, values))
    return out / total[..., None]


def switched(x: Any) -> Any:
    return lax.cond((x * x).mean() > 0.5, lambda x: x / jnp.abs(x).max(), lambda x: x, x)


def one_of_four(x: Any, w: Any, which: Any) -> Any:
    branches = [lambda x: x, jnp.tanh, lambda x: x @ w, lambda x: x - x.mean()]
    return lax.switch(which[0], branches, x)


def clipped(w: Any, x: Any) -> Any:
    """A gradient scaled down to a norm of one."""
    g = jax.grad(lambda w: (layer(x, w) ** 2).sum())(w)
    return g * jnp.minimum(1, 1 / jnp.sqrt((g * g).sum()))


def losses(w: Any, x: Any, labels: Any) -> Any:
    """A mean cross entropy in eight chunks of rows, [N, D] by [D, V]."""

    def step(total: Any, chunk: Any) -> Any:
        rows, own = chunk
        logits = rows @ w / 8
        picked = jnp.take_along_axis(logits, own[:, None], 1)[:, 0]
        return total + (jax.nn.logsumexp(logits, -1) - picked).sum(), None

    chunks = x.reshape(8, -1, x.shape[1]), labels.reshape(8, -1)
    return lax.scan(step, 0.0, chunks)[0] / x.shape[0]


def kalman(moves: Any, seen: Any, observed: Any) -> Any:
    """A Kalman filter: the states by which what is observed came about."""
    width = moves.shape[0]

    def step(state: Any, y: Any) -> Any:
        mean, spread = state
        mean, spread = moves @ mean, moves @ spread @ moves.T + 0.1 * jnp.eye(width)
        of_seen = seen @ spread @ seen.T + jnp.eye(seen.shape[0])
        gain = jnp.linalg.solve(of_seen, seen @ spread).T
        mean = mean + gain @ (y - seen @ mean)
        return (mean, spread - gain @ seen @ spread), mean

    return lax.scan(step, (jnp.zeros(width), jnp.eye(width)), observed)[1]


STACK, BATCH, STEPS = (12, 64, 64), (512, 64), (16, 128, 64)
KEYS = (8, 4, 8, 8, 8)
MEAN = reduced(1, 8)

TABLE = [
    row("layers, weights sharded", layers, (Array(STACK, SECOND), Array(BATCH, X)), X,
        best=Best(gathered(12 * 64 * 64, 8), "each weight gathered once")),
    row("layers, weights in shards of layers", layers, (Array((8, 64, 64), X), Array(BATCH, X)), X,
        best=Best(gathered(8 * 64 * 64, 8), "each weight gathered once"),
        reason="XLA's compiler takes the gather of all layers out of the loop; ours holds one"),
    row("gradient of layers, weights sharded", gradient(layers),
        (Array(STACK, SECOND), Array(BATCH, X)), SECOND,
        best=Best(2 * gathered(12 * 64 * 64, 8),
                  "each weight gathered once, its gradient reduce-scattered")),
    row("the same, recomputed", gradient(recomputed), (Array(STACK, SECOND), Array(BATCH, X)),
        SECOND, best=Best(2 * gathered(12 * 64 * 64, 8),
                          "each weight gathered once, its gradient reduce-scattered")),
    row("gradient of layers, data parallel", gradient(layers), (Array(STACK), Array(BATCH, X)),
        NONE, best=Best(reduced(12 * 64 * 64, 8), "an all-reduce of the gradient")),
    row("gradient of layers, tensor parallel", gradient(layers),
        (Array(STACK, P(None, None, "y")), Array(BATCH, X)), P(None, None, "y"), (2, 4),
        reason="more and smaller exchanges in each step, for fewer bytes"),
    row("gradient over microbatches", accumulated, (Array((64, 64)), Array(STEPS, SECOND)), NONE,
        best=Best(reduced(64 * 64, 8), "one all-reduce after the loop")),
    row("gradient over microbatches, scattered", accumulated,
        (Array((64, 64)), Array(STEPS, SECOND)), X,
        best=Best(scattered(64 * 64, 8), "one reduce-scatter after the loop"),
        reason="the whole gradient added up, and scattered once; XLA scatters in every step"),
    row("gradient over microbatches, those sharded", accumulated,
        (Array((64, 64), X), Array((8, 128, 64), X)), X,
        best=Best(gathered(64 * 64, 8) + scattered(64 * 64, 8),
                  "the weight gathered, a microbatch each, one reduce-scatter")),
    row("losses of chunks of rows, 2x4", jax.grad(losses, (0, 1)),
        (Array((64, 128), P(None, "y")), Array((256, 64), X), integers((256,), 128, X)),
        (P(None, "y"), X), (2, 4)),
    row("states observed, time sharded", kalman,
        (Array((16, 16), scale=0.2), Array((8, 16), scale=0.3), Array((32, 8), X)), X,
        best=Best(gathered(32 * 8, 8), "what is observed gathered once")),
    row("recurrent, time sharded", recurrent,
        (Array((64, 64)), Array(STEPS, X), Array((128, 64))), X,
        reason="one exchange for both in the end; ours hands more kernels to other threads"),
    row("recurrent, weight sharded", recurrent,
        (Array((64, 64), X), Array(STEPS, SECOND), Array((128, 64), X)), X,
        best=Best(gathered(64 * 64, 8), "the weight gathered once")),
    row("gradient of a recurrence, weight sharded", gradient(recurrent),
        (Array((64, 64), X), Array(STEPS, SECOND), Array((128, 64), X)), X,
        best=Best(2 * gathered(64 * 64, 8), "the weight gathered, its gradient reduce-scattered")),
    row("LSTM, batch sharded", lstm, (Array((96, 256)), Array((24, 64, 32), SECOND)), SECOND,
        best=LOCAL),
    row("LSTM, gates by columns", lstm, (Array((96, 256), SECOND), Array((24, 64, 32))), NONE),
    row("while with a norm in its condition", newton,
        (Array((64, 64), scale=0.1), Array((64, 64))), X),
    row("map over a sharded dim", lambda x: lax.map(lambda r: lax.top_k(r, 3)[0], x),
        (Array((64, 32), X),), X, best=LOCAL),
    row("attention by blocks, heads sharded", attention,
        (Array((4, 32, 8, 8), P("x", None, "y")), Array(KEYS, P(None, "x", None, "y")),
         Array(KEYS, P(None, "x", None, "y"))), GRID, (2, 4), LOCAL),
    row("attention by blocks, blocks sharded", attention,
        (Array((4, 32, 8, 8), SECOND), Array(KEYS, X), Array(KEYS, X)), P(None, None, "x")),
    row("a branch", switched, (Array((64, 64), X),), X,
        best=Best(2 * MEAN, "a mean before, a maximum inside")),
    row("one of four branches", one_of_four,
        (Array((64, 64), X), Array((64, 64)), integers((1,), 4)), X,
        best=Best(MEAN, "a mean in one branch, nothing in the others")),
    row("gradient clipped to a norm", clipped, (Array((64, 64), X), Array(BATCH, X)), X,
        best=Best(2 * gathered(64 * 64, 8) + MEAN,
                  "the weight gathered, its gradient reduce-scattered, a norm")),
    row("counted loop of shifts", lambda x: lax.fori_loop(
        0, 8, lambda _, x: jnp.roll(x, 1, 0) + x, x), (Array((512, 64), X),), X,
        best=Best(8 * 64 * 4, "a row to the next, eight times")),
]  # fmt: skip
