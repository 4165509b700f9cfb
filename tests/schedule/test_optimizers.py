"""Split, reorder, slice: an optimiser's step on slices, by moves (CoCoNeT, section 3)."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.schedule.moves.reorder import reorder
from meshwise.schedule.moves.slice_state import State, slice_state
from meshwise.schedule.moves.split import split
from tests.meshes import mesh_of
from tests.schedule.steps import Step, adam, kinds, lamb, only, random


def on_slices(step: Step):
    """The schedule of the paper: the update on tiles, and state kept as such."""
    halves = split(step.view, [only(step.view, "psum")])
    view = reorder(halves.view, halves.seconds, more_bytes=True).view
    for name, (argument, result) in step.states.items():
        view = slice_state(view, [State(argument, result, name)])
    return view


@pytest.mark.parametrize("size", [64, 61, 5])
def test_adam_on_slices_is_adam(size):
    step = adam(size)
    view = on_slices(step)
    assert kinds(view) == ["reduce_scatter", "all_gather"]
    for got, want in zip(step.simulate(view), step.simulate(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [64, 61])
def test_lamb_on_slices_sums_its_norms_between_devices(size):
    step = lamb(size)
    view = on_slices(step)
    assert kinds(view).count("reduce_scatter") == kinds(view).count("all_gather") == 1
    for got, want in zip(step.simulate(view), step.simulate(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_reorder_that_gathers_more_is_refused_unless_asked():
    step = adam()
    halves = split(step.view, [only(step.view, "psum")])
    with pytest.raises(mw.IllegalMove, match="gathers 672 bytes after it, 224 before"):
        reorder(halves.view, halves.seconds)


def test_state_read_whole_elsewhere_is_refused():
    step = adam()
    halves = split(step.view, [only(step.view, "psum")])
    with pytest.raises(mw.IllegalMove, match="m is read whole"):
        slice_state(halves.view, [State(2, 1, "m")], 0, ("x",))


@pytest.mark.parametrize("batch", [8, 16])
def test_a_reshape_whose_parts_are_parts_is_no_end(batch):
    """[batch, 4] as one dim and back: rows of each device stay its own."""

    def step(g, w):
        flat = jax.lax.psum(g[0], "x").reshape(batch * 4, 3)
        return (flat * w).reshape(batch, 4, 3)

    args = random(8, batch, 4, 3), random(batch * 4, 3)
    program = mw.SpmdProgram.from_shard_map(step, mesh_of(x=8), (P("x"), P()), P(), *args)
    s = mw.Schedule(program)
    _, gathered = s.split(s.find("all_reduce")[0], dim=0)
    s.reorder(gathered)
    assert [e.primitive.name for e in s.program.jaxpr.jaxpr.eqns][-1] == "all_gather"
    np.testing.assert_array_equal(s.program.simulate(*args), program.simulate(*args))
