"""The descents of a search: each begins somewhere else, and ends with a plan.

Coordinate descent keeps to the basin that it begins in. So there are several: from completion, from
the program's own order, and from where something is otherwise that no step of a descent changes for
itself. What lies otherwise throughout, or sends more often, has to be worth it.
"""

from collections.abc import Callable, Sequence

from meshwise.choose.candidates import Reach, may_move_behind, natural_candidates
from meshwise.choose.even_groups import with_even_groups
from meshwise.choose.found import LESS, Found, descended
from meshwise.choose.graph import Graph
from meshwise.choose.limits import Limits, limits_of, nominal, read_bytes
from meshwise.choose.pricing import exchanges_of
from meshwise.choose.regions import Node
from meshwise.choose.regions_last import with_regions_last
from meshwise.choose.repeating import with_work_repeated
from meshwise.choose.search import Search
from meshwise.choose.starts import (
    backward_start,
    completion_start,
    forward_start,
    moved_starts,
)
from meshwise.ir.sharding import local_bytes

# Of what a device reads, so much that it may be worth to move it elsewhere first.
MOST = 0.25

# The plans that descents end with, given those that are found already; none where it is not worth
# another descent, or what it ends with.
Descent = Callable[[Graph, Limits, Sequence[Found]], list[Found]]


def descents(graph: Graph, limits: Limits) -> list[Found]:
    """All plans that descents end with."""
    found: list[Found] = []
    for descent in DESCENTS:
        found += descent(graph, limits, found)
    return found


def _from_completion_and_forward(
    graph: Graph, limits: Limits, found: Sequence[Found]
) -> list[Found]:
    """From completion, and from the program's own order."""
    starts = completion_start(graph, limits), forward_start(graph, limits)
    return [descended(Search(graph, axes), limits) for axes in dict.fromkeys(map(tuple, starts))]


def _with_axes_behind(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found where axes of dims that are exchanged along may go behind those of others.

    Each exchange by itself is short then, but several may be longer than one that moves all axes at
    once: Fourier transforms along three dims of pencils.
    """
    nodes = (n for n in graph.nodes if n.rule.permuted)
    moved = (n for n in nodes if may_move_behind(graph, n, nominal(graph, n)))
    if not any(_sends_most(graph, n) for n in moved):
        return []
    wider = limits.reaching(Reach(behind=True))
    return [descended(Search(graph, forward_start(graph, wider)), wider)]


def _sends_most(graph: Graph, node: Node) -> bool:
    """Whether a node sends most of what it reads, as its own values lie.

    Borders, sums of shards, and the largest of each are short wherever the axes are.
    """
    natural = natural_candidates(graph, node, nominal(graph, node))
    for axes in natural:
        exchanges = exchanges_of(graph, node, axes)
        sent = sum(one.wire_bytes for _, one in exchanges or ())
        if exchanges is None or sent >= MOST * read_bytes(graph, node, axes) > 0:
            return True
    return not natural


def _completed_otherwise(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found where other dims have the axes that several claim, if it is worth it.

    That has all values lie otherwise, and sends more often: not for a few bytes less.
    """
    ends: list[Found] = []
    least = min(one.seconds for one in found)
    for other in map(graph.completed_as, graph.completion.others):
        wider = limits.or_those_of(limits_of(other))
        ends.append(descended(Search(graph, completion_start(other, wider)), wider))
    return [one for one in ends if LESS * one.seconds <= least]


def _backward(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found from the last equation on, where all plans so far move results at the end."""
    if not all(one.moves_results for one in found):
        return []
    one = descended(Search(graph, backward_start(graph, limits)), limits)
    return [one] if one.sent_bytes < min(other.sent_bytes for other in found) else []


def _with_steps_gathered(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found where stacks in shards of steps may be gathered whole, if there are any.

    Few bytes in one collective may cost less than their move to other dims and a gather of a part
    in every step. What the plan holds then is compared like that of any other.
    """
    ends, graphs = [], [graph]
    if graph.completion.rows_whole is not None:
        graphs.append(graph.completed_as(graph.completion.rows_whole))
    for one in graphs:
        wider = limits_of(one, gathers_steps=True)
        if wider.held.keys() != limits.held.keys():
            ends.append(descended(Search(one, completion_start(one, wider)), wider))
    return ends


def _with_arguments_moved(graph: Graph, limits: Limits, found: Sequence[Found]) -> list[Found]:
    """What is found where arguments move to other dims first.

    Where launches count for much, or steps of a loop would exchange along their dims each time, or
    what is exchanged along dims is more than arguments, there and back.
    """
    best = min(found, key=lambda one: one.seconds)
    by_bytes = graph.hardware.least_bytes
    if by_bytes and not graph.program.has_loops and not _exchanges_more(best, graph):
        return []
    moved = [descended(Search(graph, start), limits) for start in moved_starts(graph, limits)]
    return [one for one in moved if LESS * one.seconds < best.seconds]


def _exchanges_more(plan: Found, graph: Graph) -> bool:
    """Whether a plan exchanges along dims, and sends more than all arguments moved, and back."""
    given = ((v, v.fixed) for v in graph.values.values() if v.fixed is not None)
    moved = sum(
        local_bytes(value.shape, value.itemsize, sharding, graph.mesh)
        for value, sharding in given
        if sharding.used_axes
    )
    placed = zip(graph.nodes, plan.search.placed, strict=True)
    return plan.sent_bytes > 2 * moved and any(
        own.strategy.axes[factor] for node, own in placed for factor in node.rule.permuted
    )


DESCENTS: tuple[Descent, ...] = (
    _from_completion_and_forward,
    _with_axes_behind,
    _completed_otherwise,
    _backward,
    with_even_groups,
    _with_steps_gathered,
    _with_arguments_moved,
    with_work_repeated,
    with_regions_last,
)
