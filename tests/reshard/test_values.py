"""Every device holds the right rows after a reshard, on real devices."""

import random

import pytest

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
