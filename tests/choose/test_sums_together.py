"""Terms of an addition that become sums at once: one reduction, and what is before them stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from benchmarks.suite.programs.models import attention_back, attention_back_of_input

MESH = AbstractMesh((2, 4), ("x", "y"))
FEATURES, BLOCKS, COLUMNS = P("x", None, "y"), P("x", "y"), P(None, "y")
# What one device of four lacks of the input, and of the sum of what it gives to the others.
PART = 3 / 4 * (16 // 2) * 32 * 64 * 4
WEIGHT = 64 * 8 * 8 * 4


# The function, the specs of the input, of weights, of the result's cotangent and of the results,
# and the bytes that are sent.
CASES = {
    "features in shards": (
        attention_back_of_input,
        FEATURES,
        COLUMNS,
        FEATURES,
        FEATURES,
        2 * PART,
    ),
    "weights in blocks": (
        attention_back,
        FEATURES,
        BLOCKS,
        FEATURES,
        (FEATURES, BLOCKS, BLOCKS, BLOCKS),
        2 * PART + 3 * (1 / 2 + 1 / 2) * WEIGHT / 4,
    ),
}


def partitioned(case):
    function, x, weights, back, out, _ = CASES[case]
    step = mw.jit(function, mesh=MESH, in_shardings=(x, *(weights,) * 3, back), out_shardings=out)
    return step.partition(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in SHAPES])


SHAPES = [(16, 32, 64), *[(64, 8, 8)] * 3, (16, 32, 8, 8)]


@pytest.mark.parametrize("case", CASES)
def test_one_gather_and_one_reduction(case):
    assert partitioned(case).wire_bytes == CASES[case][-1]


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) * 0.1 for s in SHAPES]
    wanted = jax.jit(CASES[case][0])(*args)
    found = partitioned(case).simulate(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
