"""`SpmdProgram.from_shard_map` reads what `jax.shard_map` runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.schedule.steps import random

W, X = random(4), random(16, 4, seed=1)


def mesh_of(**axes):
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=jax.devices()[:8])


def both(fn, mesh, ins, outs, args, **options):
    """What our program and JAX's compute."""
    program = mw.SpmdProgram.from_shard_map(fn, mesh, ins, outs, *args, **options)
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, **options))
    return program, program(*args), mapped(*args)


GRADIENTS = {
    "of what all share": lambda w, x: jax.grad(lambda w: jnp.sum(w * x))(w),
    "through a sum": lambda w, x: jax.grad(lambda w: lax.psum(jnp.sum(w * x), "x"))(w),
    "through a mean": lambda w, x: jax.grad(lambda w: lax.pmean(jnp.sum(jnp.tanh(w * x)), "x"))(w),
    "in a loop": lambda w, x: lax.fori_loop(
        0, 3, lambda _, w: w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(w * x)))(w), w
    ),
    "in a branch": lambda w, x: lax.cond(
        w[0] > 0, jax.grad(lambda w: jnp.sum(w * x)), lambda w: w * 0, w
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_taken_inside(mesh8, name):
    program, got, want = both(GRADIENTS[name], mesh8, (P(), P("x")), P(), (W, X))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(program.simulate(W, X), want, rtol=1e-5, atol=1e-5)
    assert "psum_invariant" not in str(program)
    assert "pvary" not in str(program)


def test_gathers_and_casts_of_the_types_of_jax(mesh8):
    def fn(x):
        whole = lax.all_gather(x, "x", axis=0, tiled=True, to="invarying")
        return whole, lax.psum(lax.pcast(whole, "x", to="varying"), "x")

    _, got, want = both(fn, mesh8, P("x"), (P(), P()), (X,))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


def test_without_the_check_a_gradient_is_each_devices_own(mesh8):
    fn = GRADIENTS["of what all share"]

    def own(w, x):
        return fn(w, x)[None]

    _, got, want = both(own, mesh8, (P(), P("x")), P("x"), (W, X), check_vma=False)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_jax_refuses_with_the_check_is_read_without(mesh8):
    fn = lambda x: lax.all_gather(x, "x", axis=0, tiled=True)  # noqa: E731
    program = mw.SpmdProgram.from_shard_map(fn, mesh8, P("x"), P(), X)
    np.testing.assert_array_equal(program(X), X)


ALONE = {
    "sum": (lambda x: lax.psum(x, ("one", "x")), P()),
    "gather": (lambda x: lax.all_gather(x, ("one", "x"), tiled=True), P()),
    "gather, stacked": (lambda x: lax.all_gather(x, ("one", "x")), P()),
    "gather over one": (lambda x: lax.all_gather(x, "one"), P(None, "x")),
    "scatter": (
        lambda x: lax.psum_scatter(jnp.tile(x, (8, 1)), ("one", "x"), tiled=True),
        P("x"),
    ),
    "exchange": (
        lambda x: lax.all_to_all(jnp.tile(x, (1, 2)), ("one", "x"), 1, 0, tiled=True),
        P("x"),
    ),
    "send": (lambda x: lax.ppermute(x, ("one", "x"), [(i, (i + 1) % 8) for i in range(8)]), P("x")),
    "number": (lambda x: lax.axis_index(("one", "x")) + 0 * x[:, 0].astype(int), P("x")),
    "size": (lambda x: x * lax.axis_size(("one", "x")), P("x")),
}


@pytest.mark.parametrize("name", ALONE)
def test_axes_of_one_device(name):
    fn, outs = ALONE[name]
    mesh = mesh_of(one=1, x=8)
    _, got, want = both(fn, mesh, P(("one", "x")), outs, (X,), check_vma=False)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("fn", "outs", "error", "text"),
    [
        (lambda x: (x, x), (P(),), mw.TreeError, "out_specs"),
        (lambda x: lax.psum(x, "nope"), P(), NameError, "nope"),
    ],
)
def test_what_cannot_be_read(mesh8, fn, outs, error, text):
    with pytest.raises(error, match=text):
        mw.SpmdProgram.from_shard_map(fn, mesh8, P("x"), outs, X)


def test_a_shard_map_inside_is_refused(mesh8):
    def fn(x):
        inner = jax.shard_map(
            lambda y: lax.psum(y, "x"), mesh=mesh8, in_specs=P("x"), out_specs=P()
        )
        return inner(x)

    with pytest.raises((mw.ArgumentError, ValueError)):
        mw.SpmdProgram.from_shard_map(fn, mesh8, P("x"), P(), X)
