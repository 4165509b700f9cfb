"""Operators of types and sizes at the edge: bytes without a zero, vectors without components."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
S = P(("y", "x"))
AT = lax.ScatterDimensionNumbers


def powers(*shape, seed=0):
    return (2.0 ** np.random.default_rng(seed).integers(-6, 6, shape)).astype(jnp.float8_e8m0fnu)


def same(function, *args, specs, out=None):
    wanted = jax.jit(function)(*args)
    got = mw.jit(function, mesh=MESH, in_shardings=specs, out_shardings=out)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.float8_e8m0fnu])
def test_padding_is_not_among_the_largest(dtype):
    x = (np.arange(1, 1031) % 7 + 1).astype(np.float32).astype(dtype)
    same(lambda x: lax.top_k(x, 3), x, specs=(S,))


def test_numbers_without_a_zero_are_set():
    at = np.random.default_rng(0).permutation(203)[:96].astype(np.int32)
    for specs in [(None, S, S), (P("x"), P("y"), P("y"))]:
        same(lambda x, i, u: x.at[i].set(u), powers(203, 8), at, powers(96, 8), specs=specs)


@pytest.mark.parametrize("scatter", [lax.scatter, lax.scatter_max, lax.scatter_add])
def test_index_vectors_without_components(scatter):
    """Windows at the start, whatever is given."""
    x = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    none = np.zeros((0,), np.int32)
    window = AT((0, 1), (), ())
    same(lambda x, i, u: scatter(x, i, u, window), x, none, x[:3] + 1, specs=(S, None, None), out=S)
    same(
        lambda x, i, u: scatter(x, i, u, AT((1, 2), (), ())),
        x, np.zeros((8, 0), np.int32), np.stack([x * 0 + k for k in range(8)]),
        specs=(None, S, S),
    )  # fmt: skip
