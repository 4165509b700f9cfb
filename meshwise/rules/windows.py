"""Reductions over windows and their gradients: pooling.

A dim passes through where its windows hold one element each and nothing is left out or added;
the others are whole.
"""

import math
from collections.abc import Sequence
from typing import Any

from meshwise.rules.factoring import Dim, Factoring, shapes, total_size
from meshwise.rules.registry import Application, OpRule, register


def _windowed(
    factoring: Factoring, params: dict[str, Any], tensors: Sequence[tuple[int, ...]]
) -> list[list[Dim]]:
    """Dims of tensors on both sides of the windows: shared where the windows do nothing."""
    dims: list[list[Dim]] = [[] for _ in tensors]
    for d in range(len(tensors[0])):
        sizes = [shape[d] for shape in tensors]
        trivial = (
            params["window_dimensions"][d] == 1
            and params["window_strides"][d] == 1
            and tuple(params["padding"][d]) == (0, 0)
            and len(set(sizes)) == 1
        )
        shared = factoring.new(sizes[0]) if trivial else None
        for tensor, size in zip(dims, sizes, strict=True):
            tensor.append(factoring.new(size, "whole") if shared is None else shared)
    return dims


def _window_flops(application: Application, tensor: Any) -> float:
    return float(math.prod(tensor.shape) * math.prod(application.params["window_dimensions"]))


@register("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_window_rule(application: Application) -> OpRule:
    factoring = Factoring()
    tensors = shapes((*application.operands, *application.results))
    before, after = _windowed(factoring, application.params, tensors)
    sums = application.eqn.primitive.name == "reduce_window_sum"
    return OpRule(
        factoring.rule([before], [after]),
        linear=((0,),) if sums else (),
        flops=_window_flops(application, application.results[0]),
    )


@register("reduce_window")
def _reduce_window_function_rule(application: Application) -> OpRule:
    """A reduction by a function: operands and then their initial values, which are scalars."""
    count = len(application.operands) // 2
    factoring = Factoring()
    tensors = shapes((application.operands[0], application.results[0]))
    before, after = _windowed(factoring, application.params, tensors)
    factors = factoring.rule([before] * count + [[]] * count, [after] * count)
    return OpRule(factors, flops=_window_flops(application, application.results[0]) * count)


@register("select_and_gather_add")
def _select_and_gather_rule(application: Application) -> OpRule:
    """Of each window of the second operand, one position is selected in the first."""
    factoring = Factoring()
    tensors = shapes((application.operands[0], application.results[0]))
    before, after = _windowed(factoring, application.params, tensors)
    flops = _window_flops(application, application.results[0])
    return OpRule(factoring.rule([before, before], [after]), linear=((0,),), flops=flops)


@register("select_and_scatter_add")
def _select_and_scatter_add_rule(application: Application) -> OpRule:
    """Of each window of the second operand, one position gets an element of the first added."""
    factoring = Factoring()
    source, operand = _windowed(factoring, application.params, shapes(application.operands))
    flops = _window_flops(application, application.operands[0])
    return OpRule(factoring.rule([source, operand], [operand]), linear=((0,),), flops=flops)


@register("select_and_scatter")
def _select_and_scatter_rule(application: Application) -> OpRule:
    """As above, with functions: operand, source and initial value."""
    factoring = Factoring()
    tensors = shapes(application.operands[:2])
    operand, source = _windowed(factoring, application.params, tensors)
    flops = total_size(application.operands) * math.prod(application.params["window_dimensions"])
    return OpRule(factoring.rule([operand, source, []], [operand]), flops=flops)
