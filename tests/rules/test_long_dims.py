"""Dims of more elements than an integer of 32 bits counts. No array of them is made."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.ir.factors import Strategy
from meshwise.ir.mesh import plain_mesh
from meshwise.rules.registry import REGISTRY, LocalContext

MESH = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))


def planned(function: Any, size: int, dtype: str = "float32") -> mw.SpmdProgram:
    array = jax.ShapeDtypeStruct((size,), dtype)
    return mw.jit(function, mesh=MESH, in_shardings=P("x")).partition(array)


@pytest.mark.parametrize(
    "size", [7, 8, 9, 13, 17, 100, 2**31 - 1, 2**31, 2**31 + 1, 3 * 10**9 + 5, 2**33 + 1, 2**33 + 9]
)
def test_what_is_no_padding(size: int):
    (eqn,) = jax.make_jaxpr(jnp.sin)(jax.ShapeDtypeStruct((size,), "float32")).jaxpr.eqns
    factors = REGISTRY.describe(eqn).factors
    context = LocalContext(eqn, factors, Strategy((("x",),)), plain_mesh(("x",), (8,)))
    found = jax.vmap(lambda _: context.real_rows(0), axis_name="x")(jnp.arange(8))
    local = -(-size // 8)
    wanted = np.clip(size - local * np.arange(8), 0, local)
    np.testing.assert_array_equal(np.clip(np.asarray(found, np.int64), 0, local), wanted)


@pytest.mark.parametrize(
    ("x64", "size", "counted"),
    [(False, 2**31 - 1, "i32"), (False, 2**32, "u32"), (True, 2**32, "i64"), (True, 2**40, "i64")],
)
def test_positions_are_counted_in_integers_that_hold_them(x64: bool, size: int, counted: str):
    with jax.enable_x64(x64):
        program = planned(lambda x: x * lax.iota(np.float32, size), size)
        (positions,) = [e for e in program.jaxpr.eqns if e.primitive.name == "iota"]
    assert positions.outvars[0].aval.str_short(short_dtypes=True).startswith(counted)


@pytest.mark.parametrize("size", [2**32, 2**32 + 1, 50_001 * 60_001])
def test_sums(size: int):
    assert [c.kind.value for c in planned(jnp.sum, size).collectives] == ["all_reduce"]


def test_what_cannot_be_counted_is_refused():
    text = "(?s)4,294,967,297 elements, at .*test_long_dims.py.*int32.*two dims"
    with pytest.raises(mw.UnplannedError, match=text):
        planned(lambda x: jnp.argmax(x) + 1, 2**32 + 1)
