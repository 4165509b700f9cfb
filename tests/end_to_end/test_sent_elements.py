"""Element-wise programs of arrays that lie otherwise: what moves is what takes fewest bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.end_to_end.sent import Row, below, check_numbers, names, reals, sent_by

X, Y = P("x"), P(None, "x")
A, B, NUMBERS = reals(64, 128), reals(128, 64).T, below(3, 64, 128)


def exchanged(itemsize, times=1):
    """All_to_alls of 64 x 128 elements of so many bytes over 8 devices."""
    return {"all_to_all": (times, times * 64 * 128 // 8 * itemsize * 7 // 8)}


def short(x, y):
    return x * y.astype(jnp.bfloat16).astype(jnp.float32)


def decayed(parameter, gradient, moments):
    """A step of Lion, of which what moves is the sign alone."""
    moments = 0.9 * moments + 0.1 * gradient
    return parameter - 1e-3 * (jnp.sign(moments) + 0.1 * parameter), moments


def symmetric(x):
    """Of a matrix and its transpose one moves, and what both make stays with the matrix."""
    y = jnp.sin(x)
    return (y.T + y) * jnp.cos(y)


def symmetric_steps(x):
    return jax.lax.fori_loop(0, 4, lambda _, y: (y.T + y) / 2, x)


SQUARE = reals(64, 64)

ROWS = [
    Row("mask of numbers", lambda x, m: jnp.where(m > 0, x, 0), (A, NUMBERS), (8,), (Y, X), Y,
        exchanged(1)),
    Row("mask of what is computed", lambda x, y: jnp.where(jnp.sin(y) * 2 > 1, x, 0), (A, B), (8,),
        (Y, X), Y, exchanged(1)),
    Row("short floats", short, (A, B), (8,), (Y, X), Y, exchanged(2)),
    Row("what makes a mask lies as what it masks", lambda x, y: jnp.where(y > 0, x, y), (A, B),
        (8,), (X, X), X),
    Row("gradient of a threshold", jax.grad(lambda y, x: (jax.nn.relu(y) * x).sum()), (A, B), (8,),
        (Y, X), X, {"all_to_all": (1, 64 * 128 // 8 * 7 // 8)}),
    Row("products move, not what they are of", lambda x, y, z: x + y * z, (A, B, A[::-1]), (8,),
        (Y, X, X), Y, exchanged(4)),
    Row("a difference moves, then a mask of it", lambda x, y, z: jnp.where(y - z > 0, x, 0),
        (A, B, A[::-1]), (8,), (Y, X, X), Y, exchanged(1)),
    Row("moments in finer shards than the parameter", decayed, (reals(128, 64), *[A.T] * 2), (2, 4),
        (P("y"), P(("x", "y")), P(("x", "y"))), (P("y"), P(("x", "y"))),
        {"ppermute": (1, 16 * 64 * 4), "all_gather": (1, 16 * 64 * 4)}),
    Row("a matrix and its transpose", symmetric, (SQUARE,), (8,), (X,), X,
        {"all_to_all": (1, 64 * 64 // 8 * 4 * 7 // 8)}, 1e-6),
    Row("a matrix and its transpose in every step", symmetric_steps, (SQUARE,), (8,), (X,), X,
        {"all_to_all": (4, 4 * 64 * 64 // 8 * 4 * 7 // 8)}, 1e-6),
    Row("blocks and their transposes in every step", symmetric_steps, (SQUARE,), (2, 4),
        (P("x", "y"),), P("x", "y"), {"ppermute": (8, 4 * 64 * 64 // 8 * 4)}, 1e-6),
]  # fmt: skip
TABLE_OF_ROWS = pytest.mark.parametrize("row", ROWS, ids=names(ROWS))


@TABLE_OF_ROWS
def test_sends(row: Row):
    assert sent_by(row) == row.sent


@TABLE_OF_ROWS
def test_numbers_on_eight_devices(row: Row):
    check_numbers(row, real=True)
