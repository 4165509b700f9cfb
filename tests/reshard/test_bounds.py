"""No path costs less than the bound of the state that it starts from: compared with Dijkstra's."""

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshwise.cost.hardware import CPU, GENERIC, LARGE_ARRAYS, TPU_V5E, Hardware
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.sharding import Reduction, Sharding, unreduced
from meshwise.reshard.bounds import bounds_of
from meshwise.reshard.canonical import levels
from meshwise.reshard.moves import Moves, moves_of
from meshwise.reshard.path import SearchTooLong, shortest_path
from meshwise.reshard.plan import Reshard
from meshwise.reshard.problem import Problem
from meshwise.reshard.search import plan_reshard, reshard_cost
from meshwise.reshard.straight import straight_moves
from meshwise.reshard.transfers import State, Transfers
from tests.reshard.cases import MESHES, all_shardings

STARTS_UNLIKE = replace(
    TPU_V5E, name="unlike", launch_factors=(("all_to_all", 4.0), ("all_gather", 0.5)), round_s=8e-6
)
HARDWARE = [GENERIC, LARGE_ARRAYS, TPU_V5E, CPU, STARTS_UNLIKE]
# Even, uneven, with fewer rows than shards, and of few bytes and many.
SHAPES = [(24,), (24, 48), (17, 48), (3, 64), (2, 9), (512, 768), (2, 24, 5), (64, 2, 64)]


def drawn(mesh: str, rank: int, count: int, terms: bool) -> Iterator[tuple[Sharding, Sharding]]:
    draw = random.Random(f"{mesh} {rank} {terms}")
    every = list(all_shardings(MESHES[mesh], rank))
    for _ in range(count):
        source, target = draw.choice(every), draw.choice(every)
        free = [a for a in MESHES[mesh].names if a not in source.used_axes]
        over = draw.sample(free, draw.randint(0, len(free))) if terms else []
        yield unreduced(source.dims, over, Reduction.SUM), target


def least(moves: Moves, start: State, cap: int) -> float:
    """The cost of the cheapest path from a state, without any bound."""
    costs, count = {start: 0.0}, itertools.count()
    queue = [(0.0, next(count), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if moves.is_end(state):
            return cost
        if cost > costs[state]:
            continue
        rounds = filter(None, (each.found() for each in straight_moves(moves, state)))
        for move in itertools.chain(moves.moves(state), rounds):
            after = cost + move.cost
            if move.peak_bytes <= cap and after < costs.get(move.state, math.inf):
                costs[move.state] = after
                heapq.heappush(queue, (after, next(count), move.state))
    return math.inf


@pytest.mark.parametrize(
    "count", [2, pytest.param(12, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda one: one.name)
@pytest.mark.parametrize("terms", [False, True], ids=["values", "terms"])
@pytest.mark.parametrize("mesh", ["2x4", "2x3", "2x2x2"])
def test_no_path_costs_less(mesh: str, terms: bool, hardware: Hardware, count: int) -> None:
    for shape in SHAPES:
        for source, target in drawn(mesh, len(shape), count, terms):
            for level in levels(Reshard(shape, 4, MESHES[mesh], source, target, hardware)):
                compare(level.whole[0], random.Random(f"{shape} {source} {target}"))


def compare(problem: Problem, draw: random.Random) -> None:
    """Bounds of the start and of some states that moves lead to."""
    moves = moves_of(problem)
    bounds = bounds_of(problem, moves.padded_end_bytes)
    state = moves.start
    for _ in range(4):
        found = least(moves, state, bounds.cap)
        assert bounds.cost(state) <= found * (1 + 1e-9), (problem, state)
        further = [move for move in moves.moves(state) if move.peak_bytes <= bounds.cap]
        if not further:
            break
        state = draw.choice(further).state


FEW = [  # shape, source, target, axes that are still summed over, states at most
    ((8, 64, 4, 8), ("", "", "xyz", ""), ("", "x", "", ""), "", 120),
    ((8, 64, 4, 2, 8), ("", "", "", "", "xy"), ("", "", "", "xy", ""), "z", 180),
]


@pytest.mark.parametrize(("shape", "source", "target", "terms", "most"), FEW)
def test_few_states_are_looked_at_where_launches_cost_most(shape, source, target, terms, most):
    """By bytes alone it was 155 and 664: most states that one launch leads to."""
    dims = tuple(map(tuple, source)), tuple(map(tuple, target))
    ends = unreduced(dims[0], tuple(terms), Reduction.SUM), Sharding(dims[1])
    seen = 0
    for level in levels(Reshard(shape, 4, MESHES["2x2x2"], *ends, CPU)):
        moves = moves_of(level.whole[0])
        assert shortest_path(moves, moves.padded_end_bytes)
        seen += len(moves.known)
    assert 0 < seen <= most


def test_a_search_ends_after_so_many_moves():
    """What is better than a path in hand may have half a million moves to be found among."""
    mesh = next(iter(MESHES.values()))
    source, target = Sharding((("x",), (), ())), Sharding(((), (), ("x",)))
    asked = Reshard((64, 8, 64), 4, mesh, source, target, GENERIC)
    moves = moves_of(next(levels(asked)).whole[0])
    with pytest.raises(SearchTooLong):
        shortest_path(moves, math.inf, most_moves=0)
    assert shortest_path(moves, math.inf, most_moves=1000) == shortest_path(moves, math.inf)


LONG = [  # a mesh, uneven dims that are all gathered, what a device must receive, and what it sends
    ((4, 2, 2), (5, 7, 9), 1236, 1480),
    ((4, 4, 2), (5, 7, 9), 1252, 1520),
    ((4, 4, 2), (1001, 71, 53), 14_583_828, 14_700_000),
]


@pytest.mark.parametrize(("sizes", "shape", "lacking", "most"), LONG)
def test_no_search_is_long(sizes, shape, lacking, most, monkeypatch):
    """Half a million moves were looked at: what a device must receive says little of padding."""
    mesh = refine_mesh(tuple("xyz"), sizes)
    axes = tuple(mesh.refine((name,)) for name in "xyz")
    ends = Sharding(axes), Sharding(((), (), ()))
    tried = []
    with monkeypatch.context() as patched:
        found = Transfers.transfers
        patched.setattr(Transfers, "transfers", lambda *a: tried.append(1) or found(*a))
        plan = plan_reshard(Reshard(shape, 4, mesh, *ends, GENERIC))
    assert lacking <= plan.wire_bytes <= most
    assert len(tried) < 6_000  # states


DEAR = [  # on 6x20, uneven shapes and ends: 1,004, 878 and 620 states were looked at for the price
    ((31, 61), ("x", "y"), ("", "x")),
    ((31, 61), ("xy", ""), ("", "x")),
    ((12, 1000, 768), ("x", "y", ""), ("", "x", "")),
]


@pytest.mark.parametrize(("shape", "source", "target"), DEAR)
def test_a_price_is_found_among_fewer_moves(shape, source, target, monkeypatch):
    """Thousands are asked for one program. What is taken is looked for among all moves."""
    mesh = refine_mesh(("x", "y"), (6, 20))
    ends = [Sharding(tuple(mesh.refine(tuple(axes)) for axes in end)) for end in (source, target)]
    asked = Reshard(shape, 4, mesh, *ends, GENERIC)
    tried = []
    with monkeypatch.context() as patched:
        found = Transfers.transfers
        patched.setattr(Transfers, "transfers", lambda *a: tried.append(1) or found(*a))
        price = reshard_cost(asked)
    assert len(tried) < 250  # states
    assert plan_reshard(asked).seconds <= price * (1 + 1e-9)
