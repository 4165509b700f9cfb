"""Values of every type go in and out as through `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

X = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.fixture(scope="module")
def both(mesh8):
    """One function under both jits; it keeps types as far as they decide them."""

    def fn(x):
        return x * 2, x + jnp.float16(1), x, jnp.zeros_like(x)

    return mw.jit(fn, mesh=mesh8), jax.jit(fn)


SCALARS = {
    "float": 3.0,
    "int": 3,
    "bool": True,
    "complex": 1j,
    "float64": np.float64(3),
    "int8": np.int8(3),
    "bool_": np.bool_(True),
    "array of rank 0": np.array(2, np.uint16),
    "weak array": jnp.asarray(3.0),
    "strong array": jnp.float32(3.0),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_and_weak_types(both, name):
    ours, theirs = (fn(SCALARS[name]) for fn in both)
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type)
        np.testing.assert_array_equal(got, wanted)


def walls(w):
    return w.at[1:-1].set(w[:-2] + w[2:])


WEAK = {
    "set": lambda w: w.at[0].set(w[1]),
    "walls": walls,
    "loop": lambda w: jax.lax.fori_loop(0, 3, lambda i, u: walls(u), w),
    "padded": lambda w: jnp.pad(w, 1)[1:-1],
    "reversed": lambda w: jax.lax.cumsum(w, reverse=True),
    "product": lambda w: w @ jnp.broadcast_to(w[0][:, None], (8, 5)),
    "window": lambda w: jax.lax.reduce_window(w, -jnp.inf, jax.lax.max, (16, 1), (1, 1), "VALID"),
    "gradient": lambda w: jax.grad(lambda s: (w * s).sum())(2.0),
    "cast": lambda w: walls(w.astype("float32")),
}


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("name", WEAK)
def test_results_give_way_to_others_as_under_jit(mesh8, name, spec):
    def fn(x):
        return WEAK[name](jnp.where(x > 0, 1.0, 2.0))

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    program = mw.jit(fn, mesh=mesh8, in_shardings=spec).partition(x)
    wanted = jax.jit(fn)(x)
    for found in (program(x), program.simulate(x)):
        assert (found.dtype, found.weak_type) == (wanted.dtype, wanted.weak_type)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_types_select_a_program(mesh8):
    seen = []

    @mw.jit(mesh=mesh8)
    def fn(x):
        seen.append(str(jax.typeof(x)))
        return x + 1

    for x in (3, 4, 3.0, np.float32(3), jnp.asarray(3.0), 5.0, np.arange(3), np.arange(4), 7):
        fn(x)
    assert seen == ["~int32[]", "~float32[]", "float32[]", "int32[3]", "int32[4]"]


def test_64_bits_where_they_are_enabled(mesh8):
    step = mw.jit(lambda x: x / 4, mesh=mesh8, in_shardings=P("x"))
    x = np.arange(8, dtype=np.float64)
    for enabled, dtype in [(False, np.float32), (True, np.float64)] * 2:
        with jax.enable_x64(enabled):
            out = step(x)
            assert out.dtype == dtype
            assert step(np.arange(8)).dtype == dtype
            np.testing.assert_array_equal(out, (x / 4).astype(dtype))
            assert jax.grad(lambda x: step(x).sum())(x).dtype == dtype
    with jax.enable_x64(True):
        assert mw.jit(lambda n: n + 2**40, mesh=mesh8)(1) == 2**40 + 1


def test_64_bits_and_positions(mesh2x4):
    """Positions of slices, windows and rows are of one type, whatever integers are by default."""

    def fn(x):
        return jnp.roll(x, 3, 0)[1:].at[2:9].set(jnp.cumsum(x[:7], 0)) + x[::-1][1:]

    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(13, 9))
        for ins, outs in ((P(), P("x", "y")), (P("y", "x"), P("x")), (P(("y", "x")), P())):
            step = mw.jit(fn, mesh=mesh2x4, in_shardings=ins, out_shardings=outs)
            found = np.asarray(step.partition(x).simulate(x))
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, fn(jnp.asarray(x)), rtol=1e-14)


DTYPES = ["bool", "uint8", "int4", "int32", "bfloat16", "float8_e4m3fn", "float16", "complex64"]


def test_arrays_of_many_types(mesh2x4):
    def fn(tree):
        return [jnp.roll(a, 1, axis=1) for a in tree] + [jnp.where(tree[0], tree[1], 0)]

    tree = [jnp.asarray(X % 2).astype(d) for d in DTYPES]
    step = mw.jit(fn, mesh=mesh2x4, in_shardings=P("x", "y"), out_shardings=P("y", "x"))
    for got, wanted in zip(step(tree), fn(tree), strict=True):
        assert got.dtype == wanted.dtype
        assert got.sharding.spec == P("y", "x")
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys(mesh2x4, impl):
    def fn(key, keys):
        bits = jax.random.bits(key, (8,))
        return jax.random.split(key, 8), keys[::-1], bits, jax.random.key_data(keys[0])

    key = jax.random.key(7, impl=impl)
    keys = jax.random.split(key, 4)
    step = mw.jit(
        fn,
        mesh=mesh2x4,
        in_shardings=(None, P("y")),
        out_shardings=(P(("x", "y")), P("x"), None, None),
    )
    wanted = jax.jit(fn)(key, keys)
    placed = jax.device_put(keys, NamedSharding(mesh2x4, P("y")))
    for arg in (keys, placed, placed):
        made, turned, bits, data = step(key, arg)
        assert made.dtype == key.dtype
        assert (made.sharding.spec, turned.sharding.spec) == (P(("x", "y")), P("x"))
        for got, want in zip((made, turned), wanted[:2], strict=True):
            np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(want))
        np.testing.assert_array_equal(bits, wanted[2])
        np.testing.assert_array_equal(data, wanted[3])


def test_raw_keys(mesh8):
    def fn(key):
        first, second = jax.random.split(key)
        return first, jax.random.normal(second, (8, 3))

    step = mw.jit(fn, mesh=mesh8, out_shardings=(None, P("x")))
    key = other = jax.random.PRNGKey(3)
    for _ in range(3):
        key, drawn = step(key)
        other, wanted = fn(other)
        np.testing.assert_array_equal(key, other)
        np.testing.assert_array_equal(drawn, wanted)


def test_arrays_without_elements(mesh2x4):
    def fn(x, y):
        return x, x.sum(), x.sum(0), jnp.zeros((0, 4)) + y, jnp.concatenate([x, x])

    step = mw.jit(fn, mesh=mesh2x4, in_shardings=(P("x"), P()), out_shardings=P())
    x = np.zeros((0, 3), np.float32)
    for got, wanted in zip(step(x, 1.0), fn(x, 1.0), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(got, wanted)


def test_scalars_and_arrays_of_rank_0_through_a_step(mesh2x4):
    @mw.jit(mesh=mesh2x4, out_shardings=P())
    def step(state, x):
        count, mean = state
        return count + 1, mean + (x.mean() - mean) / (count + 1)

    state = (0, 0.0)
    for i in range(4):
        state = step(state, X + i)
    assert state[0] == 4
    np.testing.assert_allclose(state[1], X.mean() + 1.5, rtol=1e-6)
