"""The identity of a reduction changes nothing that it is joined with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwise.ir.sharding import Reduction
from meshwise.rules.identity import reduction_identity

JOIN = {
    Reduction.SUM: lax.add,
    Reduction.PROD: lax.mul,
    Reduction.MAX: lax.max,
    Reduction.MIN: lax.min,
    Reduction.AND: lax.bitwise_and,
    Reduction.OR: lax.bitwise_or,
}
FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2]
INTEGERS = [jnp.int8, jnp.int32, jnp.uint8, jnp.uint32]


def values(dtype):
    if dtype == jnp.bool_:
        return jnp.asarray([True, False])
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return jnp.asarray([info.min, info.max, 0, 1, 5], dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray([1 + 2j, -3.5j, 0], dtype)
    info = jnp.finfo(dtype)
    return jnp.asarray([info.min, info.max, 0.0, 1.5, -2.0], dtype)


@pytest.mark.parametrize("reduction", Reduction)
@pytest.mark.parametrize(
    "dtype", [*FLOATS, *INTEGERS, jnp.complex64, jnp.bool_], ids=lambda dtype: dtype.__name__
)
def test_identity_changes_nothing(reduction, dtype):
    bitwise = reduction in (Reduction.AND, Reduction.OR)
    if bitwise and not (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)):
        pytest.skip("no such reduction")
    if dtype == jnp.complex64 and reduction in (Reduction.MAX, Reduction.MIN):
        pytest.skip("complex numbers have no order that devices share")
    if dtype == jnp.bool_ and reduction in (Reduction.SUM, Reduction.PROD):
        pytest.skip("booleans have no sum")
    identity = reduction_identity(reduction, dtype)
    assert identity.dtype == dtype and identity.shape == ()
    joined = jax.jit(JOIN[reduction])(values(dtype), jnp.full_like(values(dtype), identity))
    np.testing.assert_array_equal(joined, values(dtype))


def test_infinities_of_floats():
    assert reduction_identity(Reduction.MAX, np.float32) == -np.inf
    assert reduction_identity(Reduction.MIN, jnp.bfloat16) == np.inf
    lowest = reduction_identity(Reduction.MAX, jnp.float8_e4m3fn)
    assert lowest == jnp.finfo(jnp.float8_e4m3fn).min, "this dtype has no infinity"
