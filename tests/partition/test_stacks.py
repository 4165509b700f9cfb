"""Stacks of a loop: a device keeps its own steps where nothing else is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

MESH = AbstractMesh((4,), ("x",))


def states(w, rows, reverse=False):
    def step(state, row):
        state = jnp.tanh(state @ w + row)
        return state, (state, state > 0)

    return lax.scan(step, jnp.zeros_like(rows[0]), rows, reverse=reverse)[1]


def partitioned(function, steps, out):
    step = mw.jit(function, mesh=MESH, in_shardings=P(), out_shardings=out)
    f32 = jnp.float32
    return step.partition(jax.ShapeDtypeStruct((8, 8), f32), jax.ShapeDtypeStruct((steps, 8), f32))


def held(program):
    """The shapes of what the loop carries and stacks, floats only."""
    (loop,) = [e for e in program.jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    return [v.aval.shape for v in loop.outvars if v.aval.dtype == jnp.float32]


@pytest.mark.parametrize("steps", [8, 7])
@pytest.mark.parametrize("reverse", [False, True])
def test_only_own_steps_are_kept(steps, reverse):
    program = partitioned(lambda w, rows: states(w, rows, reverse), steps, P("x"))
    assert held(program) == [(8,), (2, 8)]
    draw = np.random.default_rng(0)
    args = draw.normal(size=(8, 8)).astype("f"), draw.normal(size=(steps, 8)).astype("f")
    for found, wanted in zip(program.simulate(*args), states(*args, reverse), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "function, out",
    {
        "two shardings": (lambda w, rows: 2 * (states(w, rows)[0],), (P("x"), P())),
        "the whole": (lambda w, rows: states(w, rows)[0], P()),
        "columns": (lambda w, rows: states(w, rows)[0], P(None, "x")),
    }.values(),
)
def test_what_is_read_otherwise_is_whole_along_the_steps(function, out):
    assert held(partitioned(function, 8, out))[-1][0] == 8


@pytest.mark.parametrize("made", [1.0, 3, True])
def test_rows_that_are_numbers(made):
    fn = mw.jit(
        lambda rows: lax.scan(lambda c, row: (c + row.sum(), made), 0.0, rows),
        mesh=MESH,
        in_shardings=P("x"),
        out_shardings=(P(), P("x")),
    )
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype("f")
    total, stack = fn.partition(rows).simulate(rows)
    np.testing.assert_allclose(total, rows.sum(), rtol=1e-5)
    np.testing.assert_array_equal(stack, jnp.full(8, made))


def padded_reads(program):
    """The shapes of what loops read whole, and of what is cut to its size before them."""
    eqns = program.jaxpr.jaxpr.eqns
    loops = [e for e in eqns if e.primitive.name == "scan"]
    read = [v.aval.shape for e in loops for v in e.invars if len(v.aval.shape) == 2]
    return read, [e.outvars[0].aval.shape for e in eqns if e.primitive.name == "slice"]


def normed(rows, reverse=False):
    def step(state, row):
        state = state / 2 + row
        return state / (1 + abs(state).sum()), state.sum()

    return lax.scan(step, jnp.zeros_like(rows[0]), rows, reverse=reverse)


def added(rows):
    return lax.scan(lambda c, row: (jnp.tanh(c + row), None), jnp.zeros_like(rows[0]), rows)[0]


CASES = {
    "gathered": (normed, (7, 3), [(8, 3)], []),
    "in reverse": (lambda rows: normed(rows, reverse=True), (7, 3), [(8, 3)], []),
    "moved to columns": (added, (7, 4), [(7, 1)], [(7, 1)]),
    "also returned": (lambda rows: (normed(rows), rows), (7, 3), [(7, 3)], [(7, 3)]),
}


@pytest.mark.parametrize("function, shape, read, cut", CASES.values(), ids=CASES)
def test_rows_are_read_of_what_was_gathered(function, shape, read, cut):
    fn = mw.jit(function, mesh=MESH, in_shardings=P("x"), out_shardings=P())
    rows = np.random.default_rng(0).normal(size=shape).astype("f")
    program = fn.partition(rows)
    assert padded_reads(program) == (read, cut)
    found, wanted = jax.tree.leaves(program.simulate(rows)), jax.tree.leaves(function(rows))
    for own, one in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, one, atol=1e-5)


def test_keys_with_padding_behind_them():
    def drawn(keys):
        draw = jax.vmap(jax.random.normal)
        return lax.scan(lambda c, key: (c + draw(key).sum(), c), 0.0, keys)

    keys = jax.random.split(jax.random.key(0), (7, 3))
    fn = mw.jit(drawn, mesh=MESH, in_shardings=P("x"), out_shardings=P())
    found = fn.partition(keys).simulate(keys)
    for own, one in zip(found, drawn(keys), strict=True):
        np.testing.assert_allclose(own, one, atol=1e-5)
