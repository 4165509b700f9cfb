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
        wide = np.complex64 if np.iscomplexobj(b) else np.float32
        np.testing.assert_allclose(np.asarray(a, wide), np.asarray(b, wide), rtol=1e-5)


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


@pytest.mark.parametrize("dtype", [np.complex64, jnp.int4])
def test_arrays_without_words_travel_together(dtype):
    """No integers are as wide as their elements."""
    draw = np.random.default_rng(2)
    x = draw.integers(-8, 8, (64, 64)).astype(dtype)
    zeros = (np.zeros((), dtype),) * 2
    add = lambda x, y: (lax.add(x[0], y[0]), lax.max(x[1], y[1]))  # noqa: E731
    flat = x.reshape(-1)
    same(lambda *x: lax.sort(x, num_keys=2), flat, flat[::-1], specs=(S, S), out=S)
    if dtype is np.complex64:  # no integers of four bits are reduced on CPU
        same(lambda *x: lax.reduce(x, zeros, add, (0,)), x, x[::-1] + 1, specs=(S, S))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: lax.reduce(x, np.float32(1.5), lax.add, (0,)),
        lambda x: lax.reduce(x, x[0, 0], lambda a, b: a * b, (0, 1)),
        lambda x: lax.reduce_window(x, np.float32(1.5), lax.add, (16, 1), (1, 1), "VALID"),
    ],
)
def test_initial_values_that_count_do_so_once(reduce):
    """XLA divides a reduction of what was exchanged, which it joins, into one of each part."""
    x = 1 + np.random.default_rng(4).uniform(size=(16, 8)).astype(np.float32) / 8
    same(lambda x: (reduce(x), reduce(x * 2 - 1)), x, specs=(S,))


@pytest.mark.parametrize("at", [[0, 1, 2], [2, 0, 1], [3, 2, 0]])
@pytest.mark.parametrize("specs", [(S, None, None), (P("x"), P("y"), P(None, "y"))])
def test_the_last_of_overlapping_windows_wins(at, specs):
    """Windows may be the first dims of the updates."""
    draw = np.random.default_rng(3)
    x, new = (draw.normal(size=size).astype(np.float32) for size in [(13,), (9, 3)])
    positions = np.array(at, np.int32)[:, None]
    same(lambda x, i, u: lax.scatter(x, i, u, AT((0,), (), (0,))), x, positions, new, specs=specs)


@pytest.mark.parametrize("function", [lax.cummax, lax.cummin])
@pytest.mark.parametrize("reverse", [False, True])
def test_complex_numbers_without_an_order_are_compared_in_theirs(function, reverse):
    x = np.array([1 + 2j, complex(np.inf, 1), complex(1, np.nan), complex(np.nan, 0), -np.inf - 1j])
    x = np.concatenate([x, [0, 1 + 2j, 1 + 3j, 2, 2, complex(np.inf, np.nan), 3, 4]])
    same(lambda x: function(x, reverse=reverse), x.astype(np.complex64), specs=(S,), out=S)


PAIRS = (1, 2, 2, 1)
IDENTITIES = {
    "largest": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, PAIRS, PAIRS, "SAME"),
    "mean": lambda x: lax.reduce_window(x, 0.0, lax.add, PAIRS, PAIRS, "SAME") / 4,
    "steps": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1,) * 4, PAIRS, "VALID"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_windows_over_an_image_of_one_pixel_change_nothing(name):
    x = np.random.default_rng(3).normal(size=(8, 1, 1, 4)).astype(np.float32)
    same(IDENTITIES[name], x, specs=(S,))
    same(jax.grad(lambda x: jnp.sin(IDENTITIES[name](x)).sum()), x, specs=(S,))
