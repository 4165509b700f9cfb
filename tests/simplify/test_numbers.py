"""Numbers that are known while tracing are those that JAX computes; others are not known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.flatten import inline_calls
from meshwise.simplify.numbers import MOST_NUMBERS, Numbers


def numbers_of(function: Any, *args: Any) -> Any:
    """What is known of the result, and the result."""
    closed = inline_calls(jax.make_jaxpr(function)(*args))
    makers = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    (out,) = closed.jaxpr.outvars
    return Numbers(makers, constants).of(out), function(*args)


KNOWN = {
    "neighbour": lambda: (jnp.arange(7) + 1) % 7,
    "the other neighbour": lambda: (jnp.arange(7) - 1) % 7,
    "halves": lambda: jnp.arange(9) // 2,
    "halves, towards zero": lambda: jax.lax.div(jnp.arange(9) - 4, jnp.int32(2)),
    "rest, as its number": lambda: jax.lax.rem(jnp.arange(9) - 4, jnp.int32(3)),
    "bytes that overflow": lambda: jnp.arange(200, dtype="uint8") * jnp.uint8(3),
    "signs": lambda: jnp.sign(jnp.arange(5) - 2) * abs(jnp.arange(5) - 3) - (-jnp.arange(5)),
    "bounded": lambda: jnp.clip(jnp.arange(7) + 1, 2, 6),
    "larger, smaller": lambda: jnp.maximum(jnp.arange(6), 3) + jnp.minimum(jnp.arange(6), 2),
    "chosen": lambda: jnp.where((jnp.arange(6) > 2) & (jnp.arange(6) != 4), jnp.arange(6), 9),
    "one of three": lambda: jax.lax.select_n(
        jnp.arange(4) % 3, jnp.arange(4), jnp.arange(4, 8), jnp.arange(8, 12)
    ),
    "bits": lambda: (jnp.arange(6) ^ 3) | (jnp.arange(6) & 2),
    "not": lambda: ~(jnp.arange(6) <= 2),
    "laid otherwise": lambda: jnp.arange(6).reshape(2, 3).T[::-1, 1],
    "laid in another order": lambda: jnp.ravel(jnp.arange(6).reshape(2, 3), order="F"),
    "times a number of Python": lambda: jnp.floor(jnp.arange(64) * 1.05).astype(int),
    "scaled twice, by a power of two": lambda: jnp.floor(jnp.arange(9) * 0.7 * 4).astype(int),
    "side by side": lambda: jnp.concatenate([jnp.arange(6), jnp.ones(2, int)]),
    "spread": lambda: jnp.arange(4)[:, None] * 3 + jnp.arange(5),
    "a constant": lambda: jnp.asarray(np.array([3, 1, 4, 1, 5])) + 1,
    "rounded": lambda: jnp.floor((jnp.arange(8) + 0.5) * 0.5).astype(int),
    "rounded quotients": lambda: jnp.floor((jnp.arange(96) + 0.5) * 48 / 96).astype(int),
    "rounded up": lambda: jnp.ceil((jnp.arange(10) + 0.25) * 5 / 10).astype(int),
}  # fmt: skip
NOT_KNOWN = {
    "an argument": lambda x: x + jnp.arange(4),
    "sums of products, which may be contracted": lambda x: jnp.arange(4) * 0.1 + 0.3,
    "quotients near an integer": lambda x: jnp.floor((jnp.arange(96) + 0.5) * 64 / 96),
    "a product of products, near an integer": lambda x: jnp.floor(jnp.arange(40) * 0.1 * 0.7 * 100),
    "a quotient that is only cast": lambda x: (jnp.arange(4) / 3.0 + 0.1).astype(jnp.float32),
    "one that is not there": lambda x: jax.lax.select_n(x % 2 + 2, x, x),
    "one of three, of two": lambda x: jax.lax.select_n(jnp.arange(4) % 3, jnp.arange(4), x),
    "a quotient": lambda x: jnp.arange(4) / 3.0,
    "divided by zero": lambda x: jax.lax.div(jnp.arange(4), jnp.arange(4)),
    "too large an integer": lambda x: (jnp.arange(4) * 1e9).astype(jnp.int32),
    "short floats": lambda x: jnp.arange(4, dtype=jnp.bfloat16),
    "one of many": lambda x: jax.lax.select_n(jnp.arange(40), *(jnp.arange(40) for _ in range(40))),
    "too many": lambda x: jnp.arange(MOST_NUMBERS + 1) + 1,
}


@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str) -> None:
    found, wanted = numbers_of(KNOWN[name])
    assert found is not None
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_not_known(name: str) -> None:
    found, _ = numbers_of(NOT_KNOWN[name], np.arange(4))
    assert found is None
