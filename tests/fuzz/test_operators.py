"""Each operator that programs are made of, alone or nearly: split in ways that dice choose."""

import os

import pytest

from tests.fuzz.checking import check
from tests.fuzz.making import Operator, Profile, make
from tests.fuzz.operators import OPERATORS_BY_NAME
from tests.fuzz.shrinking import reproducer

SEEDS = range(int(os.environ.get("FUZZ_SEEDS", "8")))
WAYS = ("dice 0", "dice 1", "dice 2")


@pytest.mark.parametrize("name", OPERATORS_BY_NAME)
def test_an_operator_split_by_dice(name: str):
    operator: Operator = OPERATORS_BY_NAME[name]
    profile = Profile(((1, operator),), gradients=0.25)
    for seed in SEEDS:
        case, problems = make(seed, (profile,), (1, 2, 3))
        assert not problems
        failures = check(case, WAYS, "numpy")
        shown = [f"{f.kind}: {f.detail}\n{reproducer(case, f.completion)}" for f in failures]
        assert not failures, "\n\n".join(shown)
