"""Coordinate descent over the cost graph, at fixed hints.

Each node in turn takes the strategy that is cheapest given its neighbours: its own computation,
plus for every value it touches the cheapest tree of reshards from the produced sharding to all
that its users want. A node whose neighbour changed is looked at again. Then all users of a value
move together to one sharding of it: a gather that three products share is worth more than any of
them can see alone. They do so without the node that makes the value, and with it; where that ends,
also with makers that take what nobody but their users, once moved, would suggest to them. Last,
what scatters terms of a sum is placed with all that makes these, so that no sum is left. The cost
only falls, so the descent ends, never dearer than where it began.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from meshwise.choose.candidates import candidates
from meshwise.choose.graph import Value
from meshwise.choose.limits import Limits, fixed_axes, nominal, open_hints
from meshwise.choose.regions import Node
from meshwise.choose.search import WIDE, Change, Search
from meshwise.choose.surroundings import found_once
from meshwise.choose.tree import IMPOSSIBLE
from meshwise.ir.sharding import DimAxes, Sharding

Choice = tuple[Node, DimAxes]
Priced = tuple[float, int, DimAxes]  # seconds, a number among the choices, and the choice

MOST_SWEEPS = 8
MOST_ROUNDS = 4
MOST_AROUND = 16  # values around a node that moves with the maker of one of them
WORTH_IT = 1e-13  # seconds; smaller savings are rounding


@dataclass(frozen=True, slots=True)
class _Moving:
    """What moves together to one sharding of a value: users of it, and perhaps its maker.

    A maker that `follows` is asked what it could be once the users have moved, and they do not
    move without it; any other chooses among what it is offered as its neighbours are now.
    """

    value: Value
    users: tuple[int, ...]
    maker: Node | None
    follows: bool


def descend(search: Search, limits: Limits) -> None:
    """Improve until no move helps."""
    fixed = fixed_axes(search.graph).keys() - open_hints(search.graph)
    free = {n.index for n in search.graph.nodes} - fixed
    dirty = set(free)
    for _ in range(MOST_ROUNDS):
        settle_nodes(search, dirty, free, limits)
        dirty = _move_shared_values(search, free, limits)
        dirty = dirty or _move_shared_values(search, free, limits, follows=True)
        dirty = dirty or _move_with_makers(search, free, limits)
        if not dirty:
            break


def settle_nodes(search: Search, dirty: set[int], free: Set[int], limits: Limits) -> None:
    """Each dirty node takes its best strategy, until none is dirty; only what is free moves."""
    for sweep in range(MOST_SWEEPS):
        if not dirty:
            break
        for index in sorted(dirty, reverse=bool(sweep % 2)):
            node = search.graph.nodes[index]
            dirty.discard(index)
            best = found_once(search, limits, (index,), None, partial(_best, search, node, limits))
            if best is not None:
                dirty |= (search.keep(search.put(node, best)) & free) - {index}


def _best(search: Search, node: Node, limits: Limits) -> DimAxes | None:
    """The axes that save most; None where the current ones are best.

    Reshards are looked for only where a choice may save something, and more than another does.
    """
    hopeful: list[Priced] = []
    most = search.most_saved(node.index) + search.placed[node.index].seconds
    for k, axes in enumerate(choices_of(search, node, limits)[1:]):
        if most - search.placement(node, axes).seconds <= WORTH_IT:
            continue
        changes = search.put(node, axes)
        bound = search.least_delta(changes)
        if bound < -WORTH_IT:
            hopeful.append((bound, k, axes))
        search.undo(changes)
    best: Priced | None = None
    for bound, k, axes in sorted(hopeful):
        if best is not None and bound > best[0] + WORTH_IT:
            break
        changes = search.put(node, axes)
        found = search.delta(changes), k, axes
        search.undo(changes)
        if found[0] < -WORTH_IT and (best is None or found < best):
            best = found
    return None if best is None else best[2]


def choices_of(search: Search, node: Node, limits: Limits) -> list[DimAxes]:
    """The axes worth pricing for a node as its neighbours are now; the current ones first."""
    if search.width(node.index) <= WIDE:
        return _choices_of(search, node, limits)
    key = "choices", search.graph, node.index, search.state_near((node.index,))
    return limits.once(key, partial(_choices_of, search, node, limits))


def _choices_of(search: Search, node: Node, limits: Limits) -> list[DimAxes]:
    graph = search.graph
    operands = tuple([search.produced(graph.values[v]) for v in node.operands])
    results = tuple([frozenset(search.wanted(graph.values[v])) for v in node.results])
    current = search.placed[node.index].strategy.axes
    natural = tuple(nominal(graph, node))
    within = limits.work[node.index], limits.held.get(node.index), limits.reach
    key = "choices", graph.alike[node.index], operands, results, natural, current, within

    def find() -> list[DimAxes]:
        wanted = [sorted(wishes, key=str) for wishes in results]
        found = candidates(graph, node, operands, wanted, natural, current, limits.reach)
        return [a for a in found if a is current or limits.allow(graph, node, a)]

    return graph.once(key, find)


def _move_shared_values(
    search: Search, free: Set[int], limits: Limits, follows: bool = False
) -> set[int]:
    """Move all users of each shared value to one sharding of it, where that is cheaper.

    With `follows` the maker may take what only its users, once moved, suggest to it. Returns the
    nodes that should be looked at again.
    """
    dirty: set[int] = set()
    for value in search.graph.values.values():
        moving = _moving(search, value, free, follows)
        changes = [] if moving is None else _move(search, moving, limits)
        if changes:
            dirty |= search.keep(changes) & free
    return dirty


def _move_with_makers(search: Search, free: Set[int], limits: Limits) -> set[int]:
    """Place nodes that make sums so that they make none, where the makers of operands follow.

    Each of these alone saves nothing, as the others are split then still: a scatter of few rows
    into zeros is done by every device where that sends less, and so is what makes the rows. Only
    what computes nothing is asked. Returns the nodes that should be looked at again.
    """
    dirty: set[int] = set()
    for node in search.graph.nodes:
        if node.flops or node.index not in free:
            continue
        if any(s.unreduced for s in search.placed[node.index].results):
            best: tuple[float, list[Choice]] = (-WORTH_IT, [])
            for axes in choices_of(search, node, limits)[1:]:
                moves = _with_makers(search, node, axes, free, limits)
                if len(moves) > 1 and together(search, moves, search.least_delta) < best[0]:
                    saved = together(search, moves, search.delta)
                    best = min(best, (saved, moves), key=lambda one: one[0])
            changes = [c for one, axes in best[1] for c in search.put(one, axes)]
            dirty |= search.keep(changes) & free
    return dirty


def _with_makers(
    search: Search, node: Node, axes: DimAxes, free: Set[int], limits: Limits
) -> list[Choice]:
    """A node that makes no sum, with makers of what it reads that make it so; none if it does."""
    graph = search.graph
    placed = search.placement(node, axes)
    if any(s.unreduced for s in placed.results):
        return []
    moves = {node.index: (node, axes)}
    for var, wanted in zip(node.operands, placed.operands, strict=True):
        value = graph.values[var]
        if value.remade or value.maker is None or search.produced(value).straight == wanted:
            continue
        if value.maker not in free:
            continue
        maker = graph.nodes[value.maker]
        for option in choices_of(search, maker, limits):
            made = search.placement(maker, option).results[value.result]
            if made.straight == wanted:
                moves.setdefault(maker.index, (maker, option))
                break
    return list(moves.values())


def _moving(search: Search, value: Value, free: Set[int], follows: bool) -> _Moving | None:
    """What may move with a value; None where nothing does, or only what moves by itself anyway."""
    users = tuple(sorted({n for n, _ in value.uses} & free))
    if not users or value.remade:
        return None
    maker = _maker_along(search, value, users, free)
    if maker is None and (follows or len(users) == 1):
        return None
    return _Moving(value, users, maker, follows)


def _move(search: Search, moving: _Moving, limits: Limits) -> list[Change]:
    """Move those that can to one sharding of a value, if that pays; what changed.

    Its maker may move with them: neither it nor they would without the other.
    """
    value, maker = moving.value, moving.maker
    nodes = moving.users if maker is None else (*moving.users, maker.index)

    def find() -> list[tuple[int, DimAxes]]:
        best = _best_move(search, moving, limits)
        return [(nodes.index(node.index), axes) for node, axes in best]

    moves = found_once(search, limits, nodes, (value.var, moving.follows), find)
    placed = [(search.graph.nodes[nodes[place]], axes) for place, axes in moves]
    return [c for node, axes in placed for c in search.put(node, axes)]


def _best_move(search: Search, moving: _Moving, limits: Limits) -> list[Choice]:
    """The move that saves most; none where none saves anything."""
    nodes = search.graph.nodes
    best: tuple[float, list[Choice]] = (-WORTH_IT, [])
    if _most_saved(search, moving, limits) <= WORTH_IT:
        return []
    for offers in _moves_of(search, moving, limits):
        hoped = [(nodes[i], min(found)[2]) for i, found in offers.items()]
        if len(hoped) < 2 or together(search, hoped, search.least_delta) > best[0] + WORTH_IT:
            continue
        moves = [
            (nodes[i], axes)
            for i, found in offers.items()
            if (axes := _cheapest_offer(search, moving.value, nodes[i], found)) is not None
        ]
        saved = together(search, moves, search.delta)
        if len(moves) > 1 and saved < best[0]:
            best = saved, moves
    return best[1]


def _most_saved(search: Search, moving: _Moving, limits: Limits) -> float:
    """What a move saves at most: all reshards around it, and the work of users, but for the least.

    Of a maker that follows nobody knows yet what it could be.
    """
    graph, placed = search.graph, search.placed
    others = () if moving.maker is None else (moving.maker.index,)
    saved = search.most_saved(*moving.users, *others)
    for index in (*moving.users, *others):
        saved += placed[index].seconds
        if not (moving.follows and index in others):
            node = graph.nodes[index]
            choices = choices_of(search, node, limits)
            saved -= min([search.placement(node, axes).seconds for axes in choices])
    return saved


def _moves_of(search: Search, moving: _Moving, limits: Limits) -> Iterator[dict[int, list[Priced]]]:
    """For each sharding of a value how its users could read it so, then with its maker as well."""
    value, maker, follows = moving.value, moving.maker, moving.follows
    offered = _offers(search, value, moving.users, limits)
    if not follows:
        yield from offered.values()
    if maker is None:
        return
    priced: dict[DimAxes, tuple[Sharding, float]] = {}
    choices = choices_of(search, maker, limits)
    for sharding, offers in offered.items():
        made: list[Priced] = []
        if follows:
            choices = _choices_then(search, maker, offers, limits)
        for k, axes in enumerate(choices):
            if axes not in priced:
                priced[axes] = _made_so(search, value, maker, axes)
            makes, least = priced[axes]
            if makes == sharding and least < IMPOSSIBLE:
                made.append((least, k, axes))
        if made:
            yield {**offers, maker.index: made}


def _choices_then(
    search: Search, maker: Node, offers: Mapping[int, Sequence[Priced]], limits: Limits
) -> list[DimAxes]:
    """The axes worth pricing for the maker of a value when its users read it as they offer."""
    moves = [(search.graph.nodes[i], min(found)[2]) for i, found in offers.items()]
    changes = [c for node, axes in moves for c in search.put(node, axes)]
    found = choices_of(search, maker, limits)
    search.undo(changes)
    return found


def _made_so(search: Search, value: Value, maker: Node, axes: DimAxes) -> tuple[Sharding, float]:
    """The sharding in which a value is made so, and what that costs at least without reshards."""
    changes = search.put(maker, axes)
    found = search.produced(value).reduced, search.least_delta(changes, without=value)
    search.undo(changes)
    return found


def _maker_along(search: Search, value: Value, users: Sequence[int], free: Set[int]) -> Node | None:
    """The maker of a value, if it may move with the users.

    Around none of them are more than a few values: a region of all layers has as many as there are
    layers, and would be priced again, with all of them, for each.
    """
    maker = value.maker
    if maker is None or maker not in free or maker in users:
        return None
    nodes = [search.graph.nodes[i] for i in (maker, *users)]
    near = all(search.width(node.index) <= MOST_AROUND for node in nodes)
    return nodes[0] if near else None


def together(
    search: Search, moves: Sequence[Choice], price: Callable[[Sequence[Change]], float]
) -> float:
    """What it costs to place several nodes at once."""
    changes = [c for node, axes in moves for c in search.put(node, axes)]
    seconds = price(changes)
    search.undo(changes)
    return seconds


def _offers(
    search: Search, value: Value, users: Sequence[int], limits: Limits
) -> dict[Sharding, dict[int, list[Priced]]]:
    """For each sharding of a value, how each user could read it so, and what that costs at least.

    That is without the reshards of the value itself.
    """
    offers: dict[Sharding, dict[int, list[Priced]]] = {}
    operands: dict[int, list[int]] = {}
    for index, operand in value.uses:
        operands.setdefault(index, []).append(operand)
    for index in users:
        node, positions = search.graph.nodes[index], operands[index]
        for k, axes in enumerate(choices_of(search, node, limits)):
            changes = search.put(node, axes)
            wanted = {search.placed[index].operands[i] for i in positions}
            if len(wanted) == 1:
                least = search.least_delta(changes, without=value)
                if least < IMPOSSIBLE:
                    offered = offers.setdefault(wanted.pop(), {})
                    offered.setdefault(index, []).append((least, k, axes))
            search.undo(changes)
    return offers


def _cheapest_offer(
    search: Search, value: Value, node: Node, offers: Sequence[Priced]
) -> DimAxes | None:
    """The first of a user's cheapest ways to read a value in some sharding; None if impossible."""
    best: Priced | None = None
    for bound, k, axes in sorted(offers):
        if best is not None and bound > best[0] + WORTH_IT:
            break
        changes = search.put(node, axes)
        price = search.delta(changes, without=value)
        search.undo(changes)
        if price < IMPOSSIBLE and (best is None or (price, k) < best[:2]):
            best = price, k, axes
    return None if best is None else best[2]
