"""What a device holds turned goes to where it is wanted in one step."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

BLOCKS, CROSSED = P("x", "y"), P("y", "x")
X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
PART = X.nbytes / 8
# A block moves, and, as shards have another shape there, half of one more is exchanged.
CASES = {
    "both dims, crossed": (lambda x: jnp.flip(x, (0, 1)), BLOCKS, CROSSED),
    "one dim, crossed": (lambda x: jnp.flip(x, 0), BLOCKS, CROSSED),
    "a quarter": (jnp.rot90, BLOCKS, BLOCKS),
    "three quarters": (lambda x: jnp.rot90(x, 3), BLOCKS, BLOCKS),
    "a dim over both axes, moved": (lambda x: jnp.flip(x, 0), P(("x", "y")), CROSSED),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_turned_and_moved_sends_no_more_than_what_is_moved(name):
    function, lies, wanted = CASES[name]
    mesh = mesh_of(x=2, y=4)
    step = mw.jit(function, mesh=mesh, in_shardings=lies, out_shardings=wanted)
    program = step.partition(X)
    np.testing.assert_array_equal(program.simulate(X), function(X))
    assert program.wire_bytes == 1.5 * PART
