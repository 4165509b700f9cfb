"""Descents that begin where element-wise regions bind nobody.

A region is large, and all that meets in it lies alike, so products and reductions around it keep to
what it has, and it to what they have: a descent from completion often ends in the layout that
completion gave the region, where another one would send half. So regions lie whole on every device
first, of which each neighbour reads what it likes for nothing, and neighbours choose as their other
operands suggest. Then regions follow them. The gradient of a gated MLP over two axes: its hidden
units lie as the weights do, not its rows as what comes back to it.
"""

from collections.abc import Sequence, Set

from meshwise.choose.descend import settle_nodes
from meshwise.choose.found import LESS, Found, descended
from meshwise.choose.graph import Graph
from meshwise.choose.limits import Limits, fixed_axes
from meshwise.choose.search import Search
from meshwise.choose.sums_together import make_sums_together
from meshwise.ir.sharding import DimAxes

# Of fewer nodes the descents before find what there is.
FEW = 3


def with_regions_last(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found from the best plan so far with regions whole at first, if it is worth it.

    And with everything whole, which binds nobody at all. With figures of a machine, where launches
    cost most, nothing was found so in 77 programs.
    """
    if not graph.hardware.least_bytes:
        return []
    best = min(found, key=lambda one: one.seconds)
    free = {n.index for n in graph.nodes} - fixed_axes(graph).keys()
    if len(free) < FEW or not best.sent_bytes:
        return []
    # An addition of sums goes with its terms.
    regions = {i for i in free if graph.nodes[i].is_region and not graph.nodes[i].carries}
    plan = best.search.axes
    wholes = [regions, free]
    starts = [_settled(graph, limits, plan, whole, best.seconds) for whole in wholes]
    ends = [descended(Search(graph, start), limits) for start in dict.fromkeys(starts)]
    return [one for one in ends if LESS * one.seconds <= best.seconds]


def _settled(
    graph: Graph, limits: Limits, start: Sequence[DimAxes], whole: Set[int], seconds: float
) -> tuple[DimAxes, ...]:
    """Where nodes settle around what is whole, which is whole still, unless all of them are.

    What settles with more work than it may be given stays as it was.
    """
    free = {n.index for n in graph.nodes} - fixed_axes(graph).keys()
    bound = free - whole or free
    axes = [((),) * len(own) if k in whole else own for k, own in enumerate(start)]
    search = Search(graph, axes)
    settle_nodes(search, set(bound), bound, limits)
    if make_sums_together(search, limits, seconds):
        settle_nodes(search, set(bound), bound, limits)
    return tuple(
        own if limits.allow(graph, node, own) else before
        for node, own, before in zip(graph.nodes, search.axes, start, strict=True)
    )
