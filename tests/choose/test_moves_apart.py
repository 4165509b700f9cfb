"""Element-wise equations are planned apart from what they read, where one of both moves."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

MESH = mesh_of(x=2, y=4)
BLOCKS, ROWS = P("x", "y"), P(("x", "y"))
SHAPE = (32, 32)
MOVED = 3 / 4 * 16 * 8 * 4  # blocks to rows: a device keeps a fourth of its block


def halved(p, g, t):
    p = p - 0.1 * g
    return p, t - p, 0.5 * p


def distance(p, g, t):
    p = p - 0.1 * g
    t = 0.9 * t + 0.1 * p
    return p, t, ((t - p) ** 2).sum()


CASES = {  # a function, how its results lie, and what is sent
    "made anew of what was moved": (halved, (BLOCKS, ROWS, ROWS), MOVED),
    "read only where it meets others": (distance, (BLOCKS, ROWS, P()), MOVED + 14 / 8 * 4),
}


@pytest.mark.parametrize("case", CASES)
def test_one_value_moves(case):
    function, results, sent = CASES[case]
    step = mw.jit(function, mesh=MESH, in_shardings=(BLOCKS, BLOCKS, ROWS), out_shardings=results)
    random = np.random.default_rng(0)
    args = [random.normal(size=SHAPE).astype(np.float32) for _ in range(3)]
    program = step.partition(*args)
    assert program.wire_bytes == sent
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        program.simulate(*args),
        function(*args),
    )
