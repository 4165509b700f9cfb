"""`lax.platform_dependent`: the branch that will run is partitioned, the others are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


def test_a_diagonal_sends_no_matrix(mesh8):
    """`jnp.diagonal` is written otherwise for one platform."""
    fn = mw.jit(jnp.diagonal, mesh=mesh8, in_shardings=P("x"))
    program = fn.partition(X)
    assert not program.per_device.whole
    assert program.wire_bytes <= 64 * 4 * 2
    np.testing.assert_array_equal(fn(X), np.diagonal(X))


def test_nor_does_its_gradient(mesh8):
    """The choice is in another call there than the number by which it is made."""
    gradient = jax.grad(lambda x: (jnp.diag(x) ** 2).sum())
    fn = mw.jit(gradient, mesh=mesh8, in_shardings=P("x"), out_shardings=P("x"))
    program = fn.partition(X)
    assert not program.per_device.whole
    assert "cond" not in str(program.jaxpr)
    assert program.wire_bytes <= 64 * 4 * 2
    np.testing.assert_allclose(fn(X), gradient(X))


@pytest.mark.parametrize("is_inner", [False, True])
def test_the_branch_of_the_mesh_is_taken(mesh8, is_inner):
    def choose(x):
        return lax.platform_dependent(
            x, cpu=lambda x: x.sum(0), tpu=lambda x: x.prod(0), default=lambda x: x.max(0)
        )

    def looped(x):
        return lax.fori_loop(0, 2, lambda _, y: y + jax.jit(choose)(x), jnp.zeros(64))

    fn = mw.jit(looped if is_inner else choose, mesh=mesh8, in_shardings=P("x"))
    np.testing.assert_allclose(fn(X), X.sum(0) * (1 + is_inner), rtol=1e-5, atol=1e-5)
    assert "cond" not in str(fn.partition(X))
    no_devices = mw.jit(choose, mesh=AbstractMesh((8,), ("x",)), in_shardings=P("x"))
    assert "reduce_max" in str(no_devices.partition(X))


def test_without_a_branch_for_it_the_choice_stays(mesh8):
    def choose(x):
        return lax.platform_dependent(x, tpu=lambda x: x * 2, cuda=lambda x: x * 3)

    no_devices = mw.jit(choose, mesh=AbstractMesh((8,), ("x",)), in_shardings=P("x"))
    program = no_devices.partition(X)
    assert "cond" in str(program) or program.per_device.whole
