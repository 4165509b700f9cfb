"""Plans cost no more than an exhaustive search finds, keep the memory law, and add up."""

import random
from dataclasses import replace

import pytest

from meshwise.cost.hardware import GENERIC, LARGE_ARRAYS, TPU_V5E, Hardware
from meshwise.ir.sharding import Reduction, Sharding, local_bytes, unreduced
from meshwise.reshard.canonical import levels
from meshwise.reshard.plan import Reshard, ReshardPlan, StepKind
from meshwise.reshard.search import plan_reshard, reshard_cost, solve
from tests.reshard.cases import MESHES, Pair, all_shardings, user_shardings
from tests.reshard.exhaustive import least_seconds, moves

STARTS_UNLIKE = replace(
    TPU_V5E, launch_factors=(("all_to_all", 4.0), ("all_gather", 0.5)), round_s=8e-6
)
SHAPES = [(24,), (24, 48), (24, 24, 48)]
BIG = [(24 * 64,), (24 * 64, 24 * 64), (24 * 8, 24 * 8, 24 * 8)]
# How many pairs of each rank are compared with the exhaustive search.
SOME = {1: 40, 2: 10, 3: 3}
MANY = {1: 40, 2: 30, 3: 12}


def sampled_pairs(mesh: str, rank: int, count: int, terms: bool) -> list[Pair]:
    draw = random.Random(f"{mesh} {rank} {terms}")
    shardings = list(all_shardings(MESHES[mesh], rank))
    pairs = [(draw.choice(shardings), draw.choice(shardings)) for _ in range(count)]
    if not terms:
        return pairs
    found = []
    for source, target in pairs:
        free = [a for a in MESHES[mesh].names if a not in source.used_axes]
        chosen = draw.sample(free, draw.randint(0, len(free)))
        kept = [a for a in chosen if a not in target.used_axes and draw.random() < 0.2]
        found.append(
            (
                unreduced(source.dims, chosen, Reduction.SUM),
                unreduced(target.dims, kept, Reduction.SUM),
            )
        )
    return found


@pytest.mark.parametrize(
    "counts", [SOME, pytest.param(MANY, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("terms", [False, True], ids=["values", "terms"])
@pytest.mark.parametrize("shape", SHAPES + BIG, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
def test_no_plan_costs_less(mesh, shape, terms, counts):
    for source, target in sampled_pairs(mesh, len(shape), counts[len(shape)], terms):
        for hardware in (GENERIC, LARGE_ARRAYS, TPU_V5E):
            args = shape, 4, MESHES[mesh], source, target, hardware
            least = least_seconds(*args)
            found = reshard_cost(Reshard(*args))
            if found > least * 1.0301:
                found -= launched_apart(Reshard(*args))
            assert found <= least * 1.0301, (str(source), str(target), found / least)


def launched_apart(asked: Reshard) -> float:
    """Seconds that large gathers of several dims take as they go one by one.

    The exhaustive search has them in one launch, and does not say which of its paths have any.
    """
    paths = [solve(level.whole[0])[0] for level in levels(asked)]
    path = min(paths, key=lambda path: path.cost)
    return (path.cost - sum(move.cost for move in path.moves)) / asked.hardware.link_bytes_per_s


@pytest.mark.parametrize("mesh", ["2x4", "2x3"])
@pytest.mark.parametrize("terms", [False, True], ids=["values", "terms"])
def test_no_plan_costs_less_where_kinds_start_unlike(mesh, terms):
    for source, target in sampled_pairs(mesh, 2, 15, terms):
        args = (24, 48), 4, MESHES[mesh], source, target, STARTS_UNLIKE
        plan = plan_reshard(Reshard(*args))
        assert plan.seconds <= least_seconds(*args) * 1.0301, (str(source), str(target))
        assert plan.seconds == pytest.approx(priced(plan, STARTS_UNLIKE), rel=1e-9)


def priced(plan: ReshardPlan, hardware: Hardware = GENERIC) -> float:
    """Seconds of a plan from its steps."""
    total = 0.0
    for step in plan.steps:
        kind = {StepKind.ROUNDS: "round", StepKind.REALIGN: "ppermute"}.get(step.kind, step.kind)
        launch = hardware.round_s if kind == "round" else hardware.start_s(kind)
        assert launch is not None
        total += step.wire_bytes * hardware.byte_factor(kind) / hardware.link_bytes_per_s
        total += step.launches * launch
    return total


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
def test_plans_add_up_and_keep_the_memory_law(mesh, shape):
    refined = MESHES[mesh]
    for source, target in sampled_pairs(mesh, len(shape), 60, terms=True):
        plan = plan_reshard(Reshard(shape, 4, refined, source, target, GENERIC))
        assert plan.seconds <= reshard_cost(Reshard(shape, 4, refined, source, target, GENERIC))
        assert plan.wire_bytes == sum(step.wire_bytes for step in plan.steps)
        assert plan.launches == sum(step.launches for step in plan.steps)
        assert plan.seconds == pytest.approx(priced(plan), rel=1e-9)
        ends = [local_bytes(shape, 4, s, refined) for s in (source, target)]
        assert plan.peak_bytes == max(ends)
        at = source
        for step in plan.steps:
            assert _are_one(step.source, at), plan
            at = step.target
        assert _are_one(at, target)


def _are_one(one: Sharding, other: Sharding) -> bool:
    """Whether axes stand in the same order; a dim may be taken apart in one of them."""
    if len(one.dims) == len(other.dims):
        return one == other
    return sum(one.dims, ()) == sum(other.dims, ()) and one.unreduced == other.unreduced


@pytest.mark.parametrize("mesh", ["2x4", "2x2x2", "2x3"])
def test_no_single_step_sends_less(mesh):
    refined = MESHES[mesh]
    for source in all_shardings(refined, 2):
        start = (source.dims, frozenset(), "")
        for kind, sent, (dims, _) in moves((24, 48), 4, refined, list(refined.names), start):
            plan = plan_reshard(Reshard((24, 48), 4, refined, source, Sharding(dims), GENERIC))
            assert plan.wire_bytes <= sent, (kind, plan)


def test_uneven_plans_add_up():
    for mesh in MESHES.values():
        for source, target in sampled_pairs("2x4", 2, 40, terms=False):
            if not {*source.used_axes, *target.used_axes} <= set(mesh.names):
                continue
            plan = plan_reshard(Reshard((17, 9), 4, mesh, source, target, GENERIC))
            assert plan.seconds == pytest.approx(priced(plan), rel=1e-9), plan
            assert plan.seconds == reshard_cost(Reshard((17, 9), 4, mesh, source, target, GENERIC))


def test_no_full_gather_where_the_target_is_sharded():
    refined = MESHES["2x4"]
    ends = [s for s in user_shardings(refined, 2) if s.used_axes]
    for shape in [(48, 48), (17, 48), (17, 9)]:
        for source in ends:
            for target in ends:
                plan = plan_reshard(Reshard(shape, 4, refined, source, target, GENERIC))
                assert plan.peak_bytes < shape[0] * shape[1] * 4, plan
