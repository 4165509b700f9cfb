"""Dims that do not divide, at the boundary of a program: 17 rows on 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw

ROWS = 17
X = np.sin(np.arange(ROWS * 6, dtype=np.float32) ** 1.5).reshape(ROWS, 6)
W = np.sin(np.arange(30, dtype=np.float32) ** 1.7).reshape(6, 5)
Y = np.cos(np.arange(ROWS * 5, dtype=np.float32)).reshape(ROWS, 5)


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w"]) * params["scale"][:, None]
    return ((hidden - y) ** 2).mean() + hidden.max() + jnp.sort(hidden, axis=1)[:, 0].sum()


def train(state, x, y):
    """One step; a state of 17 rows, its momentum, and a counter."""
    value, grads = jax.value_and_grad(loss)(state["params"], x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.05 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "step": state["step"] + 1}, value


def initial():
    params = {"w": W, "scale": np.ones(ROWS, np.float32)}
    return {"params": params, "momentum": jax.tree.map(np.zeros_like, params), "step": 0}


def close(got, wanted, tolerance=1e-4):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-5), got, wanted
    )


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((8,), ("x",), (request.param,))


@pytest.fixture(scope="module")
def step(mesh):
    rows = {"w": P(), "scale": P("x")}
    state = {"params": rows, "momentum": rows, "step": P()}
    return mw.jit(
        train,
        mesh=mesh,
        in_shardings=(state, P("x"), P("x")),
        out_shardings=(state, P()),
        donate_argnums=0,
    )


def test_state_stays_padded_and_sharded_over_the_steps(step, mesh, monkeypatch):
    place = mw.jit(lambda a: a, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    x, y = place(X), place(Y)
    state = wanted = initial()
    for i in range(4):
        state, value = step(state, x, y)
        wanted, wanted_value = train(wanted, X, Y)
        for tree in (state["params"], state["momentum"]):
            assert isinstance(tree["scale"], mw.UnevenArray)
            assert tree["scale"].shape == (ROWS,)
            assert tree["scale"].padded.sharding.shard_shape((24,)) == (3,)
            assert isinstance(tree["w"], jax.Array)
        assert int(state["step"]) == i + 1
        np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
        # From now on nothing is padded, cut or moved.
        monkeypatch.setattr("meshwise.run.execute.pad_array", None)
        monkeypatch.setattr(mw.UnevenArray, "value", None)
    monkeypatch.undo()
    close(jax.tree.map(np.asarray, state), wanted)


def test_equal_to_one_device_without_hints_on_the_state(mesh):
    step = mw.jit(train, mesh=mesh, in_shardings=(None, P("x"), P("x")))
    state = wanted = initial()
    for _ in range(3):
        state, value = step(state, X, Y)
        wanted, wanted_value = train(wanted, X, Y)
        np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    close(jax.tree.map(np.asarray, state), wanted)


def test_simulated(step):
    program = step.partition(initial(), X, Y)
    close(program.simulate(initial(), X, Y), train(initial(), X, Y))
    assert program.in_shardings[1].spec == P("x")


@pytest.fixture(scope="module")
def pieces(mesh):
    """A program of one uneven argument and result, and an uneven array."""
    fn = mw.jit(lambda x: jnp.sin(x) * 2, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    return fn, fn(X)


def test_through_jit_and_grad_from_outside(pieces, mesh):
    fn, out = pieces
    wanted = np.sin(X) * 2
    assert isinstance(out, mw.UnevenArray)
    close(out, wanted)
    with jax.set_mesh(mesh):
        close(jax.jit(fn)(X), wanted)
        close(jax.jit(lambda x: fn(x) + x)(out), np.sin(wanted) * 2 + wanted)
        close(jax.grad(lambda x: (fn(x) ** 2).sum())(X), 8 * np.sin(X) * np.cos(X))
        close(jax.grad(lambda x: fn(x).sum())(out), 2 * np.cos(wanted))
        close(jax.jit(jax.grad(lambda x: fn(x).sum()))(out), 2 * np.cos(wanted))
        close(jax.vmap(fn)(np.stack([X, X + 1])), np.stack([wanted, np.sin(X + 1) * 2]))
        close(jax.jvp(fn, (X,), (X,))[1], 2 * np.cos(X) * X)
        assert jax.eval_shape(fn, out).shape == X.shape
    close(fn(out), np.sin(wanted) * 2)
    close(mw.jit(lambda x: fn(x) - x, mesh=mesh)(out), np.sin(wanted) * 2 - wanted)


def test_into_programs_of_another_layout(pieces, mesh):
    _, out = pieces
    wanted = np.sin(X) * 2
    whole = mw.jit(lambda x: x.sum(0), mesh=mesh, in_shardings=P(), out_shardings=P())
    with pytest.raises(mw.HintError, match="lies as"):
        whole(out)
    close(whole(out.value), wanted.sum(0))
    close(mw.jit(lambda x: x.sum(0), mesh=mesh)(out), wanted.sum(0))
    closing = mw.jit(lambda x: x + out, mesh=mesh, in_shardings=P())
    close(closing(X), X + wanted)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15])
def test_other_numbers_of_rows(rows):
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,))

    def fn(x):
        return x.mean(0), jnp.cumsum(x, 1), x.argmax(0), (x - x.max(0)).sum()

    x = np.sin(np.arange(rows * 3, dtype=np.float32)).reshape(rows, 3)
    step = mw.jit(fn, mesh=mesh, in_shardings=P("x"))
    for got, wanted in zip(step(x), fn(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    rows_out = mw.jit(lambda x: x + 1, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))(x)
    assert isinstance(rows_out, mw.UnevenArray if rows % 8 else jax.Array)
    np.testing.assert_array_equal(rows_out, x + 1)


@pytest.mark.parametrize("like", [jnp.zeros_like, jnp.ones_like, jnp.empty_like])
def test_arrays_like_an_uneven_one(mesh8, like):
    """As an optimizer makes its state: of the logical shape, whole along what does not divide."""
    uneven = mw.jit(lambda x: x * 2, mesh=mesh8, out_shardings=P("x"))(X)
    found = like(uneven)
    assert (found.shape, found.dtype) == (X.shape, X.dtype)
    assert found.sharding.is_fully_replicated
    assert mw.jit(jnp.add, mesh=mesh8, out_shardings=P("x"))(uneven, found).shape == X.shape
