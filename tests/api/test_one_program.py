"""One program serves every call that says the same of its arguments."""

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.rules.registry import REGISTRY


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


def test_a_rule_that_is_registered_later_is_asked_by_what_was_derived_before(monkeypatch):
    monkeypatch.setattr(REGISTRY, "rules", dict(REGISTRY.rules))
    twice = Primitive("mw_test_registered_later")
    twice.def_abstract_eval(lambda x: x)
    mlir.register_lowering(twice, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    kernel = mw.like(lambda x: x * 2, twice.bind)
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((64, 8), "float32")

    def whole():
        program = mw.jit(lambda x: kernel(x) + 1, mesh=mesh, in_shardings=P("x")).partition(x)
        return program.per_device.whole

    assert whole()
    mw.register_rule(twice, "... -> ...")
    assert not whole()
