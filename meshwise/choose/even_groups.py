"""What is found where a dim is split into groups over as many devices as divide them.

Twelve groups over eight devices are two for each of six, and columns move to where their group is,
and back. XLA's partitioner has groups over four, the axes that divide them, and gathers columns
over the others: pairs of devices have the same three groups, of which each cuts its own columns
again for nothing. No step of a descent leads there, as all that reads groups would move at once.
"""

from collections.abc import Sequence

from meshwise.choose.found import Found, descended
from meshwise.choose.graph import Graph
from meshwise.choose.limits import Limits, with_work_at
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.choose.starts import completion_start
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import DimAxes

# So many times less is worth it that groups lie over fewer devices.
LESS = 1.03


def with_even_groups(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found so, if it is worth it, and completion has a split exchange for its groups.

    Devices that have the same groups do all the same of these, which is no more than XLA's do. But
    products and sums are held to the work that they are given elsewhere.
    """
    best, given = min(found, key=lambda one: one.seconds), completion_start(graph, limits)
    placed = [*zip(graph.nodes, given, strict=True)]
    if not best.sent_bytes or not any(_has_uneven_groups(graph, *one) for one in placed):
        return []
    start = [
        tuple([_dividing(graph, *own) for own in zip(node.rule.sizes, axes, strict=True)])
        for node, axes in placed
    ]
    light = {node.index for node in graph.nodes if not any(node.reduced)}
    one = descended(Search(graph, start), with_work_at(limits, graph, start, light))
    return [one] if LESS * one.seconds <= best.seconds else []


def _has_uneven_groups(graph: Graph, node: Node, axes: DimAxes) -> bool:
    """Whether a dim is split into groups that its axes do not divide."""
    majors = {dim[0] for dim in node.rule.compound_dims}
    return any(_dividing(graph, node.rule.sizes[f], axes[f]) != axes[f] for f in majors)


def _dividing(graph: Graph, size: int, axes: Axes) -> Axes:
    """The first of some axes, as many as divide a size."""
    count = len(axes)
    while size % graph.mesh.size(axes[:count]):
        count -= 1
    return axes[:count]
