"""Program and completion -> Plan."""

from collections.abc import Sequence

from meshwise.choose.candidates import may_move_behind
from meshwise.choose.found import Found, copies_of, descended, total_seconds
from meshwise.choose.gathering import gathered_once
from meshwise.choose.graph import Graph, build_graph
from meshwise.choose.limits import Limits, limits_of, nominal
from meshwise.choose.plan import EquationPlan, Plan
from meshwise.choose.pricing import turned_along, work_seconds
from meshwise.choose.repeating import with_work_repeated
from meshwise.choose.search import Search
from meshwise.choose.spreading import spread_out
from meshwise.choose.starts import (
    backward_start,
    completion_start,
    forward_start,
    moved_starts,
)
from meshwise.choose.weighing import weighed
from meshwise.cost.hardware import Hardware
from meshwise.ir.factors import Strategy, operand_sharding, result_sharding
from meshwise.ir.program import Program
from meshwise.ir.sharding import unreduced
from meshwise.propagate.completion import Completion
from meshwise.rules.registry import OpRule

DRIVERS = ("descend", "gspmd")

# So many times less is worth it that values lie otherwise throughout.
LESS = 1.03


def choose(
    program: Program,
    rules: Sequence[OpRule],
    completion: Completion,
    hardware: Hardware,
    driver: str = "descend",
) -> Plan:
    """Decide strategies and reshards.

    `"gspmd"` keeps every value in the sharding that completion gave it; `"descend"` goes on from
    there to improve the cost at fixed hints, and keeps completion where it finds nothing better.
    """
    graph = build_graph(program, rules, completion, hardware)
    limits = limits_of(graph)
    start = completion_start(graph, limits)
    completed = Search(graph, start, carries=False)
    stopping = copies_of(completed, stop_at_completion=True)
    completion_seconds = total_seconds(completed, stopping)
    found: list[Found] = []
    if driver == "descend":
        starts = dict.fromkeys((tuple(start), tuple(forward_start(graph, limits))))
        found += [descended(Search(graph, axes), limits) for axes in starts]
        found += _with_axes_behind(graph, limits)
        found += _with_leading_dims(graph, limits, min(one.seconds for one in found))
        if all(one.moves_results for one in found):
            one = descended(Search(graph, backward_start(graph, limits)), limits)
            found += [one] if one.sent_bytes < min(other.sent_bytes for other in found) else []
        found += _with_steps_gathered(graph, limits)
        found += _with_arguments_moved(graph, limits, found)
        found += with_work_repeated(graph, limits, found)
    found.append(Found(completion_seconds, completed, stopping))
    # None is dearer, with launches, than completion is.
    found = [one for one in found if one.seconds <= completion_seconds]
    best = _best(found)
    if driver == "descend":
        best = weighed(best, found, limits, completion_seconds)
        gathered = gathered_once(best, limits)
        if gathered is not None:
            one, bound = gathered
            best = weighed(_best([one, *found]), [one, *found], limits, bound)
        best = spread_out(best, limits)
    return _plan(best, completion, completion_seconds, driver)


def _best(found: Sequence[Found]) -> Found:
    """Fewest bytes, however many launches."""
    return min(found, key=lambda one: (one.large_seconds, one.seconds))


def _with_axes_behind(graph: Graph, limits: Limits) -> list[Found]:
    """What is found where axes of dims that are exchanged along may go behind those of others.

    Each exchange by itself is short then, but several may be longer than one that moves all axes at
    once: Fourier transforms along three dims of pencils.
    """
    nodes = (n for n in graph.nodes if n.rule.permuted)
    if not any(may_move_behind(graph, n, nominal(graph, n)) for n in nodes):
        return []
    wider = limits.and_behind
    return [descended(Search(graph, forward_start(graph, wider)), wider)]


def _with_leading_dims(graph: Graph, limits: Limits, seconds: float) -> list[Found]:
    """What is found where leading dims have the axes that others claim, if it is worth it.

    That has all values lie otherwise, and sends more often: not for a few bytes less.
    """
    if graph.completion.led is None:
        return []
    led = graph.completed_as(graph.completion.led)
    wider = limits.or_those_of(limits_of(led))
    one = descended(Search(graph, completion_start(led, wider)), wider)
    return [one] if LESS * one.seconds <= seconds else []


def _with_arguments_moved(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found where arguments move to other dims first, where launches count for much."""
    if graph.hardware.least_bytes:
        return []
    least = min(one.seconds for one in found)
    moved = [descended(Search(graph, start), limits) for start in moved_starts(graph, limits)]
    return [one for one in moved if LESS * one.seconds < least]


def _with_steps_gathered(graph: Graph, limits: Limits) -> list[Found]:
    """What is found where stacks in shards of steps may be gathered whole, if there are any.

    Few bytes in one collective may cost less than their move to other dims and a gather of a part
    in every step. What the plan holds then is compared like that of any other.
    """
    found, graphs = [], [graph]
    if graph.completion.rows_whole is not None:
        graphs.append(graph.completed_as(graph.completion.rows_whole))
    for one in graphs:
        wider = limits_of(one, gathers_steps=True)
        if wider.held.keys() != limits.held.keys():
            found.append(descended(Search(one, completion_start(one, wider)), wider))
    return found


def _plan(found: Found, completion: Completion, completion_seconds: float, driver: str) -> Plan:
    graph = found.search.graph
    equations = [_equation_plan(found.search, i) for i in range(len(graph.rules))]
    return Plan(
        program=graph.program,
        rules=tuple(graph.rules),
        completion=completion,
        equations=tuple(equations),
        in_shardings=graph.in_shardings,
        out_shardings=graph.out_shardings,
        copies={var: edges for var, (_, edges) in found.copies.items()},
        seconds=found.seconds,
        completion_seconds=completion_seconds,
        work_seconds=sum(
            work_seconds(graph, node, placed.strategy.axes, padded=False)
            for node, placed in zip(graph.nodes, found.search.placed, strict=True)
        ),
        driver=driver,
        hardware=graph.hardware,
    )


def _equation_plan(search: Search, index: int) -> EquationPlan:
    """One equation's share of its node's strategy."""
    graph = search.graph
    rule = graph.rules[index].factors
    nodes = graph.nodes_of[index]
    axes = [()] * len(rule.sizes)  # type: list[tuple[str, ...]]
    carried: tuple[str, ...] = ()
    for node_index, member in nodes:
        placed = search.placed[node_index].strategy
        for factor, own in enumerate(member.factors):
            if own >= 0:
                axes[factor] = placed.axes[own]
        carried += tuple(a for f in member.summed for a in placed.axes[f]) + placed.carried
    strategy = Strategy(tuple(axes), carried)
    carries = graph.carries[index]
    eqn = graph.program.equations[index]
    operands = tuple(
        operand_sharding(rule, strategy, i, i in carries) for i in range(len(eqn.invars))
    )
    own_node = graph.nodes[nodes[0][0]]
    turned = turned_along(graph, own_node, search.placed[own_node.index].strategy.axes)
    made = [result_sharding(rule, strategy, i) for i in range(len(eqn.outvars))]
    results = tuple(unreduced(s.dims, s.unreduced, s.reduction, turned) for s in made)
    return EquationPlan(strategy, operands, results, index in graph.remade)
