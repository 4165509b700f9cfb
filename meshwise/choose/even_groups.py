"""What is found where a dim is split into groups over as many devices as divide them.

Twelve groups over eight devices are two for each of six, and columns move to where their group is,
and back. XLA's partitioner has groups over four, the axes that divide them, and gathers columns
over the others: pairs of devices have the same three groups, of which each cuts its own columns
again for nothing. No step of a descent leads there, as all that reads groups would move at once.
"""

from collections.abc import Sequence

from meshwise.choose.found import LESS, Found, descended
from meshwise.choose.graph import Graph
from meshwise.choose.limits import Limits, fixed_axes, with_work_at
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.choose.starts import completion_start
from meshwise.ir.sharding import DimAxes


def with_even_groups(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found so, if it is worth it, and completion has a split exchange for its groups.

    Devices that have the same groups do all the same of these, which is no more than XLA's do. But
    products and sums are held to the work that they are given elsewhere.
    """
    best = min(found, key=lambda one: one.seconds)
    if not best.sent_bytes or not any(node.rule.compound for node in graph.nodes):
        return []
    given, fixed = completion_start(graph, limits), fixed_axes(graph)
    start = [
        axes if node.index in fixed else _evenly(graph, node, axes)
        for node, axes in zip(graph.nodes, given, strict=True)
    ]
    placed = zip(graph.nodes, given, start, strict=True)
    if not any(_has_uneven_groups(*one) for one in placed):
        return []
    light = {node.index for node in graph.nodes if not any(node.reduced)}
    one = descended(Search(graph, start), with_work_at(limits, graph, start, light))
    return [one] if LESS * one.seconds <= best.seconds else []


def _evenly(graph: Graph, node: Node, axes: DimAxes) -> DimAxes:
    """A node's strategy over as many axes as divide each of its factors."""
    sizes = zip(axes, node.rule.sizes, strict=True)
    return tuple([graph.mesh.dividing(own, size) for own, size in sizes])


def _has_uneven_groups(node: Node, given: DimAxes, even: DimAxes) -> bool:
    """Whether a dim is split into groups that the axes they are given do not divide."""
    return any(given[dim[0]] != even[dim[0]] for dim in node.rule.compound_dims)
