"""What is found from where every device holds least.

A descent moves one node, or the users of one value. Where all that leads from one to another lies
whole on every device, none of it moves to shards by itself: its neighbours would be brought there
and back. So one more descent begins where each node holds as little as it may, all at once, over
the axes of its neighbours, and one where these may be any: columns that are put in order between
products of rows lie over axes that nothing whole around them names. What it ends with is taken only
where it is no worse in anything: it is cheaper, sends no more, and neither holds nor computes more.
"""

from meshwise.choose.candidates import Reach
from meshwise.choose.descend import choices_of
from meshwise.choose.found import Found, descended
from meshwise.choose.limits import Limits, fixed_axes
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.ir.sharding import DimAxes, local_bytes

# So many times what is held at least is worth another descent, and one over any axes.
MUCH, MORE = 1.3, 1.6
# So many times less is worth it that all lies over axes that nothing around it named: layers of a
# transformer would send 3% less so, in twice as many collectives.
LESS = 1.1
# And so many times the work is no more of it.
HARDLY = 1.01


def spread_out(best: Found, limits: Limits) -> Found:
    """The plan that is found from where every device holds least, or the best one so far."""
    return _spread(best, limits, MUCH, 1.0)


def spread_anywhere(best: Found, limits: Limits) -> Found:
    """The same where nodes may lie over axes that none of their neighbours does."""
    return _spread(best, limits.reaching(Reach(anywhere=True)), MORE, LESS)


def _spread(best: Found, limits: Limits, much: float, less: float) -> Found:
    search = best.search
    start = _least_held(search, limits)
    held, least = 0, 0
    for node, axes in zip(search.graph.nodes, start, strict=True):
        held += _held_bytes(search, node, search.placed[node.index].strategy.axes)
        least += _held_bytes(search, node, axes)
    if held <= much * least:
        return best
    one = descended(Search(search.graph, start), limits)
    is_cheaper = less * one.seconds < best.seconds and one.sent_bytes <= best.sent_bytes
    is_no_more = (
        one.peak_bytes <= best.peak_bytes and one.work_seconds <= HARDLY * best.work_seconds
    )
    return one if is_cheaper and is_no_more else best


def _least_held(search: Search, limits: Limits) -> list[DimAxes]:
    """Every node as it holds least within limits; as it is where that is as much."""
    fixed = fixed_axes(search.graph)
    return [
        fixed[node.index]
        if node.index in fixed
        else min(choices_of(search, node, limits), key=lambda a: _held_bytes(search, node, a))
        for node in search.graph.nodes
    ]


def _held_bytes(search: Search, node: Node, axes: DimAxes) -> int:
    """Bytes that a device holds of what a node reads and makes, but for what lies whole anyway."""
    values, placed = search.graph.values, search.placement(node, axes)
    around = zip((*node.operands, *node.results), (*placed.operands, *placed.results), strict=True)
    return sum(
        local_bytes(value.shape, value.itemsize, sharding.straight, search.graph.mesh)
        for var, sharding in around
        if not ((value := values[var]).remade or value.is_whole)
    )
