"""Convolutions by groups that do not divide over the devices.

XLA on CPU makes one convolution with a kernel of zeros between groups of some types (`float64`,
`complex128`). What padding holds, here a NaN, is no number of a group that is there then either.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw

NAMES = ("NWC", "WIO", "NWC")
CHANNELS = P(None, None, "x")


def rows(x):
    """A kernel of its own for each row; padded rows are divided by their sum."""
    return jax.vmap(lambda v: jnp.convolve(v / v.sum(), jnp.flip(v), mode="same"))(x)


def depthwise(x, w):
    x = jnp.log(jnp.abs(x)).astype(x.dtype)
    return lax.conv_general_dilated(
        x, 1 / w, (1,), "SAME", feature_group_count=13, dimension_numbers=NAMES
    )


def batch_groups(x, w):
    x = jnp.log(jnp.abs(x)).astype(x.dtype)
    return lax.conv_general_dilated(
        x, 1 / w, (1,), "SAME", batch_group_count=5, dimension_numbers=NAMES
    )


def gradient(x, w):
    return jax.grad(lambda x, w: (jnp.abs(depthwise(x, w)) ** 2).sum(), argnums=(0, 1))(x, w)


CASES = {
    "rows": (rows, [(13, 6)], P("x")),
    "channels": (depthwise, [(2, 9, 26), (3, 2, 39)], CHANNELS),
    "gradient": (gradient, [(2, 9, 26), (3, 2, 39)], CHANNELS),
    "batches": (batch_groups, [(10, 9, 4), (3, 4, 15)], (P("x"), CHANNELS)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("case", CASES)
def test_padding_reaches_no_other_group(case, dtype, mesh8):
    function, shapes, specs = CASES[case]
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        args = [(draw.normal(size=shape) + 3).astype(dtype) for shape in shapes]
        step = mw.jit(function, mesh=mesh8, in_shardings=specs)
        found, wanted = step(*args), jax.jit(function)(*args)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(one), other, rtol=2e-5, atol=1e-5)
