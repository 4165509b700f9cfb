"""How many nodes are placed is counted where many concern one, so that nobody asks all of them.

What a value costs that many read is said by its maker and the shardings in which they read it, not
by who reads it in which; what a sum of many terms carries, by the shardings in which these are
made.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwise._jax import Var
from meshwise.choose.graph import Graph, Value
from meshwise.choose.placement import Placement
from meshwise.ir.sharding import Sharding

# So many readers of a value, or terms of a sum, are counted.
MANY = 16

Use = tuple[int, int]  # a node, and which of its operands
Counted = tuple[int, bool, int]  # a tally, and which of a node's results, or operands, is in it


@dataclass(frozen=True, eq=False)
class Tallies:
    """What is counted, by the number of the tally.

    `readers` has that of each value that many read, and `terms` that of each node that sums many;
    `counted` says of each node what is counted where, and `fixed` is counted before.
    """

    size: int
    readers: Mapping[Var, int]
    terms: Mapping[int, int]
    counted: Sequence[Sequence[Counted]]
    fixed: Sequence[tuple[int, Sharding]]


def tallies_of(graph: Graph, terms: Sequence[Sequence[Value]]) -> Tallies:
    """What is worth counting in a graph, whose nodes make sums of some terms."""
    counted: list[list[Counted]] = [[] for _ in graph.nodes]
    fixed: list[tuple[int, Sharding]] = []
    readers: dict[Var, int] = {}
    sums: dict[int, int] = {}
    for var, value in graph.values.items():
        # In branches it matters who reads it.
        if len(value.uses) > MANY and value.read_in is None:
            readers[var] = len(readers)
            for node, operand in value.uses:
                counted[node].append((readers[var], False, operand))
    for node, values in enumerate(terms):
        if len(values) > MANY:
            sums[node] = len(readers) + len(sums)
            for value in values:
                if value.fixed is not None:
                    fixed.append((sums[node], value.fixed))
                elif value.maker is not None:
                    counted[value.maker].append((sums[node], True, value.result))
    return Tallies(len(readers) + len(sums), readers, sums, counted, fixed)


class Placements(list[Placement]):
    """The placements of all nodes, and of each tally how often each sharding is in it."""

    def __init__(self, placed: Iterable[Placement], tallies: Tallies):
        """Count what is placed; from here on by `place`."""
        super().__init__(placed)
        self.tallies = tallies
        self.counts = [Counter[Sharding]() for _ in range(tallies.size)]
        for tally, sharding in tallies.fixed:
            self.counts[tally][sharding] += 1
        for placement, counted in zip(self, tallies.counted, strict=True):
            for tally, is_result, k in counted:
                shardings = placement.results if is_result else placement.operands
                self.counts[tally][shardings[k]] += 1

    def place(self, node: int, placement: Placement) -> None:
        """Place a node otherwise."""
        before, self[node] = self[node], placement
        for tally, is_result, k in self.tallies.counted[node]:
            old = (before.results if is_result else before.operands)[k]
            new = (placement.results if is_result else placement.operands)[k]
            if new is not old:
                count = self.counts[tally]
                count[new] += 1
                count[old] -= 1
                if not count[old]:
                    del count[old]

    def others(self, tally: int, uses: Sequence[Use]) -> frozenset[Sharding]:
        """The shardings in which a value is read by others than some of its readers."""
        count = self.counts[tally]
        if not uses:
            return frozenset(count)
        own = Counter([self[node].operands[operand] for node, operand in uses])
        return frozenset([sharding for sharding, n in count.items() if n > own[sharding]])
