"""What a strategy of a node may not exceed: work, and what a loop holds of a stack.

And nodes with nothing to decide.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from meshwise._jax import Literal, Var, stack_p, step_p
from meshwise.choose.candidates import NEAR, Reach, candidates, natural_candidates
from meshwise.choose.graph import Graph, Value
from meshwise.choose.pricing import exchanges_of, node_seconds, work_seconds
from meshwise.choose.regions import Node
from meshwise.choose.tree import IMPOSSIBLE
from meshwise.ir.factors import dims_sharding
from meshwise.ir.sharding import DimAxes, local_bytes, sharding_of

T = TypeVar("T")

# Results that are gathered after an exchange send about as much again.
TWICE = 2
_STACKS = (step_p, stack_p)


@dataclass(frozen=True, eq=False)
class Limits:
    """What a strategy of a node may not exceed.

    `work`: in seconds a device, padding aside. `held`: bytes of the stack that a loop reads a step
    of, or makes a row of, by node. `known` is what descents within these limits found so far;
    `reach` says which strategies they try.
    """

    work: Sequence[float]
    held: Mapping[int, float]
    known: dict[Any, Any] = field(default_factory=dict)
    reach: Reach = NEAR

    def once(self, key: Any, find: Callable[[], T]) -> T:
        """What is found for a key, found once; a key begins with the name of what it is."""
        if key not in self.known:
            self.known[key] = find()
        return self.known[key]

    def reaching(self, reach: Reach) -> "Limits":
        """The same limits, with strategies tried that go further."""
        return replace(self, known={}, reach=reach)

    def or_those_of(self, other: "Limits") -> "Limits":
        """What either of two allows a node."""
        work = [max(pair) for pair in zip(self.work, other.work, strict=True)]
        both = self.held.keys() & other.held.keys()
        return Limits(work, {node: max(self.held[node], other.held[node]) for node in both})

    def allow(self, graph: Graph, node: Node, axes: DimAxes) -> bool:
        """Whether a strategy of a node is within both."""
        if _limited_seconds(graph, node, axes) > self.work[node.index]:
            return False
        return self.allow_held(graph, node, axes)

    def allow_held(self, graph: Graph, node: Node, axes: DimAxes) -> bool:
        """Whether what a loop holds of a stack is within it."""
        most = self.held.get(node.index)
        return most is None or _stack_bytes(graph, node, axes) <= most


def limits_of(graph: Graph, gathers_steps: bool = False) -> Limits:
    """The limits of a graph's nodes; stacks that lie in shards of steps may be gathered or not."""
    return Limits(_work_limits(graph), _held_limits(graph, gathers_steps))


def with_work_of(limits: Limits, graph: Graph, axes: Sequence[DimAxes]) -> Limits:
    """The limits where no node may be given more work than under these strategies."""
    given = zip(limits.work, graph.nodes, axes, strict=True)
    most = [min(w, _limited_seconds(graph, n, a) * (1 + 1e-9)) for w, n, a in given]
    return Limits(most, limits.held)


def with_work_at(limits: Limits, graph: Graph, axes: Sequence[DimAxes], nodes: Set[int]) -> Limits:
    """The limits where some nodes may be given as much work as under these strategies."""
    given = zip(limits.work, graph.nodes, axes, strict=True)
    most = [
        max(w, _limited_seconds(graph, n, a) * (1 + 1e-9)) if n.index in nodes else w
        for w, n, a in given
    ]
    return Limits(most, limits.held)


def _held_limits(graph: Graph, gathers_steps: bool) -> dict[int, float]:
    """A stack is not gathered for a loop: a step's part of it is, inside.

    So it is held in shards as small as completion has them, wherever dims other than that of the
    steps can be sharded as finely. With `gathers_steps` a stack that lies in shards of steps, which
    no loop can go through as it lies, is without limit.
    """
    found = {}
    for node in graph.nodes:
        if graph.program.equations[node.members[0].equation].primitive not in _STACKS:
            continue
        dims = nominal(graph, node)
        if gathers_steps and any(dims[_stack_position(node)][:1]):
            continue
        operands = [sharding_of(d) for d in dims[: len(node.operands)]]
        options = candidates(graph, node, operands, (), dims, None)
        least = min(_stack_bytes(graph, node, axes) for axes in options)
        given = _part_bytes(graph, _stack(graph, node), dims[_stack_position(node)])
        found[node.index] = max(least, given)
    return found


def _stack_position(node: Node) -> int:
    """The stack among a node's operands and results: the one with a dim more."""
    tensors = (*node.rule.operands, *node.rule.results)
    return max(range(len(tensors)), key=lambda k: len(tensors[k]))


def _stack(graph: Graph, node: Node) -> Value:
    return graph.values[(*node.operands, *node.results)[_stack_position(node)]]


def _stack_bytes(graph: Graph, node: Node, axes: DimAxes) -> float:
    dims = (*node.rule.operands, *node.rule.results)[_stack_position(node)]
    return _part_bytes(graph, _stack(graph, node), dims_sharding(dims, axes))


def _part_bytes(graph: Graph, value: Value, axes: DimAxes) -> float:
    """Bytes of a device's part, padding aside: of columns that do not divide it is no more."""
    shards = (graph.mesh.size(own) for own in axes)
    parts = [n / max(1, min(n, k)) for n, k in zip(value.shape, shards, strict=True)]
    return math.prod(parts) * value.itemsize


def _work_limits(graph: Graph) -> list[float]:
    """The most work that each equation may be given.

    It is the least that the shardings of its own values suggest: a product of two matrices that
    are both sharded over the contracted dim is never computed whole on every device to save an
    all_reduce. What a local rule cannot follow suggests nothing, nor does one matrix alone of a
    product whose other one has a hint that is against it. Element-wise work is free, if it is not
    on all pairs of elements; so is other work that takes no longer than reading its operands, where
    every device has them: a permutation of random numbers is sorted on each, and nothing is sent.
    What is made of no argument is free, too: weights of positions, by which images are made larger.
    """
    everywhere, of_none = _held_everywhere(graph), _made_of_none(graph)
    hinted = _hinted(graph)
    limits = []
    for node in graph.nodes:
        held = everywhere.issuperset(node.operands)
        of_pairs = node.is_region and is_of_pairs(graph, node)
        of_pairs = of_pairs and not of_none.issuperset(node.results)
        free = not of_pairs and (node.is_region or (held and is_light(graph, node)))
        once = all(graph.program.trips[m.equation] == 1 for m in node.members)
        given = tuple([hinted.get(v) if once else None for v in node.operands])
        key = "work", graph.alike[node.index], tuple(nominal(graph, node)), given
        least = IMPOSSIBLE if free else graph.once(key, partial(_least_work, graph, node, given))
        limits.append(least * (1 + 1e-9))
    return limits


def _hinted(graph: Graph) -> dict[Var, DimAxes]:
    """The dims' axes of arguments and values that have hints."""
    inputs = zip(graph.program.inputs, graph.program.in_hints, graph.in_shardings, strict=True)
    found = {var: sharding.dims for var, hint, sharding in inputs if hint is not None}
    for equation in graph.program.hints:
        var = graph.program.equations[equation].outvars[0]
        found[var] = graph.nominal(var)
    return found


def _least_work(graph: Graph, node: Node, held: Sequence[DimAxes | None]) -> float:
    """Of the strategies that the shardings of a node's own values suggest, in seconds.

    `held` are the shardings of operands that have hints, where one of them may be against a sum
    over what another one is sharded over.
    """
    natural = natural_candidates(graph, node, nominal(graph, node))
    natural = [_summed_as_held(node, axes, held) for axes in natural]
    natural = [_exchanged_where_worth(graph, node, axes) for axes in natural]
    followed = [a for a in natural if node_seconds(graph, node, a) < IMPOSSIBLE]
    followed = _with_its_largest(graph, node, followed)
    return min((_limited_seconds(graph, node, axes) for axes in followed), default=IMPOSSIBLE)


def _with_its_largest(graph: Graph, node: Node, options: Sequence[DimAxes]) -> list[DimAxes]:
    """Of a node that exchanges along dims, the strategies that leave its largest operand there.

    A small kernel that lies over more devices than its image does suggests no work for all of
    them: the image would be moved for it.
    """
    given = nominal(graph, node)
    sharded = [k for k in range(len(node.operands)) if any(given[k])]
    if not sharded or not node.rule.permuted:
        return list(options)
    k = max(sharded, key=lambda k: graph.values[node.operands[k]].bytes)
    dims = node.rule.operands[k]
    return [axes for axes in options if dims_sharding(dims, axes) == given[k]] or list(options)


def _limited_seconds(graph: Graph, node: Node, axes: DimAxes) -> float:
    """Work that is limited: padding aside, and element-wise work on a sum on its way."""
    share = node.own_flops / node.flops if node.flops else 0.0
    return share * work_seconds(graph, node, axes, padded=False)


def _exchanged_where_worth(graph: Graph, node: Node, axes: DimAxes) -> DimAxes:
    """Without the axes of dims that local rules exchange along, if gathering these may send less.

    Where results are wanted whole, they need not be gathered then: sorting, in shards, numbers that
    are looked up afterwards sends all of them twice. What every device can make, as the places in
    an argsort, is gathered for nothing. Bytes decide, on any devices: a faster collective alone is
    no reason to have every device do all of the work, so that where seconds of a machine are
    compared gathering has to send less.
    """
    whole = tuple([() if f in node.rule.permuted else own for f, own in enumerate(axes)])
    if whole == axes:
        return axes

    sent = exchanges_of(graph, node, axes)
    exchanged = math.inf if sent is None else sum(one.wire_bytes for _, one in sent)
    most = TWICE * exchanged if graph.hardware.least_bytes else exchanged
    gathered = read_bytes(graph, node, whole) - read_bytes(graph, node, axes)
    return whole if gathered < most else axes


def read_bytes(graph: Graph, node: Node, axes: DimAxes) -> int:
    """Bytes that a device holds of what a node reads, but for what every device can make."""
    read = zip(map(graph.values.__getitem__, node.operands), node.rule.operands, strict=True)
    return sum(
        local_bytes(v.shape, v.itemsize, sharding_of(dims_sharding(dims, axes)), graph.mesh)
        for v, dims in read
        if not v.remade
    )


def _summed_as_held(node: Node, axes: DimAxes, held: Sequence[DimAxes | None]) -> DimAxes:
    """Without the axes of sums over which an operand with a hint is not sharded."""
    summed = {f for over in node.reduced for f, _ in over}
    against = {
        f
        for dims, given in zip(node.rule.operands, held, strict=True)
        if given is not None
        for factors, own in zip(dims, given, strict=True)
        for f in summed.intersection(factors)
        if not set(axes[f]) <= set(own)
    }
    return tuple([() if f in against else own for f, own in enumerate(axes)])


def _held_everywhere(graph: Graph) -> set[Var]:
    """Values that every device has without anything being sent: made of replicated ones."""
    hinted = fixed_axes(graph)
    held = {var for var, value in graph.values.items() if value.is_whole}
    for node in graph.nodes:
        if held.issuperset(node.operands) and not any(hinted.get(node.index, ())):
            held.update(node.results)
    return held


def _made_of_none(graph: Graph) -> set[Var]:
    """Values that follow from no argument, nor from a hint that has them in shards."""
    program, found = graph.program, set(graph.program.jaxpr.jaxpr.constvars)
    for index, eqn in enumerate(program.equations):
        moves = index in program.hints and any(graph.nominal(eqn.outvars[0]))
        if not moves and all(isinstance(a, Literal) or a in found for a in eqn.invars):
            found.update(eqn.outvars)
    return found


def is_of_pairs(graph: Graph, node: Node) -> bool:
    """Whether a region computes with more elements than there are in what enters or leaves it.

    Then it is work like a product's: forces between all particles, distances from all centres.
    What each device makes for itself, of fewer elements, it makes where that is read.
    """
    outside = [v for v in node.operands if graph.values[v].maker != node.index]
    for var in node.results:
        value = graph.values[var]
        if value.returned or any(user != node.index for user, _ in value.uses):
            outside.append(var)
    most = max((_made_of(graph, graph.values[v]) for v in outside), default=0)
    inside = (math.prod(node.rule.sizes[f] for f in {*m.factors} - {-1}) for m in node.members)
    return max(inside) > most > 0


def _made_of(graph: Graph, value: Value) -> int:
    """How many elements a value has, or what it is made of wherever it is read."""
    own = math.prod(value.shape)
    if value.maker is None or not value.remade:
        return own
    return graph.remade[graph.nodes[value.maker].members[0].equation]


def is_light(graph: Graph, node: Node) -> bool:
    """Whether a node's flops take no longer than its values take to be read and written."""
    values = [graph.values[v] for v in dict.fromkeys((*node.operands, *node.results))]
    moved = sum(v.bytes * v.trips for v in values)
    hardware = graph.hardware
    computing = hardware.compute_s(node.flops, node.serial_flops, node.calls)
    return computing <= moved / hardware.memory_bytes_per_s


def nominal(graph: Graph, node: Node) -> list[DimAxes]:
    """The dims' axes that completion gave a node's operands, then its results."""
    return [graph.nominal(v) for v in (*node.operands, *node.results)]


def open_hints(graph: Graph) -> set[int]:
    """Nodes of hints that leave dims open, which may lie otherwise than completion has them."""
    hints = graph.program.hints
    leave_open = {i for i, hint in hints.items() if not hint.derived and hint.closed is None}
    return {n.index for n in graph.nodes if n.members[0].equation in leave_open}


def fixed_axes(graph: Graph) -> dict[int, DimAxes]:
    """Nodes to begin with as they are: hints that somebody gave, and nodes without factors."""
    fixed: dict[int, DimAxes] = {}
    for node in graph.nodes:
        hint = graph.program.hints.get(node.members[0].equation)
        if hint is not None and not hint.derived:
            axes: list[tuple[str, ...]] = [()] * len(node.rule.sizes)
            var = graph.program.equations[node.members[0].equation].outvars[0]
            for factor, own in zip(node.members[0].factors, graph.nominal(var), strict=True):
                axes[factor] = own
            fixed[node.index] = tuple(axes)
        elif not node.rule.sizes:
            fixed[node.index] = ()
    return fixed
