"""The factor rule of every operator variant, as text."""

import pytest

from meshwise.ir.factors import bind_rule
from meshwise.ir.sharding import Reduction
from tests.rules.case import Case
from tests.rules.cases import CASES

ROWS = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@ROWS
def test_text(case: Case):
    assert str(case.rule.factors) == case.text


@ROWS
def test_text_reads_as_the_rule(case: Case):
    rule = case.rule.factors
    if not rule.operands:
        return  # a text has at least one operand
    operands = [getattr(v.aval, "shape", ()) for v in case.equation.invars]
    results = [v.aval.shape for v in case.equation.outvars]
    sizes = {name: rule.sizes[f] for f, name in enumerate("ijklmnopqrstuvwxyz"[: len(rule.sizes)])}
    assert bind_rule(case.text, operands, results, sizes) == rule


@ROWS
def test_rule_fits_its_equation(case: Case):
    rule = case.rule.factors
    tensors = (*rule.operands, *rule.results)
    variables = (*case.equation.invars, *case.equation.outvars)
    for dims, variable in zip(tensors, variables, strict=True):
        for factors, size in zip(dims, variable.aval.shape, strict=True):
            product = 1
            for factor in factors:
                product *= rule.sizes[factor]
            assert factors or size == 1
            # The dims of a permutation factor may differ in size.
            assert size in (product, 1) or rule.permuted.intersection(factors[:1])
    assert case.rule.flops >= 0 and not case.rule.opaque


@pytest.mark.parametrize("tail", ["sum=i j", "sum=i sum=j", "sum=j whole=k sum=i"])
def test_a_kind_may_be_written_twice(tail):
    rule = bind_rule(f"i j k -> k | {tail}", [(2, 3, 4)], [(4,)])
    assert dict(rule.reductions) == {0: Reduction.SUM, 1: Reduction.SUM}
