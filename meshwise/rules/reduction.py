"""Reductions over dims, and the positions of the largest and smallest elements, with these or not.

A dim that is summed may be sharded: each device then holds a term of the result. Where the
reduction has no collective (`xor`, bitwise `and` and `or` of integers, a function of the user's),
each device reduces its own part, and what they found is reduced again, in the order of the shards;
the dim is whole where the function's initial values may not count again (`initial.py`).
The largest of complex numbers are looked for where the dim is whole.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise._jax import last_argmax, last_argmin, max_and_argmax, min_and_argmin
from meshwise.ir.program import type_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.factoring import Dim, Factoring, Kind, shapes
from meshwise.rules.identity import OF_BOOLS, mask_padding, reduction_identity
from meshwise.rules.initial import may_count_again
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.small_exchanges import Meeting, row_count, take_rows

_REDUCTIONS = {
    "reduce_sum": Reduction.SUM,
    "reduce_prod": Reduction.PROD,
    "reduce_max": Reduction.MAX,
    "reduce_min": Reduction.MIN,
    "reduce_and": Reduction.AND,
    "reduce_or": Reduction.OR,
}


def _kind(name: str, dtype: Any) -> Kind:
    """The kind of a reduced dim: a reduction by a collective, one in two steps, else whole."""
    reduction = _REDUCTIONS.get(name)
    if reduction is None:
        return "permute"
    if dtype == np.bool_:
        return OF_BOOLS.get(reduction, reduction)
    if reduction in (Reduction.AND, Reduction.OR):
        return "permute"
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
    together = kind == "permute"
    return OpRule(
        factoring.rule([dims], [kept]),
        local=_bits_local if together else None,
        exchanges=_reduce_exchanges if together else None,
        linear=((0,),) if name == "reduce_sum" else (),
        flops=float(math.prod(operand.shape)),
    )


# Whether bits are set that change nothing.
_UNCHANGING = {"reduce_and": Reduction.AND, "reduce_or": Reduction.OR, "reduce_xor": Reduction.OR}


def _bits_local(context: LocalContext, operand: Any) -> list[Any]:
    reduction = _UNCHANGING[context.eqn.primitive.name]
    unchanging = reduction_identity(reduction, operand.dtype)
    return _in_two_steps(
        context, [operand], [unchanging], lambda parts, dims: context.bind(*parts, axes=dims)
    )


@register("reduce")
def _reduce_function_rule(application: Application) -> OpRule:
    """A reduction by a function: operands and then their initial values, which are scalars.

    The function is associative, as JAX asks, and need not commute: what is found in parts of a dim
    is joined in their order.
    """
    count = len(application.operands) // 2
    reduced = application.params["dimensions"]
    shape = application.operands[0].shape
    factoring = Factoring()
    kind = "permute" if may_count_again(application) else "whole"
    dims = [factoring.new(n, kind if d in reduced else None) for d, n in enumerate(shape)]
    kept = [dim for d, dim in enumerate(dims) if d not in reduced]
    return OpRule(
        factoring.rule([dims] * count + [[]] * count, [kept] * count),
        local=_function_local,
        exchanges=_reduce_exchanges,
        flops=float(math.prod(shape) * count),
    )


def _function_local(context: LocalContext, *operands: Any) -> list[Any]:
    count = len(operands) // 2
    initial = operands[count:]

    def reduce(parts: Sequence[Any], dims: tuple[int, ...]) -> list[Any]:
        return context.bind(*parts, *initial, dimensions=dims)

    return _in_two_steps(context, operands[:count], initial, reduce)


def _reduced(context: LocalContext) -> tuple[int, ...]:
    return context.params["axes" if "axes" in context.params else "dimensions"]


def _reduced_dims(context: LocalContext) -> dict[int, int]:
    """The sharded dims that are reduced, and the factor of each."""
    dims = {d: context.rule.operands[0][d] for d in sorted(_reduced(context))}
    return {d: dim[0] for d, dim in dims.items() if dim and context.axes(dim[0])}


def _reduce_meeting(context: LocalContext) -> Meeting:
    shards = math.prod(context.shards(factor) for factor in _reduced_dims(context).values())
    found = tuple(type_of(v).dtype for v in context.eqn.outvars)
    return Meeting(shards, math.prod(context.local_result_shape(0)), (1, found), (1, found))


def _reduce_exchanges(context: LocalContext) -> list[Exchange]:
    return _reduce_meeting(context).sends.found if _reduced_dims(context) else []


def _in_two_steps(
    context: LocalContext,
    operands: Sequence[Any],
    unchanging: Sequence[Any],
    reduce: Callable[[Sequence[Any], tuple[int, ...]], list[Any]],
) -> list[Any]:
    """Each device reduces its own part, then all reduce what was found in the parts."""
    sharded = _reduced_dims(context)
    for dim, factor in sharded.items():
        pairs = zip(operands, unchanging, strict=True)
        operands = [mask_padding(context, x, dim, factor, value) for x, value in pairs]
    found = reduce(operands, _reduced(context))
    if not sharded:
        return found

    def combine(*parts: Any) -> list[Any]:
        return [lax.expand_dims(x, (0,)) for x in reduce(parts, (0,))]

    axes = tuple(a for factor in sharded.values() for a in context.axes(factor))
    rows = [lax.reshape(x, (1, x.size)) for x in found]
    whole = _reduce_meeting(context).hold(rows, axes, combine)
    return [lax.reshape(x, part.shape) for x, part in zip(whole, found, strict=True)]


# What finds where the largest or smallest are; with what they are, or without.
_SEARCHES = {
    "argmax": Reduction.MAX,
    "argmin": Reduction.MIN,
    "max_and_argmax": Reduction.MAX,
    "min_and_argmin": Reduction.MIN,
    "last_argmax": Reduction.MAX,
    "last_argmin": Reduction.MIN,
}
# Those that find the last of equals.
_LAST = {"last_argmax": last_argmax, "last_argmin": last_argmin}


@register(*_SEARCHES)
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
    results = len(application.results)
    factors = factoring.rule([dims], [kept] * results)
    flops = float(math.prod(operand) * results)
    return OpRule(factors, local=_arg_local, exchanges=_arg_exchanges, flops=flops)


def _arg_factor(context: LocalContext) -> int | None:
    """The factor of the dim that is searched, if it is sharded."""
    (axis,) = context.params["axes"]
    dim = context.rule.operands[0][axis]
    return dim[0] if dim and context.axes(dim[0]) else None


def _arg_meeting(context: LocalContext, factor: int) -> Meeting:
    (axis,), shape = context.params["axes"], context.local_shape(0)
    found = tuple(type_of(v).dtype for v in context.eqn.outvars)
    sent = type_of(context.eqn.invars[0]).dtype, found[-1]
    return Meeting(context.shards(factor), row_count(shape, axis), (1, sent), (1, found))


def _arg_exchanges(context: LocalContext) -> list[Exchange]:
    factor = _arg_factor(context)
    return [] if factor is None else _arg_meeting(context, factor).sends.found


def _arg_local(context: LocalContext, operand: Any) -> list[Any]:
    (axis,) = context.params["axes"]
    largest = _SEARCHES[context.eqn.primitive.name] is Reduction.MAX
    search_both = max_and_argmax if largest else min_and_argmin
    search_last = _LAST.get(context.eqn.primitive.name)
    says_what = len(context.eqn.outvars) > 1

    def search(x: Any) -> list[Any]:
        if search_last:
            return [search_last(x, **context.params)]
        return search_both(x, **context.params) if says_what else context.bind(x)

    factor = _arg_factor(context)
    if factor is None:
        return search(operand)
    worst = reduction_identity(_SEARCHES[context.eqn.primitive.name], operand.dtype)
    operand = mask_padding(context, operand, axis, factor, worst)
    *values, place = search(operand)
    value = _with_nans(_elements_at(operand, place, axis), *values)
    index = lax.add(place, lax.convert_element_type(context.offset(factor), place.dtype))
    if search_last:  # where all are the worst, padding comes last
        index = lax.min(index, lax.full_like(index, context.rule.sizes[factor] - 1))

    def combine(values: Any, indices: Any) -> list[Any]:
        # Candidates come in the order of the shards, so the first of equals wins, and a NaN wins
        # over all, as within one shard; of those that are last in their shards the last does.
        if search_last:
            last = search_last(values, axes=(0,), index_dtype=np.int32)
            return [take_rows(indices, lax.expand_dims(last, (0,)))]
        value, shard = search_both(values, axes=(0,), index_dtype=np.int32)
        value, shard = (lax.expand_dims(x, (0,)) for x in (value, shard))
        where = take_rows(indices, shard)
        return [_with_nans(take_rows(values, shard), value), where] if says_what else [where]

    candidates = [lax.reshape(x, (1, x.size)) for x in (value, index)]
    found = _arg_meeting(context, factor).hold(candidates, context.axes(factor), combine)
    return [lax.reshape(x, index.shape) for x in found]


def _with_nans(first: Any, extreme: Any = None) -> Any:
    """What a reduction found in rows; a NaN that is first in one is the row's, also if it is lost.

    Where zeros of both signs are equal, what is found may be another one than the first. XLA on CPU
    loses a NaN in reductions along a minor dim that it vectorizes.
    """
    return first if extreme is None else lax.select(lax.ne(first, first), first, extreme)


def _elements_at(x: Any, places: Any, axis: int) -> Any:
    """Of each row along a dim the element at a place."""
    others = tuple(d for d in range(x.ndim) if d != axis)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=others,
        start_indices_batching_dims=tuple(range(places.ndim)),
    )
    index = lax.expand_dims(places, (places.ndim,))
    return lax.gather(x, index, numbers, (1,) * x.ndim, mode=lax.GatherScatterMode.CLIP)
