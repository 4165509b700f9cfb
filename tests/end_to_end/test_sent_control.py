"""Loops and branches: what they send, and the numbers of one device, gradients too."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.end_to_end.sent import (
    NOTHING,
    Row,
    check_numbers,
    mesh_of,
    names,
    program_of,
    reals,
    reduced,
    sent_by,
)

LAYERS, WIDTH, BATCH = 3, 16, 64


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


def switched(index: int) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        branches = [lambda x: x - x.mean(0), lambda x: 2 * x, lambda x: x]
        return lax.switch(index + (x.shape[0] > 10**6), branches, x)

    return function


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


W = reals(LAYERS, WIDTH, WIDTH) / 4
X = reals(BATCH, WIDTH)
ROWS = reals(4, BATCH, WIDTH)
STACK = P(None, "x")
WEIGHT = WIDTH * WIDTH
WHOLE_WEIGHTS = {"all_gather": (LAYERS, LAYERS * 7 * WEIGHT * 4 // 8)}


def with_policy(policy: Any) -> Callable[..., Any]:
    return gradient(partial(layers, step=jax.checkpoint(layer, policy=policy)))


def gathered(times: int, elements: int) -> tuple[int, int]:
    return times, times * 7 * elements * 4 // 8


POLICIES = jax.checkpoint_policies
FSDP_GRADIENT = {
    "all_gather": gathered(2 * LAYERS, WEIGHT),
    "reduce_scatter": gathered(LAYERS, WEIGHT),
}
TABLE = [
    Row("layers, batch sharded", layers, (W, X), (8,), (P(), P("x")), P("x"), NOTHING, 1e-5),
    Row("layers, weights sharded: gathered one by one", layers, (W, X), (8,), (STACK, P("x")),
        P("x"), WHOLE_WEIGHTS, 1e-5),
    Row("stack of weights in shards of layers", layers, (reals(8, WIDTH, WIDTH) / 4, X), (8,),
        (P("x"), P("x")), P("x"),
        {"all_to_all": gathered(1, WEIGHT), "all_gather": gathered(8, WEIGHT)}, 1e-5),
    Row("gradient of layers, data parallel", gradient(layers), (W, X), (8,), (P(), P("x")), P(),
        reduced(LAYERS * WEIGHT), 1e-5),
    Row("gradient of layers, weights sharded", gradient(layers), (W, X), (8,), (STACK, P("x")),
        STACK, FSDP_GRADIENT, 1e-5),
    *(Row(f"gradient of layers, recomputed but {name}", with_policy(getattr(POLICIES, name)),
          (W, X), (8,), (STACK, P("x")), STACK, FSDP_GRADIENT, 1e-5)
      for name in ("nothing_saveable", "everything_saveable", "dots_saveable",
                   "dots_with_no_batch_dims_saveable")),
    Row("gradient of layers with a gain, recomputed", gradient(partial(layers, step=residual)),
        (reals(LAYERS, WIDTH + 1, WIDTH) / 4, X), (8,), (P(), P("x")), P(),
        reduced(WEIGHT + WIDTH, times=LAYERS), 1e-5),
    Row("gradient over microbatches", accumulated, (W[0], ROWS), (8,), (P(), STACK), P(),
        reduced(WEIGHT), 1e-5),
    Row("gradient over microbatches, two axes", accumulated, (W[0], ROWS), (2, 4),
        (P(), P(None, ("x", "y"))), P(), reduced(WEIGHT), 1e-5),
    Row("gradient over microbatches, scattered", accumulated, (W[0], ROWS), (8,), (P(), STACK),
        P("x"), {"reduce_scatter": gathered(1, WEIGHT)}, 1e-5),
    Row("gradient over microbatches, added to another", accumulated_from,
        (reals(WIDTH, WIDTH), W[0], ROWS), (8,), (P(), P(), STACK), P(), reduced(WEIGHT), 1e-5),
    Row("gradient over microbatches of microbatches", accumulated_twice,
        (W[0], reals(2, 3, BATCH, WIDTH)), (8,), (P(), P(None, None, "x")), P(),
        reduced(WEIGHT), 1e-5),
    Row("loss over microbatches", total_loss, (W[0], ROWS), (8,), (P(), STACK), P(),
        reduced(1), 1e-5),
    Row("gradient of few bits added to one of more", accumulated_wide,
        (W[0].astype(jnp.bfloat16), ROWS.astype(jnp.bfloat16)), (8,), (P(), STACK), P(),
        reduced(WEIGHT), 5e-2),
    Row("losses added up and stacked", losses, (W[0], ROWS), (8,), (P(), STACK), P(),
        reduced(1 + len(ROWS)), 1e-5),
    Row("gradient through a loop over microbatches", jax.grad(total_loss), (W[0], ROWS), (8,),
        (P(), STACK), P(), reduced(WEIGHT), 1e-5),
    Row("gradient of rows read at positions", jax.grad(of_rows), (W, ROWS), (8,), (P(), STACK),
        P(), reduced(LAYERS * WEIGHT), 1e-5),
    Row("recurrent, batch sharded", recurrent, (W[0], ROWS, X), (8,), (P(), STACK, P("x")),
        (P("x"), STACK), NOTHING, 1e-5),
    Row("recurrent, time sharded", recurrent, (W[0], reals(8, BATCH, WIDTH), X), (8,),
        (P(), P("x"), P()), (P("x"), STACK), {"all_to_all": gathered(1, BATCH * WIDTH)}, 1e-5),
    Row("recurrent, uneven batch", recurrent, (W[0], reals(4, 13, WIDTH), reals(13, WIDTH)), (8,),
        (P(), STACK, P("x")), (P("x"), STACK), NOTHING, 1e-5),
    Row("backwards", lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x, reverse=True), (ROWS,),
        (8,), (STACK,), (P("x"), STACK)),
    Row("counted", counted, (X,), (8,), (P("x"),), P("x")),
    Row("counted by data", counted_to, (X, np.int32(3)), (8,), (P("x"), P()), P("x")),
    Row("a branch of three", chosen, (np.int32(1), X), (2, 4), (P(), P("x", "y")), P("x", "y"),
        {"all_reduce": (1, 16)}, 1e-6),
    Row("carried the other way round", swapped, (X, X + 1), (8,), (P("x"), P("x")), P("x"),
        NOTHING, 1e-5),
    Row("keys carried", noisy, (ROWS,), (8,), (STACK,), P("x"), NOTHING, 1e-5),
    Row("hints inside", hinted, (W, X), (8,), (P(), P(None, "x")), P(None, "x"),
        {"all_to_all": gathered(2 * LAYERS, BATCH * WIDTH // 8)}, 1e-5),
    Row("forces of all pairs", attracted, (reals(64, 3), reals(64, 3), reals(64)), (8,),
        (P("x"),) * 3, P("x"), {"all_gather": (6, 7 * 4 * (64 + 5 * 64 * 3) // 8)}, 1e-5),
    Row("a sum of a constant is taken once", invariant, (X, reals(5, BATCH, WIDTH), X), (8,),
        (P("x"), STACK, P("x")), P("x"), reduced(WIDTH), 1e-4),
    Row("a rule for derivatives inside", gradient(partial(layers, step=lambda h, w: clipped(
        layer(h, w)))), (W, X), (8,), (P(), P("x")), P(), reduced(LAYERS * WEIGHT), 1e-5),
    Row("three axes", gradient(layers), (W, X), (2, 2, 2), (P(None, "x", "y"), P(("x", "z"), "y")),
        P(None, "x", "y"), None, 1e-5),
    Row("best paths, states sharded: scores gathered", best_paths, (reals(32, 32), reals(6, 32)),
        (8,), (STACK, STACK), STACK, {"all_gather": gathered(5, 32)}),
]  # fmt: skip
FREE = [
    Row("while, uneven", halved, (reals(13, 6),), (8,), (P("x"),), P("x"), None, 1e-5),
    Row("while, two axes", halved, (reals(12, 6),), (2, 4), (P("y", "x"),), P("y", "x"), None,
        1e-5),
    Row("if", if_large, (reals(13, 6),), (8,), (P("x"),), P("x"), None, 1e-5),
    Row("if not", if_large, (reals(13, 6) / 100,), (8,), (P("x"),), P("x"), None, 1e-5),
    *(Row(f"branch {i}", chosen, (np.int32(i), reals(13, 6)), (8,), (P(), P("x")), P("x"), None,
          1e-5) for i in range(-1, 4)),
    Row("nested", nested, (reals(13, 6),), (8,), (P("x"),), None, None, 1e-5),
    Row("nested, three axes", nested, (reals(12, 8),), (2, 2, 2), (P(("x", "y"), "z"),), None,
        None, 1e-5),
    Row("gradient of a branch", jax.grad(lambda x: (if_large(x) ** 3).sum()), (reals(13, 6),),
        (8,), (P("x"),), P("x"), None, 1e-4),
    Row("loops that end one by one", jax.vmap(ends, (0, None)), (reals(13, 6), reals(8, 5)), (8,),
        (P("x"), P()), P("x"), None, 1e-5),
    Row("loops that end one by one, rows shared out in each", jax.vmap(ends, (0, None)),
        (reals(13, 6), reals(8, 5)), (8,), (P(), P("x")), None, None, 1e-5),
    Row("conjugate gradients", solved, (reals(8, 8), reals(8)), (8,), (P("x"), P("x")), P("x"),
        None, 1e-4),
    Row("a hint on a literal that is carried", with_hinted_literal, (X,), (8,), (P("x"),), None),
    Row("added to the largest", added_to_largest, (ROWS,), (8,), (STACK,), P(), None, 1e-5),
    Row("loops in vain", in_vain, (reals(13, 6), np.int32(3)), (8,), (P("x"), P()), P("x")),
    Row("best paths, uneven states", best_paths, (reals(13, 13), reals(6, 13)), (2, 4),
        (P("x", "y"), P(None, "y")), P(None, "y")),
    Row("rows scattered", lambda c, u: lax.scan(lambda c, t: (c.at[jnp.arange(16) * 7 % 24].add(t),
        None), c, u)[0], (reals(24, 8), reals(5, 16, 8)), (8,), (P("x"), STACK), None, None, 1e-5),
    Row("products of what is carried", lambda a, x: lax.fori_loop(0, 4, lambda _, x:
        a.T @ (a @ x), x), (reals(16, 6), reals(6)), (8,), (P("x"), P()), P(), None, 1e-5),
    Row("no steps", lambda x: lax.scan(lambda c, r: (c + r, c), x[0] if len(x) else 1.0,
        jnp.zeros((0, 6))), (reals(13, 6),), (8,), (P("x"),), None, None, 1e-5),
]  # fmt: skip


@pytest.mark.parametrize("row", [r for r in TABLE if r.sent is not None], ids=lambda r: r.name)
def test_sends_no_more(row: Row):
    assert not program_of(row).partition(*row.args).per_device.whole
    assert sent_by(row) == row.sent


@pytest.mark.parametrize("row", TABLE + FREE, ids=names(TABLE + FREE))
def test_numbers_of_one_device(row: Row):
    check_numbers(row, real=False)


ON_DEVICES = ("gradient over microbatches, added to another", "while, uneven", "nested", "if")


@pytest.mark.parametrize("name", ON_DEVICES)
def test_on_devices(name: str):
    (row,) = [r for r in TABLE + FREE if r.name == name]
    check_numbers(row, real=True)


def count(jaxpr: Any) -> int:
    """Equations, those of bodies included."""
    inner = [x for e in jaxpr.eqns for x in jax.tree.leaves(list(e.params.values()))]
    return len(jaxpr.eqns) + sum(count(x.jaxpr) for x in inner if hasattr(x, "jaxpr"))


def equations(function: Callable[..., Any], devices: int, *shapes: tuple[int, ...]) -> int:
    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    step = mw.jit(function, mesh=mesh_of(devices), in_shardings=(STACK, P("x")))
    return count(step.partition(*types).jaxpr)


def test_size_depends_on_neither_trips_nor_devices():
    sizes = {
        equations(gradient(layers), devices, (trips, 4096, 4096), (4096, 4096))
        for trips in (2, 200)
        for devices in (8, 4096)
    }
    assert len(sizes) == 1, sizes
