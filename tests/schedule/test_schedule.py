"""`mw.Schedule`: handles, moves by a user, scripts that replay, differences in figures."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.schedule.script import Script
from tests.meshes import mesh_of
from tests.schedule.steps import adam, lamb


def moved(step) -> mw.Schedule:
    """All moves of an optimiser: sum in two halves, update between, state and norms together."""
    s = mw.Schedule(step.program)
    scattered, gathered = s.split(s.find("all_reduce")[0])
    s.reorder(gathered, more_bytes=True)
    s.slice_state("m")
    s.slice_state("v")
    if small := s.find("all_reduce"):
        s.bucket(small)
    s.fuse([scattered, s.find("all_gather")[0]])
    return s


@pytest.mark.parametrize("size", [64, 61])
@pytest.mark.parametrize("make", [adam, lamb])
def test_a_step_on_slices(make, size):
    step = make(size)
    s = moved(step)
    small = ["all_reduce"] if make is lamb else []
    assert [c.kind.value for c in s.program.collectives] == [
        "reduce_scatter",
        *small,
        "all_gather",
    ]
    for got, want in zip(s.program.simulate(*step.args), step.simulate(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_is_fused_is_at_the_line_of_its_collective_or_else_of_its_end():
    step = adam(64)
    for kinds in (("all_reduce", "sqrt"), ("mul", "sqrt")):
        s = mw.Schedule(step.program)
        lines = [s.find(kind)[0].line for kind in kinds]
        (fused,) = s.fuse([s.find(kind)[0] for kind in kinds])[:1]
        assert fused.line == (lines[0] if "all_reduce" in kinds else lines[1])
        assert fused.line != "unknown"


def test_a_script_replays_on_another_trace():
    script = moved(lamb(64)).script()
    again = mw.Schedule(lamb(64).program).run(script)
    assert again.script() == script
    assert str(again.program) == str(moved(lamb(64)).program)
    other = mw.Schedule(lamb(80).program).run(script)
    assert [c.kind.value for c in other.program.collectives] == [
        "reduce_scatter",
        "all_reduce",
        "all_gather",
    ]


def test_a_moved_program_runs_on_devices_step_after_step(mesh8):
    step = adam(61)
    on_devices = mw.SpmdProgram.from_shard_map(
        lambda g, w: w - g, mesh8, (None, None), None, step.args[1], step.args[1]
    )
    assert on_devices(step.args[1], step.args[1]).sum() == 0
    s = moved(step)
    args = step.args
    want = list(args[1:])
    state = list(args[1:])
    for _ in range(3):
        state = list(s.program.simulate(args[0], *state))
        want = list(step.program.simulate(args[0], *want))
    for got, wanted in zip(state, want, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_difference_in_figures():
    text = moved(adam(64)).diff()
    assert "sent" in text
    assert "peak memory" in text
    assert "split of all_reduce" in text


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(0),
        lambda x: (x.sum(0), (x * x).sum(0)),  # both in one
        lambda x: jax.grad(lambda w: (x @ w).sum())(jnp.ones(8)),
    ],
)
def test_a_collective_for_the_result_has_the_line_that_the_program_shows(function):
    hinted = mw.jit(function, mesh=mesh_of(data=8), in_shardings=P("data"))
    schedule = mw.Schedule(hinted, jnp.ones((16, 8)))
    (sent,) = schedule.original.collectives
    (handle,) = schedule.find("all_reduce", source="test_schedule.py")
    assert sent.source in str(handle)
    schedule.split(handle)
    assert all(sent.source in str(made) for made in schedule.find())


def test_a_value_that_was_moved_is_no_longer_there():
    s = mw.Schedule(adam().program)
    reduced = s.find("all_reduce")[0]
    s.split(reduced)
    with pytest.raises(mw.IllegalMove, match="not in this schedule"):
        s.split(reduced)


@pytest.mark.parametrize(
    ("name", "text"), [("q", "'q' is no argument of step"), ("g", "g has no next value")]
)
def test_states_are_named(name, text):
    s = mw.Schedule(adam().program)
    with pytest.raises(mw.ArgumentError, match=text):
        s.slice_state(name)


def test_several_tensors_in_buckets():
    step = adam(64)
    s = mw.Schedule(step.program)
    with pytest.raises(mw.IllegalMove, match="A bucket joins two collectives or more"):
        s.bucket(s.find("all_reduce"))


def test_a_script_keeps_what_was_not_to_be_padded():
    s = mw.Schedule(adam(64).program)
    s.split(s.find("all_reduce")[0], pad=False)
    assert mw.Schedule(adam(64).program).run(s.script()).script() == s.script()
    with pytest.raises(mw.IllegalMove, match="parts of equal size"):
        mw.Schedule(adam(61).program).run(s.script())


SPLIT = "def schedule(s):\n    s.split(s.find('all_reduce')[0])\n"


def then(rest):
    def schedule(s):
        s.split(s.find("all_reduce")[0])
        rest(s)

    return schedule


def unpacked(first, second):
    pass


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ("autoo", mw.ArgumentError, '(?s)no script.*autoo.*schedule="auto" finds one'),
        ("def schedule(s:", mw.ArgumentError, "no script"),
        ("def other(s): pass", mw.ArgumentError, "called `schedule`"),
        ("schedule = 1 / 0", mw.ArgumentError, "no script.*ZeroDivisionError"),
        (lambda s: s.split(s.find("all_reduce")[3]), mw.IllegalMove, "does not fit step"),
        (then(lambda s: s.find("all_gather")[1]), mw.IllegalMove, "does not fit step"),
        (then(lambda s: unpacked(*s.find("all_gather"))), TypeError, "missing 1"),
        (f"{SPLIT}    a, b = s.find('all_gather')", ValueError, "not enough values to unpack"),
        (f"{SPLIT}    {{}}['m']", KeyError, "m"),
        (f"{SPLIT}    s.nomove()", AttributeError, "nomove"),
        (f"{SPLIT}    s.split(nothing)", NameError, "nothing"),
    ],
)
def test_scripts_that_do_not_fit(script, error, text):
    s = mw.Schedule(adam().program)
    with pytest.raises(error, match=text):
        s.run(script)
    assert s.script() == mw.Schedule(adam().program).script()


def test_what_a_move_looks_for_and_does_not_find_is_no_fault_of_the_script(monkeypatch):
    monkeypatch.setattr("meshwise.api.schedule.split", lambda *given: list(given)[9])
    s = mw.Schedule(adam().program)
    with pytest.raises(IndexError, match="list index"):
        s.run(SPLIT)


@pytest.mark.parametrize("number", [np.int64, np.uint8, jnp.int32, np.array])
def test_numbers_of_any_kind_are_written_as_pythons(number):
    s = mw.Schedule(adam(64).program)
    s.split(s.find("all_reduce")[0], dim=number(0))
    s.overlap(s.find("sqrt"), chunks=number(2))
    assert "dim=0)" in s.script()
    assert "chunks=2)" in s.script()
    assert mw.Schedule(adam(64).program).run(s.script()).script() == s.script()


def test_names_of_a_script_are_names():
    script = Script()
    assert [script.name(x) for x in ("not", "while", "s", "2x", "psum", "psum")] == [
        "not_", "while_", "s_", "_2x", "psum", "psum_2"
    ]  # fmt: skip


def test_a_counted_name_is_no_name_that_was_given():
    script = Script()
    asked = ("psum_2", "psum", "psum", "psum_2", "psum_2_2")
    assert len({script.name(x) for x in asked} | {script.copy().name("psum_2")}) == 6


def test_an_axis_of_one_device_cuts_no_state():
    def step(g, w):
        return w - lax.psum(g, "x")

    args = np.ones((4, 8), np.float32), np.ones(8, np.float32)
    mesh = mesh_of(x=4, z=1)
    program = mw.SpmdProgram.from_shard_map(
        lambda g, w: step(g[0], w), mesh, (P("x"), P()), P(), *args
    )
    s = mw.Schedule(program)
    with pytest.raises(mw.IllegalMove, match="several devices"):
        s.slice_state("w", 0, dim=0, axes="z")


def test_a_step_that_prints_can_be_reordered():
    def step(g, w):
        whole = lax.all_gather(lax.psum_scatter(g[0], "x", tiled=True), "x", tiled=True)
        jax.debug.callback(lambda _: None, whole)
        return w - whole * 2

    args = np.arange(32, dtype=np.float32).reshape(4, 8), np.ones(8, np.float32)
    program = mw.SpmdProgram.from_shard_map(step, mesh_of(x=4), (P("x"), P()), P(), *args)
    s = mw.Schedule(program)
    with contextlib.suppress(mw.IllegalMove):
        s.reorder(s.find("all_gather")[0])
    np.testing.assert_allclose(s.program.simulate(*args), args[1] - 2 * args[0].sum(0))
