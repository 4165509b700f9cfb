"""The largest k along a dim.

The dim may be sharded: each device sends its own k candidates, and the largest of all are taken
again. Candidates come in the order of the shards, so that of equals the first one wins as it does
on one device.
"""

import math
from typing import Any

import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise._jax import DropVar
from meshwise.ir.program import type_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.factoring import Factoring, shapes, total_size
from meshwise.rules.identity import mask_padding, reduction_identity
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.small_exchanges import Meeting, row_count, rows_back, rows_last, take_rows


@register("top_k", "approx_top_k")
def _largest_rule(application: Application) -> OpRule:
    """The k positions of the result are no part of the dim that is searched."""
    (operand,), results = shapes(application.operands), shapes(application.results)
    axis = _axis(application.params, len(operand))
    # An approximate search may give the candidates of its own blocks: how many depends on the size.
    # XLA on CPU loses the sign of some NaNs of one byte, which padding has to be below all numbers.
    is_byte = issubdtype((d := application.operands[0].dtype), np.floating) and d.itemsize == 1
    aggregates = application.params.get("aggregate_to_topk", True)
    searched = "permute" if aggregates and not is_byte else "whole"
    factoring = Factoring()
    dims = [factoring.new(n, searched if d == axis else None) for d, n in enumerate(operand)]
    after = [*dims]
    after[axis] = factoring.new(results[0][axis], "whole")
    steps = math.log2(max(2, application.params["k"]))
    return OpRule(
        factoring.rule([dims], [after, after]),
        local=_largest_local,
        exchanges=_largest_exchanges,
        flops=steps * total_size(application.operands),
    )


def _axis(params: dict[str, Any], rank: int) -> int:
    return params["axis" if "axis" in params else "reduction_dimension"] % rank


def _factor(context: LocalContext) -> int | None:
    """The factor of the dim that is searched, if it is sharded."""
    dims = context.rule.operands[0]
    dim = dims[_axis(context.params, len(dims))]
    return dim[0] if context.is_split(dim) else None


def _meeting(context: LocalContext, factor: int) -> Meeting:
    shape, k = context.local_shape(0), context.params["k"]
    axis = _axis(context.params, len(shape))
    sent = context.eqn.outvars if _tells_where(context) else context.eqn.outvars[:1]
    dtypes = tuple(type_of(v).dtype for v in sent)
    own = min(k, shape[axis])
    rows = row_count(shape, axis)
    return Meeting(context.shards(factor), rows, (own, dtypes), (k, dtypes))


def _tells_where(context: LocalContext) -> bool:
    """Whether anything reads where the largest are."""
    return not isinstance(context.eqn.outvars[1], DropVar)


def _largest_exchanges(context: LocalContext) -> list[Exchange]:
    factor = _factor(context)
    return [] if factor is None else _meeting(context, factor).sends.found


def _largest_local(context: LocalContext, operand: Any) -> list[Any]:
    factor = _factor(context)
    if factor is None:
        return context.bind(operand)
    axis = _axis(context.params, operand.ndim)
    meeting = _meeting(context, factor)
    operand = mask_padding(context, operand, axis, factor, _never_wins(context, operand.dtype))
    values, indices = context.bind(operand, **_some(context, k=meeting.before[0]))
    indices = lax.add(indices, lax.full_like(indices, context.offset(factor)))

    def combine(values: Any, *indices: Any) -> list[Any]:
        best, places = context.bind(values, **_all(context))
        return [best, *(take_rows(each, places) for each in indices)]

    shape = values.shape
    candidates = [values, indices] if _tells_where(context) else [values]
    found = meeting.hold([rows_last(x, axis) for x in candidates], context.axes(factor), combine)
    found = [rows_back(x, axis, shape) for x in found]
    return found if len(found) == 2 else [*found, lax.full(found[0].shape, 0, indices.dtype)]


def _some(context: LocalContext, k: int) -> dict[str, Any]:
    """Parameters of a search in one shard; an approximate one must find what it would in all."""
    if "axis" in context.params:
        return {"k": k}
    given = context.params["reduction_input_size_override"]
    size = context.global_shape(0)[context.params["reduction_dimension"]]
    return {"k": k, "reduction_input_size_override": given if given > 0 else size}


def _all(context: LocalContext) -> dict[str, Any]:
    """Parameters of the search in the candidates of all shards, `[length, rows]`."""
    if "axis" in context.params:
        return {"axis": 0}
    exact = {"recall_target": 1.0, "reduction_input_size_override": -1}
    return {"reduction_dimension": 0, **exact}


def _never_wins(context: LocalContext, dtype: Any) -> Any:
    """What padding is overwritten with: no number is below it, and equal ones come before it.

    `top_k` has a total order, in which NaNs with a sign lie below minus infinity.
    """
    if "axis" not in context.params:
        largest = context.params["is_max_k"]
        return reduction_identity(Reduction.MAX if largest else Reduction.MIN, dtype)
    if issubdtype(dtype, np.floating):
        return np.full(np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype)[0]
    return reduction_identity(Reduction.MAX, dtype)
