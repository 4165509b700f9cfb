"""Random programs for one device of many, moved at random: layouts, values and scripts hold."""

import contextlib
import random

import pytest

import meshwise as mw
from tests.schedule.random_lines import added_up
from tests.schedule.random_moves import move_at_random
from tests.schedule.random_programs import random_program
from tests.schedule.soundness import check, misstated, results


def moved_at_random(seed: int) -> int:
    """Check the program of a seed; how many moves were legal."""
    written = random_program(seed)
    program, args, rng = written.made(), written.numbers(), random.Random(-seed)
    schedule = mw.Schedule(program)
    try:
        made = move_at_random(schedule, rng, written.states, rng.randint(2, 8))
        check(program, args, schedule, results(program, args), written.is_exact, written.states)
    except Exception as error:
        raise AssertionError(f"seed {seed}\n{written.text()}\n{schedule.script()}") from error
    return made


def test_a_sample():
    made = [moved_at_random(seed) for seed in range(40)]
    assert sum(map(bool, made)) > 20, "hardly a program allows a move"


def hoisted_at_random(seed: int) -> int:
    """Check the loops of a seed that sum over devices; how many gave their sums away."""
    written = random_program(seed, 5, [added_up])
    program, args, made = written.made(), written.numbers(), 0
    schedule = mw.Schedule(program)
    try:
        for position in range(len(schedule.find("scan"))):
            with contextlib.suppress(mw.IllegalMove):
                schedule.hoist(schedule.find("scan")[position], more_bytes=True)
                made += 1
        check(program, args, schedule, results(program, args), written.is_exact)
    except Exception as error:
        raise AssertionError(f"seed {seed}\n{written.text()}\n{schedule.script()}") from error
    return made


def test_sums_leave_loops_or_stay():
    made = [hoisted_at_random(seed) for seed in range(12)]
    assert sum(made) > 5, "hardly a loop gives its sum away"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many(block):
    for seed in range(1000 + 300 * block, 1300 + 300 * block):
        moved_at_random(seed)


@pytest.mark.parametrize("seed", range(100, 112))
def test_layouts_of_programs_as_they_are(seed):
    written = random_program(seed)
    assert not misstated(written.made().per_device, written.numbers())


def test_the_same_seed_gives_the_same_program():
    assert random_program(7).text() == random_program(7).text()
