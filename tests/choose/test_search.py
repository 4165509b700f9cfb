"""The state of a search, by itself: which sums a node carries, and what limits its work."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshwise.choose import limits as limits_module
from meshwise.choose.descend import choices_of
from meshwise.choose.graph import build_graph
from meshwise.choose.limits import limits_of
from meshwise.choose.search import Search
from meshwise.choose.starts import completion_start
from meshwise.choose.tally import MANY, Placements
from meshwise.choose.tree import IMPOSSIBLE
from meshwise.cost.hardware import GENERIC
from meshwise.ir.mesh import refine_mesh
from meshwise.propagate.complete import complete
from meshwise.trace import make_program


def graph_of(function, specs):
    types = [jax.ShapeDtypeStruct((8, 8), "float32") for _ in specs]
    closed = jax.make_jaxpr(function)(*types)
    names = [f"args[{i}]" for i in range(len(specs))]
    program = make_program(closed, refine_mesh(("x",), (2,)), specs, [None], names, ["result"])
    return build_graph(*complete(program), GENERIC)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("second", "carried"), [((P(None, "x"), P("x")), ("x",)), ((P(), P()), ()), ((P("x"), P()), ())]
)
def test_an_addition_carries_what_all_its_terms_are_sums_over(second, carried, scaled):
    graph = graph_of(
        lambda a, b, c, d: (a @ b + c @ d) * (2 if scaled else 1), (P(None, "x"), P("x"), *second)
    )
    search = Search(graph, completion_start(graph, limits_of(graph)))
    *_, addition = [node for node in graph.nodes if node.carries]
    assert search.placed[addition.index].strategy.carried == carried


def test_what_is_counted_follows_what_is_placed():
    """Of a value that many read, and of a sum of many terms, one of them an argument."""

    def function(a, b, c):
        products = [a @ (b * k) for k in range(2, 2 + MANY)]
        return sum(products, c @ b)

    graph = graph_of(function, (P(None, "x"), P("x"), P()))
    limits = limits_of(graph)
    search = Search(graph, completion_start(graph, limits))
    assert search.tallies.readers and search.tallies.terms
    before = list(search.placed)
    for node in graph.nodes:
        for axes in choices_of(search, node, limits):
            changes = search.put(node, axes)
            assert search.placed.counts == Placements(search.placed, search.tallies).counts
            for var, tally in search.tallies.readers.items():
                value = graph.values[var]
                read = {search.placed[n].operands[k] for n, k in value.uses}
                others = {search.placed[n].operands[k] for n, k in value.uses[1:]}
                assert search.wanted(value) == read | set(value.returned)
                assert search.placed.others(tally, value.uses[:1]) == others
            search.undo(changes)
    assert search.placed == before


def test_a_strategy_that_no_local_rule_can_follow_limits_no_work(monkeypatch):
    graph = graph_of(lambda a, b: jnp.sin(a) @ b, (P("x"), P()))
    limited = limits_of(graph).work
    (product,) = [n for n in graph.nodes if len(n.rule.sizes) == 3]
    halved = limited[product.index]
    seconds = limits_module.node_seconds

    def followed_whole(graph, node, axes):
        is_split = node is product and any(axes)
        return IMPOSSIBLE if is_split else seconds(graph, node, axes)

    monkeypatch.setattr(limits_module, "node_seconds", followed_whole)
    again = graph_of(lambda a, b: jnp.sin(a) @ b, (P("x"), P()))
    (product,) = [n for n in again.nodes if len(n.rule.sizes) == 3]
    assert limits_of(again).work[product.index] > halved
