"""Sorts along one dim.

The dim may be sharded, and is sorted in whichever of three ways sends least:

- *rows*: where there are many rows, the devices deal them out, each sorts whole rows, and the
  blocks go back: two all_to_alls, of a shard each;
- *splitters*: each device sorts its block and finds out how far its elements go to which shard;
  they are sent there, and sorted again: two all_to_alls of a shard each, and some counts;
- *network*: few elements on many devices pass through a sorting network.

All of them are exact, whatever the numbers, and their shapes do not depend on the data. Equal
elements keep their order; where that is not asked for, rows are sorted as on one device. A short
dim may cost less to gather than to sort in any way: that is for whoever prices the plan to see.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import dtypes, lax
from jax.numpy import issubdtype

from meshwise.ir.collectives import CollectiveKind
from meshwise.ir.program import type_of
from meshwise.rules.factoring import Factoring, shapes
from meshwise.rules.network import send_rounds, sort_in_network
from meshwise.rules.registry import Application, Exchange, LocalContext, OpRule, register
from meshwise.rules.routing import route, send_blocks
from meshwise.rules.small_exchanges import (
    Sends,
    exchange,
    pad_rows,
    row_count,
    rows_back,
    rows_last,
)
from meshwise.rules.sorted_blocks import SortedBlocks
from meshwise.rules.splitters import find_cuts, send_counts


@register("sort")
def _sort_rule(application: Application) -> OpRule:
    axis, operands = application.params["dimension"], shapes(application.operands)
    plain = all(not issubdtype(x.dtype, dtypes.extended) for x in application.operands)
    kind = "permute" if plain and operands[0][axis] < 2**31 else "whole"
    factoring = Factoring()
    dims = [factoring.new(n, kind if d == axis else None) for d, n in enumerate(operands[0])]
    tensors = [dims] * len(operands)
    return OpRule(
        factoring.rule(tensors, tensors),
        local=_sort_local,
        exchanges=_sort_exchanges,
        flops=math.log2(max(2, operands[0][axis])) * math.prod(operands[0]),
        serial=True,
    )


def _job(context: LocalContext) -> SortedBlocks | None:
    """The sort, if its dim is sharded."""
    axis, shape = context.params["dimension"], context.local_shape(0)
    dim = context.rule.operands[0][axis]
    if not context.is_split(dim) or 0 in shape:
        return None
    return SortedBlocks(
        context.rule.sizes[dim[0]],
        row_count(shape, axis),
        context.params["num_keys"],
        context.params["is_stable"],
        tuple(type_of(atom).dtype for atom in context.eqn.invars),
        context.axes(dim[0]),
        context.mesh,
    )


Way = Callable[[SortedBlocks, Sequence[Any]], list[Any]]


def _ways(job: SortedBlocks) -> list[tuple[Sends, Way]]:
    """What each way sends."""
    rows, splitters, network = (Sends(job.shards) for _ in range(3))
    dealt = job.block * _share(job) * job.shards
    for dtype in job.dtypes:
        rows.add(CollectiveKind.ALL_TO_ALL, [dtype], dealt, times=2)
    send_counts(job, splitters)
    send_blocks(job, splitters)
    send_rounds(job, network)
    return [(rows, _by_rows), (splitters, _by_splitters), (network, sort_in_network)]


def _best(job: SortedBlocks) -> tuple[Sends, Way]:
    return min(_ways(job), key=lambda way: way[0].cost)


def _sort_exchanges(context: LocalContext) -> list[Exchange]:
    job = _job(context)
    if job is None:
        return []
    return _best(job)[0].found


def _sort_local(context: LocalContext, *operands: Any) -> list[Any]:
    job = _job(context)
    if job is None:
        return context.bind(*operands)
    axis = context.params["dimension"]
    found = _best(job)[1](job, [rows_last(x, axis) for x in operands])
    return [rows_back(x, axis, operands[0].shape) for x in found]


def _share(job: SortedBlocks) -> int:
    """How many rows each device sorts where they are dealt out."""
    return -(-job.rows // job.shards)


def _by_rows(job: SortedBlocks, operands: Sequence[Any]) -> list[Any]:
    """Rows dealt out whole; operands go each by itself, as together they would be held twice."""
    padded = [pad_rows(x, _share(job) * job.shards) for x in operands]
    whole = [exchange(x, job.axes, cut=1, join=0) for x in padded]
    found = job.sort([lax.slice_in_dim(x, 0, job.size) for x in whole], job.keys, job.is_stable)
    padding = job.block * job.shards - job.size
    found = [lax.pad(x, _zero(x), [(0, padding, 0), (0, 0, 0)]) for x in found]
    back = [exchange(x, job.axes, cut=0, join=1) for x in found]
    return [lax.slice_in_dim(x, 0, job.rows, axis=1) for x in back]


def _zero(x: Any) -> Any:
    return lax.full((), 0, x.dtype)


def _by_splitters(job: SortedBlocks, operands: Sequence[Any]) -> list[Any]:
    own = job.sort_own(operands)
    return job.sort_own(route(job, own, find_cuts(job, own)))
