"""Models without marks: where they are cut, and that they are cut in the best places."""

import itertools
import random

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.pipeline.balance import TIMES_FORWARD, TIMES_SENT, beginnings
from meshwise.pipeline.stages import cut
from tests.pipeline.test_values import assert_same, mesh_of

WIDTH, HIDDEN, LAYERS = 16, 64, 8


def layer(p, x):
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def loss_of(layer):
    def loss(params, batch):
        x = batch["x"]
        for p in params:
            x = layer(p, x)
        return ((x - batch["y"]) ** 2).mean()

    return loss


def cast_first(function):
    """A function of weights in another precision; each stage casts the weights that it reads."""
    return lambda params, x: function(jax.tree.map(lambda w: w.astype("float16"), params), x)


def drawn(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) / 4


PARAMS = [{"up": drawn(WIDTH, HIDDEN + 0), "down": drawn(HIDDEN, WIDTH)}] * LAYERS
BATCH = {"x": drawn(32, WIDTH), "y": drawn(33, WIDTH)[1:]}
LOSSES = {
    "layers one after another": loss_of(layer),
    "under jax.jit": jax.jit(loss_of(layer)),
    "recomputed layers": loss_of(jax.checkpoint(layer)),
    "all recomputed": jax.checkpoint(loss_of(layer)),
    "jitted layers": loss_of(jax.jit(layer)),
    "weights cast at the top": cast_first(loss_of(layer)),
    "weights cast in jitted layers": loss_of(jax.jit(cast_first(layer))),
}


@pytest.mark.parametrize("case", LOSSES)
def test_equal_layers_are_cut_between_them(case):
    leaves, tree = jax.tree.flatten((PARAMS, BATCH))
    closed = jax.make_jaxpr(lambda *args: LOSSES[case](*jax.tree.unflatten(tree, args)))(*leaves)
    found = cut(closed, 2 * LAYERS, 0, "loss", 4)
    assert [sorted(s.params) for s in found.stages] == [
        list(range(4 * k, 4 * k + 4)) for k in range(4)
    ]
    assert [[t.shape for t in s.leaving] for s in found.stages] == [[(32, WIDTH)]] * 3 + [[()]]
    whole = jax.jit(LOSSES[case])(PARAMS, BATCH)
    ran = jax.jit(jax.extend.core.jaxpr_as_fun(found.chain))(*leaves)[0]
    np.testing.assert_allclose(ran, whole, rtol=1e-6)


CASES = {
    "layers": ({"stage": 4}, None, {}),
    "chunks": ({"stage": 2}, None, {"schedule": "interleaved", "chunks": 2}),
    "tensors, data": ({"stage": 2, "d": 2, "m": 2}, P("d"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_one_device(case):
    axes, rows, more = CASES[case]
    megatron = [{"up": P(None, "m"), "down": P("m")}] * LAYERS
    step = mw.pipeline_value_and_grad(
        LOSSES["recomputed layers"],
        axis="stage",
        microbatches=4,
        stages=axes["stage"] * more.get("chunks", 1),
        in_shardings=(megatron, rows) if rows else None,
        **more,
    )
    got = mw.jit(step, mesh=mesh_of(**axes))(PARAMS, BATCH)
    assert_same(got, jax.value_and_grad(loss_of(layer))(PARAMS, BATCH))


def test_a_heavy_head_has_a_stage_of_fewer_layers():
    def loss(params, batch):
        layers, head = params
        x = batch["x"]
        for p in layers:
            x = layer(p, x)
        return jax.nn.logsumexp(x @ head, -1).mean()

    head = drawn(WIDTH, 3 * 2 * HIDDEN)  # as much as three layers, and its sum
    leaves, tree = jax.tree.flatten(((PARAMS, head), BATCH))
    closed = jax.make_jaxpr(lambda *args: loss(*jax.tree.unflatten(tree, args)))(*leaves)
    found = cut(closed, 2 * LAYERS + 1, 0, "loss", 2)
    first, last = (len(s.params) for s in found.stages)
    assert first > last
    assert 2 * LAYERS in found.stages[1].params


def test_one_stage_of_nothing():
    step = mw.pipeline_value_and_grad(lambda w, b: w, axis="stage", microbatches=2, stages=1)
    value, gradient = step(np.float32(3), np.ones((4, 2), np.float32))
    assert (value, gradient) == (3, 1)


def test_regions_by_hand_are_priced_where_there_is_no_mesh():
    def loss(w, batch):
        x = np.float32(0.1) * batch @ w
        less_mean = jax.shard_map(
            lambda x: x - jax.lax.pmean(x, "d"),
            mesh=mesh_of(d=2),
            in_specs=P("d"),
            out_specs=P("d"),
        )
        return (less_mean(x) @ w).sum()

    args = drawn(WIDTH, WIDTH), drawn(8, WIDTH)
    step = mw.pipeline_value_and_grad(loss, axis="stage", microbatches=1, stages=2)
    assert_same(step(*args), jax.value_and_grad(loss)(*args))


def stages_of(loss, count):
    leaves, tree = jax.tree.flatten((PARAMS, BATCH))
    closed = jax.make_jaxpr(lambda *args: loss(*jax.tree.unflatten(tree, args)))(*leaves)
    return cut(closed, 2 * LAYERS, 0, "loss", count).stages


def test_a_term_of_weights_alone_counts_where_it_is_added():
    def norm(params):
        return sum((w**2).sum() for w in jax.tree.leaves(params))

    def first(params, batch):
        term = norm(params)
        return LOSSES["jitted layers"](params, batch) + term

    def last(params, batch):
        return LOSSES["jitted layers"](params, batch) + norm(params)

    found, same = [[s.params for s in stages_of(loss, 3)[:-1]] for loss in (first, last)]
    assert found == same
    assert all(found)


def test_a_call_that_begins_with_what_is_remade_stays_one():
    stages = stages_of(loss_of(jax.checkpoint(cast_first(layer))), 4)
    names = [[e.primitive.name for e in s.jaxpr.eqns] for s in stages]
    assert [n.count("remat2") + n.count("checkpoint") for n in names] == [2, 2, 2, 2]


def took(begin, seconds, crossing, byte_s):
    bounds = [0, *begin, len(seconds)]
    longest = max(sum(seconds[a:b]) for a, b in itertools.pairwise(bounds))
    sent = max((crossing[i] for i in begin), default=0)
    return TIMES_FORWARD * longest + TIMES_SENT * sent * byte_s


def test_no_other_cut_is_better():
    draw = random.Random(0)
    compared = 0
    for _ in range(3000):
        count, stages = draw.randint(1, 9), draw.randint(2, 5)
        seconds = [draw.choice([0, 0, 1, 2, 5, draw.random()]) for _ in range(count)]
        crossing = [draw.choice([0, 4, 8, 16, draw.random()]) for _ in range(count)]
        byte_s = draw.choice([0, 0.1, 1])
        every = [
            begin
            for begin in itertools.combinations(range(1, count), stages - 1)
            if all(sum(seconds[a:b]) for a, b in itertools.pairwise([0, *begin, count]))
        ]
        found = beginnings(seconds, crossing, stages, byte_s)
        assert (found is None) == (not every)
        if found is not None:
            assert tuple(found) in every
            best = min(took(begin, seconds, crossing, byte_s) for begin in every)
            assert took(found, seconds, crossing, byte_s) <= best * (1 + 1e-6)
            compared += 1
    assert compared > 1000
