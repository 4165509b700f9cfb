"""Additions whose terms become sums over the same axes, so that one reduction serves all.

Each term alone would be reduced for itself, and what is exchanged for its maker stays as it is
wanted so elsewhere. With all of them at once little is saved, or nothing, until what is before them
follows: gradients of three projections of one array, whose heads may stay where they are through
all of an attention. So another descent begins there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwise.choose.around import terms_of
from meshwise.choose.descend import Choice, choices_of, together
from meshwise.choose.graph import Value
from meshwise.choose.limits import Limits, fixed_axes
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import DimAxes, Reduction

# A part of a plan's seconds that what is before the terms may save.
HARDLY = 0.1

# For each maker of terms, the axes with which these are sums over some axes.
_Offered = Mapping[int, Sequence[DimAxes]]


def make_sums_together(search: Search, limits: Limits, seconds: float) -> bool:
    """Place makers of terms so wherever it costs hardly more, of a plan's seconds; whether any."""
    graph = search.graph
    free = {n.index for n in graph.nodes} - fixed_axes(graph).keys()
    is_any = False
    for node in graph.nodes:
        terms = _terms(search, node)
        makers = {value.maker for value in terms}
        if len(makers) < 2 or not free.issuperset((node.index, *makers)):
            continue
        ways = _ways(search, node, terms, limits)
        priced = [(together(search, way, search.delta), k, way) for k, way in enumerate(ways)]
        cost, _, least = min(priced, default=(0.0, 0, []))
        if least and cost < HARDLY * seconds:
            for one, axes in least:
                search.keep(search.put(one, axes))
            is_any = True
    return is_any


def _terms(search: Search, node: Node) -> list[Value]:
    """What an addition adds up, if all of it may be sums; else nothing."""
    values = terms_of(search.graph, node)
    return values if all(v.maker is not None and not v.remade for v in values) else []


def _ways(search: Search, node: Node, terms: Sequence[Value], limits: Limits) -> list[list[Choice]]:
    """The addition and the makers of its terms, for all axes that these may be sums over."""
    current = search.placed[node.index].strategy
    ways = []
    for over, offered in _sums(search, terms, limits).items():
        axes = tuple(tuple(a for a in own if a not in over) for own in current.axes)
        if set(over) <= set(current.carried) or not limits.allow(search.graph, node, axes):
            continue
        ways.append(_as_sums(search, node, axes, terms, offered))
    return [way for way in ways if way]


def _sums(search: Search, terms: Sequence[Value], limits: Limits) -> dict[Axes, _Offered]:
    """For the axes over which all terms may be sums, how their makers make them so."""
    makers: dict[Any, Value] = {value.maker: value for value in terms}
    found: dict[Axes, dict[int, list[DimAxes]]] = {}
    for maker, value in makers.items():
        node = search.graph.nodes[maker]
        for axes in choices_of(search, node, limits):
            made = search.placement(node, axes).results[value.result]
            if made.unreduced and made.reduction is Reduction.SUM:
                over = tuple(sorted(made.unreduced))
                found.setdefault(over, {}).setdefault(maker, []).append(axes)
    return {over: offered for over, offered in found.items() if len(offered) == len(makers)}


def _as_sums(
    search: Search, node: Node, axes: DimAxes, terms: Sequence[Value], offered: _Offered
) -> list[Choice]:
    """The addition and the makers of its terms, each the cheapest that lies as it is added up.

    Nothing where a term cannot.
    """
    graph = search.graph
    wanted = dict(zip(node.operands, search.placement(node, axes).operands, strict=True))
    moves = [(node, axes)]
    for value in terms:
        assert value.maker is not None
        maker = graph.nodes[value.maker]
        suited = [
            own
            for own in offered[maker.index]
            if search.placement(maker, own).results[value.result].dims == wanted[value.var].dims
        ]
        if not suited:
            return []
        least = min(suited, key=lambda own: together(search, [(maker, own)], search.least_delta))
        moves.append((maker, least))
    return moves
