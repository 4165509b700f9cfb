"""What is found where products may lie over axes that nothing around them lies over.

A descent tries what a node's neighbours suggest. An axis that no hint names, or that completion
did not bring to a product, is suggested by none of them: all devices along it do the same work.
So two more descents may use such axes for whatever sums: one from the best plan so far, one from
the program's own order.
"""

from meshwise.choose.candidates import Reach, has_idle_axes
from meshwise.choose.found import Found, descended
from meshwise.choose.graph import Graph
from meshwise.choose.limits import Limits, nominal
from meshwise.choose.search import Search
from meshwise.choose.starts import forward_start


def with_idle_axes(graph: Graph, best: Found, limits: Limits) -> list[Found]:
    """The plans that are found so; none where no operator that sums leaves an axis idle."""
    if not any(has_idle_axes(graph, node, nominal(graph, node)) for node in graph.nodes):
        return []
    wider = limits.reaching(Reach(idle=True))
    starts = [forward_start(graph, wider)]
    if best.search.graph is graph:
        starts.append(best.search.axes)
    return [descended(Search(graph, axes), wider) for axes in dict.fromkeys(map(tuple, starts))]
