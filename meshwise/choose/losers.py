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
    taken = [n.axes_where(lambda e, f: plan.equations[e].strategy.axes[f]) for n in graph.nodes]
    search = Search(graph, taken)
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
