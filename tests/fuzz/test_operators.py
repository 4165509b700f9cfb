"""Each operator that programs are made of, alone or nearly: split in ways that dice choose."""

import os

import pytest

from tests.fuzz.checking import check
from tests.fuzz.making import make
from tests.fuzz.operators import PROFILES_BY_NAME
from tests.fuzz.shrinking import reproducer

SEEDS = range(int(os.environ.get("FUZZ_SEEDS", "8")))
WAYS = ("dice 0", "dice 1", "dice 2")


@pytest.mark.parametrize("name", PROFILES_BY_NAME)
def test_an_operator_split_by_dice(name: str):
    for seed in SEEDS:
        case, problems = make(seed, (PROFILES_BY_NAME[name],), (1, 2, 3))
        assert not problems
        failures = check(case, WAYS, "numpy")
        shown = [f"{f.kind}: {f.detail}\n{reproducer(case, f.completion)}" for f in failures]
        assert not failures, "\n\n".join(shown)
