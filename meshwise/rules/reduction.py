"""Reductions over dims, and the positions of the largest and smallest elements, with these or not.

A dim that is summed may be sharded: each device then holds a term of the result. Where the
reduction has no collective (`xor`, bitwise `and` and `or` of integers, a function of the user's),
each device reduces its own part, and what they found is reduced again, in the order of the shards;
the dim is whole where the function's initial values may not count again (`initial.py`).
The largest of complex numbers are looked for where the dim is whole.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise._jax import extreme_and_place
from meshwise.ir.program import type_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.factoring import Dim, Factoring, Kind, shapes
from meshwise.rules.identity import OF_BOOLS, mask_padding, reduction_identity
from meshwise.rules.initial import counting_once, may_count_again
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
    again = may_count_again(application)
    kind = "permute" if again else "whole"
    dims = [factoring.new(n, kind if d in reduced else None) for d, n in enumerate(shape)]
    kept = [dim for d, dim in enumerate(dims) if d not in reduced]
    return OpRule(
        factoring.rule([dims] * count + [[]] * count, [kept] * count),
        local=_function_local if again else counting_once(_function_local),
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
    return {d: dim[0] for d, dim in dims.items() if context.is_split(dim)}


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


@dataclass(frozen=True)
class _Search:
    """What finds where the largest or smallest are: the first of equals or the last.

    With what they are, or without.
    """

    is_largest: bool
    says_what: bool = False
    is_last: bool = False

    def find(self, x: Any, axis: int, index_dtype: Any) -> list[Any]:
        """What is found along a dim of some values, and its places there."""
        axes = (axis,)
        flags = {"is_largest": self.is_largest, "is_last": self.is_last}
        value, place = extreme_and_place(x, axes=axes, index_dtype=index_dtype, **flags)
        if self.says_what:  # of zeros of both signs the reduction alone may find another one
            extreme = lax.reduce_max(x, axes) if self.is_largest else lax.reduce_min(x, axes)
            value = _with_nans(value, extreme)
        return [value, place]


_SEARCHES = {
    "argmax": _Search(is_largest=True),
    "argmin": _Search(is_largest=False),
    "max_and_argmax": _Search(is_largest=True, says_what=True),
    "min_and_argmin": _Search(is_largest=False, says_what=True),
    "last_argmax": _Search(is_largest=True, is_last=True),
    "last_argmin": _Search(is_largest=False, is_last=True),
}


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
    return dim[0] if context.is_split(dim) else None


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
    search = _SEARCHES[context.eqn.primitive.name]
    index_dtype = type_of(context.eqn.outvars[-1]).dtype
    factor = _arg_factor(context)
    if factor is None:
        if not (search.says_what or search.is_last):
            return context.bind(operand)
        return search.find(operand, axis, index_dtype)[0 if search.says_what else 1 :]
    reduction = Reduction.MAX if search.is_largest else Reduction.MIN
    operand = mask_padding(
        context, operand, axis, factor, reduction_identity(reduction, operand.dtype)
    )
    value, place = search.find(operand, axis, index_dtype)
    index = lax.add(place, lax.convert_element_type(context.offset(factor), place.dtype))
    if search.is_last:  # where all are the worst, padding comes last
        index = lax.min(index, lax.full_like(index, context.rule.sizes[factor] - 1))

    def combine(values: Any, indices: Any) -> list[Any]:
        # Candidates come in the order of the shards, so the first of equals wins, or the last, and
        # a NaN wins over all, as within one shard.
        what, shard = (lax.expand_dims(x, (0,)) for x in search.find(values, 0, np.int32))
        where = take_rows(indices, shard)
        return [what, where] if search.says_what else [where]

    candidates = [lax.reshape(x, (1, x.size)) for x in (value, index)]
    found = _arg_meeting(context, factor).hold(candidates, context.axes(factor), combine)
    return [lax.reshape(x, index.shape) for x in found]


def _with_nans(first: Any, extreme: Any) -> Any:
    """What a reduction found in rows; a NaN that is first in one is the row's, also if it is lost.

    Where zeros of both signs are equal, what is found may be another one than the first. XLA on CPU
    loses a NaN in reductions along a minor dim that it vectorizes.
    """
    return lax.select(lax.ne(first, first), first, extreme)
