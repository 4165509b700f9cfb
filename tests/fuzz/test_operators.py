"""Each operator that programs are made of, alone or nearly: split in ways that dice choose."""

import os

import pytest

from tests.fuzz.checking import check
from tests.fuzz.making import make
from tests.fuzz.operators import PROFILES_BY_NAME
from tests.fuzz.shrinking import reproducer

SEEDS = range(int(os.environ.get("FUZZ_SEEDS", "4")))
MORE_SEEDS = range(4, 24)
WAYS = ("dice 0", "dice 1", "dice 2")


@pytest.mark.parametrize("name", PROFILES_BY_NAME)
def test_an_operator_split_by_dice(name: str):
    check_seeds(name, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROFILES_BY_NAME)
def test_an_operator_split_by_many_dice(name: str):
    check_seeds(name, MORE_SEEDS)


def check_seeds(name: str, seeds: range) -> None:
    """Programs of one operator, each planned in every way."""
    for seed in seeds:
        case, problems = make(seed, (PROFILES_BY_NAME[name],), (1, 2, 3))
        assert not problems
        failures = check(case, WAYS, "numpy")
        shown = [f"{f.kind}: {f.detail}\n{reproducer(case, f.completion)}" for f in failures]
        assert not failures, "\n\n".join(shown)
