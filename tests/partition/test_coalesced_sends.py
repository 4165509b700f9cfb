"""Rows that several equations fetch of the same devices travel once."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.end_to_end.sent import NOTHING, Row, check_numbers, names, reals, sent_by

X, W = reals(32, 6), 6 * 4  # the bytes of a row


def shifted(x: Any, by: int) -> Any:
    """Rows moved on, zeros where none come from."""
    before, after = max(by, 0), max(-by, 0)
    padded = jnp.pad(x, ((before, after), (0, 0)))
    return lax.slice_in_dim(padded, after, after + x.shape[0], axis=0)


def both_ways(x: Any) -> Any:
    return shifted(x, 1) - 2 * x + jnp.sin(shifted(x, -1))


def in_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, x: both_ways(x) / 4, x)


def in_a_branch(x: Any) -> Any:
    return lax.cond(x[0, 0] > -9, both_ways, jnp.sin, x)


def one_after_the_other(x: Any) -> Any:
    """What goes back depends on what came."""
    return shifted(jnp.sin(shifted(x, 1)), -1)


def permuted(launches: int, rows: int, width: int = W) -> dict[str, tuple[int, int]]:
    return {"ppermute": (launches, rows * width)}


ROWS = P("x")
TABLE = [
    Row("rolled by one and by two", lambda x: jnp.roll(x, 1, 0) * jnp.roll(x, 2, 0), (X,), (8,),
        (ROWS,), ROWS, permuted(1, 2)),
    Row("the same roll of two parts", lambda x: jnp.roll(x, 1, 0) + jnp.roll(jnp.sin(x), 1, 0),
        (X,), (8,), (ROWS,), ROWS, permuted(2, 2)),
    Row("a row each way, two devices", both_ways, (X,), (2,), (ROWS,), ROWS, permuted(1, 1)),
    Row("a row each way, eight devices", both_ways, (X,), (8,), (ROWS,), ROWS, permuted(2, 2)),
    Row("a row each way, one axis of two", both_ways, (X,), (2, 4), (P("x", None),), P("x"),
        permuted(1, 1)),
    Row("each way in turns", one_after_the_other, (X,), (2,), (ROWS,), ROWS, permuted(2, 2)),
    Row("in a loop", in_a_loop, (X,), (2,), (ROWS,), ROWS, permuted(3, 3)),
    Row("two rows one way, one the other", lambda x: shifted(x, 2) + shifted(x, -1), (X,), (2,),
        (ROWS,), ROWS, permuted(2, 3)),
    Row("whole numbers each way", both_ways, (X.astype(jnp.int32),), (2,), (ROWS,), ROWS,
        permuted(1, 1)),
    Row("nothing to send", both_ways, (X,), (2,), (P(None, "x"),), P(None, "x"), NOTHING),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=names(TABLE))
def test_sends(row: Row):
    assert sent_by(row) == row.sent


@pytest.mark.parametrize("row", TABLE, ids=names(TABLE))
def test_numbers(row: Row):
    check_numbers(row._replace(tolerance=1e-6), real=False)


def test_in_a_branch():
    row = Row("in a branch", in_a_branch, (X,), (2,), (ROWS,), ROWS, tolerance=1e-6)
    assert sent_by(row)["ppermute"] == (1, W)
    check_numbers(row, real=False)
