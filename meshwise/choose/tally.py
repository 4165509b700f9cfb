"""How many nodes are placed is counted where many concern one, so that nobody asks all of them.

What a value costs that many read is said by its maker and the shardings in which they read it, not
by who reads it in which; what a sum of many terms carries, by the shardings in which these are
made.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwise._jax import Var
from meshwise.choose.graph import Graph, Value
from meshwise.choose.placement import Placement
from meshwise.ir.sharding import Sharding

# So many readers of a value, or terms of a sum, are counted.
MANY = 16

Use = tuple[int, int]  # a node, and which of its operands


@dataclass(frozen=True, eq=False)
class Tallies:
    """What is counted, by the number of the tally.

    `readers` has that of each value that many read, and `terms` that of each node that sums many;
    `operands` and `results` say of each node what is counted where, and `fixed` is counted before.
    """

    size: int
    readers: Mapping[Var, int]
    terms: Mapping[int, int]
    operands: Mapping[int, Sequence[tuple[int, int]]]
    results: Mapping[int, Sequence[tuple[int, int]]]
    fixed: Sequence[tuple[int, Sharding]]


def tallies_of(graph: Graph, terms: Sequence[Sequence[Value]]) -> Tallies:
    """What is worth counting in a graph, whose nodes make sums of some terms."""
    operands: dict[int, list[tuple[int, int]]] = defaultdict(list)
    results: dict[int, list[tuple[int, int]]] = defaultdict(list)
    fixed: list[tuple[int, Sharding]] = []
    readers: dict[Var, int] = {}
    sums: dict[int, int] = {}
    for var, value in graph.values.items():
        # In branches it matters who reads it.
        if len(value.uses) > MANY and value.read_in is None:
            readers[var] = len(readers)
            for node, operand in value.uses:
                operands[node].append((readers[var], operand))
    for node, values in enumerate(terms):
        if len(values) > MANY:
            sums[node] = len(readers) + len(sums)
            for value in values:
                if value.fixed is not None:
                    fixed.append((sums[node], value.fixed))
                elif value.maker is not None:
                    results[value.maker].append((sums[node], value.result))
    return Tallies(len(readers) + len(sums), readers, sums, operands, results, fixed)


class Placements(list[Placement]):
    """The placements of all nodes, and of each tally how often each sharding is in it."""

    def __init__(self, placed: Iterable[Placement], tallies: Tallies):
        """Count what is placed; from here on by `place`."""
        super().__init__(placed)
        self.tallies = tallies
        self.counts = [Counter[Sharding]() for _ in range(tallies.size)]
        for tally, sharding in tallies.fixed:
            self.counts[tally][sharding] += 1
        for node in dict.fromkeys((*tallies.operands, *tallies.results)):
            self._count(node, 1)

    def place(self, node: int, placement: Placement) -> None:
        """Place a node otherwise."""
        is_counted = node in self.tallies.operands or node in self.tallies.results
        if is_counted:
            self._count(node, -1)
        self[node] = placement
        if is_counted:
            self._count(node, 1)

    def _count(self, node: int, more: int) -> None:
        placed = self[node]
        counted = [(t, placed.operands[k]) for t, k in self.tallies.operands.get(node, ())]
        counted += [(t, placed.results[k]) for t, k in self.tallies.results.get(node, ())]
        for tally, sharding in counted:
            count = self.counts[tally]
            count[sharding] += more
            if not count[sharding]:
                del count[sharding]

    def others(self, tally: int, uses: Sequence[Use]) -> frozenset[Sharding]:
        """The shardings in which a value is read by others than some of its readers."""
        count = self.counts[tally]
        if not uses:
            return frozenset(count)
        own = Counter([self[node].operands[operand] for node, operand in uses])
        return frozenset([sharding for sharding, n in count.items() if n > own[sharding]])
