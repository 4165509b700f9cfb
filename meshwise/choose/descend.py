"""Coordinate descent over the cost graph, from completion, at fixed hints.

Each node in turn takes the strategy that is cheapest given its neighbours: its own computation,
plus for every value it touches the cheapest tree of reshards from the produced sharding to all
that its users want. A node whose neighbour changed is looked at again; the sum only falls, so the
descent ends, never dearer than where it began. No single equation may be given more work per
device than completion gives it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.choose.candidates import candidates
from meshwise.choose.graph import Graph, Value
from meshwise.choose.plan import Rejected
from meshwise.choose.regions import Node
from meshwise.choose.tree import IMPOSSIBLE, reshard_tree
from meshwise.ir.factors import Strategy, operand_sharding, result_sharding
from meshwise.ir.sharding import Sharding
from meshwise.reshard.search import reshard_cost

MOST_SWEEPS = 8


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
                tuple(result_sharding(rule, strategy, i) for i in range(len(rule.results))),
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
            best = min(placements, key=lambda p: _against_nominal(graph, node, p, nominal))
        search.placed.append(best)
        search.work_limit.append(best.seconds * (1 + 1e-9))


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


def _nominal(graph: Graph, node: Node) -> list[tuple[tuple[str, ...], ...]]:
    return [graph.nominal(v) for v in (*node.operands, *node.results)]


def _against_nominal(
    graph: Graph, node: Node, placement: Placement, nominal: Sequence[tuple[tuple[str, ...], ...]]
) -> float:
    """Work, reshards of operands from completion's shardings, and of results to them."""
    total = placement.seconds
    count = len(node.operands)
    for k, var in enumerate((*node.operands, *node.results)):
        value = graph.values[var]
        own = Sharding(nominal[k])
        if value.remade:
            continue
        if k < count:
            source, target = own, placement.operands[k]
        else:
            source, target = placement.results[k - count], own
        total += reshard_cost(
            value.shape, value.itemsize, graph.mesh, source, target, graph.hardware
        )
    return total


def descend(search: Search) -> dict[int, tuple[Rejected, ...]]:
    """Improve until no single node can; returns what lost at each node in its last round."""
    graph = search.graph
    fixed = fixed_strategies(graph)
    dirty = {n.index for n in graph.nodes if n.index not in fixed}
    lost: dict[int, tuple[Rejected, ...]] = {}
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
                dirty.update(_neighbours(search, node) - fixed.keys())
    return lost


def _best(search: Search, node: Node) -> tuple[Placement, tuple[Rejected, ...]]:
    graph = search.graph
    current = search.placed[node.index]
    touched = search.around(node)
    operands = [search.produced(graph.values[v]) for v in node.operands]
    results = [
        [s for s in search.wanted(graph.values[v])] for v in node.results
    ]
    found = candidates(
        node, graph.mesh, operands, results, _nominal(graph, node), current.strategy
    )
    limit = search.work_limit[node.index]
    priced = []
    for strategy in found:
        placement = search.place(node, strategy)
        if placement.seconds <= limit:
            priced.append((search.price(node, placement, touched), len(priced), placement))
    least = min(priced)
    kept = priced[0]
    if least[0] >= kept[0] * (1 - 1e-9):
        least = kept
    lost = sorted((p for p in priced if p is not least), key=lambda p: p[:2])[:3]
    rejected = tuple(
        Rejected(p.strategy, cost - least[0]) for cost, _, p in lost if cost < IMPOSSIBLE
    )
    return least[2], rejected


def _neighbours(search: Search, node: Node) -> set[int]:
    found: set[int] = set()
    for value in search.around(node):
        found.update(n for n, _ in value.uses)
        if value.maker is not None:
            found.add(value.maker)
    found.discard(node.index)
    return found
