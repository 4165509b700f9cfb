"""An MLP's training step on meshes of eight: numbers, dropout masks, and exact wire bytes."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.end_to_end import models
from tests.meshes import mesh_of

MESHES: Mapping[str, dict[str, int]] = {
    "8": {"x": 8},
    "2x4": {"x": 2, "y": 4},
    "4x2": {"x": 4, "y": 2},
    "2x2x2": {"x": 2, "y": 2, "z": 2},
}
OPTIMISER = optax.sgd(0.1, momentum=0.9)
KEY = jax.random.key(7)
single = jax.jit(models.train_step(models.mlp_loss, OPTIMISER))
STATE = models.start(models.init_mlp(jax.random.key(0)), OPTIMISER)
STATE_BYTES = sum(x.nbytes for x in jax.tree.leaves(STATE.params))
ROWS = 512  # enough that activations are dearer to move than weights


def abstract(name: str) -> AbstractMesh:
    """A mesh without devices."""
    return mesh_of(**MESHES[name])


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points and their classes."""
    draw = np.random.default_rng(seed)
    points = draw.normal(size=(count, models.FEATURES)).astype(np.float32)
    return points, draw.integers(0, models.CLASSES, count)


def step_of(scheme: str, mesh: Any, **options: Any) -> Any:
    """The step under data parallelism ("data") or with everything split ("split")."""
    everywhere = tuple(mesh.axis_names)
    by_rows = {"h1": P(everywhere), "h2": P(everywhere)}
    mark = models.marked(by_rows) if scheme == "split" else models.unmarked
    weights = P(everywhere) if scheme == "split" else P()
    state = models.State(weights, weights)
    return mw.jit(
        models.train_step(models.mlp_loss, OPTIMISER, mark),
        mesh=mesh,
        in_shardings=(state, P(everywhere), P()),
        out_shardings=(state, P(), None),
        **options,
    )


def assert_same(got: Any, wanted: Any, rtol: float = 1e-5) -> None:
    """Trees of floats up to rounding; booleans bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    for g, w in ((np.asarray(g), np.asarray(w)) for g, w in leaves):
        assert g.dtype == w.dtype
        if w.dtype == np.bool_:
            np.testing.assert_array_equal(g, w)
        else:
            np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * np.abs(w).max(initial=0))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("scheme", ["data", "split"])
def test_one_step_equals_one_device(scheme: str, mesh: str):
    batch = rows(ROWS)
    wanted = single(STATE, batch, KEY)
    program = step_of(scheme, abstract(mesh)).partition(STATE, batch, KEY)
    assert_same(program.simulate(STATE, batch, KEY), wanted)


@pytest.mark.parametrize("mesh", MESHES)
def test_data_parallelism_reduces_each_gradient_once(mesh: str):
    program = step_of("data", abstract(mesh)).partition(STATE, rows(ROWS), KEY)
    assert {c.kind for c in program.collectives} == {"all_reduce"}
    loss = 4
    assert sum(np.prod(c.shape) * 4 for c in program.collectives) == STATE_BYTES + loss
    assert program.wire_bytes == 2 * 7 * (STATE_BYTES + loss) // 8


@pytest.mark.parametrize("mesh", MESHES)
def test_split_state_gathers_and_scatters(mesh: str):
    """ZeRO-3: a weight gathered at most twice, its gradient scattered once, nothing reduced whole.

    Sizes tell the weights apart.
    """
    program = step_of("split", abstract(mesh)).partition(STATE, rows(ROWS), KEY)
    moved = {kind: Counter[int]() for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    for c in program.collectives:
        moved[c.kind][int(np.prod(c.shape)) * (8 if c.kind == "all_gather" else 1)] += c.count
    sizes = {x.size for x in jax.tree.leaves(STATE.params)}
    assert len(sizes) == len(STATE.params)
    assert set(moved["all_gather"]) <= sizes
    assert max(moved["all_gather"].values()) <= 2
    assert moved["reduce_scatter"] == Counter(sizes)
    assert set(moved["all_reduce"]) == {1}  # the loss
    assert program.wire_bytes <= 3 * 7 * STATE_BYTES // 8 + 7


@pytest.mark.parametrize("scheme", ["data", "split"])
def test_twenty_steps_on_eight_devices(scheme: str, mesh2x4: Mesh):
    step = step_of(scheme, mesh2x4)
    ours = theirs = STATE
    for k in range(20):
        key = jax.random.fold_in(KEY, k)
        ours, our_loss, our_masks = step(ours, rows(64, k), key)
        theirs, their_loss, their_masks = single(theirs, rows(64, k), key)
        assert_same((our_loss, our_masks), (their_loss, their_masks))
    assert_same(ours, theirs, rtol=5e-5)


@pytest.mark.parametrize("scheme", ["data", "split"])
@pytest.mark.parametrize("count", [13, 17])
def test_rows_that_do_not_divide(count: int, scheme: str, mesh8: Mesh):
    """Three steps on 13 and 17 rows over eight devices, the batch a padded array of the mesh."""
    step = step_of(scheme, mesh8)
    ours = theirs = STATE
    for k in range(3):
        ours, our_loss, our_masks = step(ours, rows(count, k), KEY)
        theirs, their_loss, their_masks = single(theirs, rows(count, k), KEY)
        assert_same((our_loss, our_masks), (their_loss, their_masks))
    assert_same(ours, theirs)


def test_masks_do_not_depend_on_the_mesh():
    """Dropout masks of a step, bit for bit, whichever way its rows and features are split."""
    batch = rows(12)
    _, _, wanted = single(STATE, batch, KEY)
    for name, axes in MESHES.items():
        first, last = next(iter(axes)), list(axes)[-1]
        hints = {"h1": P(first), "h2": P(None, last)} if len(axes) > 1 else {"h1": P(None, "x")}
        step = mw.jit(
            models.train_step(models.mlp_loss, OPTIMISER, models.marked(hints)),
            mesh=abstract(name),
        )
        _, _, masks = step.partition(STATE, batch, KEY).simulate(STATE, batch, KEY)
        assert_same(masks, wanted)
