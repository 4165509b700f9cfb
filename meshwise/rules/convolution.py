"""Convolutions: a matrix product over features, with windows over the spatial dims.

The batch and the output features pass through; the input features are summed. With feature
groups, the features of input and output are `(group feature)`, and the groups pass through; with
batch groups, so are the batch of the input and the output features.

A spatial dim is split with the input rows that its windows need: where the kernel is small, the
shards of the output read the input through a window (GSPMD, arXiv 2105.04663 section 4.3); where
it is larger than the output, as in the gradient of the kernel, whose kernel is the cotangent, the
shards of the kernel do, and what they make are terms of a sum. The kernel of size one that moves
one by one passes through.
"""

import math
from typing import Any

import numpy as np

from meshwise.ir.sharding import Reduction
from meshwise.rules.contraction import sum_of
from meshwise.rules.elementwise import keeps_sums
from meshwise.rules.factoring import Dim, Factoring, shapes
from meshwise.rules.identity import mask_padding
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.window import (
    Reading,
    Window,
    dilate,
    laid_around,
    read_exchanges,
    read_rows,
)


@register("conv_general_dilated")
def _convolution_rule(application: Application) -> OpRule:
    params = application.params
    left, right = shapes(application.operands)
    (out,) = shapes(application.results)
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    factoring, reduction = Factoring(), sum_of(application.results[0].dtype)
    group = factoring.new(max(feature_groups, batch_groups))
    batch = factoring.new(left[lhs_spec[0]] // batch_groups)
    inner = factoring.new(right[rhs_spec[1]], reduction)
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
        dims = _spatial_dims(factoring, sizes, _is_untouched(params, d, sizes), reduction)
        lhs[lhs_spec[d + 2]], rhs[rhs_spec[d + 2]], result[out_spec[d + 2]] = dims
    kernel = math.prod(right[d] for d in rhs_spec[1:])
    return OpRule(
        factoring.rule([lhs, rhs], [result]),
        linear=((0,), (1,)) if keeps_sums(application) else (),
        local=_convolution_local,
        exchanges=_exchanges,
        flops=2.0 * kernel * math.prod(out),
    )


def _is_untouched(params: dict[str, Any], d: int, sizes: tuple[int, int, int]) -> bool:
    """Whether the rows of a spatial dim do not meet: each row of the output reads that one."""
    alone = sizes[1] == 1 and params["lhs_dilation"][d] == params["window_strides"][d] == 1
    return alone and tuple(params["padding"][d]) == (0, 0)


def _spatial_dims(
    factoring: Factoring, sizes: tuple[int, int, int], untouched: bool, reduction: Reduction
) -> tuple[Dim, ...]:
    """Dims of the input, kernel and output: which two are split together."""
    size, kernel, out = sizes
    if untouched:
        dim = factoring.new(size)
        return dim, (), dim
    if not out:
        return tuple(factoring.dims(sizes, "whole"))
    if kernel > out:
        dim = factoring.new(kernel, reduction, permuted=True)
        return dim, dim, factoring.new(out, "whole")
    dim = factoring.new(size, "permute")
    return dim, factoring.new(kernel, "whole"), dim


def _readings(context: LocalContext) -> list[tuple[int, Reading]]:
    """The sharded spatial dims that are read through windows, by number."""
    params = context.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    found = []
    for d in range(len(lhs_spec) - 2):
        axes = context.operand_axes(0, lhs_spec[d + 2])
        (factor,) = context.rule.operands[0][lhs_spec[d + 2]] or (-1,)
        if not axes or factor not in context.rule.permuted:
            continue
        stride, dilation = params["window_strides"][d], params["rhs_dilation"][d]
        kernel, out = (
            context.global_shape(1)[rhs_spec[d + 2]],
            context.result_shape(0)[out_spec[d + 2]],
        )
        extent = (kernel - 1) * dilation + 1
        rows = out
        if factor in context.rule.reduction_of:  # the kernel's rows read the input
            stride, extent, rows = dilation, (out - 1) * stride + 1, kernel
        reading = Reading(
            lhs_spec[d + 2],
            axes,
            Window(stride, -params["padding"][d][0], extent, params["lhs_dilation"][d]),
            size=context.global_shape(0)[lhs_spec[d + 2]],
            rows=rows,
            shards=context.mesh.size(axes),
            border=context.border(lhs_spec[d + 2]),
        )
        found.append((d, reading))
    return found


def _exchanges(context: LocalContext) -> list[Exchange] | None:
    readings = [reading for _, reading in _readings(context)]
    return read_exchanges(readings, context.local_shape(0), context.itemsize(0))


def _convolution_local(context: LocalContext, lhs: Any, rhs: Any) -> list[Any]:
    """Rows are fetched and padded first; the groups that a device has are counted in its shard."""
    params = context.params
    lhs_spec, rhs_spec, _ = params["dimension_numbers"]
    changed: dict[str, Any] = {}
    for name, operand, place in (("feature_group_count", 0, 1), ("batch_group_count", 0, 0)):
        if params[name] > 1:
            dim = params["dimension_numbers"][0][place]
            group = context.rule.operands[operand][dim][0]
            count = changed[name] = context.local_size(group)
            # Where XLA makes one convolution of all groups, padding is multiplied by its zeros.
            own, other = lhs.shape[dim] // count, rhs.shape[rhs_spec[0]] // count
            lhs = mask_padding(context, lhs, dim, group, np.zeros((), lhs.dtype), own)
            rhs = mask_padding(context, rhs, rhs_spec[0], group, np.zeros((), rhs.dtype), other)
    padding, dilations = list(params["padding"]), list(params["lhs_dilation"])
    zero = np.zeros((), lhs.dtype)
    readings = _readings(context)
    for d, reading in readings:
        factor = context.rule.operands[0][reading.dim][0]
        sums = factor in context.rule.reduction_of
        lhs = read_rows(lhs, reading, context.mesh, zero, everywhere=sums)
        if sums:
            rhs = mask_padding(context, rhs, rhs_spec[d + 2], factor, np.zeros((), rhs.dtype))
    lhs, around = laid_around(context, lhs, [reading for _, reading in readings])
    for dim in around:
        padding[lhs_spec[2:].index(dim)] = (0, 0)
    for d, reading in readings:
        if len(set(reading.leads)) == 1:  # the convolution itself dilates
            low = reading.leads[0]
            padding[d] = (low, reading.span - reading.dilated - low)
        else:
            lhs = dilate(lhs, reading, context.mesh, zero)
            padding[d], dilations[d] = (0, 0), 1
    return context.bind(lhs, rhs, padding=tuple(padding), lhs_dilation=tuple(dilations), **changed)
