"""What lost, and by how much: looked for when somebody asks, as planning needs only what wins."""

from bisect import insort
from collections.abc import Sequence

from meshwise.choose.descend import WORTH_IT, Priced, choices_of
from meshwise.choose.graph import build_graph
from meshwise.choose.limits import fixed_axes, limits_of
from meshwise.choose.plan import Plan, Rejected
from meshwise.choose.regions import Node
from meshwise.choose.returning import returning
from meshwise.choose.search import Search
from meshwise.choose.tree import IMPOSSIBLE
from meshwise.ir.factors import Strategy
from meshwise.ir.sharding import DimAxes

SHOWN = 3


def losers(plan: Plan) -> dict[int, tuple[Rejected, ...]]:
    """The next best strategies of each equation that was decided by itself, the cheapest first.

    Priced over the axes of the plan, with everything else as it has it. A plan that keeps what
    completion gave weighed nothing.
    """
    if plan.driver == "gspmd":
        return {}
    what = plan.program, plan.rules, plan.completion, plan.hardware
    graph = returning(build_graph(*what, plan.apart), plan.out_shardings)
    search = Search(graph, [_taken(plan, node) for node in graph.nodes])
    limits, fixed = limits_of(graph), fixed_axes(graph)
    found = {}
    for node in graph.nodes:
        if len(node.members) == 1 and node.index not in fixed:
            current, *others = choices_of(search, node, limits)
            cheapest = _cheapest(search, node, others)
            found[node.members[0].equation] = tuple(
                Rejected(Strategy(axes), max(0.0, seconds))
                for seconds, _, axes in cheapest
                if seconds < IMPOSSIBLE and axes != current
            )
    return found


def _taken(plan: Plan, node: Node) -> DimAxes:
    """The axes of a node's factors, from the strategies of its equations."""
    axes: list[tuple[str, ...]] = [()] * len(node.rule.sizes)
    for member in node.members:
        own = plan.equations[member.equation].strategy.axes
        for factor, used in zip(member.factors, own, strict=True):
            if factor >= 0:
                axes[factor] = used
    return tuple(axes)


def _cheapest(search: Search, node: Node, others: Sequence[DimAxes]) -> list[Priced]:
    """The cheapest of other choices, by what each costs more than the current one.

    Reshards are looked for only where a choice may still be among them.
    """
    bounds: list[Priced] = []
    for k, axes in enumerate(others):
        changes = search.put(node, axes)
        bounds.append((search.least_delta(changes), k, axes))
        search.undo(changes)
    found: list[Priced] = []
    for bound, k, axes in sorted(bounds):
        if len(found) >= SHOWN and bound > found[SHOWN - 1][0] + WORTH_IT:
            break
        changes = search.put(node, axes)
        insort(found, (search.delta(changes), k, axes))
        search.undo(changes)
    return found[:SHOWN]
