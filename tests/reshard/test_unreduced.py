"""Unreduced values: reduced wholly or in part, by every operator, on real devices."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from meshwise.cost.hardware import GENERIC
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import Reduction, Sharding, replicated, unreduced
from meshwise.reshard.plan import Reshard, StepKind
from meshwise.reshard.search import plan_reshard
from tests.reshard.cases import MESHES, device_indices, run_plans, shards

OPERATORS = {
    Reduction.SUM: np.add,
    Reduction.MAX: np.maximum,
    Reduction.MIN: np.minimum,
    Reduction.PROD: np.multiply,
    Reduction.AND: np.logical_and,
    Reduction.OR: np.logical_or,
}


def term_numbers(axes: tuple[str, ...], mesh: Mesh) -> list[int]:
    """For each device, which of the terms over some axes it holds."""
    numbers = []
    for index in device_indices(mesh):
        number = 0
        for axis in axes:
            number = number * mesh.axis_size[axis] + index[axis]
        numbers.append(number)
    return numbers


def held(values: list[np.ndarray], sharding: Sharding, mesh: Mesh) -> np.ndarray:
    """Each device's shard of the one of `values` that it holds a term of."""
    every = [shards(value, Sharding(sharding.dims), mesh) for value in values]
    numbers = term_numbers(sharding.unreduced, mesh)
    return np.stack([every[number][device] for device, number in enumerate(numbers)])


def check(shape, pairs, mesh, dtype=np.float32):
    rng = np.random.default_rng(7)
    plans, locals_, wanted = [], [], []
    for source, target in pairs:
        operator = OPERATORS[source.reduction]
        count = mesh.size(source.unreduced)
        terms = [rng.integers(1, 3, shape).astype(dtype) for _ in range(count)]
        kept = [source.unreduced.index(a) for a in target.unreduced]
        sizes = [mesh.axis_size[a] for a in source.unreduced]
        groups: dict[tuple[int, ...], list[np.ndarray]] = {}
        for place, term in zip(itertools.product(*map(range, sizes)), terms, strict=True):
            groups.setdefault(tuple(place[k] for k in kept), []).append(term)
        reduced = [functools.reduce(operator, group) for group in groups.values()]
        plans.append(plan_reshard(Reshard(shape, terms[0].itemsize, mesh, source, target, GENERIC)))
        locals_.append(held(terms, source, mesh))
        wanted.append(held([r.astype(dtype) for r in reduced], target, mesh))
    valid = [shards(np.ones(shape, bool), Sharding(t.dims), mesh, fill=0) for _, t in pairs]
    outs = run_plans(locals_, plans, mesh)
    for plan, out, want, mask in zip(plans, outs, wanted, valid, strict=True):
        assert out.dtype == dtype, plan
        np.testing.assert_array_equal(out[mask], want[mask], err_msg=str(plan))


def pairs_of(mesh: Mesh, reduction: Reduction) -> list[tuple[Sharding, Sharding]]:
    """Unreduced over the first, the second or both axes, to every kind of target."""
    x, y = mesh.refine(("x",)), mesh.refine(("y",))
    no = ()
    ends = [
        (((no, no), y), ((no, no), no)),
        (((no, no), y), ((y, no), no)),
        (((no, no), y), ((no, y), no)),
        (((x, no), y), ((x, y), no)),
        (((x, no), y), ((y, x), no)),
        (((x, no), y), ((no, no), no)),
        (((no, no), x + y), ((no, no), no)),
        (((no, no), x + y), ((y, no), no)),
        (((no, no), x + y), ((y + x, no), no)),
        (((no, no), x + y), ((x, y), no)),
        (((no, no), x + y), ((no, x), y)),
        (((no, no), x + y), ((no, no), x)),
        (((y, no), x), ((no, y), x)),
    ]
    return [
        (unreduced(*source, reduction), unreduced(*target, reduction)) for source, target in ends
    ]


@pytest.mark.parametrize("shape", [(24, 24), (17, 24), (3, 5)], ids=str)
@pytest.mark.parametrize("mesh", ["2x4", "2x3"])
def test_sums(mesh, shape):
    check(shape, pairs_of(MESHES[mesh], Reduction.SUM), MESHES[mesh])


@pytest.mark.parametrize("reduction", [Reduction.MAX, Reduction.MIN, Reduction.PROD])
def test_other_operators(reduction):
    check((9, 8), pairs_of(MESHES["4x2"], reduction), MESHES["4x2"])


@pytest.mark.parametrize("reduction", [Reduction.AND, Reduction.OR, Reduction.MAX])
def test_booleans(reduction):
    check((9, 8), pairs_of(MESHES["2x4"], reduction), MESHES["2x4"], np.bool_)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, jnp.bfloat16])
def test_other_dtypes(dtype):
    check((8, 8), pairs_of(MESHES["2x4"], Reduction.SUM), MESHES["2x4"], np.dtype(dtype))


def test_scalars():
    mesh = MESHES["2x4"]
    for reduction in (Reduction.SUM, Reduction.MAX, Reduction.PROD):
        source = unreduced((), mesh.names, reduction)
        check((), [(source, replicated(0)), (source, unreduced((), ("x",), reduction))], mesh)


def kinds(source: Sharding, target: Sharding, mesh: str = "2x4") -> list[StepKind]:
    plan = plan_reshard(Reshard((64, 64), 4, MESHES[mesh], source, target, GENERIC))
    return [step.kind for step in plan.steps]


def test_a_sum_over_all_devices_is_one_all_reduce():
    mesh = MESHES["2x4"]
    source = unreduced(((), ()), mesh.names, Reduction.SUM)
    assert kinds(source, replicated(2)) == [StepKind.ALL_REDUCE]


def test_a_sum_that_is_wanted_in_shards_is_one_reduce_scatter():
    mesh = MESHES["2x4"]
    y = mesh.refine(("y",))
    source = unreduced((("x",), ()), y, Reduction.SUM)
    assert kinds(source, Sharding((("x",), y))) == [StepKind.REDUCE_SCATTER]
    assert kinds(source, Sharding((("x", *y), ()))) == [StepKind.REDUCE_SCATTER]


def test_a_sum_that_others_repeat_is_shared_among_them():
    mesh = MESHES["2x4"]
    source = unreduced(((), ()), mesh.refine(("y",)), Reduction.SUM)
    plan = plan_reshard(Reshard((64, 64), 4, mesh, source, replicated(2), GENERIC))
    assert plan.steps[0].kind is StepKind.SLICE
    assert plan.wire_bytes == 20_480  # an all_reduce of the whole sends 24,576
