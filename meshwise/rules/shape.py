"""Operators that move elements without computing: transposes, broadcasts, tiles, stacks."""

from typing import Any

import jax
import numpy as np
from jax import lax

from meshwise.rules.factoring import Dim, Factoring, shapes, total_size
from meshwise.rules.registry import Application, LocalContext, OpRule, register


@register("transpose")
def _transpose_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.operands[0].shape)
    permuted = [dims[d] for d in application.params["permutation"]]
    return OpRule(factoring.rule([dims], [permuted]), linear=((0,),), moves=True)


@register("squeeze")
def _squeeze_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.operands[0].shape)
    removed = application.params["dimensions"]
    kept = [dim for d, dim in enumerate(dims) if d not in removed]
    return OpRule(factoring.rule([dims], [kept]), linear=((0,),), moves=True)


@register("broadcast_in_dim")
def _broadcast_rule(application: Application) -> OpRule:
    factoring = Factoring()
    result = factoring.dims(application.params["shape"])
    places = application.params["broadcast_dimensions"]
    operand: list[Dim] = [
        () if n == 1 else result[place]
        for n, place in zip(application.operands[0].shape, places, strict=True)
    ]
    factors = factoring.rule([operand], [result])
    return OpRule(factors, linear=((0,),), local=_broadcast_local, moves=True)


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
    factors = factoring.rule([operand], [result])
    return OpRule(factors, linear=((0,),), local=_tile_local, moves=True)


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
    if not context.is_split(dim):
        return context.bind(shape=shape)
    counted = _counting(context.rule.sizes[dim[0]])
    (positions,) = context.bind(shape=shape, dtype=counted)
    positions = lax.add(positions, lax.full_like(positions, context.offset(dim[0], counted)))
    return [lax.convert_element_type(positions, dtype)]


def _counting(size: int) -> np.dtype:
    """The integers that count so many positions, as wide as JAX has them."""
    if size <= np.iinfo(np.int32).max:
        return np.dtype(np.int32)
    longest = jax.dtypes.canonicalize_dtype(np.int64)
    return longest if longest == np.int64 else np.dtype(np.uint32)


@register("empty", "empty2")
def _empty_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.results[0].shape)
    return OpRule(factoring.rule([], [dims]), local=_empty_local)


def _empty_local(context: LocalContext) -> list[Any]:
    if "shape" not in context.params:  # a scalar
        return context.bind()
    return context.bind(shape=context.local_result_shape(0))


@register("stack")
def _stack_rule(application: Application) -> OpRule:
    axis = application.params["axis"]
    operands = shapes(application.operands)
    factoring = Factoring()
    dims = factoring.dims(operands[0])
    result = list(dims)
    result.insert(axis, factoring.new(len(operands), "whole"))
    factors = factoring.rule([dims] * len(operands), [result])
    return OpRule(factors, linear=(tuple(range(len(operands))),), moves=True)


@register("unstack")
def _unstack_rule(application: Application) -> OpRule:
    axis = application.params["axis"]
    (operand,) = shapes(application.operands)
    factoring = Factoring()
    dims = [factoring.new(n, "whole" if d == axis else None) for d, n in enumerate(operand)]
    part = [dim for d, dim in enumerate(dims) if d != axis]
    factors = factoring.rule([dims], [part] * len(application.results))
    return OpRule(factors, linear=((0,),), moves=True)


@register("bitcast_convert_type")
def _bitcast_rule(application: Application) -> OpRule:
    """A narrower type adds a dim and a wider one removes it; that dim is whole."""
    (operand,), (result,) = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    dims = factoring.dims(operand[: min(len(operand), len(result))])
    before = dims + [factoring.new(n, "whole") for n in operand[len(dims) :]]
    after = dims + [factoring.new(n, "whole") for n in result[len(dims) :]]
    return OpRule(factoring.rule([before], [after]), flops=total_size(application.results))
