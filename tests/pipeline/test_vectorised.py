"""Pipelines of equal stages as a loop: values, gradients, iterations, and what is sent."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.pipeline.models import normal
from tests.pipeline.test_values import assert_same, every_equation, mesh_of

WIDTH = 8


def layer(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"])


def layers_of(count):
    rng = np.random.default_rng(count)
    return [{"w": normal(rng, WIDTH, WIDTH), "b": normal(rng, WIDTH)} for _ in range(count)]


def stage(layers, x):
    return layers.apply(layer, x)


def inputs_of(microbatches, size=4):
    return normal(np.random.default_rng(microbatches), microbatches, size, WIDTH) * 3


def plain(layers, x):
    for p in layers:
        x = layer(p, x)
    return x


def pipelined(stacked, x, **more):
    if stacked.repeat > 1:
        more |= {"schedule": "circular", "repeat": stacked.repeat}
    return mw.pipeline(stage, stacked, x, axis="stage", **more)


def loss(function):
    return lambda layers, x: (function(layers, x) ** 2).mean()


CASES = [(7, 2, 2, 2), (3, 4, 1, 2)]  # layers, S, repeat, M
MORE = [(4, 4, 1, 6), (8, 4, 2, 4), (6, 4, 1, 3), (13, 3, 4, 5), (8, 4, 2, 6), (2, 1, 2, 3)]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in MORE)], ids=str
)
def test_values_and_gradients_without_a_mesh(case):
    count, stages, repeat, microbatches = case
    layers, x = layers_of(count), inputs_of(microbatches)
    stacked = mw.stack_stages(layers, stages, repeat)
    want = jax.value_and_grad(loss(plain))(layers, x)
    value, gradients = jax.jit(jax.value_and_grad(loss(pipelined)))(stacked, x)
    rows = gradients.unstack()
    assert_same((value, [jax.tree.map(lambda r, i=i: r[i], rows) for i in range(count)]), want)
    # Copies have gradients of their own: none.
    total = sum(float(jnp.abs(r).sum()) for r in jax.tree.leaves(gradients.params))
    assert total == pytest.approx(sum(float(jnp.abs(r).sum()) for r in jax.tree.leaves(rows)), 1e-5)


@pytest.mark.parametrize("case", [(8, 4, 2, 5), (6, 4, 1, 3)], ids=str)
def test_values_and_gradients_on_devices(case):
    count, stages, repeat, microbatches = case
    layers, x = layers_of(count), inputs_of(microbatches)
    stacked = mw.stack_stages(layers, stages, repeat)
    mesh = mesh_of(stage=stages, data=2)
    step = mw.jit(
        jax.value_and_grad(loss(pipelined)), mesh=mesh, in_shardings=(None, P(None, "data"))
    )
    value, gradients = step(stacked, x)
    want = jax.value_and_grad(loss(plain))(layers, x)
    rows = gradients.unstack()
    assert_same((value, [jax.tree.map(lambda r, i=i: r[i], rows) for i in range(count)]), want)


def sent(program):
    found = Counter()
    for c in program.collectives:
        found[str(c.kind), c.axes, np.prod(c.shape)] += c.count
    return found


@pytest.mark.parametrize("case", [(4, 4, 1, 6), (8, 4, 2, 6), (12, 4, 3, 4)], ids=str)
def test_one_ppermute_an_iteration(case):
    count, stages, repeat, microbatches = case
    stacked, x = mw.stack_stages(layers_of(count), stages, repeat), inputs_of(microbatches)
    iterations = repeat * microbatches + stages - 1
    program = mw.jit(pipelined, mesh=mesh_of(stage=stages)).partition(stacked, x)
    shift, result = ("ppermute", ("stage",), 4 * WIDTH), ("all_reduce", ("stage",), x.size)
    assert sent(program) == {shift: iterations, result: 1}
    (loop,) = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    assert loop.params["length"] == iterations
    backward = mw.jit(jax.grad(loss(pipelined)), mesh=mesh_of(stage=stages)).partition(stacked, x)
    assert sent(backward) == {shift: 2 * iterations, result: 1}


def test_gradients_are_summed_over_the_data_once():
    stacked, x = mw.stack_stages(layers_of(4), 4), inputs_of(4, 32)
    mesh = mesh_of(stage=4, data=2)
    step = mw.jit(jax.grad(loss(pipelined)), mesh=mesh, in_shardings=(None, P(None, "data")))
    counts = Counter()
    for c in step.partition(stacked, x).collectives:
        counts[str(c.kind), c.axes] += c.count
    assert counts["ppermute", ("stage",)] == 2 * 7
    assert counts["all_reduce", ("data",)] <= 2


@pytest.mark.parametrize("remat", [True, False])
def test_what_is_saved_for_the_backward_pass(remat):
    """With remat, of each iteration the stages' inputs alone: no hidden values, and no queue."""
    stacked, x = mw.stack_stages(layers_of(8), 4, 2), inputs_of(6)

    def run(stacked):
        return (pipelined(stacked, x, remat=remat) ** 2).sum()

    def saved(stacked):
        return jax.vjp(run, stacked)[1]

    jaxpr = jax.make_jaxpr(saved)(stacked).jaxpr
    loops = [
        e for e in every_equation(jaxpr) if e.primitive.name == "scan" and e.params["length"] == 15
    ]
    stacks = [v.aval.shape for e in loops for v in e.outvars if v.aval.shape[:1] == (15,)]
    floats = [s for s in stacks if s[1:] == (4, 4, WIDTH)]
    assert len(floats) <= (2 if remat else 4)
    assert all(s[1:2] != (2,) for s in stacks)


def test_stages_of_ones_own_and_several_values():
    """Plain arrays as parameters, a tree of activations, an integer that passes through."""

    def scaled(w, state):
        x, shift = state["x"], state["shift"]
        return {"x": w * x + shift, "shift": shift}

    w = np.array([2.0, 3.0], np.float32)
    state = {"x": inputs_of(5), "shift": np.arange(5, dtype=np.int32)}
    got = mw.jit(lambda w, s: mw.pipeline(scaled, w, s, axis="stage"), mesh=mesh_of(stage=2))(
        w, state
    )
    shift = state["shift"][:, None, None]
    np.testing.assert_allclose(got["x"], 3 * (2 * state["x"] + shift) + shift, rtol=1e-6)
    np.testing.assert_array_equal(got["shift"], state["shift"])


def test_stacking():
    layers = layers_of(7)
    for stages, repeat, sizes in [
        (4, 1, (2, 2, 2, 1)),
        (2, 2, (2, 2, 2, 1)),
        (8, 1, (1,) * 7 + (0,)),
    ]:
        stacked = mw.stack_stages(layers, stages, repeat)
        assert stacked.sizes == sizes
        shape = (stages, repeat, max(sizes)) if repeat > 1 else (stages, max(sizes))
        assert {p.shape[: len(shape)] for p in jax.tree.leaves(stacked)} == {shape}
        rows = stacked.unstack()
        for i, p in enumerate(layers):
            np.testing.assert_array_equal(rows["w"][i], p["w"])
        again = mw.stack_stages(rows, stages, repeat)
        jax.tree.map(np.testing.assert_array_equal, again.params, stacked.params)
    order = mw.stack_stages({"w": np.arange(8.0)}, 2, 2).params["w"]
    np.testing.assert_array_equal(order, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]])


def normed(scale, x):
    """A stage without a derivative at zero."""
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x))


@pytest.mark.parametrize("options", [{}, {"schedule": "circular", "repeat": 2}], ids=str)
def test_stages_without_a_microbatch_make_no_nan(options):
    scales = jnp.linspace(0.5, 2.0, 4 * options.get("repeat", 1))
    stages = scales.reshape(-1, 4).T if "repeat" in options else scales
    inputs = inputs_of(6)

    def piped(stages):
        return (mw.pipeline(normed, stages, inputs, **options) ** 2).sum()

    def plain_loss(scales):
        x = inputs
        for scale in scales:
            x = jax.vmap(lambda x, scale=scale: normed(scale, x))(x)
        return (x**2).sum()

    value, found = jax.value_and_grad(piped)(stages)
    wanted, gradient = jax.value_and_grad(plain_loss)(scales)
    found = found.T.reshape(-1) if "repeat" in options else found
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(found, gradient, rtol=1e-3, atol=1e-3)


def test_keys_travel_with_activations():
    def noisy(w, activations):
        x, key = activations
        key = jax.random.fold_in(key, 1)
        return jnp.tanh(x @ w) + jax.random.uniform(key, x.shape), key

    weights = normal(np.random.default_rng(0), 4, WIDTH, WIDTH)
    inputs = inputs_of(6), jax.random.split(jax.random.key(0), 6)

    def in_turn(weights, inputs):
        for w in weights:
            inputs = jax.vmap(noisy, (None, 0))(w, inputs)
        return inputs

    got, keys = mw.pipeline(noisy, weights, inputs)
    wanted, last = in_turn(weights, inputs)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(last))
    gradient = jax.grad(lambda w: mw.pipeline(noisy, w, inputs)[0].sum())(weights)
    np.testing.assert_allclose(
        gradient, jax.grad(lambda w: in_turn(w, inputs)[0].sum())(weights), rtol=1e-4, atol=1e-4
    )


TYPED = [(mw.jit, P("stage")), (mw.jit, P(None, "data")), (jax.jit, P("data"))]
MORE_TYPED = [(mw.jit, P()), (mw.jit, P(None, "stage", "data")), (jax.jit, P("stage"))]


@pytest.mark.parametrize(
    ("jit", "spec"), [*TYPED, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE_TYPED)]
)
def test_explicit_axes(spec, jit):
    """What a stage closes over has a type with axes too, and a gradient."""
    mesh = jax.make_mesh((4, 2), ("stage", "data"))
    layers, x, shift = layers_of(6), inputs_of(8), normal(np.random.default_rng(0), 4, WIDTH)
    stacked = mw.stack_stages(layers, 4)
    lies = NamedSharding(mesh, spec)
    placed = (
        jax.device_put(stacked, NamedSharding(mesh, P("stage"))),
        jax.device_put(x, lies),
        jax.device_put(shift, NamedSharding(mesh, P("data"))),
    )

    def loss_of(run):
        return lambda p, x, shift: (run(p, x, lambda x: jnp.tanh(x) + shift) ** 2).mean()

    def in_stages(p, x, act):
        made = mw.pipeline(lambda p, x: act(stage(p, x)), p, x, axis="stage")
        assert jax.typeof(made) == jax.typeof(x)
        return made

    def one_by_one(stacked, x, act):
        for k in range(4):
            own = jax.tree.map(lambda p, k=k: p[k, : stacked.sizes[k]], stacked.params)
            for i in range(stacked.sizes[k]):
                x = layer(jax.tree.map(lambda p, i=i: p[i], own), x)
            x = act(x)
        return x

    got = jit(jax.value_and_grad(loss_of(in_stages), argnums=(1, 2)))(*placed)
    want = jax.value_and_grad(loss_of(one_by_one), argnums=(1, 2))(stacked, x, shift)
    assert_same(got, want)


@pytest.mark.parametrize(
    "spec", [P(), P("stage"), P("data", "stage"), P(None, None, "data")], ids=str
)
@pytest.mark.parametrize("case", [(6, 4, 1), (8, 4, 1), (8, 2, 2), (6, 2, 2), (8, 3, 1)], ids=str)
def test_layers_of_explicit_axes_are_stacked(case, spec):
    count, stages, repeat = case
    mesh = jax.make_mesh((4, 2), ("stage", "data"))
    x = normal(np.random.default_rng(1), count, 4, WIDTH)
    if count % 4 and spec == P("stage"):
        spec = P(None, "stage")
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    want, got = mw.stack_stages(x, stages, repeat), mw.stack_stages(placed, stages, repeat)
    np.testing.assert_array_equal(got.params, want.params)
    np.testing.assert_array_equal(got.unstack(), x)
    if case == (8, 4, 1) and spec == P("stage"):  # stays where it is
        assert got.params.sharding.spec[0] == "stage"
