"""What users set of JAX for their programs: NaNs looked for, x64, no jit, types checked."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
FOUR = jax.make_mesh((4,), ("z",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
THREE = jax.make_mesh((3,), ("z",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
TURNED = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
TEN = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)
TEN[0, 0] = 3.0


def ones(a):
    """Ones in all rows, and 0 / 0 in those of padding."""
    return a / a


def uneven(function, array):
    return mw.jit(function, mesh=MESH, in_shardings=P("y"), out_shardings=P("y"))(array)


@pytest.fixture(scope="module")
def padded_with_nan():
    return uneven(lambda a: a / a * 0 + a, TEN)


SETTINGS = {
    "nothing": contextlib.nullcontext,
    "NaNs looked for": lambda: jax.debug_nans(True),
    "infinities looked for": lambda: jax.debug_infs(True),
    "no jit": jax.disable_jit,
    "types checked": lambda: jax.enable_checks(True),
    "x64": lambda: jax.enable_x64(True),
}
TARGETS = [
    NamedSharding(MESH, P(("x", "y"))),
    NamedSharding(MESH, P(None, "x")),
    NamedSharding(FOUR, P("z")),
    NamedSharding(THREE, P(None, "z")),
]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_arrays_are_moved_whatever_is_set(setting, padded_with_nan):
    with_nan = jax.device_put(np.where(TEN > 2, np.nan, TEN), NamedSharding(MESH, P()))
    with setting():
        for target in TARGETS:
            for given in (padded_with_nan, with_nan):
                moved = mw.reshard(given, target)
                np.testing.assert_array_equal(np.asarray(moved), np.asarray(given))
        assert padded_with_nan.value.shape == padded_with_nan.copy().shape == (10, 6)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.complex128])
def test_wide_numbers_stay_wide_where_x64_is_off(dtype):
    wide = (TEN * 1e9).astype(dtype)
    with jax.enable_x64(True):
        twice = uneven(lambda a: a * 2, wide)
        placed = jax.device_put(wide, NamedSharding(MESH, P()))
    found = [twice.value, *(mw.reshard(x, t) for x in (twice, placed) for t in TARGETS)]
    with jax.enable_x64(True):
        found += [twice.value, *(mw.reshard(x, t) for x in (twice, placed) for t in TARGETS)]
    assert {x.dtype for x in found} == {np.dtype(dtype)}
    for x in found:
        assert any(np.array_equal(x, y) for y in (wide, wide * 2))


def test_a_call_before_x64_leaves_the_one_after_it_alone():
    wide = TEN.astype(np.float64)
    with jax.enable_x64(True):
        placed = jax.device_put(wide, NamedSharding(MESH, P()))
    half = mw.jit(lambda a: a / 2, mesh=MESH, out_shardings=P("y"))
    narrow = half(placed)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(half(placed), wide / 2)
    assert narrow.shape == (10, 6)


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f(x),
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.vmap(f, 1, 1)(x),
        lambda f, x: jax.value_and_grad(lambda a: f(a).sum())(x)[0],
        lambda f, x: f.partition(x)(x),
        lambda f, x: f.lower(x).compile()(x),
    ],
)
def test_a_nan_in_padding_is_none(call):
    f = mw.jit(ones, mesh=MESH, in_shardings=P("y"))
    with jax.debug_nans(True):
        call(f, TEN)
        with pytest.raises(FloatingPointError):
            call(f, TEN * (TEN > 0))


def test_types_are_checked_of_programs_that_send():
    with jax.enable_checks(True):
        for f in (lambda a: a @ a.T, lambda a: a.sum(0), lambda a: jnp.sort(a, 0)):
            got = mw.jit(f, mesh=MESH, in_shardings=P("y"))(TEN[:8])
            np.testing.assert_allclose(got, f(TEN[:8]), rtol=1e-5, atol=1e-6)


def in_specs(a):
    """In words that say nothing without a mesh in context."""
    a = lax.with_sharding_constraint(a * 2, P("z"))
    return jnp.log(mw.reshard(a, P(None, "z")))


PLACED = {
    "numbers": lambda a: a,
    "on one device": jnp.asarray,
    "on the mesh": lambda a: jax.device_put(a, NamedSharding(FOUR, P("z"))),
}
CALLS = {
    "called": lambda f, a: f(a),
    "differentiated": lambda f, a: jax.jvp(f, (a,), (a,))[1],
    "mapped": lambda f, a: jax.vmap(f)(a[None])[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("place", PLACED.values(), ids=PLACED)
def test_step_by_step_a_function_is_in_the_mesh_that_is_given(place, call):
    step = mw.jit(in_specs, mesh=FOUR)
    positive = np.abs(TEN[:8, :4]) + 1
    wanted = np.ones((8, 4)) if call is CALLS["differentiated"] else np.log(positive * 2)
    with jax.disable_jit():
        np.testing.assert_allclose(call(step, place(positive)), wanted, rtol=1e-5)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        call(step, place(-positive))


# Settings that hold for a part of a function alone, or for its trace


def wide_inside(a):
    with jax.enable_x64(True):
        wide = a.astype("float64") * 3.0 / 7
        return wide, jnp.argsort(a, 0), jnp.arange(10)[:, None] * wide.sum(0)


def bits_inside(a):
    """Drawn by position; of the shape of all; and, in a loop, of keys that are split so."""
    key = jax.random.key(3)
    drawn = jax.random.normal(key, a.shape)
    with jax.threefry_partitionable(False):
        drawn -= 3 * jax.random.normal(key, a.shape)
        keys = jax.random.split(key, 4)
        step = lambda b, key: (b + jax.random.uniform(key, a.shape), None)  # noqa: E731
        return lax.scan(step, drawn * a, keys)[0]


def narrow_outside(a):
    """A counter and a kernel of a part with x64 off, beside a sum with x64 on."""
    count = lax.fori_loop(0, 3, lambda i, c: c + 1, 2**31 - 2)
    order = mw.like(lambda a: jnp.argsort(a, 0), lambda a: jnp.argsort(a, 0))(a)
    with jax.enable_x64(True):
        return count, order, a.astype("float64").sum(0)


INSIDE = {"x64": wide_inside, "x64 beside": narrow_outside, "random bits": bits_inside}


@pytest.mark.parametrize("spec", [P("y"), P(None, "x")], ids=str)
@pytest.mark.parametrize("name", INSIDE)
def test_what_is_set_for_a_part_holds_for_that_part(name, spec):
    function = INSIDE[name]
    step, wanted = mw.jit(function, mesh=MESH, in_shardings=spec), jax.jit(function)(TEN)
    for each in step(TEN), step.partition(TEN).simulate(TEN), jax.jit(step)(TEN):
        for one, other in zip(*map(jax.tree.leaves, (each, wanted)), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "setting", [lambda: jax.enable_x64(True), lambda: jax.threefry_partitionable(False)]
)
def test_what_was_set_for_a_trace_holds_where_it_is_lowered(setting):
    def drawn(a):
        return jax.random.uniform(jax.random.key(0), a.shape) + a * 2 / 3

    with setting():
        traced, wanted = mw.jit(drawn, mesh=MESH, in_shardings=P("x")).trace(TEN), drawn(TEN)
    compiled = traced.lower().compile()
    with setting():
        found = compiled(TEN)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-6, atol=1e-6)


def test_a_pullback_of_wide_numbers_is_called_where_x64_is_off():
    with jax.enable_x64(True):
        wide = TEN.astype(np.float64)
        out, pullback = jax.vjp(mw.jit(lambda a: jnp.sin(a) * 2 / 3, mesh=MESH), wide)
    for pull in (pullback, jax.jit(pullback)):
        (found,) = pull(out)
        np.testing.assert_allclose(found, np.cos(wide) * 2 / 3 * np.asarray(out), rtol=1e-12)


# A function that names another mesh of the same devices


def test_another_mesh_is_named_inside_of_jit():
    def f(a):
        return lax.with_sharding_constraint(jnp.sin(a) * 2, NamedSharding(TURNED, P("a")))

    ours = mw.jit(f, mesh=MESH, in_shardings=P("x"), out_shardings=P("x"))
    for call in (ours, jax.jit(ours), jax.jit(jax.grad(lambda a: ours(a).sum()))):
        assert call(TEN[:8]).shape == TEN[:8].shape
    batched = jax.jit(jax.vmap(ours))(TEN[None, :8])
    np.testing.assert_allclose(batched[0], jnp.sin(TEN[:8]) * 2, rtol=1e-6)


def test_another_mesh_is_named_ahead_of_time():
    def summed(a):
        send = jax.shard_map(
            lambda part: lax.psum(part, "a"), mesh=TURNED, in_specs=P("a"), out_specs=P()
        )
        return send(a)

    ours = mw.jit(summed, mesh=MESH)
    wanted = TEN[:8].reshape(4, 2, 6).sum(0)
    assert ours.eval_shape(TEN[:8]).shape == ours.trace(TEN[:8]).out_info.shape == (2, 6)
    for got in (ours(TEN[:8]), ours.lower(TEN[:8]).compile()(TEN[:8])):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_no_tracing_takes_programs_that_are_known():
    f = mw.jit(lambda a: a * 2, mesh=MESH, in_shardings=P("y"))
    f(TEN)
    with jax.no_tracing():
        np.testing.assert_array_equal(f(TEN), TEN * 2)


def test_promotion_is_refused_in_users_functions():
    rows = jax.ShapeDtypeStruct((16,), "float32")
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        mw.jit(lambda x: x + x[None], mesh=mesh_of(x=8)).partition(rows)
