"""Program and completion -> Plan."""

from collections.abc import Sequence

from meshwise._jax import Var
from meshwise.choose.descend import descend
from meshwise.choose.graph import build_graph, is_remade
from meshwise.choose.plan import EquationPlan, Plan, Rejected
from meshwise.choose.search import Search
from meshwise.choose.starts import completion_start, forward_start, limits_of
from meshwise.choose.tree import Edge, reshard_tree
from meshwise.cost.hardware import Hardware
from meshwise.ir.factors import Strategy, operand_sharding, result_sharding
from meshwise.ir.program import Program
from meshwise.ir.sharding import Sharding
from meshwise.propagate.completion import Completion
from meshwise.rules.registry import OpRule

DRIVERS = ("descend", "gspmd")

Copies = dict[Var, tuple[float, tuple[Edge, ...]]]  # of each value: seconds, and its reshards
Lost = dict[int, tuple[Rejected, ...]]


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
    plans: list[tuple[float, Search, Copies, Lost]] = []
    if driver == "descend":
        for axes in dict.fromkeys((tuple(start), tuple(forward_start(graph, limits)))):
            search = Search(graph, axes)
            lost = descend(search, limits)
            copies = _copies(search, stop_at_completion=False)
            plans.append((_total(search, copies), search, copies, lost))
    plans.append((completion_seconds, completed, stopping, {}))
    seconds, best, copies, lost = min(plans, key=lambda plan: plan[0])
    return _plan(best, copies, lost, seconds, completion_seconds, driver)


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
        rest = tuple(e for e in rest if e[1] != produced)
        found[var] = (seconds + more) * value.trips, edges + rest
    return found


def _total(search: Search, copies: Copies) -> float:
    return sum(c for c, _ in copies.values()) + sum(p.seconds for p in search.placed)


def _plan(
    search: Search,
    copies: Copies,
    lost: Lost,
    seconds: float,
    completion_seconds: float,
    driver: str,
) -> Plan:
    graph = search.graph
    equations = [_equation_plan(search, i, lost) for i in range(len(graph.rules))]
    return Plan(
        program=graph.program,
        rules=tuple(graph.rules),
        completion=graph.completion,
        equations=tuple(equations),
        in_shardings=graph.in_shardings,
        out_shardings=graph.out_shardings,
        copies={var: edges for var, (_, edges) in copies.items()},
        seconds=seconds,
        completion_seconds=completion_seconds,
        driver=driver,
        figures=graph.hardware.name,
    )


def _equation_plan(search: Search, index: int, lost: Lost) -> EquationPlan:
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
    rejected = lost.get(own_node.index, ()) if len(own_node.members) == 1 else ()
    remade = is_remade(graph.program, graph.rules, own_node)
    return EquationPlan(strategy, operands, results, rejected, remade)
