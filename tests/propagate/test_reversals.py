"""Reversals that undo each other through element-wise work: nothing sent, the same numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw


def around(x: Any) -> Any:
    return jnp.flip(jnp.sin(jnp.flip(x)) * 2)


def gradient(x: Any) -> Any:
    """Reversed in the forward pass, and back in the backward pass."""
    return jax.grad(lambda x: (jnp.flip(jnp.tanh(jnp.flip(x, 1)) ** 2, 1) ** 3).sum())(x)


def turned_half(x: Any) -> Any:
    return jax.grad(lambda x: (jnp.rot90(x, 2) ** 2).sum())(x)


def with_rows(x: Any) -> Any:
    """What is repeated along the reversed dim is the same from either end."""
    return jnp.flip(jnp.flip(x, 0) * x[:1] + 1, 0)


def total(x: Any) -> Any:
    return (jnp.flip(x) * jnp.flip(jnp.cos(x))).sum()


def twice(x: Any) -> Any:
    return lax.rev(lax.rev(x, (0,)), (0,))


def weighted(x: Any) -> Any:
    """One operand is read the other way round instead."""
    return jnp.flip(jnp.flip(x) * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape))


def in_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, x: jnp.flip(jnp.cos(jnp.flip(x)) - 1), x)


def read_twice(x: Any) -> Any:
    """The reversed value is a result itself."""
    y = jnp.sin(jnp.flip(x))
    return jnp.flip(y), y


def both_ways(x: Any) -> Any:
    """Blocks move once."""
    return jnp.flip(jnp.sin(jnp.flip(x, 0)), 1)


def rows_apart(x: Any) -> Any:
    """A maximum over one dim of what is reversed in both stays reversed."""
    return jnp.flip(x).max(0)


def quarter_gradient(x: Any) -> Any:
    """A transpose on the way there, and one on the way back."""
    return jax.grad(lambda x: (jnp.sin(jnp.rot90(x)) ** 2).sum())(x)


def turned_back(x: Any) -> Any:
    """Columns are reversed, and rows of the transpose of what is computed of them."""
    return jnp.flip(jnp.sin(jnp.flip(x, 1)).T * 2, 0).T


def stood_up(x: Any) -> Any:
    """Dims of one element come and go between."""
    y = jnp.flip(x, 1)[None, :, :, None]
    return jnp.flip(jnp.tanh(y.transpose(2, 0, 3, 1)).squeeze((1, 2)), 0).T


def weighted_by_place(x: Any) -> Any:
    """What is computed of a transpose meets an operand of its own."""
    y = jnp.flip(x, 1).T * jnp.arange(x.shape[1], dtype=x.dtype)[:, None]
    return jnp.flip(y, 0) + y


def with_own_transpose(x: Any) -> Any:
    """One value by two dims."""
    y = jnp.flip(x[:7, :7], 0)
    return jnp.flip(jnp.sin(y) + y.T, 0)


def with_own_transpose_both(x: Any) -> Any:
    y = jnp.flip(x[:7, :7])
    return jnp.flip(jnp.sin(y) + y.T)


NOTHING = [
    around,
    gradient,
    turned_half,
    twice,
    in_a_loop,
    quarter_gradient,
    turned_back,
]
SOME = [
    stood_up,
    both_ways,
    with_rows,
    total,
    weighted,
    read_twice,
    rows_apart,
    weighted_by_place,
    with_own_transpose,
    with_own_transpose_both,
]


@pytest.mark.parametrize("function", NOTHING + SOME, ids=lambda f: f.__name__)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y")], ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (7, 9)], ids=str)
def test_numbers(function: Callable[..., Any], spec: P, shape: tuple[int, int]) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    sent = mw.jit(function, mesh=mesh, in_shardings=spec).partition(x)
    if function in NOTHING and shape == (8, 12):
        assert sent.wire_bytes == 0
    if function is both_ways and spec == P("x", "y"):
        assert len(sent.collectives) == 1 or shape == (7, 9)
    for ours, wanted in zip(
        jax.tree.leaves(sent.simulate(x)), jax.tree.leaves(function(x)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), wanted, rtol=1e-4, atol=1e-5)
