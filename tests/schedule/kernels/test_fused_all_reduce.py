"""`fused_all_reduce` against sums and computations on one device."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwise.schedule.kernels import fused_all_reduce
from tests.schedule.kernels.running import WATCHED, mesh_of, run_without_races


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_descent_step(n):
    size = n * 1024
    gradients, weights, rate = draw(n, size), draw(size), np.float32(0.1)

    def step(gradient, weight, rate):
        return fused_all_reduce(
            lambda g, w, r: [w - r * g],
            [gradient[0]],
            [weight],
            [rate],
            axis="x",
            gathered=[0],
            interpret=WATCHED,
        )[0]

    found = run_without_races(
        step, mesh_of(x=n), (P("x"), P("x"), P()), P(), gradients, weights, rate
    )
    np.testing.assert_allclose(found, weights - 0.1 * gradients.sum(0), rtol=1e-5, atol=1e-5)
