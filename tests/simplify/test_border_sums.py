"""Sums of what was scattered into zeros: when no row is made for them, and what they come to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.flatten import flatten
from tests.fuzz.evaluate.run import evaluate

ROWS, COLUMNS = 6, 11
# Twice in one place, before the first and after the last one.
PLACES = np.array([3, -20, 10, 3, 11, 0], np.int32)
OF_BYTES = np.array([3, 0, 10, 3, 1, 0], np.uint8)


def scattered(u: Any, places: Any, mode: str = "drop", into: Any = 0.0, wide: int = COLUMNS) -> Any:
    """One number in each row of zeros."""
    return jnp.full((ROWS, wide), into, u.dtype).at[jnp.arange(ROWS), places].add(u[0], mode=mode)


def windows(u: Any, places: Any) -> Any:
    """Columns of `[COLUMNS, ROWS]` at places that are data."""
    return jnp.zeros((COLUMNS, ROWS), u.dtype).at[places].add(u, mode="drop")


# Functions of `u[6, 6]` and places of which no scatter is left.
SUMMED: dict[str, Callable[[Any, Any], Any]] = {
    "of each row": lambda u, p: scattered(u, p).sum(1),
    "of all": lambda u, p: scattered(u, p).sum(),
    "negative": lambda u, p: (-scattered(u, p)).sum(1),
    "clipped, of all": lambda u, p: scattered(u, p, "clip").sum(),
    "places of one byte": lambda u, p: scattered(u, OF_BYTES, wide=300).sum(1),
    "whole rows": lambda u, p: windows(u, p).sum(0),
    "whole rows, of all": lambda u, p: windows(u, p).sum(),
    "two places": lambda u, p: jnp.zeros((11, 5)).at[p, p // 2].add(u[0], mode="drop").sum(),
    "between other dims": lambda u, p: jnp.zeros((6, 11, 6)).at[:, p].add(
        u[:, :, None] * u, mode="drop").sum(1),
    "batch that comes last": lambda u, p: jnp.zeros((11, 6)).at[p, jnp.arange(6)].add(
        u[0], mode="drop").sum(0),
}  # fmt: skip

# Functions of which it is left.
KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "clipped, one in each row": lambda u, p: scattered(u, p, "clip").sum(1),
    "of each column": lambda u, p: scattered(u, p).sum(0),
    "into ones": lambda u, p: scattered(u, p, into=1.0).sum(1),
    "of squares": lambda u, p: (scattered(u, p) ** 2).sum(1),
    "part of a row": lambda u, p: jnp.zeros((11, 8)).at[p, :6].add(u, mode="drop").sum(0),
    "more updates than places": lambda u, p: jnp.zeros((2, 6)).at[p].add(u, mode="drop").sum(0),
    "the largest": lambda u, p: jnp.zeros((11, 6)).at[p].max(u, mode="drop").sum(0),
}


def arguments() -> tuple[np.ndarray, np.ndarray]:
    """Small integers, of which sums in any order are the same."""
    return np.random.default_rng(0).integers(-9, 9, (ROWS, ROWS)).astype(np.float32), PLACES


def checked(function: Callable[[Any, Any], Any]) -> list[str]:
    """The primitives of a flat program, which computes what the function does."""
    args = arguments()
    traced = jax.make_jaxpr(function)(*args)
    closed = flatten(traced)
    ((found,), (wanted,)) = (evaluate(jaxpr, args) for jaxpr in (closed, traced))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    return [eqn.primitive.name for eqn in closed.jaxpr.eqns]


@pytest.mark.parametrize("name", SUMMED)
def test_no_scatter_is_left(name: str):
    assert "scatter-add" not in checked(SUMMED[name])


@pytest.mark.parametrize("name", KEPT)
def test_other_sums_stay(name: str):
    assert any(n.startswith("scatter") for n in checked(KEPT[name]))


def test_what_is_read_elsewhere_stays():
    """The scatter is an operand of more than its sum."""
    names = checked(lambda u, p: scattered(u, p) * scattered(u, p).sum(1, keepdims=True))
    assert names.count("scatter-add") == 1


def test_not_a_number_that_is_dropped():
    """What points beyond is not added, whatever it is."""

    def total(u: Any, places: Any) -> Any:
        return scattered(u, places).sum()

    numbers = np.where(PLACES == 11, np.nan, 1).astype(np.float32)[None]
    closed = flatten(jax.make_jaxpr(total)(numbers, PLACES))
    assert evaluate(closed, (numbers, PLACES)) == [4.0]


def test_a_sum_of_negative_zeros_is_zero():
    """The sum of a row begins with zero: of -0.0 alone it is 0.0."""

    def inverse(u: Any, places: Any) -> Any:
        return 1 / (-scattered(u, places, wide=12)).sum(1)

    zeros = np.zeros((1, ROWS), np.float32), PLACES
    closed = flatten(jax.make_jaxpr(inverse)(*zeros))
    (found,) = evaluate(closed, zeros)
    assert "scatter-add" not in {eqn.primitive.name for eqn in closed.jaxpr.eqns}
    np.testing.assert_array_equal(found, np.full(ROWS, np.inf))
