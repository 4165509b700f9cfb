"""One program serves every call that says the same of its arguments."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw


def test_the_second_step_builds_nothing_new(mesh2x4: jax.sharding.Mesh):
    """Host arrays first, then the program's own results: the hints are the same."""
    traced = []

    def step(state, x):
        traced.append(1)
        return {"w": state["w"] + x.sum(), "n": state["n"] + 1}

    hints = {"w": P("x", None), "n": P()}
    train = mw.jit(step, mesh=mesh2x4, in_shardings=(hints, P("y")), out_shardings=hints)
    state, x = {"w": np.ones((4, 3), np.float32), "n": np.int32(0)}, np.ones(8, np.float32)
    for _ in range(3):
        state = train(state, x)
    assert len(traced) == 1
    np.testing.assert_allclose(state["w"], 1 + 8 * 3)


def test_a_placement_that_nobody_hinted_selects_a_program(mesh2x4: jax.sharding.Mesh):
    double = mw.jit(lambda x: x * 2, mesh=mesh2x4)
    x = np.ones((4, 8), np.float32)
    specs = [P("x"), P("x", None), P(None, "y")]
    placed = [jax.device_put(x, NamedSharding(mesh2x4, s)) for s in specs]
    assert [double(p).sharding.spec for p in placed] == [P("x"), P("x"), P(None, "y")]
