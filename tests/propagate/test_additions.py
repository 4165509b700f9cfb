"""Additions to rows at positions, updates in shards: reduced once, and the same numbers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.end_to_end.sent import Row, check_numbers, names, reduced, sent_by

X, NONE = P("x"), P()
DRAW = np.random.default_rng(7)


def numbers(*shape: int, dtype: str = "float32") -> Any:
    return DRAW.integers(-9, 9, shape).astype(dtype)


def places(*shape: int, bound: int = 24) -> Any:
    return DRAW.integers(-2, bound + 2, shape).astype(np.int32)


def two(x: Any, i: Any, u: Any, j: Any, v: Any) -> Any:
    return x.at[i].add(u).at[j].add(v)


def three_of_zeros(i: Any, u: Any, j: Any, v: Any) -> Any:
    zeros = jnp.zeros((24, 3), u.dtype)
    return zeros.at[i].add(u).at[j].subtract(v, mode="drop").at[i + 1].add(u * 2, mode="clip")


def in_a_loop(i: Any, u: Any, x: Any, twice: bool) -> Any:
    def step(x: Any, row: Any) -> Any:
        x = x.at[row[0]].add(row[1])
        return (x.at[row[0] - 1].add(row[1] * 3) if twice else x), None

    return lax.scan(step, x, (i, u))[0]


def counted(i: Any, u: Any, x: Any) -> Any:
    return lax.fori_loop(0, len(i), lambda k, x: x.at[i[k]].add(u[k]), x)


def read_in_the_loop(i: Any, u: Any, x: Any) -> Any:
    return lax.scan(lambda x, row: (x.at[row[0]].add(row[1]), x[0]), x, (i, u))


def read_between(x: Any, i: Any, u: Any, j: Any, v: Any) -> Any:
    first = x.at[i].add(u)
    return first.at[j].add(v), first.sum()


ROWS_OF, OTHERS = (places(400), numbers(400, 3)), (places(333), numbers(333, 3))
STEPS = places(5, 200), numbers(5, 200)
ONCE = reduced(24 * 3)
SCATTERED = {kind: (1, 7 * 3 * 3 * 4) for kind in ("all_gather", "reduce_scatter")}
IN_STEPS = P(None, "x")

ROWS = [
    Row("one", lambda x, i, u: x.at[i].add(u), (numbers(24, 3), *ROWS_OF), (8,), (NONE, X, X),
        NONE, ONCE),
    Row("two", two, (numbers(24, 3), *ROWS_OF, *OTHERS), (8,), (NONE, X, X, X, X), NONE, ONCE),
    Row("two by rows", two, (numbers(24, 3), *ROWS_OF, *OTHERS), (8,), X, X,
        SCATTERED),
    Row("two by uneven rows", two, (numbers(23, 3), *ROWS_OF, *OTHERS), (8,), X, X,
        SCATTERED),
    Row("three of zeros", three_of_zeros, (*ROWS_OF, *OTHERS), (8,), X, NONE, ONCE),
    Row("three of integers", three_of_zeros,
        (places(400), numbers(400, 3, dtype="int32"), places(96), numbers(96, 3, dtype="int32")),
        (8,), X, NONE, ONCE),
    Row("in a loop", partial(in_a_loop, twice=False), (*STEPS, numbers(24)), (8,),
        (IN_STEPS, IN_STEPS, NONE), NONE, reduced(24)),
    Row("twice in a loop", partial(in_a_loop, twice=True), (*STEPS, numbers(24)), (8,),
        (IN_STEPS, IN_STEPS, NONE), NONE, reduced(24)),
    Row("counted", counted, (*STEPS, numbers(24)), (8,), (IN_STEPS, IN_STEPS, NONE), NONE,
        reduced(24)),
    Row("read in the loop", read_in_the_loop, (*STEPS, numbers(24)), (8,),
        (IN_STEPS, IN_STEPS, NONE), NONE, reduced(24, times=5)),
    Row("read between", read_between, (numbers(24, 3), *ROWS_OF, *OTHERS), (8,),
        (NONE, X, X, X, X), NONE, reduced(24 * 3, times=2)),
    Row("few, which are gathered", two,
        (numbers(240, 3), places(16), numbers(16, 3), places(16), numbers(16, 3)), (8,),
        (NONE, X, X, X, X), NONE, {"all_gather": (4, 2 * 14 * 4 * 4)}),
]  # fmt: skip
TABLE = pytest.mark.parametrize("row", ROWS, ids=names(ROWS))


@TABLE
def test_sends(row: Row):
    assert sent_by(row) == row.sent


@TABLE
def test_numbers(row: Row):
    check_numbers(row, real=False)


@pytest.mark.parametrize("row", ROWS[4:8:3], ids=names(ROWS[4:8:3]))
def test_numbers_on_eight_devices(row: Row):
    check_numbers(row, real=True)


def test_gradients():
    """Of the updates and of what they are added to."""
    weights = numbers(24, 3)

    def loss(x: Any, u: Any, v: Any, i: Any, j: Any) -> Any:
        return jnp.sum(weights * two(x, i, u, j, v) ** 2)

    i, u, j, v = *ROWS_OF, *OTHERS
    args = numbers(24, 3), u, v, i, j
    row = Row("gradients", jax.grad(loss, (0, 1, 2)), args, (8,), (NONE, X, X, X, X), (NONE, X, X))
    check_numbers(row, real=False)
