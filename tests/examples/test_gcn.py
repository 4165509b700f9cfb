"""The graph network: what parts send, to the byte; the karate club; the numbers of one device."""

import itertools
import sys

import jax
import numpy as np
import pytest

from examples.cases import program_of
from examples.gcn import graphs, hints, model
from examples.gcn.__main__ import DEVICES, club
from examples.sizes import plan
from tests.examples.stepping import all_reduce, all_to_all, check_numbers, check_peers, check_sent

CONFIG = model.Config()
NODES, EDGES = club()


def in_parts():
    part = graphs.blocks(graphs.karate()[0], len(NODES.classes), DEVICES)
    parts, places = graphs.in_parts(EDGES, part)
    return graphs.placed(NODES, places, DEVICES), parts, places


PLACED, PARTS, PLACES = in_parts()
GIVEN = {"edges": (NODES, EDGES), "grid": (NODES, EDGES), "parts": (PLACED, PARTS)}
CASES = {name: hints.case(name, CONFIG, *data) for name, data in GIVEN.items()}
EACH = pytest.mark.parametrize("name", CASES)
QUICK = pytest.mark.parametrize(
    "name", ["edges", "parts", pytest.param("grid", marks=pytest.mark.slow)]
)


def random_graph(count: int, pairs: int):
    draw = np.random.default_rng(count)
    found = {tuple(sorted(draw.choice(count, 2, replace=False))) for _ in range(pairs)}
    return np.array(sorted(found)), draw.normal(size=(count, 5)).astype(np.float32)


def test_the_karate_club_is_zacharys():
    """Its degrees, and its 45 triangles, as everybody has them."""
    pairs, sides = graphs.karate()
    assert pairs.shape == (78, 2) and len({tuple(sorted(p)) for p in pairs.tolist()}) == 78
    degrees = [16, 9, 10, 6, 3, 4, 4, 4, 5, 2, 3, 1, 2, 5, 2, 2, 2]
    degrees += [2, 2, 3, 2, 2, 2, 5, 3, 3, 2, 4, 3, 4, 4, 6, 12, 17]
    assert np.bincount(pairs.ravel()).tolist() == degrees
    known = {frozenset(p) for p in pairs.tolist()}
    threes = itertools.combinations(range(34), 3)
    assert (
        sum(all(frozenset(p) in known for p in itertools.combinations(t, 2)) for t in threes) == 45
    )
    assert sides.sum() == 17 and sides[0] == 0 and sides[33] == 1
    assert np.flatnonzero(sides == 0)[-4:].tolist() == [16, 17, 19, 21]


@pytest.mark.parametrize("count, pairs, parts", [(34, 78, 8), (50, 200, 7), (20, 30, 3)])
def test_parts_have_what_arrives_at_each_node(count: int, pairs: int, parts: int):
    """A graph and its parts move the same values, as the matrix of the graph says."""
    given, x = random_graph(count, pairs)
    edges = graphs.normalised(given, count)
    matrix = np.zeros((count, count), np.float32)
    np.add.at(matrix, (edges.receivers, edges.senders), edges.scales)
    np.testing.assert_allclose(model.along_edges(x, edges), matrix @ x, rtol=1e-5, atol=1e-5)
    cut, places = graphs.in_parts(edges, graphs.blocks(given, count, parts))
    nodes = graphs.placed(model.Nodes(x, x[:, 0], x[:, 1]), places, parts)
    found = model.between_parts(jax.numpy.asarray(nodes.features), cut)
    found = np.asarray(found).reshape(-1, x.shape[1])[places]
    np.testing.assert_allclose(found, matrix @ x, rtol=1e-5, atol=1e-5)


def test_blocks_are_equal_and_near_each_other():
    pairs, _ = graphs.karate()
    part = graphs.blocks(pairs, 34, 4)
    assert np.bincount(part).tolist() == [9, 8, 9, 8]
    dice = np.random.default_rng(0).permutation(part)
    cut, by_dice = ((p[pairs[:, 0]] != p[pairs[:, 1]]).sum() for p in (part, dice))
    assert cut < by_dice


def test_parts_send_what_they_read_to_the_byte():
    """A layer's all_to_all of the nodes that are read, there and back; gradients; two scalars."""
    widths = CONFIG.widths[1:]
    most = PARTS.reads.shape[2]
    rows = [all_to_all(DEVICES * most * width, DEVICES) for width in widths]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(CASES["parts"].types[0]))
    wanted = {
        "all_to_all": (2 * len(widths), 2 * sum(rows)),
        "all_reduce": (3, all_reduce(parameters + 2, DEVICES)),
    }
    check_sent(CASES["parts"], wanted)


def test_large_graphs_in_parts_send_a_part_of_what_they_do_in_any_order():
    products, cut, papers, cut_papers = (plan(case) for case in hints.large_cases())
    assert cut.sent < products.sent / 10 and cut_papers.sent < papers.sent / 80
    for found, layers in ((cut, 3), (cut_papers, 3)):
        assert found.kinds["all_to_all"] == 2 * layers
        assert set(found.kinds) == {"all_to_all", "all_reduce"}


def test_any_order_sends_no_more_than_the_nodes_to_all():
    """Of each layer the nodes are gathered and their sums scattered, there and back."""
    bound = sum(4 * all_reduce(len(NODES.classes) * width, 8) for width in CONFIG.widths[1:])
    parameters = sum(leaf.size for leaf in jax.tree.leaves(CASES["edges"].types[0]))
    for name in ("edges", "grid"):
        assert program_of(CASES[name]).wire_bytes <= bound + all_reduce(parameters + 2, 8)


@EACH
def test_training_has_the_numbers_of_one_device(name: str):
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), CONFIG))
    check_numbers(CASES[name], params, [GIVEN[name]] * 5, 1e-5)


def test_the_parts_train_to_the_same_and_place_all_but_one():
    """The member who is placed wrong is the ninth, of whom Zachary says the same."""
    start = model.init(jax.random.key(0), CONFIG)
    ends = []
    for name in ("edges", "parts"):
        step, params = jax.jit(CASES[name].step), start
        for _ in range(100):
            params, _ = step(params, *GIVEN[name])
        ends.append(params)
    for found, wanted in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    sides = np.asarray(model.forward(ends[0], NODES.features, EDGES)).argmax(-1)
    assert np.flatnonzero(sides != NODES.classes).tolist() == [8]


@pytest.mark.parametrize("which", ["gspmd", "shardy"])
@QUICK
def test_sends_no_more_than_xla(name: str, which):
    check_peers(CASES[name], which)


def test_without_pymetis_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(SystemExit) as caught:
        graphs.metis(graphs.karate()[0], 34, 8)
    assert str(caught.value) == graphs.NO_METIS and "pip install pymetis" in graphs.NO_METIS


def test_with_pymetis_few_edges_are_cut():
    pytest.importorskip("pymetis")
    pairs, _ = graphs.karate()
    part = graphs.metis(pairs, 34, 2)
    assert set(part) == {0, 1} and (part[pairs[:, 0]] != part[pairs[:, 1]]).sum() < 16
