"""What lies whole from one end to the other is moved to shards all at once."""

import jax
import jax.numpy as jnp
import numpy as np
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
