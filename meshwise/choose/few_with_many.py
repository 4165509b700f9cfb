"""What is found where few arguments are gathered, and the largest value lies along another dim.

Completion has values lie as arguments do. Where these are few, as the parameters of splats, and
what is computed of each of them with each of many others is far larger, as what a splat is to each
pixel, sums over the few send the many: it is better to gather the few once, and to share out the
many. No step of a descent leads there, as all values move at once.
"""

from meshwise.choose.found import LESS, Found, descended
from meshwise.choose.graph import Graph, Value
from meshwise.choose.limits import Limits, limits_of
from meshwise.choose.search import Search
from meshwise.choose.starts import completion_start
from meshwise.ir.sharding import DimAxes, Sharding, local_bytes
from meshwise.propagate.propagate import propagate_from

# A dim is shared out if it is padded by at most this part of it.
MOST_PADDING = 16


def with_few_gathered(best: Found, limits: Limits) -> Found | None:
    """What is found so, if it is worth it; None where the gather alone sends as much as the plan.

    Nor where a device would receive more than its share of the many, or the dim of these that is to
    be shared out is one of the few as well, or seconds are a machine's.
    """
    graph = best.search.graph
    computed = [v for v in graph.values.values() if v.maker is not None and not v.remade]
    if not graph.hardware.least_bytes or not best.sent_bytes or not computed:
        return None
    many = max(computed, key=lambda value: value.bytes)
    given, dims = graph.nominal(many.var), _along_another_dim(graph, many)
    moved = {a for own, to in zip(given, dims, strict=True) for a in {*own} - {*to}}
    few = [v for v in graph.values.values() if v.fixed is not None and moved & v.fixed.used_axes]
    share = local_bytes(many.shape, many.itemsize, Sharding(dims), graph.mesh)
    gathered = sum(_gathered_bytes(graph, value) for value in few)
    if not few or gathered > share or LESS * gathered >= best.sent_bytes:
        return None
    lying = propagate_from(graph.program, graph.rules, many.var, dims, moved)
    if any(moved.intersection(own) for value in few for own in lying[value.var]):
        return None
    completed = graph.completed_as(lying)
    wider = limits.or_those_of(limits_of(completed))
    one = descended(Search(graph, completion_start(completed, wider)), wider)
    return one if LESS * one.seconds <= best.seconds else None


def _along_another_dim(graph: Graph, value: Value) -> DimAxes:
    """A value's dims with all axes on the longest that has not all; as they lie if none is so long.

    Nor if it would be padded by much: that is work as well. Those that lie over it come first, so
    that these need not move.
    """
    given = graph.nominal(value.var)
    axes = tuple([a for own in given for a in own])
    shards = graph.mesh.size(axes)
    size = max((n for d, n in enumerate(value.shape) if given[d] != axes), default=0)
    if size < shards or MOST_PADDING * (-size % shards) > size:
        return given
    to = next(d for d, n in enumerate(value.shape) if n == size and given[d] != axes)
    others = [a for d, own in enumerate(given) if d != to for a in own]
    return tuple((*own, *others) if d == to else () for d, own in enumerate(given))


def _gathered_bytes(graph: Graph, value: Value) -> int:
    """What a device receives of a value that lies in shards to have all of it."""
    assert value.fixed is not None
    return value.bytes - local_bytes(value.shape, value.itemsize, value.fixed, graph.mesh)
