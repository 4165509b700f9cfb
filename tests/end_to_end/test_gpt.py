"""The example's GPT under its four sets of hints, at a tiny size: the numbers of one device."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import meshwise as mw
from examples.gpt import hints, model
from tests.end_to_end.test_mlp import MESHES, abstract, assert_same

CONFIG = model.Config(
    vocabulary=32, sequence=8, batch=8, width=32, heads=8, hidden=64, layers=1, warmup_steps=2
)
KEY = jax.random.key(1)
SCHEMES = {scheme.name: scheme for scheme in hints.SCHEMES}
# Every scheme and every mesh in the default suite, every pair in the slow one.
OFTEN = {("data", "8"), ("zero3", "4x2"), ("megatron", "2x4"), ("2d", "2x2x2")}
PAIRS = [
    pytest.param(s, m, marks=() if (s, m) in OFTEN else pytest.mark.slow)
    for s in SCHEMES
    for m in MESHES
]
single_step = jax.jit(partial(model.train_step, config=CONFIG))


def text(seed: int, rows: int = CONFIG.batch) -> model.Batch:
    """Some bytes, and those that follow."""
    draw = np.random.default_rng(seed).integers(0, 32, (rows, CONFIG.sequence + 1), np.int32)
    return model.Batch(draw[:, :-1], draw[:, 1:])


@pytest.fixture(scope="module")
def trained() -> model.State:
    """The state after three steps, when the rate is no longer zero."""
    state = model.init(jax.random.key(0), CONFIG)
    for k in range(3):
        state, _ = single_step(state, text(k), jax.random.fold_in(KEY, k))
    return state


def assert_states_agree(got: model.State, wanted: model.State) -> None:
    """Weights and moments up to rounding.

    A bias of attention's keys changes no result: its gradient is nothing but rounding, which Adam
    makes as large as any other, so these weights are not compared.
    """
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, w), g in zip(leaves, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        if "'k']['bias'" not in name:
            np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-7, err_msg=name)


@pytest.mark.parametrize(("scheme", "mesh"), PAIRS)
def test_a_step_equals_one_device(scheme: str, mesh: str, trained: model.State):
    function, given, returned = hints.hinted_step(SCHEMES[scheme], abstract(mesh), CONFIG)
    step = mw.jit(function, mesh=abstract(mesh), in_shardings=given, out_shardings=returned)
    program = step.partition(trained, text(9), KEY)
    wanted_state, wanted_metrics = single_step(trained, text(9), KEY)
    state, metrics = program.simulate(trained, text(9), KEY)
    assert_same(metrics, wanted_metrics)
    assert_states_agree(state, wanted_state)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_twenty_steps_on_eight_devices(scheme: str, mesh2x4: Mesh):
    function, given, returned = hints.hinted_step(SCHEMES[scheme], mesh2x4, CONFIG)
    step = mw.jit(
        function, mesh=mesh2x4, in_shardings=given, out_shardings=returned, donate_argnums=0
    )
    ours = jax.tree.map(np.asarray, model.init(jax.random.key(0), CONFIG))
    theirs = jax.tree.map(jax.numpy.asarray, ours)
    for k in range(20):
        key = jax.random.fold_in(KEY, k)
        ours, our_metrics = step(ours, text(k), key)
        theirs, their_metrics = single_step(theirs, text(k), key)
        np.testing.assert_allclose(our_metrics["loss"], their_metrics["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    "scheme", [pytest.param(s, marks=() if s == "data" else pytest.mark.slow) for s in SCHEMES]
)
def test_thirteen_rows(scheme: str, trained: model.State):
    """A batch that no axis divides."""
    mesh = abstract("8" if scheme in ("data", "zero3") else "2x4")
    function, given, returned = hints.hinted_step(SCHEMES[scheme], mesh, CONFIG)
    step = mw.jit(function, mesh=mesh, in_shardings=given, out_shardings=returned)
    arguments = trained, text(4, 13), KEY
    wanted_state, wanted_metrics = single_step(*arguments)
    state, metrics = step.partition(*arguments).simulate(*arguments)
    assert_same(metrics, wanted_metrics)
    assert_states_agree(state, wanted_state)
