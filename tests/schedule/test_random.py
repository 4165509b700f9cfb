"""Random programs for one device of many, moved at random: layouts, values and scripts hold."""

import random

import pytest

import meshwise as mw
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
