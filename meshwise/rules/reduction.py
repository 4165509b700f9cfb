"""Reductions over dims, and the positions of the largest and smallest elements.

A dim that is summed may be sharded: each device then holds a term of the result. Where the
reduction has no collective (`xor`, bitwise `and` and `or` of integers, `max` of complex numbers,
a function of the user's) the dim is whole.
"""

import math
from typing import Any

import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise.ir.sharding import Reduction
from meshwise.rules.factoring import Dim, Factoring, Kind, shapes
from meshwise.rules.identity import mask_padding, reduction_identity
from meshwise.rules.registry import Application, LocalContext, OpRule, register

_REDUCTIONS = {
    "reduce_sum": Reduction.SUM,
    "reduce_prod": Reduction.PROD,
    "reduce_max": Reduction.MAX,
    "reduce_min": Reduction.MIN,
    "reduce_and": Reduction.AND,
    "reduce_or": Reduction.OR,
}


def _kind(name: str, dtype: Any) -> Kind:
    """The kind of a reduced dim: a reduction that devices can do together, else whole."""
    reduction = _REDUCTIONS.get(name)
    if reduction is None:
        return "whole"
    if dtype == np.bool_:
        return {Reduction.MAX: Reduction.OR, Reduction.MIN: Reduction.AND}.get(reduction, reduction)
    if reduction in (Reduction.AND, Reduction.OR):
        return "whole"
    if reduction in (Reduction.MAX, Reduction.MIN) and issubdtype(dtype, np.complexfloating):
        return "whole"
    return reduction


@register(*_REDUCTIONS, "reduce_xor")
def _reduce_rule(application: Application) -> OpRule:
    operand = application.operands[0]
    name = application.eqn.primitive.name
    kind = _kind(name, operand.dtype)
    reduced = application.params["axes"]
    factoring = Factoring()
    dims = [factoring.new(n, kind if d in reduced else None) for d, n in enumerate(operand.shape)]
    kept = [dim for d, dim in enumerate(dims) if d not in reduced]
    return OpRule(
        factoring.rule([dims], [kept]),
        linear=((0,),) if name == "reduce_sum" else (),
        flops=float(math.prod(operand.shape)),
    )


@register("reduce")
def _reduce_function_rule(application: Application) -> OpRule:
    """A reduction by a function: operands and then their initial values, which are scalars."""
    count = len(application.operands) // 2
    reduced = application.params["dimensions"]
    shape = application.operands[0].shape
    factoring = Factoring()
    dims = [factoring.new(n, "whole" if d in reduced else None) for d, n in enumerate(shape)]
    kept = [dim for d, dim in enumerate(dims) if d not in reduced]
    factors = factoring.rule([dims] * count + [[]] * count, [kept] * count)
    return OpRule(factors, flops=float(math.prod(shape) * count))


@register("argmax", "argmin")
def _arg_rule(application: Application) -> OpRule:
    """The reduced dim may be sharded: one candidate of each shard is exchanged."""
    (operand,) = shapes(application.operands)
    (axis,) = application.params["axes"]
    exact = not issubdtype(application.operands[0].dtype, np.complexfloating)
    factoring = Factoring()
    dims: list[Dim] = []
    for d, n in enumerate(operand):
        dims.append(factoring.new(n, None if d != axis else "permute" if exact else "whole"))
    kept = [dim for d, dim in enumerate(dims) if d != axis]
    factors = factoring.rule([dims], [kept])
    return OpRule(factors, local=_arg_local, flops=float(math.prod(operand)))


def _arg_local(context: LocalContext, operand: Any) -> list[Any]:
    (axis,) = context.params["axes"]
    dim = context.rule.operands[0][axis]
    if not dim or not context.axes(dim[0]):
        return context.bind(operand)
    factor = dim[0]
    largest = context.eqn.primitive.name == "argmax"
    reduction = Reduction.MAX if largest else Reduction.MIN
    worst = reduction_identity(reduction, operand.dtype)
    operand = mask_padding(context, operand, axis, factor, worst)
    (index,) = context.bind(operand)
    index = lax.add(index, lax.full_like(index, context.offset(factor)))
    value = (lax.reduce_max if largest else lax.reduce_min)(operand, (axis,))
    # Every device sees the candidates in the order of the shards, so the first of equals wins,
    # and a NaN wins over all, as within one shard.
    values = lax.all_gather(value, context.axes(factor))
    indices = lax.all_gather(index, context.axes(factor))
    winner = (lax.argmax if largest else lax.argmin)(values, 0, np.int32)
    shard = lax.broadcasted_iota(np.int32, indices.shape, 0)
    chosen = lax.eq(shard, lax.broadcast_in_dim(winner, indices.shape, range(1, indices.ndim)))
    return [lax.reduce_sum(lax.select(chosen, indices, lax.full_like(indices, 0)), (0,))]
