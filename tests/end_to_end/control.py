"""Functions with loops and branches, for one device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w)


def layers(w: Any, x: Any, step: Callable[..., Any] = layer) -> Any:
    """A stack of layers, one after the other."""
    return lax.scan(lambda h, w: (step(h, w), None), x, w)[0]


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of the sum of squares, by the first argument."""
    return jax.grad(lambda *args: (function(*args) ** 2).sum())


def best_paths(moves: Any, seen: Any) -> Any:
    """From which state the best path to each comes, in every step (Viterbi)."""
    return lax.scan(lambda score, own: ((score[:, None] + moves).max(0) + own,
        jnp.argmax(score[:, None] + moves, 0)), seen[0], seen[1:])[1]  # fmt: skip


def likelihood(moves: Any, seen: Any) -> Any:
    """The likelihood of a batch of sequences, step after step (the forward algorithm)."""

    def step(a: Any, own: Any) -> Any:
        return jax.nn.logsumexp(a[:, :, None] + moves, 1) + own, None

    return lax.scan(step, seen[0], seen[1:])[0]


def accumulated(w: Any, x: Any) -> Any:
    """A gradient that is added up over microbatches."""

    def step(total: Any, row: Any) -> Any:
        return total + gradient(lambda w: layer(row, w))(w), None

    return lax.scan(step, jnp.zeros_like(w), x)[0]


def accumulated_from(start: Any, w: Any, x: Any) -> Any:
    return lax.scan(lambda t, row: (t + gradient(lambda w: layer(row, w))(w), None), start, x)[0]


def accumulated_twice(w: Any, x: Any) -> Any:
    """The same within another loop that only adds too."""

    def outer(total: Any, rows: Any) -> Any:
        return accumulated_from(total, w, rows), None

    return lax.scan(outer, jnp.zeros_like(w), x)[0]


def accumulated_at_times(
    branches: Sequence[Callable[..., Any]], every: int = 2
) -> Callable[..., Any]:
    """What branches make, of every so many steps in turn, of a total and a step's gradient."""

    def all_steps(w: Any, x: Any) -> Any:
        def step(total: Any, at: Any) -> Any:
            row, t = at
            each = [lambda c, r, b=b: b(c, gradient(lambda w: layer(r, w))(w)) for b in branches]
            return lax.switch(t % every, each, total, row), None

        return lax.scan(step, jnp.zeros_like(w), (x, jnp.arange(len(x))))[0]

    return all_steps


def collected(w: Any, x: Any) -> Any:
    """A pipeline of stages: what the last one makes is put into a buffer once it is filled."""
    stages, count = len(w), len(x)

    def step(t: Any, state: Any) -> Any:
        flow, done = state
        fed = lax.dynamic_index_in_dim(x, jnp.minimum(t, count - 1), keepdims=False)
        flow = jax.vmap(layer)(jnp.roll(flow, 1, 0).at[0].set(fed), w)
        at = t - (stages - 1)
        put = lambda: lax.dynamic_update_index_in_dim(done, flow[-1], at, 0)  # noqa: E731
        return flow, lax.cond(at >= 0, put, lambda: done)

    start = jnp.zeros((stages, *x.shape[1:])), jnp.zeros_like(x)
    return lax.fori_loop(0, stages + count - 1, step, start)[1]


def of_rows(table: Any, x: Any) -> Any:
    """The gradient of rows of a table, read at positions that the step says."""

    def step(total: Any, at: Any) -> Any:
        rows = lax.dynamic_index_in_dim(table, at[0] % 3, keepdims=False)
        return total + (layer(at[1], rows) ** 2).sum(), None

    return lax.scan(step, 0.0, (jnp.arange(x.shape[0]), x))[0]


def total_loss(w: Any, x: Any) -> Any:
    return lax.scan(lambda t, row: (t + (layer(row, w) ** 2).sum(), None), 0.0, x)[0]


def accumulated_wide(w: Any, x: Any) -> Any:
    """Gradients of 16 bits, added up in 32."""

    def step(total: Any, row: Any) -> Any:
        return total + gradient(lambda w: layer(row, w))(w).astype(np.float32), None

    return lax.scan(step, jnp.zeros(w.shape), x)[0]


def added_to_largest(x: Any) -> Any:
    """What steps add to begins with what is unreduced by another operator."""
    return lax.scan(lambda total, row: (total + row.sum(), None), x.max(), x)[0]


def losses(w: Any, x: Any) -> Any:
    """Added up, and each by itself."""

    def step(total: Any, row: Any) -> Any:
        loss = (layer(row, w) ** 2).sum()
        return total + loss, loss / 2

    return lax.scan(step, 0.0, x)


def recurrent(w: Any, x: Any, h: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = jnp.tanh(h @ w + row)
        return h, h

    return lax.scan(step, h, x)


def halved(x: Any) -> Any:
    """Halved until the mean square is below one: a loop whose test sends something."""
    return lax.while_loop(lambda x: (x * x).mean() > 1, lambda x: x / 2 + x.mean() * 0.01, 8 * x)


def counted(x: Any) -> Any:
    return lax.fori_loop(0, 5, lambda i, x: x * 0.5 + i, x)


def counted_to(x: Any, n: Any) -> Any:
    return lax.fori_loop(0, n, lambda i, x: x * 0.5 + i, x)


def chosen(i: Any, x: Any) -> Any:
    return lax.switch(i, [lambda x: x - x.mean(0), lambda x: 2 * x, lambda x: x * 0 + 3.0], x)


def if_large(x: Any) -> Any:
    return lax.cond((x * x).sum() > 10, lambda x: x / jnp.abs(x).max(), lambda x: x, x)


def nested(x: Any) -> Any:
    """A branch in a loop in a loop, with a loop that ends when its data says so in a branch."""

    def inner(h: Any, i: Any) -> Any:
        h = lax.cond(i % 2 == 0, lambda h: h - h.mean(0), halved, h)
        return h, h[0]

    def outer(h: Any, _: Any) -> Any:
        h, rows = lax.scan(inner, h, jnp.arange(3))
        return h + rows.sum(0), rows

    return lax.scan(outer, x, None, length=2)


def swapped(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, _: ((c[1], c[0] * 2 + c[1].mean(1, keepdims=True)), None), (x, y),
                    None, length=3)[0]  # fmt: skip


def noisy(x: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        key, h = carry
        key, now = jax.random.split(key)
        return (key, h + row * jax.random.normal(now, row.shape)), None

    return lax.scan(step, (jax.random.key(3), x[0] * 0), x)[0][1]


def hinted(w: Any, x: Any) -> Any:
    def step(h: Any, w: Any) -> Any:
        return mw.shard(layer(h, w), P(None, "x")), None

    return lax.scan(step, x, w)[0]


def invariant(w: Any, x: Any, h: Any) -> Any:
    """A sum of a constant, which each step would reduce."""
    return lax.scan(lambda h, row: (h + row * (w * w).sum(0), None), h, x)[0]


def ranked(at: Any, to: Any, weights: Any, ranks: Any) -> Any:
    """Ranks of pages along links, of whose weights each step would count those of a page."""

    def step(_: Any, ranks: Any) -> Any:
        counts = jax.ops.segment_sum(weights, to, len(ranks))
        return jax.ops.segment_sum(ranks[at] / (1 + counts**2)[at], to, len(ranks))

    return lax.fori_loop(0, 5, step, ranks)


def attracted(x: Any, v: Any, m: Any) -> Any:
    """Forces of all pairs in every step: to compute all of them everywhere would send less."""

    def step(_: Any, state: Any) -> Any:
        x, v = state
        d = x[None] - x[:, None]
        v = v + 0.01 * (m[None, :, None] * d / (1 + (d * d).sum(-1, keepdims=True))).sum(1)
        return x + 0.01 * v, v

    return lax.fori_loop(0, 5, step, (x, v))


def ends(row: Any, rows: Any) -> Any:
    """Of each row its own number of steps; each goes through all rows."""
    return lax.while_loop(
        lambda h: (h * h).sum() > 0.1,
        lambda h: h * 0.5 + lax.map(lambda r: jnp.tanh(r) * h[0], rows).mean() * 0.01,
        row,
    )


def solved(a: Any, b: Any) -> Any:
    return jax.scipy.sparse.linalg.cg(lambda v: v + a.T @ (a @ v), b, maxiter=5)[0]


def with_hinted_literal(x: Any) -> Any:
    return lax.scan(lambda c, _: ((c[0] * mw.shard(c[1], P()), c[1]), None), (x, 2.0), None, 2)[0]


def in_vain(x: Any, n: Any) -> Any:
    """In each step a loop of which only one result is read, and a loop of which none is."""

    def step(i: Any, h: Any) -> Any:
        lax.while_loop(lambda g: (g * g).sum() > 0.1, lambda g: g / 2, h)
        (h, _), _ = lax.scan(lambda c, _: ((c[0] * 0.9, c[1] + c[0].sum()), 0.5), (h, 0.0),
                                 None, length=2)  # fmt: skip
        return h

    return lax.fori_loop(0, n, step, x)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.5, 0.5),))


@jax.checkpoint
def residual(h: Any, w: Any) -> Any:
    """A layer on a stream, with a gain for each column; computed again for its gradient."""
    return h + layer(h * w[0], w[1:])
