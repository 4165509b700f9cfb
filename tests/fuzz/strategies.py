"""Plans drawn by dice: strategies that no cost would choose, and that must be right all the same.

The chooser takes what is cheap, so most of what rules allow is never emitted for it. Here each node
takes axes at random among all that its factors allow, or what a neighbour suggests.
"""

import random
from collections.abc import Sequence

from meshwise.choose.candidates import candidates
from meshwise.choose.choose import _plan
from meshwise.choose.found import Found
from meshwise.choose.graph import Graph, Value, build_graph
from meshwise.choose.limits import fixed_axes, nominal
from meshwise.choose.plan import Plan
from meshwise.choose.pricing import node_seconds
from meshwise.choose.regions import Node
from meshwise.choose.search import Search
from meshwise.choose.tree import IMPOSSIBLE, Edge
from meshwise.cost.hardware import GENERIC
from meshwise.ir.factors import Strategy, dims_sharding, fits
from meshwise.ir.sharding import DimAxes, Sharding
from meshwise.reshard.plan import Reshard
from meshwise.reshard.turned import straightened


def random_plan(program, rules, completion, seed: int) -> Plan:
    """A plan for a completed program, by dice alone."""
    graph = build_graph(program, rules, completion, GENERIC)
    draw = random.Random(seed * 31 + 7)
    search = _Unpriced(graph, _axes_of_nodes(graph, draw))
    copies = {var: (0.0, _edges(search, value, draw)) for var, value in graph.values.items()}
    found = Found(0.0, search, {v: c for v, c in copies.items() if c[1]})
    return _plan(found, 0.0, "dice")


class _Unpriced(Search):
    """Placements whose cost nobody asks for."""

    def value_seconds(self, value: Value) -> float:
        """Nothing."""
        del value
        return 0.0


def _axes_of_nodes(graph: Graph, draw: random.Random) -> list[DimAxes]:
    """Nodes in the program's order: near what is there already, or anything."""
    fixed = fixed_axes(graph)
    wild = draw.choice((0.1, 0.3, 0.6))
    placed: list[DimAxes] = []
    for node in graph.nodes:
        if node.index in fixed:
            placed.append(fixed[node.index])
        elif draw.random() < wild:
            placed.append(_anything(graph, node, draw))
        else:
            placed.append(draw.choice(_suggested(graph, node, placed)))
    return placed


def _suggested(graph: Graph, node: Node, placed: list[DimAxes]) -> list[DimAxes]:
    own = nominal(graph, node)
    sources = []
    for var, dims in zip(node.operands, own, strict=False):
        value = graph.values[var]
        if value.fixed is not None:
            sources.append(value.fixed)
        elif value.maker is not None and value.maker < len(placed):
            maker = graph.nodes[value.maker]
            made = dims_sharding(maker.rule.results[value.result], placed[value.maker])
            sources.append(Sharding(made))
        else:
            sources.append(Sharding(dims))
    found = candidates(graph, node, sources, (), own, None)
    return [axes for axes in found if node_seconds(graph, node, axes) < IMPOSSIBLE]


def _anything(graph: Graph, node: Node, draw: random.Random) -> DimAxes:
    """Sub-axes on factors, one by one, wherever the rule still allows the whole."""
    axes: list[tuple[str, ...]] = [()] * len(node.rule.sizes)
    if draw.random() < 0.5:
        groups = [subs for _, subs in graph.mesh.user_axes if subs]
    else:
        groups = [(a,) for a in graph.mesh.names]
    draw.shuffle(groups)
    for group in groups:
        factors = [f for f in range(len(axes)) if f not in node.rule.whole]
        if not factors or draw.random() < 0.15:
            continue
        for factor in draw.sample(factors, min(3, len(factors))):
            tried = list(axes)
            tried[factor] = (*tried[factor], *group)
            if _allowed(graph, node, tuple(tried)):
                axes = tried
                break
    return tuple(axes)


def _allowed(graph: Graph, node: Node, axes: DimAxes) -> bool:
    one_operator = all(len({r for f, r in over if axes[f]}) <= 1 for over in node.reduced)
    fitting = one_operator and fits(node.rule, Strategy(axes), graph.mesh, node.together)
    return fitting and node_seconds(graph, node, axes) < IMPOSSIBLE


def _edges(search: Search, value: Value, draw: random.Random) -> tuple[Edge, ...]:
    """Reshards from the copy that is made, or from any other copy, to all that are wanted."""
    if value.remade:
        return ()
    produced = search.produced(value)
    edges: list[Edge] = []
    wanted = sorted(search.wanted(value) - {produced}, key=str)
    draw.shuffle(wanted)
    if produced.turned and wanted:  # first to where its shards belong, which no reshard does beside
        edges.append((produced, draw.choice(_straight(search, value, wanted))))
        produced = edges[0][1]
        wanted = [target for target in wanted if target != produced]
    copies = [produced]
    for target in wanted:
        able = [c for c in copies if _reachable(c, target)]
        source = draw.choice(able) if able and draw.random() < 0.5 else produced
        edges.append((source, target))
        copies.append(target)
    return tuple(edges)


def _straight(search: Search, value: Value, wanted: Sequence[Sharding]) -> list[Sharding]:
    """Where one step leads from what lies turned."""
    turned, graph = search.produced(value), search.graph
    terms = turned.unreduced, turned.reduction
    ends = [s for s in wanted if (s.unreduced, s.reduction) == terms]
    asked = Reshard(value.shape, value.itemsize, graph.mesh, turned, turned, GENERIC)
    return [turned.straight, *(s for s in ends if straightened(asked._replace(target=s)))]


def _reachable(source: Sharding, target: Sharding) -> bool:
    if not target.unreduced or not source.unreduced:  # what is added to a sum becomes a term of it
        return True
    same = source.reduction is target.reduction
    return same and set(target.unreduced) <= set(source.unreduced)
