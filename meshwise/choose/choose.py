"""Program and completion -> Plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwise._jax import Var
from meshwise.choose.descend import descend
from meshwise.choose.graph import Graph, build_graph, is_remade
from meshwise.choose.holding import argument_bytes, peak_bytes
from meshwise.choose.plan import EquationPlan, Plan
from meshwise.choose.search import Search, node_seconds, work_seconds
from meshwise.choose.starts import (
    Limits,
    backward_start,
    completion_start,
    forward_start,
    limits_of,
)
from meshwise.choose.tree import Edge, reshard_tree
from meshwise.cost.hardware import Hardware
from meshwise.ir.factors import Strategy, operand_sharding, result_sharding
from meshwise.ir.program import Program
from meshwise.ir.sharding import Sharding
from meshwise.propagate.completion import Completion
from meshwise.rules.registry import OpRule

DRIVERS = ("descend", "gspmd")

Copies = dict[Var, tuple[float, tuple[Edge, ...]]]  # of each value: seconds, and its reshards

# A plan is taken for holding less where the cheapest holds so many times as much, and at least as
# many times as the fourth power of how many times it is as dear: a tenth more for a third less.
MUCH_LIGHTER = 1.2
DEARER = 4
HOLDING = 0.3  # what all that is held costs in the search for one, as a part of the cheapest plan
HOLDING_MORE = 1.0  # and in that for one that makes no more than completion does
HEAVIER = 1.4  # how many times as much as completion is far more
WORKING = 3.0  # and all work in the search for one that computes less


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
    stopping = _copies(completed, stop_at_completion=True)
    completion_seconds = _total(completed, stopping)
    found: list[Found] = []
    if driver == "descend":
        starts = dict.fromkeys((tuple(start), tuple(forward_start(graph, limits))))
        found += [_descended(Search(graph, axes), limits) for axes in starts]
        if all(_moves_results(one) for one in found):
            one = _descended(Search(graph, backward_start(graph, limits)), limits)
            found += [one] if one.sent_bytes < min(other.sent_bytes for other in found) else []
        found += _with_steps_gathered(graph, limits)
    found.append(Found(completion_seconds, completed, stopping))
    best = min(found, key=lambda one: (one.large_seconds, one.seconds))
    if driver == "descend":
        best = _lighter(best, found, limits)
        best = _no_heavier(best, found, limits)
        best = _computing_less(best, found[-1], limits)
    return _plan(best, completion, completion_seconds, driver)


@dataclass(frozen=True, eq=False)
class Found:
    """A placement of all nodes that was found, and the reshards that it takes."""

    seconds: float
    search: Search
    copies: Copies

    @cached_property
    def large_seconds(self) -> float:
        """Seconds without launches, where hardware compares plans by that; else nothing.

        Work counts in steps of a launch, so that a little less of it is worth none.
        """
        graph = self.search.graph
        if not graph.hardware.least_bytes:
            return 0.0
        sent = self.sent_bytes / graph.hardware.link_bytes_per_s
        launch, work = graph.hardware.launch_s, self.work_seconds
        return round(sent + (work // launch * launch if launch else work), 13)

    @cached_property
    def sent_bytes(self) -> float:
        """What a device sends."""
        return self.search.sent_bytes({var: edges for var, (_, edges) in self.copies.items()})

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
        """What a device holds at once beside the arguments."""
        return self.peak_bytes - argument_bytes(self.search)


def _descended(search: Search, limits: Limits) -> Found:
    descend(search, limits)
    copies = _copies(search, stop_at_completion=False)
    return Found(_total(search, copies), search, copies)


def _moves_results(found: Found) -> bool:
    """Whether a result that is no sum is moved at the end: what it is made of might be instead."""
    search = found.search
    returned = [value for value in search.graph.values.values() if value.returned]
    return any(
        value.var in found.copies and not search.produced(value).unreduced for value in returned
    )


def _with_steps_gathered(graph: Graph, limits: Limits) -> list[Found]:
    """What is found where stacks in shards of steps may be gathered whole, if there are any.

    Few bytes in one collective may cost less than their move to other dims and a gather of a part
    in every step. What the plan holds then is compared like that of any other.
    """
    found = []
    for one in (graph, graph.with_rows_whole()):
        wider = limits if one is None else limits_of(one, gathers_steps=True)
        if one is not None and wider.held.keys() != limits.held.keys():
            found.append(_descended(Search(one, completion_start(one, wider)), wider))
    return found


def _lighter(best: Found, found: Sequence[Found], limits: Limits) -> Found:
    """What holds far less than the cheapest and costs little more, where there is such.

    It is looked for where completion, the last found, holds far less: by a descent from there that
    has to pay for what it holds. It may cost no more than completion.
    """
    completed = found[-1]
    if best.peak_bytes <= MUCH_LIGHTER * min(one.peak_bytes for one in found):
        return best
    found = [_paying(best, completed, HOLDING, limits), *found]
    worth = [one for one in found if _is_worth_it(one, best, completed.seconds)]
    return min(worth, key=_weighed, default=best)


def _no_heavier(best: Found, found: Sequence[Found], limits: Limits) -> Found:
    """What makes less, where the best makes far more beside its arguments than completion does.

    A few bytes saved may leave every device with a whole mask or table. What makes less is taken
    if what is made falls by more than the cost rises; it may cost no more than completion.
    """
    completed = found[-1]
    if best.made_bytes <= HEAVIER * completed.made_bytes:
        return best
    found = [_paying(best, completed, HOLDING_MORE, limits), *found]
    worth = [
        one
        for one in found
        if MUCH_LIGHTER * one.made_bytes <= best.made_bytes
        and one.seconds <= completed.seconds
        and one.seconds * one.made_bytes <= best.seconds * best.made_bytes
    ]
    return min(worth, key=lambda one: (one.seconds * one.made_bytes, one.seconds), default=best)


def _paying(best: Found, completed: Found, part: float, limits: Limits) -> Found:
    """What a descent from completion finds to which all that the best holds costs such a part."""
    graph = best.search.graph
    held = sum(best.search.held_bytes(value) for value in graph.values.values())
    axes = [placed.strategy.axes for placed in completed.search.placed]
    per_byte = part * best.seconds / max(held, 1)
    return _descended(Search(graph, axes, seconds_per_byte=per_byte), limits)


def _computing_less(best: Found, completed: Found, limits: Limits) -> Found:
    """What computes far less than the cheapest, where completion does and it costs little more.

    That every device does all of some element-wise work is decided where that saves bytes, and each
    time it is cheap; in a loop it may become most of what is computed. So a descent from completion
    has to pay more for work. What it finds is taken if work falls by more than the cost rises; it
    may cost no more than completion.
    """
    if best.work_seconds <= MUCH_LIGHTER * completed.work_seconds:
        return best
    axes = [placed.strategy.axes for placed in completed.search.placed]
    dearer = WORKING * best.seconds / best.work_seconds
    one = _descended(Search(best.search.graph, axes, dearer_work=dearer), limits)
    much = MUCH_LIGHTER * one.work_seconds <= best.work_seconds
    worth = one.seconds * one.work_seconds <= best.seconds * best.work_seconds
    return one if much and worth and one.seconds <= completed.seconds else best


def _is_worth_it(one: Found, best: Found, most_seconds: float) -> bool:
    much = MUCH_LIGHTER * one.peak_bytes <= best.peak_bytes
    return much and one.seconds <= most_seconds and _weighed(one) <= _weighed(best)


def _weighed(one: Found) -> float:
    return one.seconds**DEARER * one.peak_bytes


def _copies(search: Search, stop_at_completion: bool) -> Copies:
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


def _total(search: Search, copies: Copies) -> float:
    return sum(c for c, _ in copies.values()) + sum(
        node_seconds(search.graph, node, placed.strategy.axes)
        for node, placed in zip(search.graph.nodes, search.placed, strict=True)
    )


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
    results = tuple(result_sharding(rule, strategy, i) for i in range(len(eqn.outvars)))
    own_node = graph.nodes[nodes[0][0]]
    remade = is_remade(graph.program, graph.rules, own_node)
    return EquationPlan(strategy, operands, results, remade)
