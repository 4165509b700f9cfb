"""What lies around the nodes of a cost graph: values, and other nodes that these concern."""

from collections import defaultdict
from collections.abc import Sequence

from meshwise.choose.graph import Graph, Value
from meshwise.choose.regions import Node


def values_around(graph: Graph, node: Node) -> list[Value]:
    """The values a node touches."""
    return [graph.values[v] for v in dict.fromkeys((*node.operands, *node.results))]


def nodes_near(graph: Graph, nodes: Sequence[int]) -> list[int]:
    """Nodes that touch what some nodes touch, or what those do that carry their sums on.

    What it costs to place these nodes otherwise depends on no other node.
    """
    after = graph.once(("carriers",), lambda: carriers(graph))
    moved = dict.fromkeys(nodes)
    waiting = list(nodes)
    while waiting:
        new = [i for i in after.get(waiting.pop(), ()) if i not in moved]
        moved.update(dict.fromkeys(new))
        waiting += new
    near = dict.fromkeys(moved)
    for value in {v.var: v for i in moved for v in values_around(graph, graph.nodes[i])}.values():
        near.update(dict.fromkeys(n for n, _ in value.uses))
        if value.maker is not None:
            near[value.maker] = None
    return list(near)


def carriers(graph: Graph) -> dict[int, list[int]]:
    """For each node, those that carry one of its results."""
    found: dict[int, list[int]] = defaultdict(list)
    for node in graph.nodes:
        for operand in sorted(node.carries):
            maker = graph.values[node.operands[operand]].maker
            if maker is not None and maker != node.index:
                found[maker].append(node.index)
    return found
