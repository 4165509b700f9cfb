"""What lies around nodes, told without naming them: where it is the same, so is what is best.

Layers that are alike, and weights of one shape under one optimiser, are different nodes of a cost
graph, and mostly lie alike among others that do. What was found for one of them holds for all.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from meshwise._jax import Var
from meshwise.choose.around import Taking, moved_with, taking, uses_by, values_touched
from meshwise.choose.graph import Graph, Value
from meshwise.choose.limits import Limits, nominal
from meshwise.choose.placement import Placement
from meshwise.choose.search import WIDE, Search
from meshwise.choose.tally import Placements, Use
from meshwise.ir.sharding import Sharding

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Place:
    """Some nodes in a graph: a number that is the same for all that are alike, and who is around.

    moved: the nodes, and those that carry their sums on; places: of each value that these touch the
    place among all of them; makers: who makes a value, of those that are not moved, and which of
    its results it is; users: who reads each value without being moved, by which operand it is;
    many: of values that many read the tallies, and where those that are moved read them.
    """

    number: int
    moved: tuple[int, ...]
    places: dict[Var, int]
    makers: tuple[tuple[int, int], ...]
    users: tuple[Mapping[int, Taking], ...]
    many: tuple[tuple[int, Sequence[Use]], ...]


def found_once(
    search: Search, limits: Limits, nodes: tuple[int, ...], what: Any, find: Callable[[], T]
) -> T:
    """What is best for some nodes, found once for all descents that come to the same around them.

    Descents that begin differently mostly end alike, and what moves nowhere is asked again. `what`
    may be a value among others, around the nodes; what is found names no node.
    """

    def found() -> T:
        alike = _told(search, limits, nodes, what)
        return find() if alike is None else limits.once(alike, find)

    own = "own", search.graph, nodes, what, search.state_near(nodes)
    return limits.once(own, found)


def _told(search: Search, limits: Limits, nodes: tuple[int, ...], what: Any) -> Any:
    """All that decides what is best for some nodes; None where that takes long to tell."""
    placed = search.placed
    key = "place", search.graph, nodes
    place = limits.once(key, partial(_place, search, limits, nodes))
    if place is None:
        return None
    said = tuple([place.places.get(part, part) for part in what or ()])
    lying = [placed[node] for node in place.moved]
    made = [placed[node].results[result] for node, result in place.makers]
    wanted = [_wanted(placed, users, limits) for users in place.users]
    many = [placed.others(*one) for one in place.many]
    return "alike", place.number, said, search.prices, *lying, *made, *wanted, *many


def _wanted(placed: Placements, users: Mapping[int, Taking], limits: Limits) -> frozenset[Sharding]:
    """The shardings in which some nodes read a value, of which many may be placed alike."""
    found: frozenset[Sharding] = frozenset()
    for operand, take in users.items():
        placements = frozenset(take(placed))
        read = limits.once(("wanted", operand, placements), partial(_read, placements, operand))
        found = found | read if found else read
    return found


def _read(placements: Collection[Placement], operand: int) -> frozenset[Sharding]:
    return frozenset([placement.operands[operand] for placement in placements])


def _place(search: Search, limits: Limits, nodes: tuple[int, ...]) -> _Place | None:
    graph, readers = search.graph, search.tallies.readers
    moved = tuple(moved_with(graph, nodes))
    position = {node: k for k, node in enumerate(moved)}
    values = values_touched(graph, moved)
    if len(values) > WIDE or any(v.read_in is not None for v in values):
        return None
    places = {value.var: k for k, value in enumerate(values)}
    own = uses_by(graph, moved)
    said = (
        len(nodes),
        tuple([_node(search, limits, node, places) for node in moved]),
        tuple([_value(graph, v, position, own[v.var], v.var in readers) for v in values]),
    )
    numbers = limits.known.setdefault("numbers", {})
    return _Place(
        numbers.setdefault(said, len(numbers)),
        moved,
        places,
        tuple(
            (v.maker, v.result) for v in values if v.maker is not None and v.maker not in position
        ),
        tuple(_by_operand(v, position) for v in values if v.var not in readers),
        tuple((readers[v.var], own[v.var]) for v in values if v.var in readers),
    )


def _by_operand(value: Value, position: dict[int, int]) -> dict[int, Taking]:
    """How to take the placements of those who read a value without being moved."""
    found: dict[int, list[int]] = {}
    for node, operand in value.uses:
        if node not in position:
            found.setdefault(operand, []).append(node)
    # Twice the last: of one node alone its placement would come without a tuple around it.
    return {operand: taking([*nodes, nodes[-1]]) for operand, nodes in found.items()}


def _node(search: Search, limits: Limits, index: int, places: dict[Var, int]) -> tuple[Any, ...]:
    graph = search.graph
    node = graph.nodes[index]
    return (
        graph.alike[index],
        tuple(nominal(graph, node)),
        limits.work[index],
        limits.held.get(index),
        search.scattered(node),
        tuple([places[var] for var in node.operands]),
        tuple([places[var] for var in node.results]),
    )


def _value(
    graph: Graph,
    value: Value,
    position: dict[int, int],
    own: Sequence[Use],
    is_read_by_many: bool,
) -> tuple[Any, ...]:
    maker = None if value.maker is None else position.get(value.maker)
    return (
        value.by_itself,
        value.maker is None,
        None if maker is None else (maker, value.result),
        value.var in graph.carries.adopting,
        is_read_by_many,
        tuple([(position[node], operand) for node, operand in own]),
    )
