"""Positions that count along a batch are found, and nothing else is taken for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwise._jax import jaxpr_as_fun
from meshwise.flatten import flatten
from meshwise.simplify.counts import Count, Counts

X = np.arange(5 * 4 * 3, dtype=np.float32).reshape(5, 4, 3)
PLACES, J = np.array([3, 0, 7, 2, -1]), np.array([2, 1, 0, 2])
FIVE = np.arange(5)


def traced(function: Any, *args: Any) -> Any:
    return flatten(jax.make_jaxpr(function)(*args))


def batches(closed: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The batch dims of the operand and of the indices, of each gather and scatter."""
    found = []
    for eqn in closed.jaxpr.eqns:
        numbers = eqn.params.get("dimension_numbers")
        if eqn.primitive.name == "gather":
            found.append((numbers.operand_batching_dims, numbers.start_indices_batching_dims))
        elif eqn.primitive.name.startswith("scatter"):
            found.append((numbers.operand_batching_dims, numbers.scatter_indices_batching_dims))
    return found


PAIRED = {
    "rows": (lambda x, i: x[jnp.arange(5), i], ((0,), (0,))),
    "rows by a constant": (lambda x, i: x[FIVE, i], ((0,), (0,))),
    "rows, clipped": (lambda x, i: x.at[jnp.arange(5), i].get(mode="clip"), ((0,), (0,))),
    "rows, filled": (lambda x, i: x.at[jnp.arange(5), i].get(mode="fill"), ((0,), (0,))),
    "rows after columns": (lambda x, i: x.swapaxes(0, 1)[i, jnp.arange(5)], ((1,), (0,))),
    "both dims": (lambda x, i: x[FIVE[:, None], jnp.arange(4), i[:, None]], ((0, 1), (0, 1))),
    "a diagonal": (lambda x, i: x[:4][jnp.arange(4), jnp.arange(4)], ((0,), (0,))),
    "counted in another type": (lambda x, i: x[jnp.arange(5, dtype="int8"), i], ((0,), (0,))),
    "behind a barrier": (
        lambda x, i: x[lax.optimization_barrier((jnp.arange(5), i))[0], i], ((0,), (0,))),
    "moved and back": (lambda x, i: x[jnp.arange(5) * 2 - jnp.arange(5), i], ((0,), (0,))),
    "added to": (lambda x, i: x.at[jnp.arange(5), i].add(1.0), ((0,), (0,))),
    "set": (lambda x, i: x.at[jnp.arange(5), i].set(x[:, 0]), ((0,), (0,))),
    "set, dropped": (lambda x, i: x.at[FIVE, i].set(x[:, 0], mode="drop"), ((0,), (0,))),
    "a batch of batches": (
        lambda x, i: jax.vmap(lambda y, j: y[jnp.arange(4), j])(x, jnp.stack([J] * 5)),
        ((0, 1), (0, 1)),
    ),
}  # fmt: skip

NOT_PAIRED = {
    "from one on": lambda x, i: x[jnp.arange(5) + 1, i],
    "backwards": lambda x, i: x[jnp.arange(5)[::-1], i],
    "some rows": lambda x, i: x[jnp.arange(3), i[:3]],
    "every other row": lambda x, i: x[jnp.arange(0, 10, 2), i],
    "not known": lambda x, i: x[i, i],
    "all the same": lambda x, i: x[jnp.zeros(5, int), i],
    "beyond its type": lambda x, i: x[(jnp.arange(5, dtype="uint8") - jnp.uint8(1)), i],
    "nothing else": lambda x, i: x[i],
}


@pytest.mark.parametrize("name", PAIRED)
def test_paired(name: str):
    function, expected = PAIRED[name]
    closed = traced(function, X, PLACES)
    assert batches(closed) == [expected]
    (found,) = jaxpr_as_fun(closed)(X, PLACES)
    np.testing.assert_array_equal(found, function(jnp.asarray(X), jnp.asarray(PLACES)))


@pytest.mark.parametrize("name", NOT_PAIRED)
def test_not_paired(name: str):
    assert batches(traced(NOT_PAIRED[name], X, PLACES)) == [((), ())]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: jnp.arange(6)[:, None] * 3 + jnp.arange(4), Count(0, (3, 1))),
        (lambda: 2 - lax.broadcasted_iota("int32", (3, 1, 4), 2), Count(2, (0, 0, -1))),
        (lambda: jnp.where(jnp.arange(4) < 4, jnp.arange(4), 9), Count(0, (1,))),
        (lambda: jnp.where(jnp.arange(4) >= 4, 9, jnp.arange(4) + 1), Count(1, (1,))),
        (lambda: jnp.where(jnp.arange(4) > 2, 9, jnp.arange(4)), None),
        (lambda: jnp.clip(jnp.arange(4), 0, 3), Count(0, (1,))),
        (lambda: jnp.clip(jnp.arange(4), 1, 3), None),
        (lambda: jnp.maximum(5, jnp.arange(4)), Count(5, (0,))),
        (lambda: jnp.arange(4) * jnp.arange(4), None),
        (lambda: jnp.arange(4.0), None),
        (lambda: jnp.asarray(np.array([[5, 7], [8, 10]])) + 0, Count(5, (3, 2))),
        (lambda: jnp.asarray(np.array([0, 1, 3])) + 0, None),
        (lambda: jnp.arange(100, dtype="int8") * jnp.int8(2), None),
        (lambda: jnp.int32(7) + 0 * jnp.int32(3), Count(7, ())),
    ],
)
def test_counts(function: Any, expected: Count | None):
    closed = jax.make_jaxpr(function)()
    flat = flatten(closed)
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    assert Counts(flat.jaxpr.eqns, constants).of(flat.jaxpr.outvars[0]) == expected
