"""Dims over several axes, taken apart: right values, at no more bytes, in few launches.

The truth is a search in which every dim is cut into its prime factors, each over one axis or none:
there every layout of (axis, local) tiles is a state.
"""

import random
from dataclasses import replace

import pytest

from meshwise.cost.hardware import CPU, GENERIC, LARGE_ARRAYS, TPU_V5E
from meshwise.ir.sharding import Reduction, Sharding, unreduced
from meshwise.reshard.canonical import levels
from meshwise.reshard.plan import Reshard
from meshwise.reshard.search import plan_reshard, solve
from tests.reshard.cases import MESHES, all_shardings, check_values
from tests.reshard.exhaustive import least_seconds

X, Y = ("x",), ("y.0", "y.1")
NO = ()
CASES = [  # shape, source, target on 2x4: the view, the collectives, bytes
    ((512, 256), (X + Y, NO), (NO, X), (2, 256, 256), ["all_to_all", "all_gather"], 229376),
    ((512, 256), (Y + X, NO), (NO, Y), (4, 128, 256), ["all_to_all", "all_gather"], 114688),
    ((16, 64), (NO, X + Y), (X, NO), (16, 2, 32), ["all_to_all", "all_gather"], 1792),
    ((512, 256), (X + Y, NO), (NO, Y), None, ["all_to_all", "all_gather"], 114688),
    ((512, 256), (X + Y, NO), (Y + X, NO), None, ["ppermute"], 65536),
    ((512, 256), (X + Y, NO), (NO, Y + X), None, ["all_to_all"], 57344),
    ((512, 256), (X, Y), (NO, Y), None, ["all_gather"], 65536),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dims_are_taken_apart_where_one_axis_leaves_alone(case):
    shape, source, target, view, kinds, sent = case
    ends = Sharding(source), Sharding(target)
    plan = plan_reshard(Reshard(shape, 4, MESHES["2x4"], *ends, GENERIC))
    assert [str(step.kind) for step in plan.steps if step.launches] == kinds
    assert plan.view == (view or shape) and plan.wire_bytes == sent
    assert ("seen as" in str(plan)) == (view is not None)


def test_one_axis_of_a_dim_goes_to_where_the_other_was():
    """No axis has to leave the dim for another to come or go in one place of it."""
    source, target = unreduced((Y,), X, Reduction.SUM), Sharding((X,))
    dear_permutes = replace(GENERIC, byte_factors=(("ppermute", 2.0),))  # one sends as little
    plan = plan_reshard(Reshard((24,), 4, MESHES["2x4"], source, target, dear_permutes))
    kinds = [str(step.kind) for step in plan.steps]
    assert kinds == ["all_to_all", "reduce_scatter", "all_gather"] and plan.wire_bytes == 60


def pieces(sharding: Sharding) -> Sharding:
    """A sharding of dims of 8 over axes of 2, each dim as three of 2."""
    return Sharding(tuple(axes[i : i + 1] for axes in sharding.dims for i in range(3)))


@pytest.mark.parametrize("hardware", [GENERIC, LARGE_ARRAYS, TPU_V5E], ids=lambda h: h.name)
def test_no_layout_costs_less(hardware):
    draw = random.Random(hardware.name)
    mesh = MESHES["2x2x2"]
    every = list(all_shardings(mesh, 2))
    for _ in range(6):
        source, target = draw.choice(every), draw.choice(every)
        truth = (2,) * 6, 1 << 20, mesh, pieces(source), pieces(target), hardware
        plan = plan_reshard(Reshard((8, 8), 1 << 20, mesh, source, target, hardware))
        found = plan.seconds + plan.wire_bytes * hardware.bytes_first / hardware.link_bytes_per_s
        least = least_seconds(*truth, with_rounds=False)
        assert found <= least * 1.0301, (str(source), str(target), found / least)


@pytest.mark.parametrize("hardware", [GENERIC, LARGE_ARRAYS, CPU], ids=lambda h: h.name)
@pytest.mark.parametrize("mesh", ["2x4", "2x2x2", "2x3"])
def test_no_more_is_sent_or_held_than_without(mesh, hardware):
    draw = random.Random(mesh)
    refined = MESHES[mesh]
    every = list(all_shardings(refined, 2))
    for shape in [(24, 48), (240, 480), (17, 48)]:
        for _ in range(12):
            what = shape, 4, refined, draw.choice(every), draw.choice(every), hardware
            plan = plan_reshard(Reshard(*what))
            whole = [solve(level.whole[0])[0] for level in levels(Reshard(*what)) if plan.steps]
            least = min(whole, key=lambda path: path.cost, default=None)
            if least is not None:
                assert plan.wire_bytes <= least.sent + 0.5, plan
                assert plan.peak_bytes <= least.peak_bytes, plan


@pytest.mark.parametrize("shape", [(24, 48), (48, 17), (17, 24), (8, 24, 5)], ids=str)
@pytest.mark.parametrize("mesh", ["2x4", "4x2", "2x2x2"])
def test_values(mesh, shape):
    draw = random.Random(f"{mesh} {shape}")
    refined = MESHES[mesh]
    every = list(all_shardings(refined, len(shape)))
    found = []
    while len(found) < 6:
        pair = draw.choice(every), draw.choice(every)
        plan = plan_reshard(Reshard(shape, 4, refined, *pair, GENERIC))
        if plan.view != shape:
            found.append(pair)
    check_values(shape, found, refined)
