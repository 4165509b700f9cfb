"""Casts of literals, which are literals where the types hold the same number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwise import _jax
from meshwise.flatten import flatten

X = np.arange(3.0, dtype=np.float32)


@pytest.mark.parametrize(
    "value, dtype, left",
    [
        (0, jnp.float32, []),
        (np.int32(7), jnp.bfloat16, []),
        (np.float32(-0.0), jnp.bfloat16, []),
        (True, jnp.int8, []),
        (np.float32(np.inf), jnp.bfloat16, []),
        (np.int32((1 << 24) + 1), jnp.float32, ["convert_element_type"]),
        (np.int32(-1), jnp.uint8, ["convert_element_type"]),
        (np.float32(1.5), jnp.int32, ["convert_element_type"]),
        (np.float32(np.nan), jnp.bfloat16, ["convert_element_type"]),
    ],
)
def test_casts_of_literals(value, dtype, left):
    @jax.jit
    def cast(x):
        return lax.convert_element_type(x, dtype)

    def function(x):
        return jnp.where(x > 1, x.astype(dtype), cast(value))

    closed = jax.make_jaxpr(function)(X)
    flat = flatten(closed)
    casts = [e for e in flat.jaxpr.eqns if e.primitive is lax.convert_element_type_p]
    assert [e.primitive.name for e in casts if not e.invars[0].aval.shape] == left
    (found,), (wanted,) = _jax.jaxpr_as_fun(flat)(X), _jax.jaxpr_as_fun(closed)(X)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(found, float), np.asarray(wanted, float))
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_a_pad_of_numpy_is_with_a_literal():
    flat = flatten(jax.make_jaxpr(lambda x: jnp.pad(x, 1))(X))
    (pad,) = flat.jaxpr.eqns
    assert pad.invars[1].val == 0 and pad.invars[1].aval.dtype == np.float32
