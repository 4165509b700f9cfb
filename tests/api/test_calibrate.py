"""`mw.calibrate`: figures measured once, kept, and used where they are asked for."""

import functools
import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.api import calibrate as api
from meshwise.api import plan_inputs, tuning_limits
from meshwise.cost.hardware import CPU
from meshwise.cost.links import Links
from meshwise.run import calibrate as run
from meshwise.run.calibrate import Sizes
from meshwise.run.calibrate import calibrate as measure
from meshwise.run.calibrate import calibrate_axes as measure_axes

LAUNCHED = {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}
SMALL = Sizes(small_bytes=1 << 11, large_bytes=1 << 14, repeats=1)


@functools.cache
def measured(devices):
    return measure(devices, SMALL)


@functools.cache
def measured_axes(mesh):
    return measure_axes(mesh, SMALL)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Small measurements, kept in a folder of the test; the list says when one is asked for.

    What is measured once is given again: a measurement compiles a program for each of its figures.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def small(devices):
        made.append(len(devices))
        return measured(tuple(devices))

    def small_axes(mesh):
        made.append(dict(mesh.shape))
        return measured_axes(mesh)

    monkeypatch.setattr(api, "measure", small)
    monkeypatch.setattr(api, "measure_axes", small_axes)
    monkeypatch.setattr(run, "_ENOUGH_S", 0.0)
    return made


def test_figures_are_measured_once_and_kept(quick):
    first = mw.calibrate()
    assert mw.calibrate() == first
    assert quick == [8]
    assert mw.calibrate(jax.devices()[:4]) != first  # of other devices
    mw.calibrate(again=True)
    assert quick == [8, 4, 8]
    assert first.flops_per_s > (first.serial_flops_per_s or 0) > 0
    assert first.memory_bytes_per_s > 0
    assert first.call_s >= 0


def test_plans_use_them_when_told_and_say_so(quick, mesh8):
    x = np.ones((16, 16), np.float32)
    options = {"mesh": mesh8, "in_shardings": (P("x"), P("x"))}
    plain = mw.jit(lambda a, b: a @ b, **options).partition(x, x)
    assert "figures" not in plain.explain()
    with pytest.raises(mw.ArgumentError, match="nobody measured"):
        mw.jit(lambda a, b: a @ b, **options, hardware="measured").partition(x, x)
    figures = mw.calibrate(mesh8.devices.flat)
    program = mw.jit(lambda a, b: a @ b, **options, hardware="measured").partition(x, x)
    assert figures.name in program.explain()
    assert program.plan.seconds != plain.plan.seconds
    assert figures.name in str(mw.autotune(program, x, x, rounds=1))
    assert figures.name not in str(mw.autotune(program, measure="cost"))


def test_the_link_of_each_axis(quick, mesh2x4):
    links = mw.calibrate(mesh2x4)
    assert isinstance(links, Links)
    assert mw.calibrate(mesh2x4) == links
    assert mw.calibrate(mesh2x4.devices.flat) == links.device
    assert quick == [dict(mesh2x4.shape)]
    assert [axis for axis, _ in links.axes] == list(mesh2x4.axis_names)
    for axis in mesh2x4.axis_names:
        figures = links.figures(axis)
        assert figures != links.device
        assert dict(figures.launch_factors).keys() == LAUNCHED
        assert figures.start_s("all_to_all") > 0
    x = np.ones((16, 16), np.float32)
    options = {"mesh": mesh2x4, "in_shardings": (P("x", "y"), P("x"))}
    api._path(jax.devices()).unlink()
    assert mw.calibrate(mesh2x4) == links, "and keeps its devices' figures again"
    program = mw.jit(lambda a, b: a @ b, **options, hardware="measured").partition(x, x)
    assert links.device.name in program.explain()
    assert links.device.name in str(mw.autotune(program, x, x, rounds=1))


def test_what_is_kept_by_another_version_is_measured_again(quick):
    mw.calibrate()
    (path,) = [*api._path(jax.devices()).parent.iterdir()]
    path.write_text(json.dumps({"name": "old", "speed": 3}), encoding="utf-8")
    assert mw.calibrate().name != "old"
    kept = json.loads(path.read_text(encoding="utf-8"))
    before = {name: value for name, value in kept.items() if name != "call_s"}
    path.write_text(json.dumps(before), encoding="utf-8")
    mw.calibrate()
    assert json.loads(path.read_text(encoding="utf-8")).keys() == kept.keys()
    path.write_text("{", encoding="utf-8")
    assert api.kept(jax.devices()) is None


@pytest.mark.parametrize(
    ("hardware", "text"),
    [("fast", "hardware='fast'"), (Links(CPU), "hardware=a Links\n.* one dev")],
)
def test_figures_that_are_none(hardware, text):
    """Nothing has to be called for that."""
    with pytest.raises(mw.ArgumentError, match=text):
        mw.jit(lambda a: a * 2, hardware=hardware)


def test_figures_of_a_mesh_without_devices(quick):
    mesh = AbstractMesh((8,), ("x",))
    fn = mw.jit(lambda a: a * 2, mesh=mesh, in_shardings=P("x"))
    program, hardware = fn.partition(jax.ShapeDtypeStruct((8,), "float32")), "measured"
    with pytest.raises(mw.ArgumentError, match="an AbstractMesh has none"):
        program.timeline(hardware)
    fn = mw.jit(lambda a: a * 2, mesh=mesh, in_shardings=P("x"), hardware=hardware)
    with pytest.raises(mw.ArgumentError, match="an AbstractMesh has none"):
        fn.partition(jax.ShapeDtypeStruct((8,), "float32"))


def test_a_timeline_goes_by_what_was_measured(quick, mesh2x4):
    x = np.ones((16, 16), np.float32)
    program = mw.jit(lambda a: a @ a, mesh=mesh2x4, in_shardings=P("x", "y")).partition(x)
    with pytest.raises(mw.ArgumentError, match="nobody measured"):
        program.timeline("measured")
    device = mw.calibrate(mesh2x4.devices.flat)
    assert program.timeline("measured") == program.timeline(device)
    links = mw.calibrate(mesh2x4)
    assert program.timeline("measured") == program.timeline(links) != program.timeline(device)


def test_what_was_measured_since_is_planned_with(quick, mesh8, monkeypatch):
    x = np.ones((16, 16), np.float32)
    fn = mw.jit(lambda a: a @ a, in_shardings=NamedSharding(mesh8, P("x")), hardware="measured")
    with pytest.raises(mw.ArgumentError, match="nobody measured"):
        fn(x)
    mw.calibrate(mesh8.devices.flat)
    np.testing.assert_array_equal(fn(x), x @ x)
    before = fn.partition(x).plan
    (path,) = [*api._path(jax.devices()).parent.iterdir()]
    kept = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(kept | {"launch_s": 1.0}), encoding="utf-8")
    after = fn.partition(x).plan
    assert before is not None
    assert after is not None
    assert after.hardware.launch_s == 1.0 != before.hardware.launch_s


def test_processes_are_not_to_plan_each_with_figures_of_its_own(quick, mesh8, monkeypatch):
    mw.calibrate(mesh8.devices.flat)
    x = np.ones((16, 16), np.float32)
    program = mw.jit(lambda a: a @ a, mesh=mesh8, in_shardings=P("x")).partition(x)
    for module in (api, plan_inputs):
        monkeypatch.setattr(module, "process_count", lambda mesh: 2)
    monkeypatch.setattr(tuning_limits, "other_processes", lambda devices: [1])
    with pytest.raises(mw.ArgumentError, match="the mesh is of 2 processes"):
        mw.jit(lambda a: a @ a, mesh=mesh8, in_shardings=P("x"), hardware="measured").partition(x)
    with pytest.raises(mw.ArgumentError, match="a clock of its own"):
        mw.autotune(program, x)
    with pytest.raises(mw.ArgumentError) as refusal:
        mw.plan(lambda a: a @ a, x, mesh=mesh8, budget_s=60)
    assert str(refusal.value) == (
        "mw.plan was given seconds to search for a mesh of several processes:\n"
        f"  - budget_s=60\n  - its mesh is {mesh8}\n"
        "All processes must come to one plan, and each has a clock of its own.\n"
        "Leave budget_s out: most_tried ends the search at one place in all of them."
    )
    assert mw.plan(lambda a: a @ a, x, mesh=mesh8, most_tried=3).program


def test_of_one_device_no_link_is_measured():
    figures = measured((jax.devices()[0],))
    assert figures.name == "1 cpu device, measured"
    assert figures.source == "measured; one device sends nothing, links: generic"
