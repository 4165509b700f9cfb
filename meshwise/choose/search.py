"""The state of a search over the cost graph: one placement a node, and what a change would save.

Which sums a node carries is not decided but follows: an addition carries what all its terms are
unreduced over, less the axes it uses itself. So placing one node may change what the nodes after
it carry; `Search.put` does both, and tells what it changed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from meshwise._jax import Var
from meshwise.choose.around import (
    around_nodes,
    carriers,
    deciding_of,
    state_near,
    terms_of,
    values_moved_with,
)
from meshwise.choose.graph import Graph, Value
from meshwise.choose.placement import Placement, produced, scattered_axes
from meshwise.choose.pricing import exchanges_of, node_seconds, turned_along, work_seconds
from meshwise.choose.regions import Node
from meshwise.choose.tally import Placements, tallies_of
from meshwise.choose.tree import IMPOSSIBLE, Edge, reshard_tree, tree_bound
from meshwise.ir.bodies import Path, times_made
from meshwise.ir.factors import Strategy, operand_sharding
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import DimAxes, Reduction, Sharding, local_bytes
from meshwise.reshard.plan import Reshard
from meshwise.reshard.search import plan_reshard, reshard_cost

# Of two plans that send the same, the one in which arguments are resharded, not what is computed of
# them, takes a buffer less: an argument stays where it is, but element-wise work on its copy is
# done in place. As a part of a reshard's seconds; less than a flop an element.
COMPUTED_BEFORE = 1e-5

# A node that touches more values is wide: most that is asked of it is remembered.
WIDE = 64
# Digits of seconds where one price is taken off another: what is left of equal ones is equal.
ROUNDED = 15

Change = tuple[int, Placement]  # a node, and how it was placed before
TreeKey = tuple[tuple[int, ...], int, Sharding, frozenset[Sharding]]


class Search:
    """Placements of all nodes, priced together."""

    def __init__(
        self,
        graph: Graph,
        axes: Sequence[DimAxes],
        carries: bool = True,
        seconds_per_byte: float = 0.0,
        dearer_work: float = 0.0,
    ):
        """Place every node by the axes of its factors; carry sums unless told not to.

        `seconds_per_byte` is what a byte costs that a device holds of a value or a copy of it, and
        `dearer_work` what work costs besides its time, as so many times that.
        """
        self.graph = graph
        self._seconds_per_byte = seconds_per_byte
        self._dearer_work = dearer_work
        self._known: list[dict[tuple[DimAxes, Axes], Placement]] = [
            graph.once(("placements", dearer_work, alike), dict) for alike in graph.alike
        ]
        self._terms: list[list[Value]] = graph.once(
            ("terms",), lambda: [terms_of(graph, node) for node in graph.nodes]
        )
        self.tallies = graph.once(("tallies",), lambda: tallies_of(graph, self._terms))
        self._deciding = graph.once(("deciding",), lambda: deciding_of(graph, self.tallies))
        self._around = graph.once(("around",), lambda: around_nodes(graph, self._deciding))
        what = seconds_per_byte, dearer_work
        self._seconds: dict[Any, float] = graph.once(("value seconds", *what), dict)
        self._at_least: dict[Any, float] = graph.once(("at least", *what), dict)
        self._wide: dict[Any, float] = graph.once(("wide", *what), dict)
        self._same: dict[Sharding, Sharding] = graph.once(("shardings",), dict)
        self._carriers = graph.once(("carriers",), lambda: carriers(graph))
        self._scattered = [scattered_axes(graph, node) for node in graph.nodes]
        placed = [self.placement(node, own) for node, own in zip(graph.nodes, axes, strict=True)]
        self.placed = Placements(placed, self.tallies)
        for node in graph.nodes if carries else ():
            self.put(node, self.placed[node.index].strategy.axes)
        self.value_cost = {v.var: self.value_seconds(v) for v in graph.values.values()}

    def placement(self, node: Node, axes: DimAxes, carried: Axes = ()) -> Placement:
        """What a strategy wants and produces (remembered)."""
        known, key = self._known[node.index], (axes, carried)
        found = known.get(key)
        if found is None:
            rule, strategy = node.rule, Strategy(axes, carried)
            wanted = [
                operand_sharding(rule, strategy, i, i in node.carries)
                for i in range(len(rule.operands))
            ]
            turned = turned_along(self.graph, node, axes)
            made = [produced(node, strategy, i, turned) for i in range(len(rule.results))]
            found = known[key] = Placement(
                strategy,
                tuple(self._same.setdefault(s, s) for s in wanted),
                tuple(self._same.setdefault(s, s) for s in made),
                self._node_seconds(node, axes),
            )
        return found

    def _node_seconds(self, node: Node, axes: DimAxes) -> float:
        seconds = node_seconds(self.graph, node, axes, leaves_turned=True)
        if not self._dearer_work:
            return seconds
        return seconds + self._dearer_work * work_seconds(self.graph, node, axes)

    def around(self, node: Node) -> Sequence[Value]:
        """The values a node touches."""
        return [value for value, *_ in self._around[node.index].values()]

    def width(self, node: int) -> int:
        """How many values a node touches."""
        return len(self._around[node])

    @property
    def prices(self) -> tuple[float, float]:
        """What this search charges for bytes that are held, and for work besides its time."""
        return self._seconds_per_byte, self._dearer_work

    def state_near(self, nodes: tuple[int, ...]) -> tuple[Any, ...]:
        """All that decides what another placement of some nodes costs in a search of this graph."""
        graph = self.graph
        near = graph.once(("near", nodes), lambda: state_near(graph, self.tallies, nodes))
        return self.prices, near(self.placed)

    @property
    def axes(self) -> list[DimAxes]:
        """The axes of each node's factors."""
        return [placed.strategy.axes for placed in self.placed]

    def scattered(self, node: Node) -> frozenset[str]:
        """Axes over which a row that a node makes of a finished stack is reduce-scattered."""
        return self._scattered[node.index]

    def produced(self, value: Value) -> Sharding:
        """The sharding in which a value is produced."""
        if value.fixed is not None:
            return value.fixed
        assert value.maker is not None
        return self.placed[value.maker].results[value.result]

    def wanted(self, value: Value) -> set[Sharding]:
        """The shardings in which a value is wanted."""
        placed = self.placed
        tally = self.tallies.readers.get(value.var)
        wanted = set(value.returned)
        if tally is not None:
            return wanted.union(placed.counts[tally])
        for node, operand in value.uses:
            wanted.add(placed[node].operands[operand])
        return wanted

    def value_seconds(self, value: Value) -> float:
        """Cost of a value's reshards: the cheapest tree from what is produced to all wanted.

        It is remembered by the placements that decide in which shardings those are, for all values
        that are alike.
        """
        number, deciding = self._deciding[value.var]
        key = number, deciding(self.placed)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self._at_least[key] = self._find_seconds(value)
        return found

    def _find_seconds(self, value: Value) -> float:
        what, holding = self._reshards(value), self._holding_seconds(value)
        if what is None:
            return holding
        tree = reshard_tree(*what[:2], self.graph.mesh, *what[2:], self.graph.hardware)
        seconds = self.likely_seconds(value, *tree)
        made = 1.0 if value.maker is None else 1 + COMPUTED_BEFORE
        return seconds * made * value.trips + holding

    def likely_seconds(self, value: Value, seconds: float, edges: Sequence[Edge]) -> float:
        """What reshards of a value cost where some are made in branches, which may not be taken."""
        if value.read_in is None or seconds == IMPOSSIBLE:
            return seconds
        what = value.shape, value.itemsize, self.graph.mesh
        return sum(
            times * reshard_cost(Reshard(*what, *edge, self.graph.hardware))
            for times, edge in zip(self.times_made(value, edges), edges, strict=True)
        )

    def times_made(self, value: Value, edges: Sequence[Edge]) -> list[float]:
        """How often each reshard of a value is made, for each time that the value is made."""
        if value.read_in is None:
            return [1.0] * len(edges)
        read = self._read_in(value)
        for source, target in reversed(edges):
            read.setdefault(source, []).extend(read.setdefault(target, [()]))
        return [times_made(read[target]) for _, target in edges]

    def _read_in(self, value: Value) -> dict[Sharding, list[Path]]:
        """The bodies that each copy is read in that is wanted of a value."""
        assert value.read_in is not None
        found: dict[Sharding, list[Path]] = {s: [()] for s in value.returned}
        for (node, operand), paths in zip(value.uses, value.read_in, strict=True):
            found.setdefault(self.placed[node].operands[operand], []).extend(paths)
        return found

    def _holding_seconds(self, value: Value) -> float:
        if not self._seconds_per_byte:
            return 0.0
        return self._seconds_per_byte * self.held_bytes(value)

    def held_bytes(self, value: Value) -> int:
        """Bytes that a device holds of a value, all its copies together."""
        if value.remade:
            return 0
        shardings = {self.produced(value).straight, *self.wanted(value)}
        what = value.shape, value.itemsize
        return sum(local_bytes(*what, s, self.graph.mesh) for s in shardings)

    def _least_seconds(self, value: Value) -> float:
        """What `value_seconds` is not below, found without looking for reshards."""
        number, deciding = self._deciding[value.var]
        key = number, deciding(self.placed)
        found = self._at_least.get(key)
        if found is None:
            found = self._at_least[key] = self._find_least_seconds(value)
        return found

    def _find_least_seconds(self, value: Value) -> float:
        what, holding = self._reshards(value), self._holding_seconds(value)
        if what is None:
            return holding
        seconds = tree_bound(*what[:2], self.graph.mesh, *what[2:], self.graph.hardware)
        if value.read_in is not None:
            seconds *= min(map(times_made, self._read_in(value).values()))
        return seconds * value.trips + holding

    def _reshards(self, value: Value) -> TreeKey | None:
        """From which sharding to which a value is brought; None where that costs nothing."""
        if value.remade:
            return None
        wanted, produced = self.wanted(value), self.produced(value)
        wanted.discard(produced)
        return (value.shape, value.itemsize, produced, frozenset(wanted)) if wanted else None

    def sent_bytes(self, copies: Mapping[Var, Sequence[Edge]]) -> float:
        """What a device sends: reshards, given for each value, and what local rules exchange."""
        graph, sent = self.graph, 0.0
        for var, edges in copies.items():
            value = graph.values[var]
            for times, (source, target) in zip(self.times_made(value, edges), edges, strict=True):
                what = value.shape, value.itemsize, graph.mesh, source, target
                plan = plan_reshard(Reshard(*what, graph.hardware))
                sent += value.trips * times * plan.wire_bytes
        for node, placed in zip(graph.nodes, self.placed, strict=True):
            exchanges = exchanges_of(graph, node, placed.strategy.axes, leaves_turned=True) or ()
            sent += sum(runs * one.wire_bytes for runs, one in exchanges)
        return sent

    def put(self, node: Node, axes: DimAxes) -> list[Change]:
        """Place a node, and let the nodes after it carry what they now can; what changed."""
        changes: list[Change] = []
        waiting = [(node, axes)]
        while waiting:
            node, axes = waiting.pop()
            new = self.placement(node, axes, self._carried(node, axes))
            before = self.placed[node.index]
            if new is before:
                continue
            changes.append((node.index, before))
            self.placed.place(node.index, new)
            after = self._carriers.get(node.index)
            if after and new.results != before.results:
                waiting += [(self.graph.nodes[i], self.placed[i].strategy.axes) for i in after]
        return changes

    def _carried(self, node: Node, axes: DimAxes) -> Axes:
        common: set[str] | None = None
        terms, tally = self._terms[node.index], self.tallies.terms.get(node.index)
        for source in map(self.produced, terms) if tally is None else self.placed.counts[tally]:
            if not source.unreduced or source.reduction is not Reduction.SUM:
                return ()
            common = set(source.unreduced) if common is None else common & set(source.unreduced)
        if not common:
            return ()
        used = {a for factor in axes for a in factor}
        if len(terms) == 1 and any(not used.issuperset(d) for d in self.produced(terms[0]).dims):
            return ()  # what is to be gathered is reduced before: terms of a sum are no smaller
        return tuple(sorted(common - used - self._scattered[node.index]))

    def most_saved(self, *nodes: int) -> float:
        """What other placements of some nodes save of reshards at most.

        That is what all values cost that they touch, or that those do that carry their sums on.
        """
        touched = partial(values_moved_with, self.graph, nodes)
        cost = self.value_cost
        return sum([cost[value.var] for value in self.graph.once(("touched", nodes), touched)])

    def undo(self, changes: Iterable[Change]) -> None:
        """Place nodes as they were before."""
        for index, before in reversed(list(changes)):
            self.placed.place(index, before)

    def delta(self, changes: Sequence[Change], without: Value | None = None) -> float:
        """Seconds that changes cost (negative: save); reshards of one value may be left out."""
        return self._delta_without(True, changes, without)

    def least_delta(self, changes: Sequence[Change], without: Value | None = None) -> float:
        """What `delta` is not below, but for rounding, found without looking for reshards."""
        return self._delta_without(False, changes, without)

    def _delta_without(
        self, is_exact: bool, changes: Sequence[Change], without: Value | None
    ) -> float:
        """Either of these.

        Of what touches many values, as a region of all layers, the whole is added up once for all
        that are left out in turn.
        """
        exact, least = (self._seconds, self.value_seconds), (self._at_least, self._least_seconds)
        known, seconds_of = exact if is_exact else least
        if without is None or not any(self.width(index) > WIDE for index, _ in changes):
            return self._delta(known, seconds_of, changes, without)
        nodes = tuple(dict.fromkeys([index for index, _ in changes]))
        key = is_exact, nodes, tuple(changes), self.state_near(nodes)
        if key not in self._wide:
            self._wide[key] = self._delta(known, seconds_of, changes, None)
        is_touched = any(without.var in self._around[index] for index in nodes)
        own = seconds_of(without) - self.value_cost[without.var] if is_touched else 0.0
        if IMPOSSIBLE in (self._wide[key], own):
            return self._delta(known, seconds_of, changes, without)
        return round(self._wide[key] - own, ROUNDED)

    def _delta(
        self,
        known: Mapping[Any, float],
        seconds_of: Callable[[Value], float],
        changes: Sequence[Change],
        without: Value | None,
    ) -> float:
        """`known` has what `seconds_of` has found before."""
        placed, cost = self.placed, self.value_cost
        first: dict[int, Placement] = {}
        for index, before in changes:
            first.setdefault(index, before)
        total = 0.0
        for index, before in first.items():
            total += placed[index].seconds - before.seconds
        around = [self._around[index] for index in first]
        touched = (
            around[0] if len(around) == 1 else {var: x for a in around for var, x in a.items()}
        )
        for var, (value, number, deciding) in touched.items():
            if value is not without:
                seconds = known.get((number, deciding(placed)))
                total += (seconds_of(value) if seconds is None else seconds) - cost[var]
                if total == IMPOSSIBLE:
                    break
        return total

    def keep(self, changes: Iterable[Change]) -> set[int]:
        """Accept changes; the nodes whose neighbours they are, themselves included."""
        touched: dict[Var, Value] = {}
        near: set[int] = set()
        for index, _ in changes:
            near.add(index)
            touched.update({v.var: v for v in self.around(self.graph.nodes[index])})
        for var, value in touched.items():
            self.value_cost[var] = self.value_seconds(value)
            near.update(n for n, _ in value.uses)
            if value.maker is not None:
                near.add(value.maker)
        return near
