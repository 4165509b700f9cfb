"""What is few before it is spread over another dim is sent there."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

MASKS = {
    "compared": lambda a, b: (a > 0)[:, None],
    "compared as rows": lambda a, b: a[:, None] > 0,
    "of a product": lambda a, b: (a * b > 0)[:, None],
    "of a product as rows": lambda a, b: (a * b)[:, None] > 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_rows_moves_before_it_is_spread_over_columns(name):
    """Not what it is made of, which takes four times as many bytes, or eight."""

    def masked(a, b, x):
        return jnp.where(MASKS[name](a, b), x, 0)

    draw = np.random.default_rng(0)
    a, b = draw.integers(-9, 9, (2, 512)).astype(np.int32)
    x = draw.normal(size=(512, 128)).astype(np.float32)
    lie = P("x"), P("x"), P(None, "x")
    step = mw.jit(masked, mesh=mesh_of(x=8), in_shardings=lie, out_shardings=P(None, "x"))
    program = step.partition(a, b, x)
    np.testing.assert_array_equal(program.simulate(a, b, x), masked(a, b, x))
    assert program.wire_bytes == 7 / 8 * 512
