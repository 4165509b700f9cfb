"""Schedules: invariants, the figures of the literature, what must be refused, the pictures."""

import pathlib
import re
from collections import Counter
from xml.etree import ElementTree

import hypothesis
import pytest
from hypothesis import strategies as st

from meshwise.errors import PipelineError
from meshwise.pipeline.pictures import as_svg, as_text
from meshwise.pipeline.schedules import (
    Action,
    Direction,
    Schedule,
    circular,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from meshwise.pipeline.table import NONE, make_table

FORWARD, BACKWARD = Direction
DEVICES, MICROBATCHES = st.integers(1, 9), st.integers(1, 30)


@hypothesis.given(DEVICES, MICROBATCHES)
def test_figures_of_gpipe(s, m):
    schedule = gpipe(s, m)
    assert len(schedule.ticks) == 2 * (m + s - 1)
    assert schedule.bubble_fraction == pytest.approx((s - 1) / (m + s - 1))
    assert max(schedule.peak_activations) == m


@hypothesis.given(DEVICES, MICROBATCHES)
def test_figures_of_1f1b(s, m):
    schedule = one_f_one_b(s, m)
    assert len(schedule.ticks) == 2 * (m + s - 1)
    assert schedule.bubble_fraction == pytest.approx((s - 1) / (m + s - 1))
    assert schedule.peak_activations == tuple(min(m, s - k) for k in range(s))


@hypothesis.given(DEVICES, MICROBATCHES)
def test_figures_of_eager_1f1b(s, m):
    schedule = eager_one_f_one_b(s, m)
    assert len(schedule.ticks) == m + 2 * (s - 1)
    assert schedule.peak_activations == tuple(min(m, 2 * (s - k) - 1) for k in range(s))


@hypothesis.given(DEVICES, MICROBATCHES)
def test_durations(s, m):
    """Where a backward takes three forwards, and devices go in step."""
    assert gpipe(s, m).duration() == 4 * (m + s - 1)
    assert one_f_one_b(s, m).duration() == (s + 3 * (2 * m + s - 2) if s > 1 else 4 * m)
    assert eager_one_f_one_b(s, m).duration() == 4 * (m + s - 1)


@hypothesis.given(DEVICES, MICROBATCHES, st.integers(1, 4))
def test_figures_of_circular(s, m, r):
    hypothesis.assume(r == 1 or m >= s)
    schedule = circular(s, m, r)
    assert len(schedule.ticks) == r * m + s - 1
    assert schedule.bubble_fraction == pytest.approx((s - 1) / (r * m + s - 1))


@hypothesis.given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_figures_of_interleaved_1f1b(s, groups, v):
    schedule = interleaved_one_f_one_b(s, groups * s, v)
    assert len(schedule.ticks) == 2 * (v * groups * s + s - 1)
    assert schedule.bubble_fraction == pytest.approx((s - 1) / (v * groups * s + s - 1))
    assert max(schedule.peak_activations) <= (v + 1) * s + s - 1


@hypothesis.given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_interleaved_1f1b_of_any_number(s, m, v):
    schedule = interleaved_one_f_one_b(s, m, v)
    assert max(schedule.peak_activations) <= (v + 1) * s + s - 1
    assert len(schedule.ticks) >= 2 * (v * m + s - 1)


SOME = [
    gpipe(4, 7),
    one_f_one_b(4, 7),
    one_f_one_b(5, 2),
    eager_one_f_one_b(4, 7),
    circular(4, 7, 3),
    interleaved_one_f_one_b(4, 8, 2),
    interleaved_one_f_one_b(3, 7, 3),
    one_f_one_b(1, 3),
]


@pytest.mark.parametrize("schedule", SOME, ids=str)
def test_messages(schedule):
    """Neighbours only, one on a link in a tick, one for each boundary and microbatch in all."""
    for sent in schedule.messages:
        assert max(Counter(sent).values(), default=1) == 1
    found = Counter(m.direction for sent in schedule.messages for m in sent)
    boundaries = (schedule.stages - 1) * schedule.microbatches if schedule.devices > 1 else 0
    assert found[FORWARD] == boundaries
    assert found[BACKWARD] == (boundaries if schedule.trains else 0)
    for message in (m for sent in schedule.messages for m in sent):
        step = 1 if message.direction is FORWARD else -1
        assert message.target == (message.source + step) % schedule.devices


@pytest.mark.parametrize("schedule", SOME, ids=str)
def test_slots_hold_what_waits_and_no_more(schedule):
    """Replay the table: every read finds what was kept for it; slots are as many as the peak."""
    table = make_table(schedule)
    held: list[dict[int, tuple]] = [{} for _ in range(schedule.devices)]
    back: list[dict[int, tuple]] = [{} for _ in range(schedule.devices)]
    most = 0
    for tick in range(len(schedule.ticks)):
        made, returned = {}, {}
        for d in range(schedule.devices):
            at = {name: x[d, tick] for name, x in table.columns.items()}
            stage, m = at["forward"], at["forward_microbatch"]
            if stage > 0:
                assert held[d][at["forward_input"]] == (stage, m)
            if stage != NONE:
                made[(d + 1) % schedule.devices] = (stage + 1, m)
            stage, m = at["backward"], at["backward_microbatch"]
            if stage > 0:
                assert held[d].pop(at["backward_input"]) == (stage, m)
            if stage != NONE and stage < schedule.stages - 1:
                assert back[d].pop(at["gradient"]) == (stage, m)
            if stage != NONE:
                returned[(d - 1) % schedule.devices] = (stage - 1, m)
        for d in range(schedule.devices):
            at = {name: x[d, tick] for name, x in table.columns.items()}
            if at["keep_input"] != NONE:
                assert not schedule.trains or at["keep_input"] not in held[d]
                held[d][at["keep_input"]] = made[d]
            if at["keep_gradient"] != NONE:
                assert at["keep_gradient"] not in back[d]
                back[d][at["keep_gradient"]] = returned[d]
            most = max(most, len(held[d]))
    assert not any(back)
    if schedule.trains:
        assert not any(held)
        assert most == table.inputs
        assert table.inputs <= max(schedule.peak_activations)


def test_1f1b_keeps_a_microbatch_a_stage_and_gpipe_all():
    for m in (4, 8, 64):
        assert make_table(one_f_one_b(4, m)).inputs == 3  # the first stage keeps none: inputs stay
        assert make_table(eager_one_f_one_b(4, m)).inputs == min(m, 5)
        assert make_table(gpipe(4, m)).inputs == m
    assert {make_table(interleaved_one_f_one_b(4, m, 2)).inputs for m in (8, 16, 64)} == {10}


def moved(schedule, action, tick):
    """The schedule with one action in another tick."""
    ticks = [[[a for a in cell if a != action] for cell in row] for row in schedule.ticks]
    if tick is not None:
        ticks[tick][action.stage % schedule.devices].append(action)
    ticks = tuple(tuple(tuple(cell) for cell in row) for row in ticks)
    return Schedule("changed", schedule.devices, schedule.stages, schedule.microbatches, ticks)


@pytest.mark.parametrize(
    ("action", "tick", "words"),
    [
        (Action(FORWARD, 1, 0), None, "forward of microbatch 0 through stage 1 is missing"),
        (Action(FORWARD, 1, 0), 0, "in tick 0 comes before the forward of microbatch 0 through"),
        (Action(BACKWARD, 1, 0), 1, "device 1 is to do 2 actions in tick 1"),
    ],
)
def test_what_is_no_schedule(action, tick, words):
    with pytest.raises(PipelineError, match=re.escape(words)):
        moved(one_f_one_b(2, 2), action, tick)


def test_what_is_no_schedule_by_its_cells():
    a, b = Action(FORWARD, 0, 0), Action(FORWARD, 1, 0)
    for ticks, words in [
        ((((a,), ()), ((b,), ())), "stage 1 is done on device 0"),
        ((((a,), ()), ((a,), ()), ((), (b,))), "stage 0 is done twice"),
        ((((a,),), ((), (b,))), "tick 0 has 1 cells"),
    ]:
        with pytest.raises(PipelineError, match=words):
            Schedule("own", 2, 2, 1, ticks, trains=False)
    with pytest.raises(PipelineError, match="3 stages cannot be dealt out evenly to 2 devices"):
        Schedule("own", 2, 3, 1, (), trains=False)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, eager_one_f_one_b, circular])
@pytest.mark.parametrize(("devices", "microbatches"), [(0, 1), (4, 0)])
def test_no_devices_and_no_microbatches_make_no_schedule(make, devices, microbatches):
    with pytest.raises(PipelineError, match=f"{microbatches} micr.* on {devices} devices"):
        make(devices, microbatches)


def test_circular_wants_as_many_microbatches_as_devices():
    with pytest.raises(
        PipelineError, match=r"A circular schedule of 2 repeats on 4 devices: 3 micr"
    ):
        circular(4, 3, 2)


def test_text():
    assert as_text(one_f_one_b(3, 4)) == (
        "device 0  F0  . F1  . F2 B0 F3 B1  . B2  . B3\n"
        "device 1   . F0  . F1 B0 F2 B1 F3 B2  . B3  .\n"
        "device 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  ."
    )
    assert as_text(eager_one_f_one_b(2, 2)) == (
        "device 0     F0    F1    B0    B1\ndevice 1      . F0+B0 F1+B1     ."
    )
    assert as_text(circular(2, 2, 2)) == (
        "device 0  F0a F1a F0b F1b   .\ndevice 1    . F0a F1a F0b F1b"
    )
    assert str(one_f_one_b(3, 4)) == (
        "1F1B: 3 stages on 3 devices, 4 microbatches, 12 ticks, 33.3% idle, at most 3 activations "
        "held"
    )


@pytest.mark.parametrize("schedule", SOME, ids=str)
def test_svg_has_a_box_an_action(schedule):
    root = ElementTree.fromstring(as_svg(schedule))
    boxes = [
        text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "c"
    ]
    assert len(boxes) == len(schedule.tick_of)
    width = float(root.get("width"))
    assert all(float(text.get("x")) < width for text in boxes)


PICTURES = {
    "pipeline_gpipe": gpipe(4, 8),
    "pipeline_1f1b": one_f_one_b(4, 8),
    "pipeline_eager": eager_one_f_one_b(4, 8),
    "pipeline_interleaved": interleaved_one_f_one_b(4, 8, 2),
    "pipeline_circular": circular(4, 8, 2),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_docs(name, request):
    file = pathlib.Path(__file__).parents[2] / "docs" / "pictures" / f"{name}.svg"
    if request.config.getoption("--update-golden"):
        file.write_text(as_svg(PICTURES[name]), encoding="utf-8")
    assert file.read_text(encoding="utf-8") == as_svg(PICTURES[name])
