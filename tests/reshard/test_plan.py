"""What a plan says, what it refuses, and how fast one is had."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.cost.hardware import CPU, GENERIC, LARGE_ARRAYS
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.sharding import Reduction, Sharding, local_bytes, replicated, unreduced
from meshwise.reshard.canonical import levels
from meshwise.reshard.plan import Reshard, StepKind
from meshwise.reshard.search import plan_reshard, reshard_bound, reshard_cost
from tests.reshard.cases import MESHES, all_shardings, check_values, run_plans, shards

MESH = MESHES["2x4"]
X, Y = MESH.refine(("x",)), MESH.refine(("y",))


def test_same_sharding_needs_nothing():
    plan = plan_reshard(Reshard((64, 64), 4, MESH, Sharding((X, Y)), Sharding((X, Y)), GENERIC))
    assert plan.steps == () and plan.seconds == 0 and plan.peak_bytes == 32 * 16 * 4
    assert str(plan).endswith("nothing to do")


def test_slices_come_before_the_gather():
    plan = plan_reshard(Reshard((64, 64), 4, MESH, Sharding((X, ())), Sharding(((), Y)), GENERIC))
    assert [step.kind for step in plan.steps] == [StepKind.SLICE, StepKind.ALL_GATHER]
    assert plan.wire_bytes == 512 * 4


def test_dims_that_axes_may_pass_through_are_few():
    mesh = MESHES["2x2x2"]
    x, y, z = (mesh.refine((name,)) for name in "xyz")
    whole = [()] * 9
    asked = [
        Reshard((2,) * 12, 4, mesh, Sharding((x, y, z, *whole)), Sharding(target), GENERIC)
        for target in ((*whole, x, y, z), (x, y, *whole, z), (z, *whole, x, y), (y, x, z, *whole))
    ]
    for one in asked:
        shapes = [level.whole[0].shape for level in levels(one)]
        used = sum(any(pair) for pair in zip(one.source.dims, one.target.dims, strict=True))
        assert all(len(shape) <= max(5, used + 1) for shape in shapes)
    launches = [plan_reshard(one).launches for one in asked]
    assert launches == [1, 1, 2, 1]


def test_one_exchange_between_two_pairs_of_dims():
    source, target = Sharding((X, Y, (), ())), Sharding(((), (), X, Y))
    plan = plan_reshard(Reshard((8, 8, 8, 8), 4, MESH, source, target, GENERIC))
    assert [step.kind for step in plan.steps] == [StepKind.ALL_TO_ALL]
    assert plan.wire_bytes == 8**4 * 4 // 8 * 7 / 8


@pytest.mark.parametrize("hardware", [GENERIC, LARGE_ARRAYS, CPU], ids=lambda one: one.name)
def test_one_permute_where_a_part_permuted_and_gathered_sends_as_much(hardware):
    """Taking a half of the target's axis apart is what it takes."""
    source, target = Sharding((X, ())), Sharding((Y, ()))
    plan = plan_reshard(Reshard((512, 256), 4, MESH, source, target, hardware))
    assert [step.kind for step in plan.steps] == [StepKind.SLICE, StepKind.PERMUTE]
    assert plan.wire_bytes == 512 * 256 * 4 // 4


@pytest.mark.parametrize("rows", [2, 3, 5, 9])
def test_bound_knows_of_devices_without_rows(rows):
    """They lack all; a bound far below that has the search look at every way to gather few rows."""
    source = Sharding(((), X + Y, (), ()))
    asked = Reshard((8, rows, 64, 64), 4, MESH, source, replicated(4), GENERIC)
    whole = 8 * rows * 64 * 64 * 4 / GENERIC.link_bytes_per_s
    assert whole <= reshard_bound(asked) <= reshard_cost(asked)


def test_padding_does_not_travel_with_a_whole_gather():
    source = Sharding((X + Y, ()))
    plan = plan_reshard(Reshard((17, 64), 4, MESH, source, replicated(2), GENERIC))
    assert plan.wire_bytes < 7 * 3 * 64 * 4


def test_one_row_moves_where_blocks_change_their_size():
    plan = plan_reshard(
        Reshard((17, 64), 4, MESH, Sharding((X + Y, ())), Sharding((X, Y)), GENERIC)
    )
    assert [step.kind for step in plan.steps] == [StepKind.ALL_TO_ALL, StepKind.REALIGN]


def test_a_plan_reads_well():
    plan = plan_reshard(Reshard((64, 64), 4, MESH, Sharding((X, ())), Sharding(((), Y)), GENERIC))
    assert str(plan) == (
        "[64, 64] from [x, -] to [-, y.0*y.1]: 2,048 wire bytes in 1 collective, 0.0212 us, "
        "peak 8,192 bytes\n"
        "  slice y.0*y.1 on dim 1: [32, 64] -> [32, 16]\n"
        "  all_gather x of dim 0: [32, 16] -> [64, 16], 2,048 bytes"
    )


def test_too_little_memory_says_the_least_possible():
    source, target = Sharding((X, ())), Sharding(((), X))
    least = 32 * 64 * 4
    args = (64, 64), 4, MESH, source, target, GENERIC
    assert plan_reshard(Reshard(*args), max_bytes=least).peak_bytes == least
    with pytest.raises(ValueError, match=r"the least possible is 8,192\n"):
        plan_reshard(Reshard(*args), max_bytes=least - 1)


def test_what_is_whole_becomes_a_term_of_a_sum():
    target = unreduced(((), ()), X, Reduction.SUM)
    plan = plan_reshard(Reshard((8, 8), 4, MESH, replicated(2), target, GENERIC))
    assert [step.kind for step in plan.steps] == [StepKind.TERM]
    assert plan.wire_bytes == plan.seconds == 0
    sharded = Sharding((X, ()))
    plan = plan_reshard(Reshard((8, 8), 4, MESH, sharded, target, GENERIC))
    assert [step.kind for step in plan.steps] == [StepKind.ALL_GATHER, StepKind.TERM]


def test_what_is_whole_becomes_no_term_of_a_maximum():
    target = unreduced(((), ()), X, Reduction.SUM)
    with pytest.raises(ValueError, match="the target is unreduced over x"):
        least = unreduced(((), ()), X, Reduction.MIN)
        plan_reshard(Reshard((8, 8), 4, MESH, replicated(2), least, GENERIC))
    other = unreduced(((), ()), X, Reduction.MAX)
    with pytest.raises(ValueError, match="another operator"):
        reshard_cost(Reshard((8, 8), 4, MESH, target, other, GENERIC))


def test_ranks_must_agree():
    with pytest.raises(ValueError, match="the ranks differ"):
        plan_reshard(Reshard((8, 8), 4, MESH, replicated(2), replicated(1), GENERIC))


@pytest.mark.parametrize("shape", [(8, 8), (5, 3)], ids=str)
def test_random_keys(shape):
    keys = jax.random.split(jax.random.key(0), shape)
    data = np.asarray(jax.random.key_data(keys))
    pairs = [((X, Y), (Y, X)), ((X, ()), ((), Y)), ((X + Y, ()), ((), X))]
    for source, target in [(Sharding(s), Sharding(t)) for s, t in pairs]:
        plan = plan_reshard(Reshard(shape, 8, MESH, source, target, GENERIC))
        local = shards(data, Sharding((*source.dims, ())), MESH, fill=0)
        [out] = run_plans([jax.random.wrap_key_data(jnp.asarray(local))], [plan], MESH)
        wanted = shards(data, Sharding((*target.dims, ())), MESH, fill=0)
        mask = shards(np.ones(data.shape, bool), Sharding((*target.dims, ())), MESH, fill=0)
        np.testing.assert_array_equal(out[mask], wanted[mask])


@st.composite
def problems(draw):
    mesh = MESHES[draw(st.sampled_from(sorted(MESHES)))]
    shape = tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=4)))
    axes = draw(st.permutations(mesh.names)), draw(st.permutations(mesh.names))
    ends = []
    for order in axes:
        dims = [()] * len(shape)
        for axis in order:
            dim = draw(st.integers(-1, len(shape) - 1))
            if dim >= 0:
                dims[dim] += (axis,)
        ends.append(Sharding(tuple(dims)))
    return mesh, shape, *ends


@given(problems())
def test_any_pair_has_a_plan_that_is_right(problem):
    mesh, shape, source, target = problem
    check_values(shape, [(source, target)], mesh)


def test_a_very_fine_mesh_is_planned_in_bounded_time():
    mesh = refine_mesh([f"a{i}" for i in range(11)], [2] * 11)
    draw = random.Random(3)
    shape = (4096, 4096, 4096)
    for _ in range(6):
        ends = []
        for _ in range(2):
            axes = draw.sample(mesh.names, 11)
            cuts = sorted(draw.sample(range(12), 2))
            ends.append(Sharding((tuple(axes[: cuts[0]]), tuple(axes[cuts[0] : cuts[1]]), ())))
        start = time.perf_counter()
        plan = plan_reshard(Reshard(shape, 4, mesh, *ends, GENERIC))
        assert time.perf_counter() - start < 5
        assert plan.steps[-1].target == ends[1]


def test_user_axes_of_a_large_mesh_are_planned_in_milliseconds():
    mesh = refine_mesh(("x", "y"), (32, 64))
    small = refine_mesh(("x", "y"), (2, 3))  # every way to use x and y whole
    names = {"x": mesh.refine(("x",)), "y": mesh.refine(("y",))}
    ends = [
        Sharding(tuple(tuple(n for a in axes for n in names[a]) for axes in s.dims))
        for s in all_shardings(small, 2)
    ]
    start = time.perf_counter()
    for source in ends:
        for target in ends:
            plan = plan_reshard(Reshard((4096, 4096), 2, mesh, source, target, GENERIC))
            shard = max(local_bytes((4096, 4096), 2, s, mesh) for s in (source, target))
            assert plan.peak_bytes <= shard
    assert time.perf_counter() - start < 0.02 * len(ends) ** 2
