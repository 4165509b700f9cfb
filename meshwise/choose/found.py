"""A placement of all nodes that a search ended with, and what it comes to."""

from dataclasses import dataclass
from functools import cached_property

from meshwise._jax import Var
from meshwise.choose.descend import descend
from meshwise.choose.graph import Graph
from meshwise.choose.holding import argument_bytes, peak_bytes, result_bytes
from meshwise.choose.limits import Limits
from meshwise.choose.pricing import node_seconds, work_seconds
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.choose.tree import Edge, reshard_tree
from meshwise.ir.operators import RESHAPES, TURNS, is_among
from meshwise.ir.sharding import Sharding

# Temporaries that nobody minds: so many bytes, and a part of arguments and results.
LITTLE_BYTES, LITTLE_PART = 2**12, 8

# So many times less is worth it that values lie otherwise throughout.
LESS = 1.03

Copies = dict[Var, tuple[float, tuple[Edge, ...]]]  # of each value: seconds, and its reshards


@dataclass(frozen=True, eq=False)
class Found:
    """A placement of all nodes that was found, and the reshards that it takes."""

    seconds: float
    search: Search
    copies: Copies

    @cached_property
    def price(self) -> float:
        """Seconds, but for launches where hardware compares plans without these.

        Work counts in steps of a launch, so that a little less of it is worth none.
        """
        graph = self.search.graph
        if not graph.hardware.least_bytes:
            return self.seconds
        sent = self.sent_bytes / graph.hardware.link_bytes_per_s
        launch, work = graph.hardware.launch_s, self.work_seconds
        return round(sent + (work // launch * launch if launch else work), 13)

    @cached_property
    def sent_bytes(self) -> float:
        """What a device sends."""
        return self.search.sent_bytes({var: edges for var, (_, edges) in self.copies.items()})

    @property
    def moves_results(self) -> bool:
        """Whether a result that is no sum is moved at the end: what it is of might be instead.

        So it is where what is moved is only laid otherwise then, as windows of an image.
        """
        graph = self.search.graph
        return any(
            var in self.copies and not self.search.produced(graph.values[var]).unreduced
            for var in graph.once(("laid as results",), lambda: _laid_as_results(graph))
        )

    @cached_property
    def work_seconds(self) -> float:
        """What a device computes, work on padding included."""
        graph = self.search.graph
        return sum(
            work_seconds(graph, node, placement.strategy.axes)
            for node, placement in zip(graph.nodes, self.search.placed, strict=True)
        )

    @cached_property
    def peak_bytes(self) -> int:
        """What a device holds at once."""
        placed = tuple([placement.strategy for placement in self.search.placed])
        return self.search.graph.once(("peak", placed), lambda: peak_bytes(self.search))

    @property
    def made_bytes(self) -> int:
        """What a device holds at once beside the arguments; half of these and results at least."""
        return max(self.peak_bytes - self._argument_bytes, self._lasting_bytes // 2)

    @property
    def temporary_bytes(self) -> int:
        """What a device holds at once beside arguments and results; a small part of these is that.

        Less than that is none to speak of.
        """
        lasting = self._lasting_bytes
        return max(self.peak_bytes - lasting, lasting // LITTLE_PART, LITTLE_BYTES)

    @property
    def _lasting_bytes(self) -> int:
        """Of arguments and results."""
        graph = self.search.graph
        return self._argument_bytes + graph.once(("results",), lambda: result_bytes(graph))

    @property
    def _argument_bytes(self) -> int:
        graph = self.search.graph
        return graph.once(("arguments",), lambda: argument_bytes(graph))


def _laid_as_results(graph: Graph) -> list[Var]:
    """The results, and all values of which they are only laid otherwise."""
    waiting = [value.var for value in graph.values.values() if value.returned]
    found: dict[Var, None] = {}
    while waiting:
        var = waiting.pop()
        found[var] = None
        maker = graph.values[var].maker
        if maker is not None and _lays_out(graph, graph.nodes[maker]):
            waiting += [v for v in graph.nodes[maker].operands if v in graph.values]
    return list(found)


def _lays_out(graph: Graph, node: Node) -> bool:
    """Whether a node puts the elements of one value in another order or shape."""
    eqns = [graph.program.equations[member.equation] for member in node.members]
    return len(node.operands) == 1 and all(is_among(eqn, RESHAPES | TURNS) for eqn in eqns)


def descended(search: Search, limits: Limits) -> Found:
    """What a descent from where a search begins ends with."""
    descend(search, limits)
    return as_placed(search)


def as_placed(search: Search, stop_at_completion: bool = False) -> Found:
    """The placement that a search is at, with its reshards."""
    copies = _copies_of(search, stop_at_completion)
    return Found(_total_seconds(search, copies), search, copies)


def _copies_of(search: Search, stop_at_completion: bool) -> Copies:
    """For each value the cost and edges of its reshards."""
    graph = search.graph
    found = {}
    for var, value in graph.values.items():
        if value.remade:
            continue
        produced = search.produced(value)
        wanted = frozenset(search.wanted(value))
        if not wanted - {produced}:
            continue
        root, seconds, edges = produced, 0.0, ()
        nominal = Sharding(graph.nominal(var))
        if stop_at_completion and produced != nominal and value.maker is not None:
            seconds, edges = reshard_tree(
                value.shape,
                value.itemsize,
                graph.mesh,
                produced,
                frozenset({nominal}),
                graph.hardware,
            )
            root = nominal
        more, rest = reshard_tree(
            value.shape, value.itemsize, graph.mesh, root, wanted, graph.hardware
        )
        more = search.likely_seconds(value, more, rest)
        rest = tuple(e for e in rest if e[1] != produced)
        found[var] = (seconds + more) * value.trips, edges + rest
    return found


def _total_seconds(search: Search, copies: Copies) -> float:
    """Seconds of all reshards and all nodes."""
    return sum(c for c, _ in copies.values()) + sum(
        node_seconds(search.graph, node, placed.strategy.axes, leaves_turned=True)
        for node, placed in zip(search.graph.nodes, search.placed, strict=True)
    )
