"""Where a model is cut: what each stage computes, reads, and sends; and marks elsewhere."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.pipeline.stages import cut
from tests.pipeline.models import language_model, layer, mlp, skips

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def cut_of(model, microbatch=2):
    """The stages, and the paths of the parameters by number."""
    leaves, tree = jax.tree.flatten(model.params)
    fed, fed_tree = jax.tree.flatten(model.batch(microbatch))

    def flat(*args):
        params, batch = args[: len(leaves)], args[len(leaves) :]
        return model.loss(jax.tree.unflatten(tree, params), jax.tree.unflatten(fed_tree, batch))

    closed = jax.make_jaxpr(flat)(*leaves, *fed)
    named = jax.tree_util.tree_flatten_with_path(model.params)[0]
    return cut(closed, len(leaves), 0, "loss"), [jax.tree_util.keystr(path) for path, _ in named]


def reads(stage, paths):
    return [paths[i] for i in stage.params]


def sent(stage):
    return [(t.str_short(short_dtypes=True)) for t in stage.leaving]


def test_equal_stages():
    found, paths = cut_of(mlp(3))
    assert [sorted(reads(s, paths)) for s in found.stages] == [
        [f"[{i}]['b']", f"[{i}]['w']"] for i in range(3)
    ]
    assert [sent(s) for s in found.stages] == [["f32[2,8]"], ["f32[2,8]"], ["f32[]"]]
    assert [len(s.fed) for s in found.stages] == [1, 0, 1]
    assert [line.split(":")[0].rsplit("/", 1)[-1] for line in found.lines] == ["models.py"] * 2


def test_labels_and_masks_are_not_sent():
    """Labels are read where they are needed, a mask is made again, a growing loss goes along."""
    found, paths = cut_of(language_model(3, tied=True))
    assert [sorted(sent(s)) for s in found.stages] == [["f32[2,5,8]", "f32[]"]] * 2 + [["f32[]"]]
    assert [s.fed for s in found.stages] == [(1,), (), (0,)]  # the tree's order: next, words
    assert reads(found.stages[0], paths)[0] == "['embedding']"
    assert "['embedding']" in reads(found.stages[2], paths)
    embedding = paths.index("['embedding']")
    assert [k for k, stage in enumerate(found.stages) if embedding in stage.params] == [0, 2]
    assert not any("bool" in text for s in found.stages for text in sent(s))


def test_what_skips_stages_is_carried_along():
    found, paths = cut_of(skips(4))
    skipping = ["f16[2,8]", "i32[2,8]"]
    for stage, floats in zip(found.stages, (1, 2, 2), strict=False):
        assert sorted(sent(stage)) == sorted(["f32[2,8]"] * floats + skipping)
    assert "['unused']" not in [p for s in found.stages for p in reads(s, paths)]


def test_casts_of_parameters_stay_where_they_are_needed():
    def loss(params, x):
        cast = [p.astype(jnp.float32) for p in params]
        for i, p in enumerate(cast):
            x = jnp.sin(mw.stage_boundary(x) if i else x) @ p
        return x.sum()

    params = [jnp.asarray(X.T @ X, jnp.bfloat16)] * 2
    closed = jax.make_jaxpr(lambda a, b, x: loss([a, b], x))(*params, X)
    first, second = cut(closed, 2, 0, "loss").stages
    assert (first.params, second.params) == ((0,), (1,))
    assert sent(first) == ["f32[4,8]"]


def test_marks_may_stand_in_calls_and_say_nothing_elsewhere():
    @jax.checkpoint
    def half(x):
        return jnp.sin(mw.stage_boundary(jnp.cos(x)))

    closed = jax.make_jaxpr(lambda w, x: jax.jit(half)(x * w).sum())(X, X)
    first, second = cut(closed, 1, 0, "loss").stages
    assert [e.primitive.name for e in first.jaxpr.jaxpr.eqns] == ["mul", "cos"]
    assert [e.primitive.name for e in second.jaxpr.jaxpr.eqns] == ["sin", "reduce_sum"]
    want = np.sin(np.cos(X))
    np.testing.assert_allclose(jax.jit(half)(X), want, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(half)(X), want, rtol=1e-6)
    slope = jax.grad(lambda x: half(x).sum())(X)
    np.testing.assert_allclose(slope, -np.cos(np.cos(X)) * np.sin(X), rtol=1e-5)
    tangent = jax.jvp(half, (X,), (X,))[1]
    np.testing.assert_allclose(tangent, slope * X, rtol=1e-5)


def test_marks_keep_trees():
    tree = {"a": X, "b": (jnp.arange(3), None)}
    marked = mw.stage_boundary(tree)
    assert jax.tree.structure(marked) == jax.tree.structure(tree)
    jaxpr = jax.make_jaxpr(mw.stage_boundary)(tree)
    assert [e.params["leads"] for e in jaxpr.jaxpr.eqns] == [True, False]


def test_marks_in_a_partitioned_function_let_sums_pass(mesh2x4):
    def function(x, w):
        return mw.stage_boundary(x @ w) * 2

    program = mw.jit(function, mesh=mesh2x4, in_shardings=(P(None, "y"), P("y"))).partition(X, X.T)
    assert [str(c.kind) for c in program.collectives] == ["all_reduce"]
    assert not program.per_device.whole
    np.testing.assert_allclose(program(X, X.T), X @ X.T * 2, rtol=1e-5)


@pytest.mark.parametrize("model", [mlp(3), language_model(3, True), skips(3)], ids=lambda m: m.name)
def test_stages_one_after_the_other_are_the_loss(model):
    found, _ = cut_of(model)
    leaves, fed = jax.tree.leaves(model.params), jax.tree.leaves(model.batch(2))
    arriving = []
    for stage in found.stages:
        inputs = [*(leaves[i] for i in stage.params), *(fed[i] for i in stage.fed), *arriving]
        arriving = jax.core.eval_jaxpr(stage.jaxpr.jaxpr, stage.jaxpr.consts, *inputs)
    np.testing.assert_allclose(arriving[0], model.loss(model.params, model.batch(2)), rtol=1e-6)


def test_custom_derivatives_are_kept():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

    def loss(params, batch):
        x = clipped(layer(params[0], batch["x"]))
        return ((layer(params[1], mw.stage_boundary(x)) - batch["y"]) ** 2).mean()

    model = mlp(2)
    batch = model.batch(4)
    step = mw.pipeline_value_and_grad(loss, axis="stage", microbatches=1)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("stage",), auto, devices=jax.devices()[:2])
    got = mw.jit(step, mesh=mesh)(model.params, batch)[1]
    want = jax.grad(loss)(model.params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


OPERATORS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "sin": lambda a, b: jnp.sin(a),
    "where": lambda a, b: jnp.where(a > 0, a, b),
}


@hypothesis.given(st.data())
def test_random_programs_cut_anywhere(data):
    """Values read by any later stage, marks anywhere: the stages are the program."""
    steps = data.draw(st.lists(st.sampled_from([*OPERATORS, "mark", "mark"]), max_size=14))
    choose = [(data.draw(st.integers(0, 99)), data.draw(st.integers(0, 99))) for _ in steps]

    def loss(w, v, x, y):
        values = [w, v, x, y]
        for step, (i, j) in zip(steps, choose, strict=True):
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(mw.stage_boundary(a) if step == "mark" else OPERATORS[step](a, b))
        return sum(values[-3:]).sum()

    args = [X[0, :3] + k for k in range(4)]
    found = cut(jax.make_jaxpr(loss)(*args), 2, 0, "loss")
    assert len(found.stages) == 1 + steps.count("mark")
    arriving, sent = [], []
    for stage in found.stages:
        inputs = [*(args[i] for i in stage.params), *(args[2 + i] for i in stage.fed), *arriving]
        arriving = jax.core.eval_jaxpr(stage.jaxpr.jaxpr, stage.jaxpr.consts, *inputs)
        sent.append(arriving)
    np.testing.assert_allclose(arriving[0], loss(*args), rtol=1e-5)
    chain = found.chain
    whole = jax.core.eval_jaxpr(chain.jaxpr, chain.consts, *args)
    wanted = [*sent.pop(), *(value for values in sent for value in values)]
    for a, b in zip(whole, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
