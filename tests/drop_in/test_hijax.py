"""Primitives that JAX takes apart by itself before it lowers: `jax.experimental.hijax`."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax
from jax.sharding import PartitionSpec as P

import meshwise as mw

Base: Any = hijax.HiPrim if hasattr(hijax, "HiPrim") else hijax.VJPHiPrimitive
X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)


class Power(Base):
    """A power with a derivative of its own."""

    def __init__(self, aval: Any, *, power: int):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {"power": power}
        super().__init__()

    def expand(self, x):
        return x**self.power

    def vjp_fwd(self, nzs_in, x):
        return raised(x, self.power), x

    def vjp_bwd_retval(self, x, cotangent):
        return (cotangent * self.power * raised(x, self.power - 1),)


def raised(x, power):
    return Power(jax.typeof(x), power=power)(x)


def rows(x):
    return raised(x, 3).sum(1)


def in_a_loop(x):
    return lax.fori_loop(0, 2, lambda _, y: raised(y, 2) / 2, x)


def gradient(x):
    return jax.grad(lambda x: rows(x).sum())(x)


@pytest.mark.parametrize("function", [rows, in_a_loop, gradient])
def test_primitives_of_jax_that_it_takes_apart(function):
    step = mw.jit(
        function, mesh=jax.make_mesh((8,), ("x",)), in_shardings=P("x"), out_shardings=P("x")
    )
    np.testing.assert_allclose(step(X), jax.jit(function)(X), rtol=1e-5)
    assert not step.partition(X).collectives
