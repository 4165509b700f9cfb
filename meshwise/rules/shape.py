"""Operators that move elements without computing: transposes, broadcasts, slices, joins."""

import math
from typing import Any

import numpy as np
from jax import lax

from meshwise.rules.factoring import Dim, Factoring, shapes, total_size
from meshwise.rules.registry import Application, LocalContext, OpRule, register


@register("transpose")
def _transpose_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.operands[0].shape)
    permuted = [dims[d] for d in application.params["permutation"]]
    return OpRule(factoring.rule([dims], [permuted]), linear=((0,),))


@register("squeeze")
def _squeeze_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.operands[0].shape)
    removed = application.params["dimensions"]
    kept = [dim for d, dim in enumerate(dims) if d not in removed]
    return OpRule(factoring.rule([dims], [kept]), linear=((0,),))


@register("broadcast_in_dim")
def _broadcast_rule(application: Application) -> OpRule:
    factoring = Factoring()
    result = factoring.dims(application.params["shape"])
    places = application.params["broadcast_dimensions"]
    operand: list[Dim] = [
        () if n == 1 else result[place]
        for n, place in zip(application.operands[0].shape, places, strict=True)
    ]
    return OpRule(factoring.rule([operand], [result]), linear=((0,),), local=_broadcast_local)


def _broadcast_local(context: LocalContext, operand: Any) -> list[Any]:
    return context.bind(operand, shape=context.local_result_shape(0))


@register("tile")
def _tile_rule(application: Application) -> OpRule:
    """A repeated dim becomes two factors, the copies and the dim: `"j -> (i j)"`."""
    factoring = Factoring()
    operand = factoring.dims(application.operands[0].shape)
    result = [
        factoring.new(n) + dim for n, dim in zip(application.params["reps"], operand, strict=True)
    ]
    return OpRule(factoring.rule([operand], [result]), linear=((0,),), local=_tile_local)


def _tile_local(context: LocalContext, operand: Any) -> list[Any]:
    result = context.local_result_shape(0)
    reps = tuple(r // n if n else 1 for r, n in zip(result, operand.shape, strict=True))
    return context.bind(operand, reps=reps)


@register("iota")
def _iota_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.params["shape"])
    size = total_size(application.results)
    return OpRule(factoring.rule([], [dims]), local=_iota_local, flops=size)


def _iota_local(context: LocalContext) -> list[Any]:
    """Positions are counted as integers and then cast, as one device does."""
    shape = context.local_result_shape(0)
    dimension, dtype = context.params["dimension"], context.params["dtype"]
    dim = context.rule.results[0][dimension]
    if not dim or not context.axes(dim[0]):
        return context.bind(shape=shape)
    (positions,) = context.bind(shape=shape, dtype=np.dtype(np.int32))
    positions = lax.add(positions, lax.full_like(positions, context.offset(dim[0])))
    return [lax.convert_element_type(positions, dtype)]


@register("empty", "empty2")
def _empty_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.results[0].shape)
    return OpRule(factoring.rule([], [dims]), local=_empty_local)


def _empty_local(context: LocalContext) -> list[Any]:
    if "shape" not in context.params:  # a scalar
        return context.bind()
    return context.bind(shape=context.local_result_shape(0))


@register("rev")
def _rev_rule(application: Application) -> OpRule:
    reversed_dims = application.params["dimensions"]
    factoring = Factoring()
    dims = [
        factoring.new(n, "whole" if d in reversed_dims else None)
        for d, n in enumerate(application.operands[0].shape)
    ]
    return OpRule(factoring.rule([dims], [dims]), linear=((0,),))


@register("slice")
def _slice_rule(application: Application) -> OpRule:
    """A dim that is taken in full passes through."""
    (operand,), (result,) = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    before: list[Dim] = []
    after: list[Dim] = []
    for n, m in zip(operand, result, strict=True):
        before.append(factoring.new(n, None if n == m else "whole"))
        after.append(before[-1] if n == m else factoring.new(m, "whole"))
    return OpRule(factoring.rule([before], [after]), linear=((0,),), local=_slice_local)


def _slice_local(context: LocalContext, operand: Any) -> list[Any]:
    full = [
        before == after
        for before, after in zip(context.rule.operands[0], context.rule.results[0], strict=True)
    ]
    limits = zip(full, operand.shape, context.params["limit_indices"], strict=True)
    return context.bind(operand, limit_indices=tuple(n if f else limit for f, n, limit in limits))


@register("pad")
def _pad_rule(application: Application) -> OpRule:
    operand, result = application.operands[0].shape, application.results[0].shape
    config = application.params["padding_config"]
    factoring = Factoring()
    before: list[Dim] = []
    after: list[Dim] = []
    for n, m, amounts in zip(operand, result, config, strict=True):
        untouched = tuple(amounts) == (0, 0, 0)
        before.append(factoring.new(n, None if untouched else "whole"))
        after.append(before[-1] if untouched else factoring.new(m, "whole"))
    linear = ((0, 1), (0,)) if application.is_zero(1) else ((0, 1),)
    return OpRule(factoring.rule([before, []], [after]), linear=linear)


@register("concatenate")
def _concatenate_rule(application: Application) -> OpRule:
    joined = application.params["dimension"]
    operands = shapes(application.operands)
    factoring = Factoring()
    shared = factoring.dims(operands[0])
    result = list(shared)
    result[joined] = factoring.new(application.results[0].shape[joined], "whole")
    tensors = []
    for shape in operands:
        dims = list(shared)
        dims[joined] = factoring.new(shape[joined], "whole")
        tensors.append(dims)
    return OpRule(factoring.rule(tensors, [result]), linear=(tuple(range(len(operands))),))


@register("split")
def _split_rule(application: Application) -> OpRule:
    axis = application.params["axis"]
    (operand,) = shapes(application.operands)
    factoring = Factoring()
    dims = [factoring.new(n, "whole" if d == axis else None) for d, n in enumerate(operand)]
    results = []
    for shape in shapes(application.results):
        part = list(dims)
        part[axis] = factoring.new(shape[axis], "whole")
        results.append(part)
    return OpRule(factoring.rule([dims], results), linear=((0,),))


@register("stack")
def _stack_rule(application: Application) -> OpRule:
    axis = application.params["axis"]
    operands = shapes(application.operands)
    factoring = Factoring()
    dims = factoring.dims(operands[0])
    result = list(dims)
    result.insert(axis, factoring.new(len(operands), "whole"))
    factors = factoring.rule([dims] * len(operands), [result])
    return OpRule(factors, linear=(tuple(range(len(operands))),))


@register("unstack")
def _unstack_rule(application: Application) -> OpRule:
    axis = application.params["axis"]
    (operand,) = shapes(application.operands)
    factoring = Factoring()
    dims = [factoring.new(n, "whole" if d == axis else None) for d, n in enumerate(operand)]
    part = [dim for d, dim in enumerate(dims) if d != axis]
    return OpRule(factoring.rule([dims], [part] * len(application.results)), linear=((0,),))


@register("bitcast_convert_type")
def _bitcast_rule(application: Application) -> OpRule:
    """A narrower type adds a dim and a wider one removes it; that dim is whole."""
    (operand,), (result,) = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    dims = factoring.dims(operand[: min(len(operand), len(result))])
    before = dims + [factoring.new(n, "whole") for n in operand[len(dims) :]]
    after = dims + [factoring.new(n, "whole") for n in result[len(dims) :]]
    return OpRule(factoring.rule([before], [after]), flops=total_size(application.results))


@register("reshape")
def _reshape_rule(application: Application) -> OpRule:
    (operand,), (result,) = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    if application.params["dimensions"] is not None:
        before, after = factoring.dims(operand, "whole"), factoring.dims(result, "whole")
    else:
        before, after = regroup(factoring, operand, result)
    return OpRule(factoring.rule([before], [after]), linear=((0,),), local=_reshape_local)


def _reshape_local(context: LocalContext, operand: Any) -> list[Any]:
    return context.bind(operand, new_sizes=context.local_result_shape(0))


def regroup(
    factoring: Factoring, operand: tuple[int, ...], result: tuple[int, ...]
) -> tuple[list[Dim], list[Dim]]:
    """Factors that the dims of two shapes of the same size have in common, major to minor.

    What is left of the two current dims shares its greatest common divisor as the next factor:
    `(6, 4) -> (24)` is `"i j -> (i j)"`, `(4, 6) -> (8, 3)` is `"i (j k) -> (i j) k"`. Where
    they share none, as after the first 2 of `(6, 4) -> (4, 6)`, the rest is whole until the
    products of the dims on both sides meet again.
    """
    before: list[Dim] = [() for _ in operand]
    after: list[Dim] = [() for _ in result]
    if 0 in operand:
        return _regroup_empty(factoring, operand, result)
    left = [[d, n] for d, n in enumerate(operand) if n != 1][::-1]
    right = [[d, n] for d, n in enumerate(result) if n != 1][::-1]
    while left:
        common = math.gcd(left[-1][1], right[-1][1])
        if common == 1:
            _leave_whole(factoring, left, right, before, after)
            continue
        factor = factoring.new(common)
        for side, dims in ((left, before), (right, after)):
            dims[side[-1][0]] += factor
            side[-1][1] //= common
            if side[-1][1] == 1:
                side.pop()
    return before, after


def _leave_whole(
    factoring: Factoring,
    left: list[list[int]],
    right: list[list[int]],
    before: list[Dim],
    after: list[Dim],
) -> None:
    """Make whole factors of both sides' dims until as much of the one is used as of the other."""
    used = [1, 1]
    while used[0] != used[1] or used[0] == 1:
        side, dims, which = (left, before, 0) if used[0] <= used[1] else (right, after, 1)
        dim, size = side.pop()
        dims[dim] += factoring.new(size, "whole")
        used[which] *= size


def _regroup_empty(
    factoring: Factoring, operand: tuple[int, ...], result: tuple[int, ...]
) -> tuple[list[Dim], list[Dim]]:
    """An empty array: leading dims of equal size pass through, the rest is whole."""
    before: list[Dim] = []
    while len(before) < min(len(operand), len(result)) and (
        operand[len(before)] == result[len(before)]
    ):
        before.append(factoring.new(operand[len(before)]))
    after = list(before)
    before += [factoring.new(n, "whole") for n in operand[len(before) :]]
    after += [factoring.new(n, "whole") for n in result[len(after) :]]
    return before, after
