"""Each mutant's old text is still there: `make mutants` can break what it means to break."""

import ast

import pytest

from tests.fuzz.operators import PROFILES_BY_NAME
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.table import MUTANTS

FAMILIES = {
    "elementwise", "contraction", "convolution", "reduction", "windows", "halo", "shape",
    "padding", "indexing", "updating", "ordering", "random", "linalg", "reshard", "propagate",
    "choose", "partition", "pipeline", "mesh", "run",
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_breaks_a_rule_that_is_there(mutant: Mutant):
    """Where this fails, the rule was rewritten: break the new text in tests/mutants/table*.py."""
    ast.parse(mutant.text())
    assert mutant.old != mutant.new
    for argument in mutant.tests:
        if argument.startswith("tests/"):
            assert (ROOT / argument.partition("::")[0]).exists(), argument
        if "dice[" in argument:
            assert argument.partition("[")[2][:-1] in PROFILES_BY_NAME


def test_every_family_has_a_mutant():
    assert {m.family for m in MUTANTS} == FAMILIES
    names = [m.name for m in MUTANTS]
    assert len(names) == len(set(names))
