"""What lies whole from one end to the other is moved to shards all at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw


def dispatched(x, slot):
    """Rows put where a table says, and taken back."""
    return jnp.tanh(jnp.zeros((128, x.shape[1])).at[slot].set(x))[slot]


def test_rows_put_and_taken_back_stay_in_columns():
    """Rows go to columns and back, and places to all: whole, rows would be gathered, 10 KiB."""
    x = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    slot = np.random.default_rng(1).permutation(128)[:96].astype(np.int32)
    mesh = jax.make_mesh((8,), ("x",))
    program = mw.jit(dispatched, mesh=mesh, in_shardings=P("x"), out_shardings=P("x")).partition(
        x, slot
    )
    there_and_back = 2 * 7 / 8 * (96 * 64 / 8) * 4
    assert program.wire_bytes == there_and_back + 7 / 8 * 96 * 4
    np.testing.assert_allclose(program(x, slot), dispatched(x, slot), rtol=1e-6)


def mixed(x, w, m):
    return m @ (x @ w) @ w


def in_order(x, w, m):
    return jnp.sort(x @ w, 0) @ w


@pytest.mark.parametrize("function", [mixed, in_order])
@pytest.mark.parametrize("shape", [(128, 32), (512, 64)])
def test_rows_and_columns_in_turn(function, shape):
    """Between products of features something goes along all rows, and nothing asks for columns."""
    n, d = shape
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) / 8 for s in (shape, (d, d), (n, n))]
    columns = P(None, "x")
    ins = (columns, P(), P())
    step = mw.jit(
        function, mesh=jax.make_mesh((8,), ("x",)), in_shardings=ins, out_shardings=columns
    )
    program = step.partition(*args)
    assert program.wire_bytes == 4 * 7 / 8 * (n * d / 8) * 4
    np.testing.assert_allclose(program.simulate(*args), function(*args), rtol=1e-4, atol=1e-5)
