"""Rows picked of a dim in shards, and what is computed with them: nothing of others comes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.same import assert_same

MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = np.random.default_rng(0).uniform(1, 2, (16, 4)).astype(np.float32)
NUMBERS = np.array([0.0, np.inf, -0.0, -np.inf], np.float32)
INFINITE = np.where(np.eye(4) > 0, np.inf, ROWS[:4]).astype(np.float32)


def sampled(x, t):
    """A token at temperature zero."""
    logits = x[-1] / t[0]
    return jnp.argmax(logits), logits


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: x[3] / s,
        lambda x, s: x[3] * s,
        lambda x, s: x[:2] * s,
        lambda x, s: x[jnp.array([3, 9, 1])] / s,
        lambda x, s: x[(s > 0).astype(jnp.int32)] * s,
        lambda x, s: lax.dynamic_slice(x, (jnp.int32(s[0] == 0), 1), (3, 2)) / s[0],
        lambda x, s: x[3] / np.float32(0),
        lambda x, s: x[5] @ (INFINITE * s[1:2]),
        lambda x, s: (x[3].reshape(2, 2) / s.reshape(2, 2)).T,
        lambda x, s: jnp.take_along_axis(x, jnp.array([[1, 3, 2, 2]]), 0)[0] * s,
        lambda x, s: 1 / -(x * 0)[3:5],
        lambda x, s: 1 / ((x * -0.0)[3:5] * 2),
        sampled,
    ],
)
def test_infinity_and_zero_meet_the_row_alone(function):
    wanted = jax.jit(function)(ROWS, NUMBERS)
    ours = mw.jit(function, mesh=MESH, in_shardings=(P("x"), P()))
    assert_same(ours(ROWS, NUMBERS), wanted)


def test_what_is_picked_and_added_up_is_sent_once():
    """The elements of a loss are summed before they are sent: a number, not one of each."""

    def loss(logits, labels):
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))

    labels = np.arange(16) % 4
    program = mw.jit(loss, mesh=MESH, in_shardings=(P(None, "x"), P())).partition(ROWS, labels)
    assert [c.shape for c in program.collectives] == [()]
    np.testing.assert_allclose(program(ROWS, labels), loss(ROWS, labels), rtol=1e-6)
