"""Coordinate descent over the cost graph, from completion, at fixed hints.

Each node in turn takes the strategy that is cheapest given its neighbours: its own computation,
plus for every value it touches the cheapest tree of reshards from the produced sharding to all
that its users want. A node whose neighbour changed is looked at again; the sum only falls, so the
descent ends, never dearer than where it began. No single equation may be given more work per
device than completion gives it.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from meshwise.choose.candidates import candidates
from meshwise.choose.graph import Graph, Value
from meshwise.choose.plan import Rejected
from meshwise.choose.regions import Node
from meshwise.choose.tree import IMPOSSIBLE, reshard_tree
from meshwise.ir.factors import Strategy, dims_sharding, operand_sharding
from meshwise.ir.sharding import DimAxes, Reduction, Sharding, unreduced
from meshwise.reshard.search import reshard_cost

MOST_SWEEPS = 8
MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Placement:
    """A strategy, and the shardings it wants of operands and produces."""

    strategy: Strategy
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    seconds: float


class Search:
    """The state of a descent: one placement a node."""

    def __init__(self, graph: Graph):
        """Nothing is placed yet; `start` places every node."""
        self.graph = graph
        self.placed: list[Placement] = []
        self.known: dict[tuple[int, Strategy], Placement] = {}
        self.work_limit: list[float] = []

    def place(self, node: Node, strategy: Strategy) -> Placement:
        """The placement of a strategy (remembered)."""
        key = node.index, strategy
        if key not in self.known:
            rule = node.rule
            self.known[key] = Placement(
                strategy,
                tuple(
                    operand_sharding(rule, strategy, i, i in node.carries)
                    for i in range(len(rule.operands))
                ),
                tuple(_produced(node, strategy, i) for i in range(len(rule.results))),
                self._seconds(node, strategy),
            )
        return self.known[key]

    def _seconds(self, node: Node, strategy: Strategy) -> float:
        """Time each device computes: its share of the flops."""
        share = 1.0
        for size, axes in zip(node.rule.sizes, strategy.axes, strict=True):
            if axes and size:
                share *= -(-size // self.graph.mesh.size(axes)) / size
        return node.flops * share / self.graph.hardware.flops_per_s

    def produced(self, value: Value) -> Sharding:
        """The sharding in which a value is produced."""
        if value.fixed is not None:
            return value.fixed
        assert value.maker is not None
        return self.placed[value.maker].results[value.result]

    def wanted(self, value: Value) -> set[Sharding]:
        """The shardings in which a value is wanted."""
        return {self.placed[n].operands[i] for n, i in value.uses} | set(value.returned)

    def value_seconds(self, value: Value) -> float:
        """Cost of a value's reshards."""
        return self.tree_seconds(value, self.produced(value), frozenset(self.wanted(value)))

    def tree_seconds(
        self, value: Value, produced: Sharding, wanted: frozenset[Sharding]
    ) -> float:
        """Cost of the cheapest tree of reshards from `produced` to all of `wanted`."""
        if value.remade:
            return IMPOSSIBLE if any(w.unreduced for w in wanted) else 0.0
        graph = self.graph
        return reshard_tree(
            value.shape, value.itemsize, graph.mesh, produced, wanted, graph.hardware
        )[0]

    def total(self) -> float:
        """Cost of everything."""
        values = sum(self.value_seconds(v) for v in self.graph.values.values())
        return values + sum(p.seconds for p in self.placed)

    def around(self, node: Node) -> list[Value]:
        """The values a node touches."""
        touched = dict.fromkeys((*node.operands, *node.results))
        return [self.graph.values[v] for v in touched]

    def price(self, node: Node, placement: Placement, touched: Sequence[Value]) -> float:
        """Cost of a node and of the values around it, were it placed so."""
        before = self.placed[node.index]
        self.placed[node.index] = placement
        total = placement.seconds
        for value in touched:
            total += self.value_seconds(value)
            if total == IMPOSSIBLE:
                break
        self.placed[node.index] = before
        return total


def _produced(node: Node, strategy: Strategy, result: int) -> Sharding:
    """The sharding of a result: unreduced over what is carried and the axes it is reduced over."""
    axes = list(strategy.carried)
    operator = Reduction.SUM
    for factor, reduction in node.reduced[result]:
        if strategy.axes[factor]:
            axes += strategy.axes[factor]
            operator = reduction
    return unreduced(dims_sharding(node.rule.results[result], strategy.axes), axes, operator)


def start_from_completion(search: Search) -> None:
    """Place every node as completion suggests: cheapest against the values' own shardings."""
    graph = search.graph
    fixed = fixed_strategies(graph)
    for node in graph.nodes:
        if node.index in fixed:
            best = search.place(node, fixed[node.index])
        else:
            nominal = _nominal(graph, node)
            operands = [Sharding(dims) for dims in nominal[: len(node.operands)]]
            found = candidates(node, graph.mesh, operands, (), nominal, None)
            placements = [search.place(node, s) for s in found]
            best = min(placements, key=lambda p: _against(graph, node, p, nominal))
        search.placed.append(best)
        search.work_limit.append(best.seconds * (1 + 1e-9))


def start_forward(search: Search, limits: Sequence[float]) -> None:
    """Place nodes in the program's order, each where its operands already are.

    What is not placed yet is taken as completion has it; `limits` bound each node's work.
    """
    graph = search.graph
    fixed = fixed_strategies(graph)
    for node in graph.nodes:
        nominal = _nominal(graph, node)
        sources = list(nominal)
        for k, var in enumerate(node.operands):
            value = graph.values[var]
            if value.fixed is not None or value.maker < len(search.placed):
                sources[k] = search.produced(value).dims
        if node.index in fixed:
            best = search.place(node, fixed[node.index])
        else:
            operands = [Sharding(dims) for dims in sources[: len(node.operands)]]
            found = candidates(node, graph.mesh, operands, (), sources, None)
            placements = [p for s in found if (p := search.place(node, s)).seconds
                          <= limits[node.index]]
            count = len(node.operands)
            targets = [*sources[:count], *[None] * len(node.results)]
            best = min(placements, key=lambda p: _against(graph, node, p, targets))
        search.placed.append(best)
    search.work_limit = list(limits)


def fixed_strategies(graph: Graph) -> dict[int, Strategy]:
    """Nodes with nothing to decide: hints, and nodes without factors."""
    fixed: dict[int, Strategy] = {}
    for node in graph.nodes:
        hint = graph.program.hints.get(node.members[0].equation)
        if hint is not None:
            dims = graph.nominal(node.results[0]) if node.results else ()
            axes = [()] * len(node.rule.sizes)
            for dim, own in zip(node.rule.operands[0] if node.rule.operands else (), dims):
                if dim:
                    axes[dim[0]] = own  # type: ignore[call-overload]
            fixed[node.index] = Strategy(tuple(axes))
        elif not node.rule.sizes and not node.carries:
            fixed[node.index] = Strategy(())
    return fixed


def _nominal(graph: Graph, node: Node) -> list[DimAxes]:
    return [graph.nominal(v) for v in (*node.operands, *node.results)]


def _against(
    graph: Graph, node: Node, placement: Placement, tensors: Sequence[DimAxes | None]
) -> float:
    """Work, reshards of operands from the given shardings, and of results to them.

    None for a result that may stay as it is.
    """
    total = placement.seconds
    count = len(node.operands)
    for k, (var, dims) in enumerate(zip((*node.operands, *node.results), tensors, strict=True)):
        value = graph.values[var]
        if value.remade or dims is None:
            continue
        if k < count:
            source, target = Sharding(dims), placement.operands[k]
        else:
            source, target = placement.results[k - count], Sharding(dims)
        total += reshard_cost(
            value.shape, value.itemsize, graph.mesh, source, target, graph.hardware
        )
    return total


def descend(search: Search) -> dict[int, tuple[Rejected, ...]]:
    """Improve until no move helps; returns what lost at each node in its last round.

    Single nodes move first. Then all users of a value move together to one sharding of it: a
    gather that three products share is worth more than any of them can see alone.
    """
    fixed = fixed_strategies(search.graph).keys()
    free = [n.index for n in search.graph.nodes if n.index not in fixed]
    lost: dict[int, tuple[Rejected, ...]] = {}
    dirty = set(free)
    for _ in range(MOST_ROUNDS):
        _settle_nodes(search, dirty, fixed, lost)
        dirty = _move_shared_values(search, set(free))
        if not dirty:
            break
    return lost


def _settle_nodes(
    search: Search, dirty: set[int], fixed: Set[int], lost: dict[int, tuple[Rejected, ...]]
) -> None:
    """Each dirty node takes its best strategy, until none is dirty."""
    graph = search.graph
    for sweep in range(MOST_SWEEPS):
        if not dirty:
            break
        for index in sorted(dirty, reverse=bool(sweep % 2)):
            node = graph.nodes[index]
            dirty.discard(index)
            before = search.placed[index]
            best, lost[index] = _best(search, node)
            if best is not before:
                search.placed[index] = best
                dirty.update(_neighbours(search, node) - fixed)


def _move_shared_values(search: Search, free: set[int]) -> set[int]:
    """Move all users of each shared value to one sharding of it, where that is cheaper.

    Returns the nodes that should be looked at again.
    """
    dirty: set[int] = set()
    for value in search.graph.values.values():
        users = {n for n, _ in value.uses} & free
        if len(users) > 1 and not value.remade:
            moved = _move_users(search, value, sorted(users))
            for index in moved:
                dirty |= (_neighbours(search, search.graph.nodes[index]) | {index}) & free
    return dirty


def _move_users(search: Search, value: Value, users: Sequence[int]) -> list[int]:
    """The users that moved, if moving those that can to one sharding of a value pays."""
    graph = search.graph
    options: dict[Sharding, dict[int, tuple[float, Placement]]] = {}
    for index in users:
        node = graph.nodes[index]
        others = [v for v in search.around(node) if v is not value]
        positions = [i for n, i in value.uses if n == index]
        for placement in _placements(search, node):
            wanted = {placement.operands[i] for i in positions}
            if len(wanted) > 1:
                continue
            price = search.price(node, placement, others)
            offers = options.setdefault(wanted.pop(), {})
            if index not in offers or price < offers[index][0]:
                offers[index] = price, placement
    touched = {v.var: v for index in users for v in search.around(graph.nodes[index])}
    before = {index: search.placed[index] for index in users}
    least, best = _price_together(search, users, touched.values()) * (1 - 1e-9), before
    for offers in options.values():
        if len(offers) < 2:
            continue
        for index, (_, placement) in offers.items():
            search.placed[index] = placement
        price = _price_together(search, users, touched.values())
        if price < least:
            least, best = price, {index: search.placed[index] for index in users}
        for index, placement in before.items():
            search.placed[index] = placement
    for index, placement in best.items():
        search.placed[index] = placement
    return [index for index in users if best[index] is not before[index]]


def _price_together(search: Search, nodes: Iterable[int], values: Iterable[Value]) -> float:
    work = sum(search.placed[index].seconds for index in nodes)
    return work + sum(search.value_seconds(v) for v in values)


def _placements(search: Search, node: Node) -> list[Placement]:
    """The placements worth pricing for a node as its neighbours are now; the current one first."""
    graph = search.graph
    operands = [search.produced(graph.values[v]) for v in node.operands]
    results = [sorted(search.wanted(graph.values[v]), key=str) for v in node.results]
    current = search.placed[node.index].strategy
    found = candidates(node, graph.mesh, operands, results, _nominal(graph, node), current)
    limit = search.work_limit[node.index]
    placements = [search.place(node, strategy) for strategy in found]
    return [p for p in placements if p.seconds <= limit]


def _best(search: Search, node: Node) -> tuple[Placement, tuple[Rejected, ...]]:
    """The cheapest placement of a node, and the next ones.

    Of equally cheap ones the current stays, unless another carries a sum further: sums that meet
    later can be reduced together.
    """
    touched = search.around(node)
    priced = [
        (search.price(node, placement, touched), not placement.strategy.carried, k, placement)
        for k, placement in enumerate(_placements(search, node))
    ]
    least = min(priced)
    kept = priced[0]
    if least[0] >= kept[0] * (1 - 1e-9):
        ties = [p for p in priced if p[0] <= kept[0] * (1 + 1e-9)]
        least = kept if not kept[1] else min(ties, key=lambda p: (p[1], p[2]))
    lost = sorted((p for p in priced if p is not least), key=lambda p: p[:3])[:3]
    rejected = tuple(
        Rejected(p[3].strategy, p[0] - least[0]) for p in lost if p[0] < IMPOSSIBLE
    )
    return least[3], rejected


def _neighbours(search: Search, node: Node) -> set[int]:
    found: set[int] = set()
    for value in search.around(node):
        found.update(n for n, _ in value.uses)
        if value.maker is not None:
            found.add(value.maker)
    found.discard(node.index)
    return found
