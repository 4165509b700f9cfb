"""Regions of a plan that are cut where another layout begins, if that sends less.

A region is one decision (`regions.py`), and the descents move it as a whole. Where two parts of it
would each lie otherwise, and between them is less to send than around them, none of them comes to
that: a stack of momenta that one product wants by rows, and the next update by columns. So one more
descent begins at the plan, with every equation of regions at which something moves a node of its
own.
"""

from dataclasses import replace

from meshwise.choose.descents import LESS
from meshwise.choose.found import Found, descended
from meshwise.choose.graph import Graph, decided_apart
from meshwise.choose.limits import limits_of
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.choose.weighing import has_too_much
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import DimAxes


def cut_where_worth_it(best: Found) -> Found:
    """What is found from a plan on where equations are decided by themselves; else the plan.

    It has to be `LESS` times less, of no more seconds with launches, and compute no more, as work
    is limited by what a node reads; nor may it hold more than that is worth.
    """
    graph = best.search.graph
    moved = frozenset(m.equation for node in _moved(best) for m in node.members)
    apart = decided_apart(graph, replace(graph.apart, equations=moved)) if moved else None
    if apart is None:
        return best
    one = descended(Search(apart, _as_in(best, apart)), limits_of(apart))
    is_no_more = one.work_seconds <= best.work_seconds * (1 + 1e-9)
    is_less = one.seconds <= best.seconds and LESS * one.price <= best.price
    return one if is_less and is_no_more and not has_too_much(one, best) else best


def _moved(plan: Found) -> list[Node]:
    """The regions that read what moves to other dims for them, or make what does for others."""
    search, found = plan.search, []
    for node in search.graph.nodes:
        placed = search.placed[node.index]
        read = zip(node.operands, placed.operands, strict=True)
        edges = [(search.produced(search.graph.values[v]), target) for v, target in read]
        made = set(node.results) & plan.copies.keys()
        edges += [edge for v in made for edge in plan.copies[v][1]]
        if node.is_region and any(a.dims != b.dims and not a.unreduced for a, b in edges):
            found.append(node)
    return found


def _as_in(plan: Found, graph: Graph) -> list[DimAxes]:
    """The axes of the factors of another graph's nodes, where equations lie as in a plan."""
    whole = plan.search.graph
    axes: dict[tuple[int, int], Axes] = {}
    for node, placed in zip(whole.nodes, plan.search.placed, strict=True):
        for member in node.members:
            for factor, own in enumerate(member.factors):
                if own >= 0:
                    axes[member.equation, factor] = placed.strategy.axes[own]
    return [node.axes_where(lambda e, f: axes[e, f]) for node in graph.nodes]
