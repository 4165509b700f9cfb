"""Coordinate descent over the cost graph, at fixed hints.

Each node in turn takes the strategy that is cheapest given its neighbours: its own computation,
plus for every value it touches the cheapest tree of reshards from the produced sharding to all
that its users want. A node whose neighbour changed is looked at again. Then all users of a value
move together to one sharding of it: a gather that three products share is worth more than any of
them can see alone. The sum only falls, so the descent ends, never dearer than where it began.
"""

from collections.abc import Sequence, Set

from meshwise.choose.candidates import candidates
from meshwise.choose.graph import Value
from meshwise.choose.plan import Rejected
from meshwise.choose.regions import Node
from meshwise.choose.search import Change, Search
from meshwise.choose.starts import Limits, fixed_axes, nominal
from meshwise.choose.tree import IMPOSSIBLE
from meshwise.ir.factors import Strategy
from meshwise.ir.sharding import DimAxes, Sharding

MOST_SWEEPS = 8
MOST_ROUNDS = 4
WORTH_IT = 1e-13  # seconds; smaller savings are rounding


def descend(search: Search, limits: Limits) -> dict[int, tuple[Rejected, ...]]:
    """Improve until no move helps; returns what lost at each node in its last round."""
    fixed = fixed_axes(search.graph).keys()
    free = {n.index for n in search.graph.nodes} - fixed
    lost: dict[int, tuple[Rejected, ...]] = {}
    dirty = set(free)
    for _ in range(MOST_ROUNDS):
        _settle_nodes(search, dirty, free, limits, lost)
        dirty = _move_shared_values(search, free, limits)
        if not dirty:
            break
    return lost


def _settle_nodes(
    search: Search,
    dirty: set[int],
    free: Set[int],
    limits: Limits,
    lost: dict[int, tuple[Rejected, ...]],
) -> None:
    """Each dirty node takes its best strategy, until none is dirty."""
    for sweep in range(MOST_SWEEPS):
        if not dirty:
            break
        for index in sorted(dirty, reverse=bool(sweep % 2)):
            node = search.graph.nodes[index]
            dirty.discard(index)
            best, lost[index] = _best(search, node, limits)
            if best is not None:
                dirty |= (search.keep(search.put(node, best)) & free) - {index}


def _best(
    search: Search, node: Node, limits: Limits
) -> tuple[DimAxes | None, tuple[Rejected, ...]]:
    """The axes that save most, None where the current ones are best; and the next ones."""
    priced = []
    current, *others = _choices(search, node, limits)
    for k, axes in enumerate(others):
        changes = search.put(node, axes)
        priced.append((search.delta(changes), k, axes))
        search.undo(changes)
    least = min(priced, default=(0.0, 0, current))
    best = least[2] if least[0] < -WORTH_IT else None
    floor = min(least[0], 0.0)
    ordered = sorted(p for p in [(0.0, -1, current), *priced] if p[2] != (best or current))
    rejected = tuple(
        Rejected(Strategy(axes), cost - floor) for cost, _, axes in ordered[:3] if cost < IMPOSSIBLE
    )
    return best, rejected


def _choices(search: Search, node: Node, limits: Limits) -> list[DimAxes]:
    """The axes worth pricing for a node as its neighbours are now; the current ones first."""
    graph = search.graph
    operands = [search.produced(graph.values[v]) for v in node.operands]
    results = [sorted(search.wanted(graph.values[v]), key=str) for v in node.results]
    current = search.placed[node.index].strategy.axes
    found = candidates(node, graph.mesh, operands, results, nominal(graph, node), current)
    return [a for a in found if a is current or limits.allow(graph, node, a)]


def _move_shared_values(search: Search, free: Set[int], limits: Limits) -> set[int]:
    """Move all users of each shared value to one sharding of it, where that is cheaper.

    Returns the nodes that should be looked at again.
    """
    dirty: set[int] = set()
    for value in search.graph.values.values():
        users = sorted({n for n, _ in value.uses} & free)
        if len(users) > 1 and not value.remade:
            changes = _move_users(search, value, users, limits)
            if changes:
                dirty |= search.keep(changes) & free
    return dirty


def _move_users(search: Search, value: Value, users: Sequence[int], limits: Limits) -> list[Change]:
    """Move the users that can to one sharding of a value, if that pays; what changed."""
    offers = _offers(search, value, users, limits)
    best: tuple[float, list[tuple[Node, DimAxes]]] = (-WORTH_IT, [])
    for offered in offers.values():
        if len(offered) < 2:
            continue
        moves = [(search.graph.nodes[i], axes) for i, (_, axes) in offered.items()]
        changes = [c for node, axes in moves for c in search.put(node, axes)]
        saved = search.delta(changes)
        search.undo(changes)
        if saved < best[0]:
            best = saved, moves
    return [c for node, axes in best[1] for c in search.put(node, axes)]


def _offers(
    search: Search, value: Value, users: Sequence[int], limits: Limits
) -> dict[Sharding, dict[int, tuple[float, DimAxes]]]:
    """For each sharding of a value, the users that could read it so, each at its cheapest."""
    offers: dict[Sharding, dict[int, tuple[float, DimAxes]]] = {}
    for index in users:
        node = search.graph.nodes[index]
        positions = [i for n, i in value.uses if n == index]
        for axes in _choices(search, node, limits):
            changes = search.put(node, axes)
            price = search.delta(changes, without=value)
            wanted = {search.placed[index].operands[i] for i in positions}
            search.undo(changes)
            if len(wanted) == 1 and price < IMPOSSIBLE:
                offered = offers.setdefault(wanted.pop(), {})
                if index not in offered or price < offered[index][0]:
                    offered[index] = price, axes
    return offers
