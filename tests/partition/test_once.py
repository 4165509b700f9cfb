"""Equal collectives of equal values run once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from meshwise.partition.once import send_once

N8 = AbstractMesh((8,), ("d",))


def heated(u, _=None):
    """A step of diffusion; zeros around."""
    p = jnp.pad(u, 1)
    return u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u), None


def slope_of_steps(u):
    """The gradient of three steps, each of which sends its two borders in both directions once."""
    return jax.grad(lambda u: (lax.scan(heated, u, None, length=3)[0] ** 2).sum())(u)


def test_borders_are_sent_once_a_step():
    program = mw.jit(slope_of_steps, mesh=N8, in_shardings=P("d"), out_shardings=P("d")).partition(
        jax.ShapeDtypeStruct((256, 33), jnp.float32)
    )
    assert all(c.count == 3 for c in program.collectives) and len(program.collectives) == 4
    x = np.random.default_rng(0).normal(size=(256, 33)).astype(np.float32)
    np.testing.assert_allclose(program.simulate(x), slope_of_steps(x), rtol=1e-5, atol=1e-5)


def traced(function):
    types = [jax.ShapeDtypeStruct((4, 3), jnp.float32)] * 2
    return _jax.make_jaxpr_over_axes(function, [("d", 8)], types)


SHIFT, BACK = [(0, 1)], [(1, 0)]
CASES = {
    "cut alike": (lambda x, y: [lax.ppermute(x[i:][:1], "d", SHIFT) for i in (1, 1)], 1),
    "cut otherwise": (lambda x, y: [lax.ppermute(x[i:][:1], "d", SHIFT) for i in (1, 2)], 2),
    "of others": (lambda x, y: [lax.ppermute(v[1:], "d", SHIFT) for v in (x, y)], 2),
    "to others": (lambda x, y: [lax.ppermute(x[1:], "d", way) for way in (SHIFT, BACK)], 2),
    "computed alike": (lambda x, y: [lax.psum(jnp.tanh(x) + y, "d") for _ in range(3)], 1),
    "recomputed on purpose": (
        lambda x, y: [lax.psum(jnp.tanh(v), "d") for v in (x, lax.optimization_barrier(x))], 2,
    ),
    "recomputed twice": (
        lambda x, y: [lax.psum(jnp.tanh(lax.optimization_barrier(x)), "d") for _ in range(2)], 2,
    ),
    "in a loop": (
        lambda x, y: lax.scan(lambda h, _: (lax.psum(h, "d") + lax.psum(h, "d"), None), x, None, 2),
        1,
    ),
}  # fmt: skip


def count(jaxpr):
    names = ("ppermute", "psum", "psum_invariant")
    bodies = [v for e in jaxpr.eqns for v in e.params.values() if hasattr(v, "jaxpr")]
    own = sum(eqn.primitive.name in names for eqn in jaxpr.eqns)
    return own + sum(count(_jax.opened(body)) for body in bodies)


@pytest.mark.parametrize("name", CASES)
def test_equal_collectives_run_once(name):
    function, expected = CASES[name]
    closed = traced(function)
    once = send_once(closed)
    assert count(once.jaxpr) == expected
    assert [v.aval for v in once.jaxpr.outvars] == [v.aval for v in closed.jaxpr.outvars]
    if count(closed.jaxpr) == expected:
        assert once is closed
