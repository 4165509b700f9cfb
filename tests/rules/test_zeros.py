"""Signs of zeros survive sums of which one term counts."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.ir.factors import Strategy
from meshwise.ir.mesh import refine_mesh
from tests.rules.case import apply
from tests.rules.cases import CASES
from tests.rules.devices import raw, split_and_join

NAMES = ["gather of rows, clip", "gather of rows, fill with a number", "dynamic_slice of one",
         "scatter-add", "scatter-add of points", "scatter-sub"]  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=lambda c: c.name)
def test_negative_zeros_stay_negative(case):
    rule = case.rule.factors
    mesh = refine_mesh(("a",), (3,))
    zeros = jnp.full_like(case.operands[0], -0.0)
    operands = [zeros, *case.operands[1:]]
    for factor in rule.reduction_of:
        axes = tuple(("a",) if f == factor else () for f in range(len(rule.sizes)))
        (found,) = split_and_join(case.equation, case.rule, Strategy(axes), mesh, operands)
        (expected,) = apply(case.equation, operands)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(raw(expected)))
