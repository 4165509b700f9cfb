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
]  # fmt: skip
TABLE_OF_ROWS = pytest.mark.parametrize("row", ROWS, ids=names(ROWS))


@TABLE_OF_ROWS
def test_sends(row: Row):
    assert sent_by(row) == row.sent


@TABLE_OF_ROWS
def test_numbers_on_eight_devices(row: Row):
    check_numbers(row, real=True)
