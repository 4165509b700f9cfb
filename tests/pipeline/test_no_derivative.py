"""Gradients of pipelines where a derivative is infinite, and nothing comes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import meshwise as mw
from tests.pipeline.models import normal
from tests.pipeline.test_values import assert_same, mesh_of

MESH = jax.make_mesh((4, 2), ("pipe", "data"), axis_types=(AxisType.Auto,) * 2)
WIDTH = 4


def batch_of(rows=8):
    rng = np.random.default_rng(0)
    return {"x": normal(rng, rows, WIDTH), "y": normal(rng, rows, WIDTH)}


def params():
    rng = np.random.default_rng(1)
    return {name: normal(rng, WIDTH, WIDTH) for name in "abcd"}


def root_beside(p, batch):
    """Roots, some at zero, that go with the activations to the last stage, as a measure."""
    h = jnp.maximum(batch["x"] @ p["a"], 0.0)
    s = jnp.sqrt(h)
    for name in "bc":
        h, s = mw.stage_boundary((h, s))
        h = h @ p[name]
    h, s = mw.stage_boundary((h, s))
    return ((h @ p["d"] - batch["y"]) ** 2).mean(), {"root": s.mean()}


def root_that_is_no_variable(p, batch):
    """The same roots, of which no gradient is wanted."""
    h = batch["x"] @ p["a"]
    s = jnp.sqrt(jnp.maximum(h, 0.0))
    for name in "bc":
        h, s = mw.stage_boundary((h, s))
        h = h @ p[name] * lax.stop_gradient(s)
    h, s = mw.stage_boundary((h, s))
    return ((h @ p["d"] - batch["y"]) ** 2).mean(), {"first": h[0, 0]}


def nothing_before(p, batch):
    """A loss that no gradient of the first stages reaches."""
    h = batch["x"] @ p["a"]
    for name in "bc":
        h = mw.stage_boundary(jnp.log(h * h) @ p[name])
    h = mw.stage_boundary(lax.stop_gradient(h))
    return ((lax.stop_gradient(h) @ p["d"] - batch["y"]) ** 2).mean(), {}


@pytest.mark.parametrize("loss", [root_beside, root_that_is_no_variable, nothing_before])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_gradient_that_is_none_does_not_cross(loss, schedule):
    options = {"axis": "pipe", "microbatches": 4, "schedule": schedule, "has_aux": True}
    step = mw.pipeline_value_and_grad(loss, **options)
    args = params(), batch_of()
    parts = [jax.tree.map(lambda x, i=i: x[i::4], args[1]) for i in range(4)]
    each = [jax.value_and_grad(loss, has_aux=True)(args[0], part) for part in parts]
    wanted = jax.tree.map(lambda *x: sum(x) / 4, *each)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(wanted[1]))
    for found in (step(*args), mw.jit(step, mesh=MESH)(*args)):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5), found, wanted
        )


def test_stages_of_one_code_may_differ_in_what_gradients_they_pass():
    def of(passes):
        scaled = jax.custom_vjp(lambda x, y, w: (jnp.tanh(x @ w + y), y + x / 2))

        def back(saved, gradients):
            x, y, w = saved
            own = gradients[0] * (1 - jnp.tanh(x @ w + y) ** 2)
            passed = own @ w.T + gradients[1] / 2 if passes else jnp.zeros_like(x)
            return passed, own + gradients[1], x.T @ own

        scaled.defvjp(lambda x, y, w: (scaled(x, y, w), (x, y, w)), back)
        return scaled

    passes, stops = of(True), of(False)

    def loss(p, batch):
        x, y = batch["x"], batch["y"] * p[0][0, 0]
        for i, (layer, w) in enumerate(zip([passes] * 3 + [stops, passes], p, strict=True)):
            x, y = mw.stage_boundary((x, y)) if i else (x, y)
            x, y = layer(x, y, w)
        return (x**2).mean() + (y**2).mean()

    rng = np.random.default_rng(1)
    weights, batch = [normal(rng, WIDTH, WIDTH) for _ in range(5)], batch_of(8)
    step = mw.pipeline_value_and_grad(loss, axis="pipe", microbatches=4)
    program = mw.jit(step, mesh=mesh_of(pipe=5)).partition(weights, batch)
    want = jax.value_and_grad(loss)(weights, batch)
    assert_same(program.simulate(weights, batch), want)


def test_fewer_gradients_are_sent():
    """Of two arrays that cross each boundary the gradient of one comes back."""

    def sent(loss):
        step = mw.pipeline_value_and_grad(loss, axis="pipe", microbatches=4, has_aux=True)
        return mw.jit(step, mesh=MESH).partition(params(), batch_of()).wire_bytes

    def both(p, batch):
        return root_that_is_no_variable(p, batch)

    def with_its_gradient(p, batch):
        h = batch["x"] @ p["a"]
        s = jnp.sqrt(jnp.maximum(h, 0.0) + 1)
        for name in "bc":
            h, s = mw.stage_boundary((h, s))
            h = h @ p[name] * s
        h, s = mw.stage_boundary((h, s))
        return ((h @ p["d"] - batch["y"]) ** 2).mean() + s.mean(), {"first": h[0, 0]}

    assert sent(both) < sent(with_its_gradient)


@pytest.mark.parametrize(
    "stage",
    [
        lambda w, x: jnp.log(x * x) * w,
        lambda w, x: w * x / (x - 1.0),
        lambda w, x: w * jnp.sqrt(jnp.abs(x - 1.0)),
    ],
)
@pytest.mark.parametrize("repeat", [1, 2])
def test_bubbles_have_no_gradient(stage, repeat):
    rng = np.random.default_rng(2)
    weights, inputs = normal(rng, 3 * repeat, WIDTH), normal(rng, 5, WIDTH) + 3

    def piped(weights, inputs):
        own = weights if repeat == 1 else weights.reshape(repeat, 3, WIDTH).swapaxes(0, 1)
        schedule = "gpipe" if repeat == 1 else "circular"
        return mw.pipeline(stage, own, inputs, schedule=schedule, repeat=repeat).sum()

    def in_turn(weights, inputs):
        for w in weights:
            inputs = jax.vmap(stage, (None, 0))(w, inputs)
        return inputs.sum()

    found = jax.grad(piped, (0, 1))(weights, inputs)
    wanted = jax.grad(in_turn, (0, 1))(weights, inputs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3), found, wanted)


def test_copies_of_layers_have_no_gradient():
    """Of three layers in two stages one stage computes one more, on what it made itself."""

    def layer(p, x):
        return p["w"] * jnp.sqrt(x)

    rng = np.random.default_rng(3)
    layers = [{"w": s * (np.abs(normal(rng, WIDTH)) + 0.1)} for s in (1, 1, -1)]
    inputs = np.abs(normal(rng, 3, WIDTH)) + 1

    def piped(layers):
        stages = mw.stack_stages(layers, 2)
        return mw.pipeline(lambda s, x: s.apply(layer, x), stages, inputs).sum()

    def in_turn(layers):
        x = inputs
        for p in layers:
            x = layer(p, x)
        return x.sum()

    found, wanted = jax.grad(piped)(layers), jax.grad(in_turn)(layers)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), found, wanted)


def test_numbers_that_give_way_do_so():
    """A number of Python's among the parameters makes no wider type of a short float."""

    def loss(p, batch):
        h = (batch["x"] @ p["a"]).astype(jnp.bfloat16) * p["scale"]
        h = mw.stage_boundary(h)
        assert h.dtype == jnp.bfloat16
        return (h * p["scale"]).astype(jnp.float32).mean()

    step = mw.pipeline_value_and_grad(loss, axis="pipe", microbatches=2)
    given = {"a": params()["a"], "scale": 0.3}, batch_of()
    value, gradients = step(*given)
    assert gradients["scale"].dtype == jnp.float32
    np.testing.assert_allclose(value, jax.value_and_grad(loss)(*given)[0], rtol=1e-2)


def test_rows_without_elements_are_cut():
    def loss(p, batch):
        return (mw.stage_boundary(batch["x"] @ p["a"]) ** 2).mean() + batch["none"].sum()

    step = mw.pipeline_value_and_grad(loss, axis="pipe", microbatches=2)
    batch = {**batch_of(), "none": np.zeros((8, 0), np.float32)}
    assert np.isfinite(step(params(), batch)[0])
