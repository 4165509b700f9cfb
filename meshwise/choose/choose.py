"""Program and completion -> Plan."""

from collections.abc import Sequence

from meshwise.choose.cutting import cut_where_worth_it
from meshwise.choose.descents import descents
from meshwise.choose.few_with_many import with_few_gathered
from meshwise.choose.found import Found, as_placed, descended
from meshwise.choose.gathering import gathered_once
from meshwise.choose.graph import Graph, build_graph, decided_apart
from meshwise.choose.idle import with_idle_axes
from meshwise.choose.limits import Limits, limits_of
from meshwise.choose.parts import Apart
from meshwise.choose.plan import EquationPlan, Plan
from meshwise.choose.pricing import turned_along, work_seconds
from meshwise.choose.returning import returned_as_made
from meshwise.choose.search import Search
from meshwise.choose.spreading import spread_anywhere, spread_out
from meshwise.choose.starts import completion_start
from meshwise.choose.weighing import weighed
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.ir.factors import Strategy, operand_sharding, result_sharding
from meshwise.ir.program import Program
from meshwise.ir.sharding import unreduced
from meshwise.propagate.completion import Completion
from meshwise.rules.registry import OpRule

DRIVERS = ("descend", "gspmd")


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
    if driver != "descend":
        completed = _completed(graph, limits_of(graph))
        return _plan(completed, completed.seconds, driver)
    found = [_descended(one) for one in (graph, *_steps_apart(graph))]
    best, completed = min(found, key=lambda pair: pair[0].seconds)
    return _plan(returned_as_made(cut_where_worth_it(best)), completed.seconds, driver)


def _steps_apart(graph: Graph) -> list[Graph]:
    """The graph in which what is made before a loop binds nothing in it, if that is another one."""
    apart = decided_apart(graph, Apart(steps=True)) if graph.program.has_loops else None
    return [] if apart is None else [apart]


def _descended(graph: Graph) -> tuple[Found, Found]:
    """What descents from completion and elsewhere end with, and completion itself."""
    limits = limits_of(graph)
    completed = _completed(graph, limits)
    found = descents(graph, limits)
    if not graph.hardware.least_bytes:
        found += _from_fewest_bytes(graph, limits)
    return _improved(found, completed, limits), completed


def _completed(graph: Graph, limits: Limits) -> Found:
    """Completion as a plan."""
    search = Search(graph, completion_start(graph, limits), carries=False)
    return as_placed(search, stop_at_completion=True)


def _improved(found: Sequence[Found], completed: Found, limits: Limits) -> Found:
    """The plan to take of those found, or what is found from there."""
    # Completion's strategies do without its shardings of values that nobody reads so.
    directly = as_placed(completed.search)
    # None is dearer, with launches, than completion is.
    found = [o for o in (*found, directly, completed) if o.seconds <= completed.seconds]
    best = weighed(_best(found), found, completed, limits, completed.seconds)
    gathered = gathered_once(best, limits)
    if gathered is not None:
        one, bound = gathered
        best = weighed(_best([one, *found]), [one, *found], completed, limits, bound)
    few = with_few_gathered(best, limits)
    if few is not None:
        best = weighed(few, [few, *found], completed, limits, best.seconds)
    best = spread_out(best, limits)
    idle = with_idle_axes(completed.search.graph, best, limits)
    cheaper = [one for one in idle if one.seconds <= completed.seconds]
    if cheaper:
        best = weighed(_best([best, *cheaper]), [best, *cheaper], completed, limits, best.seconds)
    return spread_anywhere(best, limits)


def _from_fewest_bytes(graph: Graph, limits: Limits) -> list[Found]:
    """What is found from the plan of fewest bytes, where figures are those of a machine.

    What takes longest there, launches, is the same for many plans, and a descent stops between
    them: of layers over two axes the one that gathers each weight once was 1.4 times as fast.
    """
    by_bytes = graph.priced_by(GENERIC)
    own = limits_of(by_bytes)
    best = _improved(descents(by_bytes, own), _completed(by_bytes, own), own)
    return [descended(Search(graph, best.search.axes), limits)]


def _best(found: Sequence[Found]) -> Found:
    """Fewest bytes, however many launches."""
    return min(found, key=lambda one: (one.price, one.seconds))


def _plan(found: Found, completion_seconds: float, driver: str) -> Plan:
    graph = found.search.graph
    equations = [_equation_plan(found.search, i) for i in range(len(graph.rules))]
    return Plan(
        program=graph.program,
        rules=tuple(graph.rules),
        completion=graph.completion,
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
        apart=graph.apart,
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
