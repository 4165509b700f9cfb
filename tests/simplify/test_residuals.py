"""Rows that a loop can make of others it reads are stacked for it by none."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax.bodies import scan_counts
from meshwise.flatten import flatten

MESH = AbstractMesh((2, 2), ("x", "y"))
WIDTH = 128
X = np.random.default_rng(0).normal(size=(5, 4, WIDTH)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(WIDTH, WIDTH), scale=0.1).astype(np.float32)


def layers(layer):
    """A loss of what is carried through a layer in every step, and its gradient for a weight."""

    def loss(w, x):
        def step(h, row):
            h = layer(h @ w, row)
            return h, h

        last, all_of_it = lax.scan(step, jnp.zeros(x.shape[1:]), x)
        return (last**2).sum() + (all_of_it**2).sum()

    return jax.grad(loss)


def without_stack(layer):
    """The same where only the last is read, and loops go the other way."""

    def loss(w, x):
        step = lambda h, row: (layer(h @ w, row), None)  # noqa: E731
        return (lax.scan(step, jnp.zeros(x.shape[1:]), x, reverse=True)[0] ** 2).sum()

    return jax.grad(loss)


def plain(h, row):
    return jnp.tanh(h + row)


def gelu(h, row):
    return 0.1 * jax.nn.gelu(h + row)


def forgets(h, row):
    gate = jax.nn.sigmoid(h)
    return gate * h + (1 - gate) * jnp.tanh(row + h)


def softmax(h, row):
    e = jnp.exp(h + row)
    return e / e.sum(-1, keepdims=True)


def masked(h, row):
    return jnp.where(h > row, h, jnp.tanh(row * h))


def short(h, row):
    return jnp.tanh((h + row).astype(jnp.bfloat16)).astype(jnp.float32)


def kept(h, row):
    return jax.checkpoint(lambda h, row: jnp.tanh(h + row))(h, row)


def gated_twice(state, row):
    """Two states, and their product as what is stacked: read in the other order on the way back."""
    s, n = state
    gate = jax.nn.sigmoid(row)
    s, n = gate * s + row, gate * n + row[..., ::-1]
    return (s, n), s * n


def leapfrog(state, row):
    q, p = state
    p = p - 0.1 * jnp.sin(q) * row
    q = q + 0.1 * p
    return (q, p), p * q


def smallest_lstm(state, row):
    (c, _), new = state, jnp.tanh(row)
    c = jax.nn.sigmoid(row + 1) * c + jax.nn.sigmoid(row) * new
    return (c, c), new * c


def turned(h, row):
    return jnp.tanh(h + row).reshape(2, -1).T.reshape(h.shape) * row


def hinted(h, row):
    return mw.shard(jnp.tanh(h + row), P("x"))


def stacks(function, *args):
    """How many arrays the loops of a program stack, as it is written and as it is simplified."""

    def count(eqns, name):
        return sum(eqn.primitive.name == name for eqn in eqns)

    closed = jax.make_jaxpr(function)(*args)
    loops = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]
    written = sum(len(eqn.outvars) - scan_counts(eqn)[1] for eqn in loops)
    flat = flatten(closed, lambda eqn: eqn.primitive.name == "scan")
    return written, count(flat.jaxpr.eqns, "mark_stack")


# Of each layer how many arrays are stacked as it is written, and how many are left: as JAX 0.10 and
# as JAX 0.11 writes derivatives, which stacks `1 - tanh(x) ** 2`.
NEWER = hasattr(lax, "one_minus_square_p")
LAYERS = {
    plain: ((4, 2), (3, 2)),
    # Results, inputs of the product, what goes into `gelu`, and its `tanh`.
    gelu: ((7, 4), (6, 5)),
    forgets: ((8, 5), (8, 5)),
    softmax: ((5, 4), (5, 4)),
    masked: ((5, 4), (4, 4)),
    short: ((4, 3), (3, 3)),
    kept: ((3, 3), (3, 3)),
    turned: ((4, 3), (3, 3)),
    hinted: ((4, 3), (3, 3)),
}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_what_is_stacked(layer):
    wanted = LAYERS[layer][NEWER]
    assert stacks(layers(layer), W, X) == wanted
    assert stacks(without_stack(layer), W, X) == (wanted[0] - 1, wanted[1] - 1)


def test_a_step_carries_what_it_has_read_to_the_one_before():
    """Of `h` before and behind each step one is stacked, where a loop goes back from the last."""
    assert stacks(without_stack(plain), W, X) == ((2, 1) if NEWER else (3, 1))
    product = lambda w, x: jax.jvp(lambda w: layers(plain)(w, x), (w,), (w,))  # noqa: E731
    assert stacks(product, W, X) == ((6, 5) if NEWER else (8, 4))


def test_a_number_is_carried():
    def loss(w, x):
        step = lambda h, row: ((jnp.tanh(h[0] @ w + row), 1.0), h[1])  # noqa: E731
        (last, _), ys = lax.scan(step, (jnp.zeros(x.shape[1:]), 0.0), x)
        return (last**2).sum() + ys.sum()

    check(jax.grad(loss), W, X)


def two_carried_back(x):
    """The other loop reads what is made in another order than it is carried in."""

    def step(c, row):
        new = jnp.sin(c[0] + row), jnp.cos(c[1] * row)
        return new, (*c, new[1], new[0])

    _, rows = lax.scan(step, (x[0], x[1]), x)
    read = lambda c, r: (c * 0.5 + r[0] * r[1] + r[2] * r[3] ** 2, None)  # noqa: E731
    return lax.scan(read, x[0] * 0, rows, reverse=True)[0]


def two_shapes_carried_back(x):
    def step(c, row):
        flat = jnp.flip(jnp.full(WIDTH, c[2]))
        return (flat, c[1] + row, c[2]), (*c[:2], c[1] + row, flat)

    last, rows = lax.scan(step, (jnp.zeros(WIDTH), x[0], 2.0), x)
    return last[1] * lax.scan(lambda c, r: (c + sum(r), None), x[0] * 0, rows, reverse=True)[0]


def made_and_carried_back(x):
    """What is carried on is made again of what was carried, so nothing of it is carried back."""
    _, rows = lax.scan(lambda h, row: (h + row, (h, h + row)), x[0], x)
    read = lambda c, r: (jnp.tanh(c @ W * r[0] + r[1]), None)  # noqa: E731
    return lax.scan(read, x[0], rows, reverse=True)[0]


def squared_again_and_again(x):
    """Each is read twice by the next: what is dead behind it is gone through once."""

    def step(c, row):
        for _ in range(40):
            row = row * row
        return c, row

    _, rows = lax.scan(step, 0.0, 1 + x * 1e-14)
    return lax.scan(lambda c, row: (c + row, None), x[0], rows)[0]


def in_a_long_chain(x):
    def step(c, row):
        for _ in range(1200):
            row = jnp.sin(row)
        return c, row

    _, rows = lax.scan(step, 0.0, x)
    return lax.scan(lambda c, row: (c + row, None), x[0], rows)[0]


@pytest.mark.parametrize(
    "function",
    [
        two_carried_back,
        two_shapes_carried_back,
        made_and_carried_back,
        squared_again_and_again,
        in_a_long_chain,
    ],
    ids=lambda f: f.__name__,
)
def test_rows_that_one_loop_hands_to_another(function):
    program = mw.jit(function, mesh=MESH, in_shardings=P(None, "x")).partition(X)
    wanted = jax.jit(function)(X)
    np.testing.assert_allclose(program.simulate(X), wanted, rtol=1e-4, atol=1e-4)


def scaled(c, row, k):
    return c + row.sum(), (row * (k + 2.0), row + c)


def test_many_loops_that_hand_to_one_let_it_do_little_again():
    def many(x):
        c, stacks = 0.0, []
        for k in range(20):
            c, (rows, _) = lax.scan(partial(scaled, k=k), c, x)
            stacks.append(rows)

        def read(c, rows):
            for row in rows:
                c = jnp.sin(c * row)
            return c, None

        return lax.scan(read, x[0], stacks)[0] + c

    eqns = flatten(jax.make_jaxpr(many)(X), lambda eqn: eqn.primitive.name == "scan").jaxpr.eqns
    assert sum(eqn.primitive.name == "mul" for eqn in eqns) <= 2 * 20


def test_little_is_made_twice():
    """A product of eight numbers takes no longer than what would be made again beside it."""
    assert stacks(layers(gelu), W[:8, :8], X[..., :8]) == ((6, 5) if NEWER else (7, 5))


def test_what_is_a_result_is_stacked():
    def both(w, x):
        def step(h, row):
            h = jnp.tanh(h @ w + row)
            return h, 1 - h

        return lax.scan(step, jnp.zeros(x.shape[1:]), x)

    wanted = (5, 3) if NEWER else (6, 3)
    assert stacks(both, W, X) == (1, 1)
    assert stacks(lambda w, x: jax.vjp(both, w, x)[1](both(w, x)), W, X) == wanted


@pytest.mark.parametrize("gradient", [layers, without_stack], ids=lambda f: f.__name__)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_gradients_are_those_of_one_device(layer, gradient):
    check(gradient(layer), W, X)


@pytest.mark.parametrize("step", [gated_twice, leapfrog, smallest_lstm], ids=lambda f: f.__name__)
def test_gradients_of_two_states(step):
    def loss(w, x):
        start = x[0], jnp.cos(x[1])
        return (lax.scan(lambda c, row: step(c, row @ w), start, x)[1] ** 2).mean()

    check(jax.grad(loss), W, X)


def test_two_loops_read_a_stack():
    """A product with a Hessian reads what its forward loop stacks in both loops behind it."""

    def product(w, x):
        return jax.jvp(lambda w: layers(gelu)(w, x), (w,), (w,))[1]

    check(product, W, X)
    check(lambda w, x: jax.grad(lambda w: (layers(forgets)(w, x) ** 2).sum())(w), W, X)


def check(function, *args):
    """Partitioned it gives what it gives on one device."""
    program = mw.jit(function, mesh=MESH, in_shardings=(P(None, "y"), P(None, "x")))
    found, wanted = program.partition(*args).simulate(*args), jax.jit(function)(*args)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4 * np.abs(wanted).max())
