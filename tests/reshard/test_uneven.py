"""Dims that do not divide: no more rows cross borders than must."""

import random

import jax
import numpy as np
import pytest

from meshwise.cost.hardware import GENERIC, LARGE_ARRAYS
from meshwise.ir.sharding import Sharding
from meshwise.reshard.plan import Reshard, StepKind
from meshwise.reshard.search import plan_reshard
from tests.reshard.cases import MESHES, all_shardings, check_values, program_of

ROWS = [
    # mesh, rows, from, to: rows of a shard that are sent, and rows that cross a border
    ("2x4", 10001, "x", "y", 2501 + 1),
    ("2x4", 1001, "x", "y", 251),
    ("2x4", 1001, "y", "x", 2 * 251 + 1),
    ("4x2", 1001, "x", "y", 2 * 251 + 1),
    ("2x2x2", 1003, "yz", "x", 2 * 251),
    ("2x2x2", 1514, "z", "yx", 379 + 1),
]


@pytest.mark.parametrize(("name", "n", "source", "target", "sent"), ROWS)
def test_shards_are_as_large_as_those_wanted(name, n, source, target, sent):
    """They are not rounded up to what all devices together divide."""
    mesh = MESHES[name]
    ends = (Sharding((mesh.refine(tuple(axes)), ())) for axes in (source, target))
    plan = plan_reshard(Reshard((n, 64), 4, mesh, *ends, GENERIC))
    assert plan.wire_bytes == sent * 64 * 4


@pytest.mark.parametrize("dim", [0, 1])
def test_rounds_hold_a_shard_of_the_target(dim):
    """Neither end is padded for pieces that are smaller than the buffer in which they travel."""
    mesh = MESHES["2x4"]
    shape = [64, 64]
    shape[dim] = 1001
    ends = [[(), ()], [(), ()]]
    for end, axis in zip(ends, "xy", strict=True):
        end[dim] = mesh.refine((axis,))
    plan = plan_reshard(
        Reshard(tuple(shape), 4, mesh, *(Sharding(tuple(end)) for end in ends), LARGE_ARRAYS)
    )
    assert [step.kind for step in plan.steps] == [StepKind.ROUNDS]
    [step] = plan.steps
    given = jax.ShapeDtypeStruct((8, *step.source_shape), np.float32)
    memory = program_of([plan], mesh).lower(given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.1 * 251 * 64 * 4


@pytest.mark.parametrize("hardware", [GENERIC, LARGE_ARRAYS], ids=lambda one: one.name)
@pytest.mark.parametrize("name", MESHES)
def test_values_of_long_dims(name, hardware):
    """So long that a row is little of a shard, where plans within a part of the bound are final."""
    draw = random.Random(name)
    shardings = list(all_shardings(MESHES[name], 1))
    for _ in range(3):
        n = draw.randint(300, 3000)
        pairs = [(draw.choice(shardings), draw.choice(shardings)) for _ in range(6)]
        check_values((n,), pairs, MESHES[name], hardware)
