"""A while loop that counts is a loop of so many steps; one that may not, or not so far, is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from meshwise.cost.hardware import GENERIC
from meshwise.flatten import flatten
from tests.meshes import mesh_of

X = np.linspace(-1, 1, 8 * 4, dtype=np.float32).reshape(8, 4)
I32, U8, I8 = np.int32, np.uint8, np.int8


def loop(test, step, start, *others):
    """A loop that carries an array, a counter that the array is made with, and others."""

    def run(x):
        def each(carry):
            x, i, *rest = carry
            return jnp.tanh(x) + i.astype(x.dtype), step(i, *rest), *rest

        return lax.while_loop(lambda c: test(*c[1:]), each, (x, start, *others))

    return run


def steps(function, *args):
    """Of each loop that a program has how many steps it takes; None where data says so."""
    closed = _jax.without_dead(jax.make_jaxpr(function)(*(args or (X,))))
    eqns = flatten(closed, _jax.has_bodies).jaxpr.eqns
    loops = [e.params["control"].eqn for e in eqns if e.primitive is _jax.open_p]
    return [e.params.get("length") for e in loops]


def with_jitted_parts(x):
    count = jax.jit(lambda n, x: loop(lambda i: i < n, jax.jit(lambda i: i + 1), I32(0))(x))
    return count(I32(5), x)


def with_a_bound_of_outside(x):
    n = jnp.arange(3).sum() * 2
    return lax.fori_loop(0, n, lambda i, x: jnp.tanh(x), x)


def nested(x):
    inner = loop(lambda i: i > 0, lambda i: i - 2, I32(6))
    return loop(lambda i: i < 3, lambda i: i + 1, 0)(inner(x)[0])[0]


def in_a_loop(x):
    body = loop(lambda i, n: i < n, lambda i, n: i + n, I32(0), I32(4))
    return lax.fori_loop(0, 7, lambda _, x: body(x)[0], x)


def every_row(x):
    return jax.vmap(loop(lambda i: i < 5, lambda i: i + 1, 0))(x)


COUNTED = {
    "up": (loop(lambda i: i < 5, lambda i: i + 1, 0), [5]),
    "up to and with": (loop(lambda i: i <= 5, lambda i: i + 1, 0), [6]),
    "down": (loop(lambda i: i > 0, lambda i: i - 1, 5), [5]),
    "down to and with": (loop(lambda i: i >= 0, lambda i: i - 1, 5), [6]),
    "from the left": (loop(lambda i: lax.lt(I32(0), i), lambda i: lax.add(I32(-1), i), 5), [5]),
    "until": (loop(lambda i: i != 9, lambda i: i + 3, 0), [3]),
    "down until": (loop(lambda i: i != -9, lambda i: i - 3, 0), [3]),
    "steps that pass": (loop(lambda i: i < 5, lambda i: i + 3, 0), [2]),
    "steps that meet": (loop(lambda i: i < 6, lambda i: i + 3, 0), [2]),
    "steps that meet with it": (loop(lambda i: i <= 6, lambda i: i + 3, 0), [3]),
    "steps down that pass": (loop(lambda i: i > 0, lambda i: i - 3, 5), [2]),
    "steps down past it": (loop(lambda i: i >= -1, lambda i: i - 3, 5), [3]),
    "none": (loop(lambda i: i < 5, lambda i: i + 1, 5), [0]),
    "none, it is": (loop(lambda i: i != 5, lambda i: i + 1, 5), [0]),
    "none, far past": (loop(lambda i: i > 5, lambda i: i - 1, -5), [0]),
    "none, whatever follows": (loop(lambda i: i > 5, lambda i: i + 1, 0), [0]),
    "one": (loop(lambda i: i <= 5, lambda i: i + 1, 5), [1]),
    "to the last of all": (loop(lambda i: i < I8(127), lambda i: i + I8(1), I8(-128)), [255]),
    "to nought of all": (loop(lambda i: i > U8(0), lambda i: i - U8(1), U8(255)), [255]),
    "an end that is carried": (
        loop(lambda i, n: i < n, lambda i, n: i + 2, I32(0), I32(7)),
        [4],
    ),
    "a step that is carried": (loop(lambda i, n: i < 7, lambda i, n: i + n, I32(0), I32(2)), [4]),
    "tested as a wider one": (
        loop(lambda i: i.astype(I32) < 5, lambda i: i + I8(1), I8(0)),
        [5],
    ),
    "parts that are jitted": (with_jitted_parts, [5]),
    "an end that is known": (with_a_bound_of_outside, [6]),
    "one after another": (nested, [3, 3]),
    "in a loop": (in_a_loop, [7, 1]),
    "mapped": (every_row, [5]),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_loop_that_counts(name):
    function, wanted = COUNTED[name]
    assert steps(function) == wanted
    flat = flatten(jax.make_jaxpr(function)(X))
    for found, own in zip(_jax.jaxpr_as_fun(flat)(X), jax.tree.leaves(function(X)), strict=True):
        np.testing.assert_array_equal(found, own)


def test_as_many_steps_as_an_integer_counts():
    most = loop(lambda i: i < I32(2**31 - 1), lambda i: i + 1, I32(0))
    assert steps(most) == [2**31 - 1]
    assert steps(loop(lambda i: i < I32(2**31 - 1), lambda i: i + 1, I32(-1))) == [None]


def printed(x):
    def each(carry):
        jax.debug.print("{}", carry[1])
        return jnp.tanh(carry[0]), carry[1] + 1

    return lax.while_loop(lambda c: c[1] < 5, each, (x, 0))


NOT_KNOWN = {
    "away": loop(lambda i: i >= 0, lambda i: i + 1, 0),
    "away from where it is": loop(lambda i: i <= 5, lambda i: i - 1, 5),
    "stays": loop(lambda i: i < 5, lambda i: i + 0, 0),
    "never meets": loop(lambda i: i != 5, lambda i: i + 3, 0),
    "leaves it": loop(lambda i: i != 5, lambda i: i + 1, 6),
    "no number is below nought": loop(lambda i: i >= U8(0), lambda i: i - U8(1), U8(9)),
    "added and wraps": loop(lambda i: i > U8(0), lambda i: i + U8(255), U8(9)),
    "no number is above": loop(lambda i: i <= I8(127), lambda i: i + I8(1), I8(0)),
    "steps past all": loop(lambda i: i < I8(127), lambda i: i + I8(2), I8(0)),
    "tested as a narrower one": loop(lambda i: i.astype(I8) < I8(5), lambda i: i + 200, 0),
    "counted in a narrower one": loop(
        lambda i: i < 300, lambda i: (i + 1).astype(I8).astype(I32), 0
    ),
    "floats": loop(lambda i: i < 1, lambda i: i + 0.1, 0.0),
    "doubled": loop(lambda i: i < 64, lambda i: i + i, 1),
    "scaled": loop(lambda i: i < 64, lambda i: i * 2, 1),
    "turned": loop(lambda i: i < 5, lambda i: 9 - i, 4),
    "an end that moves": lambda x: lax.while_loop(
        lambda c: c[1] < c[2], lambda c: (jnp.tanh(c[0]), c[1] + 2, c[2] + 1), (x, 0, 9)
    ),
    "a step that moves": lambda x: lax.while_loop(
        lambda c: c[1] < 9, lambda c: (jnp.tanh(c[0]), c[1] + c[2], c[2] + 1), (x, 0, 1)
    ),
    "two tests": lambda x: lax.while_loop(
        lambda c: (c[1] < 5) & (c[0].sum() < 9), lambda c: (jnp.tanh(c[0]), c[1] + 1), (x, 0)
    ),
    "prints": printed,
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_a_loop_that_ends_when_its_data_says_so(name):
    assert steps(NOT_KNOWN[name]) == [None]


@pytest.mark.parametrize("which", ["start", "end", "step"])
def test_what_only_the_data_knows(which):
    def run(x, n):
        numbers = {"start": I32(0), "end": I32(9), "step": I32(2)} | {which: n}
        return loop(lambda i: i < numbers["end"], lambda i: i + numbers["step"], numbers["start"])(
            x
        )

    assert steps(run, X, I32(3)) == [None]
    assert steps(jax.vmap(run), X, np.arange(8, dtype=I32)) == [None]


W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
BY_ROWS = P("x")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_it_sends_what_each_step_does(steps):
    """A product with rows of a weight gathers a vector in each step."""
    mesh = mesh_of(x=8)

    def by_while(x, w):
        return lax.while_loop(
            lambda c: c[1] < steps, lambda c: (jnp.tanh(w @ c[0]) + c[1], c[1] + 1), (x, 0)
        )

    def by_for(x, w):
        return lax.fori_loop(0, steps, lambda i, x: jnp.tanh(w @ x) + i, x)

    shardings = {"mesh": mesh, "in_shardings": BY_ROWS, "hardware": GENERIC}
    counted = mw.jit(by_while, out_shardings=(BY_ROWS, None), **shardings).partition(W[0], W)
    written = mw.jit(by_for, out_shardings=BY_ROWS, **shardings).partition(W[0], W)
    assert counted.wire_bytes == written.wire_bytes == steps * 7 * 4
    assert "a `while` counts for one trip" not in counted.explain()
    found, wanted = counted.simulate(W[0], W), jax.jit(by_while)(W[0], W)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    assert found[1] == wanted[1] == steps


def test_derivatives_are_those_of_a_while(mesh8):
    """Forwards a loop that counts is differentiated; backwards JAX does not, nor do we."""
    function = loop(lambda i: i < 3, lambda i: i + 1, 0)
    partitioned = mw.jit(function, mesh=mesh8, in_shardings=P(mesh8.axis_names[0]))
    _, found = jax.jvp(lambda x: partitioned(x)[0], (X,), (X,))
    _, wanted = jax.jvp(lambda x: function(x)[0], (X,), (X,))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: partitioned(x)[0].sum())(X)


def test_in_a_region():
    """What a hand-written region sends in a loop that counts is sent in each step."""

    def local(x):
        step = jax.jit(lambda x: jnp.tanh(x + lax.psum(x, "x") / 8))
        return lax.while_loop(lambda c: c[1] < 5, lambda c: (step(c[0]), c[1] + 1), (x, 0))[0]

    mesh = mesh_of(x=8)
    region = jax.shard_map(local, mesh=mesh, in_specs=BY_ROWS, out_specs=BY_ROWS)
    for function in (region, jax.jit(region), lambda x: lax.cond(True, region, region, x)):
        program = mw.jit(function, mesh=mesh, in_shardings=BY_ROWS).partition(X)
        assert program.wire_bytes == 5 * 2 * 7 * 16 / 8
