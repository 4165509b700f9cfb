"""Operators that go along one dim in order: sorts.

That dim is whole; every other dim passes through.
"""

import math

from meshwise.rules.factoring import Factoring, shapes, total_size
from meshwise.rules.registry import Application, OpRule, register


def _along(application: Application, axis: int, flops: float) -> OpRule:
    """Results are like the operands, but perhaps of another size along the axis."""
    operands, results = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    dims = [factoring.new(n, "whole" if d == axis else None) for d, n in enumerate(operands[0])]
    after = list(dims)
    if results[0][axis] != operands[0][axis]:
        after[axis] = factoring.new(results[0][axis], "whole")
    return OpRule(factoring.rule([dims] * len(operands), [after] * len(results)), flops=flops)


@register("sort")
def _sort_rule(application: Application) -> OpRule:
    axis = application.params["dimension"]
    steps = math.log2(max(2, application.operands[0].shape[axis]))
    return _along(application, axis, steps * total_size(application.operands))
