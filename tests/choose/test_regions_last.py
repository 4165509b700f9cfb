"""Layouts that no single node moves to: all of a block lies otherwise, and sends far less."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from benchmarks.suite.programs.models import attention_back, attention_back_of_input, gated_back

MESH = AbstractMesh((2, 4), ("x", "y"))
FEATURES, BLOCKS, COLUMNS, ROWS = P("x", None, "y"), P("x", "y"), P(None, "y"), P(("x", "y"))
HEADS = [(16, 32, 64), *[(64, 8, 8)] * 3, (16, 32, 8, 8)]
GATED = [(16, 32, 64), *[(64, 256)] * 2, (16, 32, 256)]
# Bytes of the input over the first axis, of a weight, and of what comes back to hidden units.
INPUT, WEIGHT, HIDDEN = 16 // 2 * 32 * 64 * 4, 64 * 256 * 4, 16 * 32 * 256 * 4
HEAD = 64 * 8 * 8 * 4


# The function, shapes, specs of arguments and results, and the bytes that are sent.
CASES = {
    "features go to sequences": (
        attention_back_of_input,
        HEADS,
        (FEATURES, *[COLUMNS] * 3, FEATURES),
        FEATURES,
        3 * (3 / 4 * INPUT / 4) + 3 * (3 / 4 * HEAD),
    ),
    "one sum of three gradients": (
        attention_back,
        HEADS,
        (FEATURES, *[BLOCKS] * 3, FEATURES),
        (FEATURES, *[BLOCKS] * 3),
        2 * (3 / 4 * INPUT) + 3 * (1 / 2 + 1 / 2) * HEAD / 4,
    ),
    "hidden units lie as weights in blocks do": (
        gated_back,
        GATED,
        (P("x"), BLOCKS, BLOCKS, ROWS),
        (P("x"), BLOCKS, BLOCKS),
        2 * (1 / 2 + 1 / 2) * WEIGHT / 4 + 3 / 4 * HIDDEN / 8 + 2 * (3 / 4 * INPUT),
    ),
    "hidden units lie as columns do": (
        gated_back,
        GATED,
        (P("x"), COLUMNS, COLUMNS, ROWS),
        (P("x"), COLUMNS, COLUMNS),
        2 * 2 * (1 / 2) * WEIGHT / 4 + 3 / 4 * HIDDEN / 8 + 2 * (3 / 4 * INPUT),
    ),
}


def partitioned(case):
    function, shapes, specs, out, _ = CASES[case]
    step = mw.jit(function, mesh=MESH, in_shardings=specs, out_shardings=out)
    return step.partition(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent(case):
    assert partitioned(case).wire_bytes == CASES[case][-1]


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    function, shapes, *_ = CASES[case]
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) * 0.1 for s in shapes]
    found, wanted = partitioned(case).simulate(*args), jax.jit(function)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
