"""What lies around the nodes of a cost graph: values, and other nodes that these concern."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from meshwise._jax import Var
from meshwise.choose.graph import Graph, Value
from meshwise.choose.regions import Node
from meshwise.choose.tally import Placements, Tallies, Use

Taking = Callable[[Placements], Any]


def values_around(graph: Graph, node: Node) -> list[Value]:
    """The values a node touches."""
    return [graph.values[v] for v in dict.fromkeys((*node.operands, *node.results))]


def values_touched(graph: Graph, nodes: Sequence[int]) -> list[Value]:
    """The values that some nodes touch, each once."""
    found = {v.var: v for i in nodes for v in values_around(graph, graph.nodes[i])}
    return list(found.values())


def moved_with(graph: Graph, nodes: Sequence[int]) -> list[int]:
    """Some nodes, and those that carry their sums on, which are placed with them."""
    after = graph.once(("carriers",), lambda: carriers(graph))
    moved = dict.fromkeys(nodes)
    waiting = list(nodes)
    while waiting:
        new = [i for i in after.get(waiting.pop(), ()) if i not in moved]
        moved.update(dict.fromkeys(new))
        waiting += new
    return list(moved)


def values_moved_with(graph: Graph, nodes: Sequence[int]) -> list[Value]:
    """The values that some nodes touch, or those that carry their sums on."""
    return values_touched(graph, moved_with(graph, nodes))


def state_near(graph: Graph, tallies: Tallies, nodes: Sequence[int]) -> Taking:
    """How to take all that decides what it costs to place some nodes otherwise.

    That are the nodes that touch what these touch, or what those do that carry their sums on, and
    of what many read the shardings in which they do.
    """
    moved = moved_with(graph, nodes)
    near = dict.fromkeys(moved)
    many: list[tuple[int, Sequence[Use]]] = []
    own = uses_by(graph, moved)
    for value in values_touched(graph, moved):
        if value.maker is not None:
            near[value.maker] = None
        if value.var in tallies.readers:
            many.append((tallies.readers[value.var], own[value.var]))
        else:
            near.update(dict.fromkeys(n for n, _ in value.uses))
    take = taking(list(near))
    return partial(_with_others, take, many) if many else take


def uses_by(graph: Graph, nodes: Iterable[int]) -> dict[Var, list[Use]]:
    """Where some nodes read each value."""
    found: dict[Var, list[Use]] = defaultdict(list)
    for node in nodes:
        for operand, var in enumerate(graph.nodes[node].operands):
            found[var].append((node, operand))
    return found


def _with_others(
    take: Taking, many: Sequence[tuple[int, Sequence[Use]]], placed: Placements
) -> tuple[Any, ...]:
    return take(placed), *[placed.others(*one) for one in many]


def carriers(graph: Graph) -> dict[int, list[int]]:
    """For each node, those that carry one of its results."""
    found: dict[int, list[int]] = defaultdict(list)
    for node in graph.nodes:
        for operand in sorted(node.carries):
            maker = graph.values[node.operands[operand]].maker
            if maker is not None and maker != node.index:
                found[maker].append(node.index)
    return found


def terms_of(graph: Graph, node: Node) -> list[Value]:
    """The values that a node makes a sum of if all of them are, but for what adopts that.

    There are none where every device makes one of them, all of it.
    """
    values = [graph.values[node.operands[k]] for k in sorted(node.carries - node.adopts)]
    found = [value for value in values if value.var not in graph.carries.adopting]
    return [] if any(value.remade for value in found) else found


def taking(nodes: Sequence[int]) -> Taking:
    """How to take of a list, as of all placements, what is some nodes' own."""
    return itemgetter(*nodes) if nodes else lambda _: ()


def deciding_of(graph: Graph, tallies: Tallies) -> dict[Var, tuple[int, Taking]]:
    """For each value a number of what is like it, and how to take what decides on its reshards.

    That are the placements of who makes and who reads it; where many do, how they read it.
    """
    numbers: dict[Any, int] = {}
    found: dict[Var, tuple[int, Taking]] = {}
    for var, value in graph.values.items():
        made = () if value.maker is None else (value.maker,)
        if var in tallies.readers:
            many = "many", value.by_itself, (len(made), value.result)
            take = partial(_with_others, taking(made), [(tallies.readers[var], ())])
            found[var] = numbers.setdefault(many, len(numbers)), take
            continue
        nodes = list(dict.fromkeys((*made, *(node for node, _ in value.uses))))
        places = {node: place for place, node in enumerate(nodes)}
        said = (
            value.by_itself,
            (len(made), value.result),
            tuple([(places[node], operand) for node, operand in value.uses]),
            var if value.read_in is not None else None,
        )
        found[var] = numbers.setdefault(said, len(numbers)), taking(nodes)
    return found


def around_nodes(
    graph: Graph, deciding: Mapping[Var, tuple[int, Taking]]
) -> list[dict[Var, tuple[Value, int, Taking]]]:
    """For each node the values that it touches, and what decides their cost."""
    return [
        {value.var: (value, *deciding[value.var]) for value in values_around(graph, node)}
        for node in graph.nodes
    ]
