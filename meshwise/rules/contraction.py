"""Matrix products: `dot_general` in all its forms, and its ragged cousin.

The terms of a product whose contracted dim is sharded have the result's dtype: a bfloat16 product
is rounded on each device before the terms are summed. Ask for float32 with
`preferred_element_type` where that matters, as one does on one device.
"""

import math
from typing import Any

import numpy as np

from meshwise.ir.sharding import Reduction
from meshwise.rules.elementwise import keeps_sums
from meshwise.rules.factoring import Dim, Factoring, shapes
from meshwise.rules.registry import Application, OpRule, register


def sum_of(dtype: Any) -> Reduction:
    """How products are joined: booleans by `or`, numbers by `sum`."""
    return Reduction.OR if dtype == np.bool_ else Reduction.SUM


@register("dot_general")
def _dot_general_rule(application: Application) -> OpRule:
    (contract_l, contract_r), (batch_l, batch_r) = application.params["dimension_numbers"]
    left, right = shapes(application.operands)
    factoring = Factoring()
    reduction = sum_of(application.results[0].dtype)
    lhs: list[Dim] = [
        factoring.new(n, reduction if d in contract_l else None) for d, n in enumerate(left)
    ]
    paired = dict(zip((*contract_r, *batch_r), (*contract_l, *batch_l), strict=True))
    rhs = [lhs[paired[d]] if d in paired else factoring.new(n) for d, n in enumerate(right)]
    result = [lhs[d] for d in batch_l]
    result += [dim for d, dim in enumerate(lhs) if d not in batch_l and d not in contract_l]
    result += [dim for d, dim in enumerate(rhs) if d not in paired]
    contracted = math.prod(left[d] for d in contract_l)
    return OpRule(
        factoring.rule([lhs, rhs], [result]),
        linear=((0,), (1,)) if keeps_sums(application) else (),
        flops=2.0 * contracted * math.prod(application.results[0].shape),
    )


@register("scaled_dot")
def _scaled_dot_rule(application: Application) -> OpRule:
    """A product of operands whose contracted dims have one scale a block: blocks are summed."""
    (contract_l, contract_r), (batch_l, batch_r) = application.params["dimension_numbers"]
    left, right, left_scale, right_scale = shapes(application.operands)
    factoring = Factoring()
    lhs, rhs = factoring.dims(left), factoring.dims(right)
    lhs_scale, rhs_scale = list(lhs), list(rhs)
    for d, e in zip(batch_l, batch_r, strict=True):
        rhs[e] = rhs_scale[e] = lhs[d]
    for d, e in zip(contract_l, contract_r, strict=True):
        blocks = math.gcd(left_scale[d], right_scale[e])
        outer = factoring.new(blocks, Reduction.SUM)
        lhs[d] = rhs[e] = outer + factoring.new(left[d] // blocks, "whole")
        lhs_scale[d] = outer + factoring.new(left_scale[d] // blocks, "whole")
        rhs_scale[e] = outer + factoring.new(right_scale[e] // blocks, "whole")
    result = [lhs[d] for d in batch_l]
    result += [dim for d, dim in enumerate(lhs) if d not in (*batch_l, *contract_l)]
    result += [dim for d, dim in enumerate(rhs) if d not in (*batch_r, *contract_r)]
    contracted = math.prod(left[d] for d in contract_l)
    return OpRule(
        factoring.rule([lhs, rhs, lhs_scale, rhs_scale], [result]),
        linear=((0,), (1,)),
        flops=2.0 * contracted * math.prod(application.results[0].shape),
    )


@register("ragged_dot_general")
def _ragged_dot_general_rule(application: Application) -> OpRule:
    """The ragged dim and the groups are whole; the rest is as in `dot_general`."""
    numbers = application.params["ragged_dot_dimension_numbers"]
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    ragged, group_dims = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    left, right, sizes = shapes(application.operands)
    factoring = Factoring()
    lhs: list[Dim] = []
    for d, n in enumerate(left):
        summed = Reduction.SUM if d in contract_l else None
        lhs.append(factoring.new(n, "whole" if d in ragged else summed))
    paired = dict(zip((*contract_r, *batch_r), (*contract_l, *batch_l), strict=True))
    rhs = []
    for d, n in enumerate(right):
        whole = "whole" if d in group_dims else None
        rhs.append(lhs[paired[d]] if d in paired else factoring.new(n, whole))
    result = [lhs[d] for d in batch_l]
    result += [dim for d, dim in enumerate(lhs) if d not in batch_l and d not in contract_l]
    result += [dim for d, dim in enumerate(rhs) if d not in paired and d not in group_dims]
    if set(ragged) & set(contract_l):  # a group of the contracted dim each: groups lead the result
        result.insert(0, factoring.new(application.results[0].shape[0], "whole"))
    group_sizes = factoring.dims(sizes, "whole")
    contracted = math.prod(left[d] for d in contract_l)
    return OpRule(
        factoring.rule([lhs, rhs, group_sizes], [result]),
        linear=((0,), (1,)) if keeps_sums_of_two(application) else (),
        masked=(0, 1),
        flops=2.0 * contracted * math.prod(application.results[0].shape),
    )


def keeps_sums_of_two(application: Application) -> bool:
    """Whether both factors of a ragged product are floats, so that sums may be taken later."""
    return all(np.dtype(o.dtype).kind in "fcV" for o in application.operands[:2])
