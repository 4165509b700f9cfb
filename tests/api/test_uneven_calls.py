"""Cached calls with uneven arrays: from C++, and never with another call's shapes."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.api.calls import Calls
from meshwise.errors import DeletedArrayError


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), (AxisType.Auto,))


def uneven(mesh, rows, scale=1.0):
    """Rows of random numbers over 8 devices; those of 24 that are missing hold NaN."""
    held = np.full((24, 3), np.nan, np.float32)
    held[:rows] = scale * np.sin(np.arange(3 * rows, dtype=np.float32) ** 1.3).reshape(rows, 3)
    held = jax.device_put(held, NamedSharding(mesh, P("x")))
    return mw.UnevenArray(held, (rows, 3)) if rows < 24 else held


def mean_apart(tree, power=1):
    x = tree["x"]
    return {"apart": (x - x.mean(0)) ** power, "mean": x.mean(0)}


def check(found, tree, power=1):
    wanted = mean_apart({k: np.asarray(v) for k, v in tree.items()}, power)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


def test_the_second_call_asks_nothing(mesh):
    fn = mw.jit(mean_apart, mesh=mesh)
    check(fn({"x": uneven(mesh, 17)}), {"x": uneven(mesh, 17)})
    fn({"x": uneven(mesh, 17)})
    with mock.patch.object(Calls, "answer", side_effect=AssertionError):
        tree = {"x": uneven(mesh, 17, 2.0)}
        found = fn(tree)
        check(found, tree)
        check(fn({"x": found["apart"]}), {"x": np.asarray(found["apart"])})
    assert type(found["apart"]) is mw.UnevenArray
    assert type(found["mean"]) is not mw.UnevenArray
    assert fn._cache_size() == 1
    fn.clear_cache()
    assert fn._cache_size() == 0


def test_of_one_padded_shape_and_other_rows(mesh):
    fn = mw.jit(mean_apart, mesh=mesh)
    for rows in (17, 23, 18, 17, 24, 23, 18):
        tree = {"x": uneven(mesh, rows)}
        found = fn(tree)
        assert found["apart"].shape == tree["x"].shape
        check(found, tree)


def test_static_values_that_are_equal_across_types(mesh):
    fn = mw.jit(lambda x, by: x * by, mesh=mesh, static_argnums=1)
    for _ in range(2):
        for by in (1, 1.0, True, 2):
            x = mw.UnevenArray(jax.device_put(np.arange(24), NamedSharding(mesh, P("x"))), (17,))
            found = fn(x, by)
            assert found.dtype == (jnp.arange(3) * by).dtype
            np.testing.assert_array_equal(found, np.arange(17) * by)


def test_results_alone_are_uneven(mesh):
    fn = mw.jit(lambda n: n * jnp.arange(17.0), mesh=mesh, out_shardings=P("x"))
    for n in (2.0, 3.0):
        np.testing.assert_allclose(fn(n), n * np.arange(17.0))
    with mock.patch("meshwise.api.dispatch.take_apart", side_effect=AssertionError):
        np.testing.assert_allclose(fn(4.0), 4 * np.arange(17.0))


def test_placed_otherwise_or_nowhere(mesh):
    fn = mw.jit(lambda x: 2 * x, mesh=mesh, out_shardings=P("x"))
    wanted = np.asarray(uneven(mesh, 17))
    columns = jax.device_put(np.pad(wanted, ((0, 0), (0, 5))), NamedSharding(mesh, P(None, "x")))
    for _ in range(2):
        for x in (uneven(mesh, 17), mw.UnevenArray(columns, (17, 3)), wanted, jnp.asarray(wanted)):
            np.testing.assert_allclose(fn(x), 2 * wanted)


def test_deleted(mesh):
    fn = mw.jit(mean_apart, mesh=mesh)
    for _ in range(2):
        fn({"x": uneven(mesh, 17)})
    gone = uneven(mesh, 17)
    gone.delete()
    with pytest.raises(DeletedArrayError, match=r"args\[0\]\['x'\]: Array has been deleted"):
        fn({"x": gone})
    program = fn.partition({"x": uneven(mesh, 17)})
    for call in (program, program.simulate):
        with pytest.raises(DeletedArrayError, match=r"args\[0\]\['x'\]: Array has been deleted"):
            call({"x": gone})


@pytest.mark.parametrize("held", [False, True], ids=["given whole", "held uneven"])
def test_not_a_number_is_found_where_it_is_no_padding(mesh, held):
    fn = mw.jit(lambda x: jnp.divide(x, x), mesh=mesh, in_shardings=(P("x"),))
    ones, with_zero = np.ones(17, np.float32), np.arange(17, dtype=np.float32)
    if held:
        same = mw.jit(lambda x: x * 1, mesh=mesh, in_shardings=(P("x"),), out_shardings=P("x"))
        ones, with_zero = same(ones), same(with_zero)
    with jax.debug_nans(True):
        for _ in range(3):
            found = fn(ones)
            assert type(found) is mw.UnevenArray
            np.testing.assert_array_equal(found, np.ones(17))
            with pytest.raises(FloatingPointError):
                fn(with_zero)


def test_types_that_give_way_have_programs_of_their_own(mesh):
    """A Python number over 17 rows gives way to `bfloat16`, one that was cast does not."""
    made = [
        mw.jit(lambda m, f=f: f(jnp.where(m, 1.5, 0.5)), mesh=mesh, out_shardings=P("x"))
        for f in (lambda x: x, lambda x: x.astype("float32"))
    ]
    mask = np.arange(17) % 3 == 0
    weak, strong = (make(mask) for make in made)
    assert (weak.weak_type, strong.weak_type) == (True, False)
    for first, second in ((weak, strong), (strong, weak)):
        add = mw.jit(lambda x: x + jnp.ones(17, "bfloat16"), mesh=mesh)
        for x in (first, second, first):
            assert add(x).dtype == (jnp.bfloat16 if x is weak else jnp.float32)
    for x in (weak, strong):
        assert x.value.weak_type == x.weak_type
        assert (x * jnp.ones(17, "bfloat16")).dtype == (jnp.bfloat16 if x is weak else jnp.float32)
    simulated = made[0].partition(mask).simulate(mask)
    assert simulated.weak_type
    assert jax.vmap(made[0])(mask[None]).weak_type


def test_uneven_results_inside_of_jit():
    """XLA may lay them over a part of an axis, which JAX cannot say."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    step = mw.jit(
        lambda a: (mw.shard(a * 2, P("x", "y")),) * 2,
        mesh=mesh,
        out_shardings=(None, P(None, ("x", "y"))),
    )
    a = np.random.default_rng(0).normal(size=(2, 2, 2)).astype("f")
    for call in (step, jax.jit(step), jax.jit(jax.checkpoint(step))):
        for value in call(a):
            np.testing.assert_array_equal(value, 2 * a)
