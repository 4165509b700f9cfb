"""Convolutions: a matrix product over features, with windows over the spatial dims.

The batch and the output features pass through; the input features are summed. With feature
groups, the features of input and output are `(group feature)`, and the groups pass through; with
batch groups, so are the batch of the input and the output features. A spatial dim passes through
where the kernel has size one and moves one by one; where the kernel covers the whole dim once it
is summed like a feature; else it is whole.
"""

import math
from typing import Any

from meshwise.ir.sharding import Reduction
from meshwise.rules.elementwise import keeps_sums
from meshwise.rules.factoring import Dim, Factoring, Kind, shapes
from meshwise.rules.registry import Application, LocalContext, OpRule, register


@register("conv_general_dilated")
def _convolution_rule(application: Application) -> OpRule:
    params = application.params
    left, right = shapes(application.operands)
    (out,) = shapes(application.results)
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    factoring = Factoring()
    group = factoring.new(max(feature_groups, batch_groups))
    batch = factoring.new(left[lhs_spec[0]] // batch_groups)
    inner = factoring.new(right[rhs_spec[1]], Reduction.SUM)
    outer = factoring.new(right[rhs_spec[0]] // max(feature_groups, batch_groups))
    lhs: list[Dim] = [()] * len(left)
    rhs: list[Dim] = [()] * len(right)
    result: list[Dim] = [()] * len(out)
    lhs[lhs_spec[0]] = (group if batch_groups > 1 else ()) + batch
    lhs[lhs_spec[1]] = (group if feature_groups > 1 else ()) + inner
    rhs[rhs_spec[0]], rhs[rhs_spec[1]] = group + outer, inner
    result[out_spec[0]], result[out_spec[1]] = batch, group + outer
    for d in range(len(left) - 2):
        sizes = left[lhs_spec[d + 2]], right[rhs_spec[d + 2]], out[out_spec[d + 2]]
        dims = _spatial_dims(factoring, sizes, _spatial_kind(params, d, sizes))
        lhs[lhs_spec[d + 2]], rhs[rhs_spec[d + 2]], result[out_spec[d + 2]] = dims
    kernel = math.prod(right[d] for d in rhs_spec[1:])
    return OpRule(
        factoring.rule([lhs, rhs], [result]),
        linear=((0,), (1,)) if keeps_sums(application) else (),
        local=_convolution_local,
        flops=2.0 * kernel * math.prod(out),
    )


def _spatial_kind(params: dict[str, Any], d: int, sizes: tuple[int, int, int]) -> Kind:
    """How spatial dim number `d` may be split."""
    size, window, _ = sizes
    untouched = tuple(params["padding"][d]) == (0, 0) and params["lhs_dilation"][d] == 1
    if untouched and window == 1 and params["window_strides"][d] == 1:
        return None
    if untouched and window == size and params["rhs_dilation"][d] == 1:
        return Reduction.SUM
    return "whole"


def _spatial_dims(factoring: Factoring, sizes: tuple[int, int, int], kind: Kind) -> list[Dim]:
    if kind is None:
        dim = factoring.new(sizes[0])
        return [dim, (), dim]
    if kind is Reduction.SUM:
        dim = factoring.new(sizes[0], kind)
        return [dim, dim, ()]
    return factoring.dims(sizes, kind)


def _convolution_local(context: LocalContext, lhs: Any, rhs: Any) -> list[Any]:
    """The groups that a device has are counted in its shard."""
    params = context.params
    changed = {}
    for name, operand, place in (("feature_group_count", 0, 1), ("batch_group_count", 0, 0)):
        if params[name] > 1:
            group = context.rule.operands[operand][params["dimension_numbers"][0][place]][0]
            changed[name] = context.local_size(group)
    return context.bind(lhs, rhs, **changed)
