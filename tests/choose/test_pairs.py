"""Matrices that meet their transposes: each has the layout that costs it least.

In losses over all pairs rows and columns meet in the labels alone, a vector, which is sent for far
less than either matrix.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

N, ROW = 64, 64 * 4  # pairs along each dim; bytes of one number for each


def loss(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[:, None], -1)
    return -picked.mean()


def gradient(logits, labels):
    return jax.grad(lambda x: loss(x, labels) + loss(x.T, labels))(logits)


MESHES = {"8": AbstractMesh((8,), ("x",)), "2x4": AbstractMesh((2, 4), ("x", "y"))}
# Two reductions of columns' numbers, and what a gather of labels takes where they are in shards.
CASES = {
    "labels whole": ("8", P("x"), P(), 2 * 2 * 7 / 8 * ROW),
    "labels sharded": ("8", P("x"), P("x"), 2 * 2 * 7 / 8 * ROW + 7 / 8 * ROW),
    "blocks": ("2x4", P("x", "y"), P(), 2 * 2 * (1 / 2) * ROW / 4 + 2 * 2 * (3 / 4) * ROW / 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_matrix_and_its_transpose_share_only_labels(case):
    mesh, lies, labels, sent = CASES[case]
    step = mw.jit(gradient, mesh=MESHES[mesh], in_shardings=(lies, labels), out_shardings=lies)
    draw = np.random.default_rng(0)
    args = draw.normal(size=(N, N)).astype(np.float32), draw.integers(0, N, N).astype(np.int32)
    program = step.partition(*args)
    np.testing.assert_allclose(program.simulate(*args), jax.jit(gradient)(*args), atol=1e-6)
    assert program.wire_bytes == sent


def test_what_is_made_symmetric_is_made_in_shards_and_gathered_once():
    """A Cholesky decomposition takes half of a matrix and of its transpose first."""

    def decomposed(d):
        return jnp.linalg.cholesky(jnp.exp(-d * d) / 100 + 2 * jnp.eye(N))

    step = mw.jit(decomposed, mesh=MESHES["8"], in_shardings=P("x"), out_shardings=P())
    d = np.random.default_rng(0).normal(size=(N, N)).astype(np.float32)
    program = step.partition(d)
    np.testing.assert_allclose(program.simulate(d), jax.jit(decomposed)(d), rtol=1e-5, atol=1e-6)
    assert program.wire_bytes == 7 / 8 * N * ROW
    (made,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "exp"]
    assert made.outvars[0].aval.shape == (N // 8, N)
