"""Dims that a hint leaves open lie as is best; those that it says lie as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

OPEN = P.UNCONSTRAINED
MESH, GRID = AbstractMesh((8,), ("x",)), AbstractMesh((2, 4), ("x", "y"))


def carried(first):
    """A loop whose carry is hinted in two ways; what it stacks lies by columns."""

    def function(rows):
        def step(carry, row):
            return mw.shard(carry / 2 + row, first), mw.shard(carry, P(OPEN, "x"))

        return lax.scan(step, jnp.zeros((16, 16)), rows)[1]

    return function


def mapped(rows):
    """JAX leaves open what it maps over."""

    def one(rows):
        def step(carry, row):
            return mw.shard(jnp.tanh(carry + row), P("x")), carry.sum()

        return lax.scan(step, jnp.zeros(16), rows)

    return jax.vmap(one, 1, 1)(rows)


CASES = {
    "rows left open": (carried(P(OPEN, None)), MESH, P(None, "x"), 672),
    "rows by x": (carried(P("x", None)), MESH, P(None, "x"), 672),
    "all left open": (carried(P(OPEN, OPEN)), MESH, P(None, "x"), 672),
    "columns by x": (carried(P(OPEN, "x")), MESH, P(None, "x"), 672),
    "mapped": (mapped, GRID, P(None, "y"), None),
}


@pytest.mark.parametrize("name", CASES)
def test_open_dims(name):
    function, mesh, spec, sent = CASES[name]
    rows = np.random.default_rng(0).normal(size=(6, 16, 16)).astype("f")
    program = mw.jit(function, mesh=mesh, in_shardings=spec).partition(rows)
    found, wanted = program.simulate(rows), jax.jit(function)(rows)
    assert sent is None or program.wire_bytes == sent
    for value, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hint", [P(OPEN, "x"), P("x", OPEN), P(OPEN, OPEN)])
def test_what_is_said_is_kept(hint):
    """Whatever costs least: the result of the hint lies as it says in its other dims."""
    program = mw.jit(lambda x: mw.shard(x @ x.T, hint), mesh=GRID, in_shardings=P("y")).partition(
        np.ones((16, 16), "f")
    )
    spec = program.out_shardings.spec
    for said, found in zip(hint, [*spec, None, None], strict=False):
        assert said is OPEN or found == said


def alternating(x, w):
    """Layers under hints of one dim and the other in turn, and their gradients."""

    def loss(x, w):
        for k in range(3):
            x = mw.shard(jnp.tanh(x @ w[k]), P(OPEN, "y") if k % 2 else P("x", OPEN))
        return (x**2).mean()

    return jax.value_and_grad(loss, (0, 1))(x, w)


def test_what_completion_has_does_without_its_shardings_of_sums():
    """A sum that completion has whole is reduced to where it is read, not there first."""
    ends = P(), (P("x"), P(None, "x", "y"))
    step = mw.jit(alternating, mesh=GRID, in_shardings=(P("x"), P()), out_shardings=ends)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(32, 64)).astype(np.float32)
    w = (0.1 * draw.normal(size=(3, 64, 64))).astype(np.float32)
    program = step.partition(x, w)
    for found, wanted in zip(
        jax.tree.leaves(program.simulate(x, w)), jax.tree.leaves(alternating(x, w)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert program.wire_bytes == 20_740  # 27,652 with XLA
