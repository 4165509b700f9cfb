"""Plans between meshes fetch every tile once, add up, and keep the memory law.

Planned without devices: of random tiles with `plan_remesh`, and by the table between meshes of
`jax.sharding.AbstractMesh` with `mw.reshard_plan`.
"""

import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.hardware import GENERIC, LARGE_ARRAYS, TPU_V5E
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.reshard.plan import ReshardPlan
from meshwise.reshard.remesh import MOST_ROUNDS, RemeshPlan, plan_remesh, round_bytes
from meshwise.reshard.tiles import Tiles
from tests.reshard.cases import MESHES, all_shardings, device_indices, rows
from tests.reshard.tiling import check_rounds, inside, random_tiles

SHAPES = [(), (24,), (7,), (0, 3), (24, 24), (5, 9), (4, 3, 10)]
HARDWARE = [GENERIC, LARGE_ARRAYS, TPU_V5E]


def random_problem(seed, shape, mesh_name, itemsize=4):
    """Tiles on up to ten devices, and a sharding on a mesh of some of them."""
    draw = random.Random(f"{seed} {shape} {mesh_name}")
    mesh = MESHES[mesh_name]
    devices = draw.randint(mesh.device_count, 10)
    source = random_tiles(draw, shape, devices, is_whole=True)
    target = draw.choice(list(all_shardings(mesh, len(shape)))) if shape else Sharding(())
    places = draw.sample(range(devices), mesh.device_count)
    return source, itemsize, mesh, target, places


def check_plan(plan, source, itemsize, mesh, target, places, hardware):
    """The rounds, what they fetch, what follows, and the totals."""
    sharding = plan.then.source
    assert plan.source == source and plan.then.target == target
    assert plan.shape == source.shape and plan.itemsize == itemsize
    for place, index in zip(places, device_indices(mesh), strict=True):
        held = [
            rows(n, axes, mesh, index) for n, axes in zip(plan.shape, sharding.dims, strict=True)
        ]
        assert inside(plan.fetched, place) == tuple(held)
    idle = set(range(len(source.starts))) - set(places)
    assert all(plan.fetched.starts[place] is None for place in idle)
    check_rounds(source, plan.fetched, plan.rounds)
    assert plan.steps == plan.then.steps
    at = sharding
    for step in plan.steps:
        assert step.source == at, plan
        at = step.target
    assert at == target

    sent = [math.prod(each.shape) * itemsize for each in plan.rounds if each.is_sent]
    assert round_bytes(plan.rounds, itemsize) == sum(sent)
    assert plan.wire_bytes == sum(sent) + sum(step.wire_bytes for step in plan.steps)
    assert plan.launches == len(sent) + sum(step.launches for step in plan.steps)
    round_s = hardware.launch_s if hardware.round_s is None else hardware.round_s
    byte_s = hardware.byte_factor("round") / hardware.link_bytes_per_s
    seconds = plan.then.seconds + len(sent) * round_s + sum(sent) * byte_s
    assert plan.seconds == pytest.approx(seconds, rel=1e-9)
    shards = [source.block, plan.fetched.block, local_shape(plan.shape, target, mesh)]
    on_the_way = [n for step in plan.steps for n in (step.source_shape, step.target_shape)]
    assert plan.peak_bytes == max(math.prod(s) * itemsize for s in [*shards, *on_the_way])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_fetch_all_and_add_up(shape, mesh):
    for seed in range(6):
        problem = random_problem(seed, shape, mesh)
        hardware = HARDWARE[seed % 3]
        plan = plan_remesh(*problem, hardware)
        check_plan(plan, *problem, hardware)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", [s for s in SHAPES if 0 not in s], ids=str)
def test_memory_is_the_least_by_default(shape, mesh):
    """The larger of the shards before and after, and one byte less is refused."""
    for seed in range(4):
        problem = random_problem(seed, shape, mesh)
        source, itemsize, refined, target, _ = problem
        plan = plan_remesh(*problem, GENERIC)
        ends = math.prod(source.block), math.prod(local_shape(shape, target, refined))
        assert plan.peak_bytes == max(ends) * itemsize
        assert plan_remesh(*problem, GENERIC, plan.peak_bytes) == plan
        more = plan_remesh(*problem, GENERIC, 8 * plan.peak_bytes)
        assert more.seconds <= plan.seconds
        with pytest.raises(mw.MemoryLimitError) as caught:
            plan_remesh(*problem, GENERIC, plan.peak_bytes - 1)
        assert f"the least possible is {plan.peak_bytes:,}\n" in str(caught.value)


def test_what_takes_too_many_rounds_is_fetched_in_parts():
    """To one device from more than may send to it: no plan; to several of them: by a gather."""
    many = 2 * MOST_ROUNDS
    source = Tiles((many,), (1,), tuple((i,) for i in range(many)))
    one, four = refine_mesh(("x",), (1,)), refine_mesh(("x",), (4,))
    assert plan_remesh(source, 4, one, Sharding(((),)), [0], GENERIC) is None
    plan = plan_remesh(source, 4, four, Sharding(((),)), [0, 1, 2, 3], GENERIC)
    check_plan(plan, source, 4, four, Sharding(((),)), [0, 1, 2, 3], GENERIC)
    assert len(plan.rounds) <= MOST_ROUNDS and plan.steps


def on(sizes, *spec):
    return NamedSharding(AbstractMesh(sizes, tuple("xyzu"[: len(sizes)])), P(*spec))


XY = ("x", "y")
BETWEEN = {  # shape of int8, before, after: what rounds fetch, launches, wire bytes, peak
    "other sizes, same tiles": ((12,), on((2, 3), XY), on((3, 2), XY), (2,), 0, 0, 2),
    "halves to thirds": ((12,), on((2, 3), "x"), on((3, 2), "x"), (4,), 1, 2, 6),
    "to fewer": ((24, 24), on((2, 4), "x", "y"), on((4,), "x"), (6, 24), 4, 144, 144),
    "to more": ((24, 24), on((4,), "x"), on((2, 4), "x", "y"), (12, 6), 4, 144, 144),
    "to a part of it": ((24, 24), on((8,), "x"), on((3,), "x"), (8, 24), 4, 240, 192),
    "uneven": ((17, 5), on((8,), "x"), on((3,), "x"), (6, 5), 2, 30, 30),
    "from one to all": ((24, 24), on((1,)), on((8,)), (6, 12), 8, 1008, 576),
    "a scalar to more": ((), on((4,)), on((6,)), (), 1, 1, 1),
    "a scalar to fewer": ((), on((6,)), on((4,)), (), 0, 0, 1),
    "nothing at all": ((0, 4), on((4,), "x"), on((3,), None, "x"), (0, 2), 0, 0, 0),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_between_abstract_meshes(case):
    shape, source, target, fetched, launches, sent, peak = BETWEEN[case]
    plan = mw.reshard_plan(shape, "int8", None, source, target)
    assert isinstance(plan, RemeshPlan)
    assert plan.fetched.block == fetched
    assert (plan.launches, plan.wire_bytes, plan.peak_bytes) == (launches, sent, peak)
    wider = mw.reshard_plan(shape, np.float32, None, source, target)
    assert wider.wire_bytes == 4 * plan.wire_bytes and wider.peak_bytes == 4 * plan.peak_bytes
    assert mw.reshard_plan(shape, jnp.int8, None, source, target, max(1, peak)) == plan
    if peak > 1:
        least = f"at most {peak - 1:,} bytes a device: the least possible is {peak:,}\n"
        with pytest.raises(mw.MemoryLimitError, match=re.escape(least)):
            mw.reshard_plan(shape, "int8", None, source, target, peak - 1)


WITHIN = {  # int8, before, after: on one mesh, or two that refine to one: wire bytes, peak
    "one mesh": ((24, 24), on((2, 4), "x", "y"), on((2, 4), "y", "x"), 72, 72),
    "other sizes": ((24, 24), on((8,), "x"), on((2, 4), "x", "y"), 54, 72),
    "as before in other words": ((24, 24), on((8,), "x"), on((2, 4), XY), 0, 72),
    "uneven": ((4,), on((6,), "x"), on((6,)), 5, 4),
}


@pytest.mark.parametrize("case", WITHIN)
def test_where_meshes_refine_to_one_plans_are_of_steps(case):
    shape, source, target, sent, peak = WITHIN[case]
    plan = mw.reshard_plan(shape, "int8", None, source, target)
    assert isinstance(plan, ReshardPlan)
    assert (plan.wire_bytes, plan.peak_bytes) == (sent, peak)
    assert mw.reshard_plan(shape, "int8", None, source, target, peak).peak_bytes == peak
    with pytest.raises(mw.MemoryLimitError, match=f"the least possible is {peak:,}\n"):
        mw.reshard_plan(shape, "int8", None, source, target, peak - 1)


def test_specs_are_on_the_mesh_that_is_given():
    named = on((2, 3), "x"), on((2, 3), None, "y")
    plan = mw.reshard_plan((6, 6), "int8", named[0].mesh, P("x"), P(None, "y"))
    assert plan == mw.reshard_plan((6, 6), "int8", None, *named)
    other = on((5,), "x")
    plan = mw.reshard_plan((6, 6), "int8", named[0].mesh, P("x"), other)
    assert plan == mw.reshard_plan((6, 6), "int8", None, named[0], other)


@pytest.mark.xfail(strict=True, reason="devices and the numbers of an AbstractMesh's are not one")
def test_devices_are_counted_by_their_numbers():
    """A mesh of devices and one without: those of an AbstractMesh are numbered from 0."""
    source, target = on((8,), "x"), on((3,), "x")
    devices = np.array(jax.devices())
    real = NamedSharding(Mesh(devices, ("x",)), P("x"))
    plans = [mw.reshard_plan((24,), "int8", None, s, target) for s in (source, real)]
    assert [len(plan.source.starts) for plan in plans] == [8, 8]


def test_a_plan_reads_well():
    plan = mw.reshard_plan((6,), "float32", None, on((2, 3), "y"), on((3, 2), "y"))
    assert str(plan) == (
        "[6] over 6 devices: 12 wire bytes in 2 collectives, 0.00012 us, peak 12 bytes\n"
        "  rounds between meshes: [2] -> [1], 4 bytes in 1 launches\n"
        "  all_gather x of dim 0: [1] -> [3], 8 bytes"
    )
