"""Derivatives of calls over Explicit axes, outside of `jax.jit`, lie on one kind of mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw

ROWS = P("x")
X = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32)


def product_in_a_scan(jit):
    product = jit(lambda x, w: mw.shard(x, ROWS) @ w)
    return lambda x: lax.scan(lambda c, _: (c * 0.9, product(c, W)), x, None, length=2)[1]


FUNCTIONS = {
    "a maximum and a sort": lambda jit: jit(lambda x: (x.max(0), jnp.sort(mw.shard(x, ROWS), 1))),
    "an argument as it is": lambda jit: jit(lambda x: (x, mw.shard(x, ROWS) * 2)),
    "a stacked carry": lambda jit: jit(
        lambda x: lax.scan(lambda h, row: (jnp.tanh(h + row), h), x[0], x)[1]
    ),
    "a choice that hands it on": lambda jit: jit(
        lambda x: lax.cond(x[0, 0] > 9, jnp.sin, lambda x: x, x)
    ),
    "a product in a scan": product_in_a_scan,
}


@pytest.mark.parametrize("way", ["grad", "linearize"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_results_mix(case, way):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    make = FUNCTIONS[case]

    def derived(jit):
        function = make(jit)

        def loss(x):
            return sum((leaf**2).sum() for leaf in jax.tree.leaves(function(x)))

        return jax.grad(loss)(X) if way == "grad" else jax.linearize(loss, X)[1](X)

    found = derived(lambda f: mw.jit(f, mesh=mesh))
    np.testing.assert_allclose(found, derived(jax.jit), rtol=1e-4, atol=1e-5)
