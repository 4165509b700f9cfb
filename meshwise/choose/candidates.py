"""The sensible strategies of a node: assignments of axes to factors that a neighbour suggests.

A candidate starts from one tensor's sharding (what an operand's maker produces, what a result's
user wants, what completion gave), projected onto the factors, and takes in what the other tensors
say where that does not conflict. Axes over which an operand is unreduced may also be put on a
factor: that is a reduce_scatter on entry (sequence parallelism is found this way).
"""

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain, product

from meshwise.choose.graph import Graph
from meshwise.choose.regions import Node
from meshwise.ir.factors import Strategy, factor_axes, fits
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import DimAxes, Sharding

Assignment = dict[int, Axes]
MOST_COMBINATIONS = 64


@dataclass(frozen=True)
class Reach:
    """What is tried beside what neighbours suggest.

    With `behind` axes of a dim that is exchanged along may go behind those of another one; with
    `idle` operators that sum, products among them, may also lie over axes that none of their
    neighbours does, and with `anywhere` all others, too.
    """

    behind: bool = False
    idle: bool = False
    anywhere: bool = False


NEAR = Reach()


def candidates(
    graph: Graph,
    node: Node,
    operands: Sequence[Sharding],
    results: Sequence[Sequence[Sharding]],
    nominal: Sequence[DimAxes],
    current: DimAxes | None,
    reach: Reach = NEAR,
) -> list[DimAxes]:
    """Axes of each factor worth pricing, the current ones first.

    `operands` are the shardings in which operands exist, `results` those in which each result is
    wanted, `nominal` what completion gave operands and then results; `reach` says what else.
    """
    found = _suggestions(graph, node, operands, results, nominal)
    held = [(*s.dims, s.unreduced) for s in operands]
    held += [s.dims for wishes in results for s in wishes] + list(nominal)
    in_play = frozenset([a for dims in held for axes in dims for a in axes])
    if reach.anywhere or (reach.idle and any(node.reduced)):
        in_play = frozenset(graph.mesh.names)
    suggested = tuple([tuple(assignment.items()) for assignment in found])
    key = "candidates", graph.alike[node.index], suggested, in_play, reach.behind
    options = graph.once(key, lambda: _options(graph, node, found, in_play, reach.behind))
    if current is None:
        return list(options)
    return [current, *[axes for axes in options if axes != current]]


def _options(
    graph: Graph, node: Node, found: Sequence[Assignment], in_play: Set[str], behind: bool
) -> list[DimAxes]:
    """Allowed axes of each factor by what is suggested, and by the axes that tensors lie over."""
    count = len(node.rule.sizes)
    options = dict.fromkeys(_merges(node, found))
    for assignment in chain(
        _whole_axis_assignments(node, graph.mesh, in_play),
        _left_whole(node, found),
        _moved_behind(node, found) if behind else (),
    ):
        options[_as_axes(assignment, count)] = None
    options[((),) * count] = None
    return _allowed(graph, node, options)


def natural_candidates(graph: Graph, node: Node, nominal: Sequence[DimAxes]) -> list[DimAxes]:
    """What the shardings of a node's own values suggest, taken together where they agree."""
    found = _suggestions(graph, node, (), (), nominal)
    return _allowed(graph, node, dict.fromkeys(_merges(node, found)))


def _merges(node: Node, found: Sequence[Assignment]) -> Iterable[DimAxes]:
    """Each suggestion, and each with what the others say where that does not conflict."""
    count = len(node.rule.sizes)
    for base in found:
        merged = dict(base)
        for other in found:
            merged = _merged(node, merged, other)
        yield _as_axes(base, count)
        yield _as_axes(merged, count)


def _allowed(graph: Graph, node: Node, options: Collection[DimAxes]) -> list[DimAxes]:
    known: dict[DimAxes, bool] = graph.once(("allowed", graph.alike[node.index]), dict)
    for axes in options:
        if axes not in known:
            fit = fits(node.rule, Strategy(axes), graph.mesh, node.together)
            fit &= all(axes[factor] == own for factor, own in node.bound)
            known[axes] = fit and _one_operator(node, axes)
    return [axes for axes in options if known[axes]]


def _one_operator(node: Node, axes: DimAxes) -> bool:
    """Whether each result is unreduced by one operator only."""
    return all(len({r for f, r in over if axes[f]}) <= 1 for over in node.reduced)


def _suggestions(
    graph: Graph,
    node: Node,
    operands: Sequence[Sharding],
    results: Sequence[Sequence[Sharding]],
    nominal: Sequence[DimAxes],
) -> list[Assignment]:
    known: dict[tuple[int, DimAxes], list[Assignment]]
    known = graph.once(("projected", graph.alike[node.index]), dict)
    found: dict[frozenset[tuple[int, Axes]], Assignment] = {}

    def suggest(position: int, dims: DimAxes) -> None:
        key = position, dims
        if key not in known:
            known[key] = _projected(node, graph.mesh, position, dims)
        for assignment in known[key]:
            found.setdefault(frozenset(assignment.items()), assignment)

    for position, sharding in enumerate(operands):
        suggest(position, sharding.dims)
        for dims in _scattered(sharding):
            suggest(position, dims)
    for position, wishes in enumerate(results):
        for sharding in wishes:
            suggest(len(operands) + position, sharding.dims)
    for position, dims in enumerate(nominal):
        suggest(position, dims)
    return list(found.values())


def _projected(node: Node, mesh: Mesh, position: int, dims: DimAxes) -> list[Assignment]:
    """The sharding of an operand or result on a node's factors; none where it is on none."""
    rule = node.rule
    place = position - len(rule.operands)
    tensor = rule.operands[position] if place < 0 else rule.results[place]
    # Only a factor that may be split unevenly is split otherwise where shards are to divide it.
    ways = (False, True) if rule.permuted & rule.compound else (False,)
    found = [factor_axes(tensor, rule, dims, mesh, dividing) for dividing in ways]
    return [assignment for assignment in found if assignment]


def _scattered(sharding: Sharding) -> Iterable[DimAxes]:
    """The dims with the unreduced axes put on one of them."""
    if sharding.unreduced:
        for dim in range(len(sharding.dims)):
            dims = list(sharding.dims)
            dims[dim] = (*dims[dim], *sharding.unreduced)
            yield tuple(dims)


def _merged(node: Node, base: Assignment, other: Assignment) -> Assignment:
    """`base` with what `other` says of factors and axes that `base` does not use with them."""
    merged = dict(base)
    for factor, axes in other.items():
        own = merged.get(factor, ())
        used = {a for f, taken in merged.items() if f in node.together[factor] for a in taken}
        if axes[: len(own)] == own and not used.intersection(axes[len(own) :]):
            merged[factor] = axes
    return merged


def has_idle_axes(graph: Graph, node: Node, nominal: Sequence[DimAxes]) -> bool:
    """Whether an operator that sums lies over some of the mesh's axes, or none."""
    used = {a for dims in nominal for axes in dims for a in axes}
    return any(node.reduced) and not node.is_region and len(used) < len(graph.mesh.names)


def may_move_behind(graph: Graph, node: Node, nominal: Sequence[DimAxes]) -> bool:
    """Whether completion gave a node axes of a dim that is exchanged along, and others."""
    return any(_moved_behind(node, _suggestions(graph, node, (), (), nominal)))


def _moved_behind(node: Node, found: Sequence[Assignment]) -> Iterable[Assignment]:
    """Each suggestion with the axes of a dim that is exchanged along behind those of another one.

    They are moved there by one exchange among themselves, which leaves the others where they are.
    """
    for base in found:
        for moved in node.rule.permuted & base.keys():
            others = {factor: axes for factor, axes in base.items() if factor != moved}
            for factor, axes in others.items():
                yield others | {factor: axes + base[moved]}


def _left_whole(node: Node, found: Sequence[Assignment]) -> Iterable[Assignment]:
    """Each suggestion without the axes of dims that are exchanged along.

    Where nothing but these is suggested, a local rule may not be able to follow any of it.
    """
    for base in found:
        if not node.rule.permuted.isdisjoint(base):
            yield {f: axes for f, axes in base.items() if f not in node.rule.permuted}


def _whole_axis_assignments(node: Node, mesh: Mesh, in_play: Set[str]) -> Iterable[Assignment]:
    """Every way to put each axis group of the tensors on one factor, where that is a small number.

    An axis of a dim that must be whole may go to another one. Regions follow their neighbours, so
    only single equations are enumerated.
    """
    if node.is_region:
        return
    groups = [g for _, subs in mesh.user_axes if (g := tuple(a for a in subs if a in in_play))]
    factors = [f for f, size in enumerate(node.rule.sizes) if size > 1 and f not in node.rule.whole]
    if not groups or (len(factors) + 1) ** len(groups) > MOST_COMBINATIONS:
        return
    for places in product([None, *factors], repeat=len(groups)):
        assignment: Assignment = {}
        for factor, group in zip(places, groups, strict=True):
            if factor is not None:
                assignment[factor] = assignment.get(factor, ()) + group
        yield assignment


def _as_axes(assignment: Assignment, count: int) -> DimAxes:
    return tuple([assignment.get(f, ()) for f in range(count)])
