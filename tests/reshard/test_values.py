"""Every device holds the right rows after a reshard, on real devices."""

import random

import pytest

from meshwise.cost.hardware import CPU, TPU_V5E
from tests.reshard.cases import MESHES, all_shardings, check_values

EVEN = [(24,), (24, 24), (24, 4, 24), (2, 2, 2, 2, 2, 2)]
UNEVEN = [(17,), (3,), (1,), (17, 24), (3, 17), (0, 8), (5, 1, 12)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", EVEN + UNEVEN, ids=str)
def test_random_pairs(mesh, shape):
    draw = random.Random(f"{mesh} {shape}")
    shardings = list(all_shardings(MESHES[mesh], len(shape)))
    pairs = [(draw.choice(shardings), draw.choice(shardings)) for _ in range(8)]
    check_values(shape, pairs, MESHES[mesh])


@pytest.mark.parametrize("hardware", [CPU, TPU_V5E], ids=lambda one: one.name)
@pytest.mark.parametrize("mesh", ["2x4", "2x2x2", "2x3"])
def test_random_pairs_by_figures_of_machines(mesh, hardware):
    """Where a launch costs as much as many bytes, other paths are the cheapest."""
    draw = random.Random(f"{mesh} {hardware.name}")
    for shape in [(24, 48), (17, 9), (3, 64), (2, 24, 5), (4, 2, 8, 8)]:
        shardings = list(all_shardings(MESHES[mesh], len(shape)))
        pairs = [(draw.choice(shardings), draw.choice(shardings)) for _ in range(6)]
        check_values(shape, pairs, MESHES[mesh], hardware)
