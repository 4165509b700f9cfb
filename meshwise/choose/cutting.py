"""Regions of a plan that are cut where another layout begins, if that sends less.

A region is one decision (`regions.py`), and the descents move it as a whole. Where two parts of it
would each lie otherwise, and between them is less to send than around them, none of them comes to
that: a stack of momenta that one product wants by rows, and the next update by columns. So one more
descent begins at the plan, with every equation a node of its own.
"""

from dataclasses import replace

from meshwise.choose.descents import LESS
from meshwise.choose.found import Found, descended
from meshwise.choose.graph import Graph, decided_apart
from meshwise.choose.limits import limits_of
from meshwise.choose.search import Search
from meshwise.choose.weighing import has_too_much
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import DimAxes


def cut_where_worth_it(best: Found) -> Found:
    """What is found from a plan on where each equation is decided by itself; else the plan.

    It has to send `LESS`, and to compute no more, as work is limited by what a node reads.
    """
    graph = best.search.graph
    apart = decided_apart(graph, replace(graph.apart, equations=True)) if best.sent_bytes else None
    if apart is None:
        return best
    one = descended(Search(apart, _as_in(best, apart)), limits_of(apart))
    is_no_more = one.work_seconds <= best.work_seconds * (1 + 1e-9)
    is_less = one.seconds <= best.seconds and LESS * one.price <= best.price
    return one if is_less and is_no_more and not has_too_much(one, best) else best


def _as_in(plan: Found, graph: Graph) -> list[DimAxes]:
    """The axes of the factors of another graph's nodes, where equations lie as in a plan."""
    whole = plan.search.graph
    axes: dict[tuple[int, int], Axes] = {}
    for node, placed in zip(whole.nodes, plan.search.placed, strict=True):
        for member in node.members:
            for factor, own in enumerate(member.factors):
                if own >= 0:
                    axes[member.equation, factor] = placed.strategy.axes[own]
    found = []
    for node in graph.nodes:
        own_axes: list[Axes] = [()] * len(node.rule.sizes)
        for member in node.members:
            for factor, own in enumerate(member.factors):
                if own >= 0:
                    own_axes[own] = axes[member.equation, factor]
        found.append(tuple(own_axes))
    return found
