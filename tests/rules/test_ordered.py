"""The largest and smallest of floats on several devices: NaN, infinities and zeros as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, -2.5]


DTYPES = [
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
    jnp.float8_e5m2,
    jnp.float8_e4m3fnuz,  # whose NaN has the bits of minus zero elsewhere
    jnp.float8_e5m2fnuz,
]


def largest(x, i, u):
    return x.at[i].max(u), x.max(0), u.max(0)


def smallest(x, i, u):
    return x.at[i].min(u), x.min(0), u.min(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [largest, smallest], ids=["max", "min"])
def test_special_numbers(function, dtype):
    """Terms of every pair of special numbers, in an order that the devices do not share."""
    rng = np.random.default_rng(0)
    x, u = (jnp.asarray(rng.choice(SPECIAL, n), dtype) for n in ((12, 7), (41, 7)))
    places = jnp.asarray(rng.integers(-1, 13, 41), jnp.int32)
    step = mw.jit(
        function,
        mesh=AbstractMesh((8,), ("x",)),
        in_shardings=(P(), P("x"), P("x")),
        out_shardings=P(),
    )
    found = step.partition(x, places, u).simulate(x, places, u)
    for one, other in zip(found, function(x, places, u), strict=True):
        np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (one, other)))
    assert jax.tree.all(jax.tree.map(lambda y: y.dtype == dtype, found))
