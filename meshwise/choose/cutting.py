"""Regions of a plan that are cut where another layout begins, if that sends less.

A region is one decision (`regions.py`), and the descents move it as a whole. Where two parts of it
would each lie otherwise, and between them is less to send than around them, none of them comes to
that: a stack of momenta that one product wants by rows, and the next update by columns. So one more
descent begins at the plan, with every equation of regions at which something moves a node of its
own.
"""

from dataclasses import replace

from meshwise._jax import Var
from meshwise.choose.found import LESS, Found, descended
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
    is limited by what a node reads; nor may it hold more than that is worth. Where what moves at
    regions is less than that of all that is sent, nothing is looked for.
    """
    graph = best.search.graph
    regions, sent = _moved(best)
    if LESS * (best.sent_bytes - sent) > best.sent_bytes:
        return best
    moved = frozenset(m.equation for node in regions for m in node.members)
    apart = decided_apart(graph, replace(graph.apart, equations=moved)) if moved else None
    if apart is None:
        return best
    one = descended(Search(apart, _as_in(best, apart)), limits_of(apart))
    is_no_more = one.work_seconds <= best.work_seconds * (1 + 1e-9)
    is_less = one.seconds <= best.seconds and LESS * one.price <= best.price
    return one if is_less and is_no_more and not has_too_much(one, best) else best


def _moved(plan: Found) -> tuple[list[Node], float]:
    """Regions that read what moves to other dims for them, or make what does for others.

    And the bytes that a device sends of that.
    """
    search, found, moving = plan.search, list[Node](), set[Var]()
    for node in filter(lambda node: node.is_region, search.graph.nodes):
        placed = search.placed[node.index]
        read = zip(node.operands, placed.operands, strict=True)
        edges = [(v, search.produced(search.graph.values[v]), target) for v, target in read]
        made = set(node.results) & plan.copies.keys()
        edges += [(v, *edge) for v in made for edge in plan.copies[v][1]]
        moved = {v for v, a, b in edges if a.dims != b.dims and not a.unreduced}
        if moved:
            found.append(node)
            moving |= moved
    return found, search.sent_bytes({v: plan.copies[v][1] for v in moving & plan.copies.keys()})


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
