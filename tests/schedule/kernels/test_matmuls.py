"""`all_gather_matmul` and `matmul_reduce_scatter` against products on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwise.schedule.kernels import (
    MatmulSummand,
    all_gather_matmul,
    fused_all_reduce,
    matmul_reduce_scatter,
)
from tests.schedule.kernels.running import WATCHED, mesh_of, run, run_without_races


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def close(found, expected, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, tolerance, tolerance * 10)


# Interpreting is slow: with the other sizes only in the slow suite.
SIZES = [2, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 8))]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("gathered", "left_spec", "right_spec"),
    [
        (("left", 0), P("x"), P()),
        (("left", 1), P(None, "x"), P()),
        (("right", 0), P(), P("x")),
    ],
)
def test_gathered_product(n, gathered, left_spec, right_spec):
    left, right = draw(n * 16, n * 8), draw(n * 8, 40, seed=1)

    def step(left, right):
        return all_gather_matmul(left, right, axis="x", gathered=gathered, interpret=WATCHED)

    found = run_without_races(step, mesh_of(x=n), (left_spec, right_spec), P(), left, right)
    close(found, left @ right)


def test_gathered_product_both_ways_in_blocks(monkeypatch):
    """Pieces that go round both ways, products of several blocks, short numbers."""
    monkeypatch.setattr("meshwise.schedule.kernels.products.MOST_ROWS", 16)
    monkeypatch.setattr("meshwise.schedule.kernels.products.MOST_COLUMNS", 128)
    n = 3
    left, right = (a.astype(jnp.bfloat16) for a in (draw(n * 64, 256), draw(256, 256, seed=1)))

    def step(left, right):
        return all_gather_matmul(
            left, right, axis="x", preferred_element_type=jnp.float32, interpret=WATCHED
        )

    found = run_without_races(step, mesh_of(x=n), (P("x"), P()), P(), left, right)
    assert found.dtype == np.float32
    close(found, left.astype(np.float32) @ right.astype(np.float32))


@pytest.mark.parametrize("n", SIZES)
def test_scattered_product(n):
    left, right = draw(n * 16, n * 8), draw(n * 8, 40, seed=1)

    def step(left, right):
        return matmul_reduce_scatter(left, right, axis="x", interpret=WATCHED)

    found = run_without_races(step, mesh_of(x=n), (P(None, "x"), P("x")), P("x"), left, right)
    close(found, left @ right)


def test_scattered_product_on_one_axis_of_two():
    left, right = draw(2, 4 * 64, 4 * 8), draw(2, 4 * 8, 128, seed=1)

    def step(left, right):
        return matmul_reduce_scatter(left[0], right[0], axis="x", interpret=WATCHED)[None]

    found = run_without_races(
        step,
        mesh_of(y=2, x=4),
        (P("y", None, "x"), P("y", "x")),
        P("y", "x"),
        left,
        right,
    )
    close(found, left @ right)


@pytest.mark.parametrize("n", [2, 4])
def test_product_sum_layer_norm_gather(n):
    """A row-parallel layer's end as one kernel: product, sum, bias, dropout, residual, norm."""
    left, right = draw(n * 32, n * 8), draw(n * 8, 128, seed=1)
    mask, residual = draw(n * 32, 128) > -0.5, draw(n * 32, 128, seed=2)
    bias = draw(128)

    def block(sums, mask, residual, bias):
        y = jnp.where(mask, (sums + bias) * 1.25, 0.0) + residual
        mean = y.mean(-1, keepdims=True)
        return [(y - mean) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5), y]

    def step(left, right, mask, residual, bias):
        return matmul_reduce_scatter(
            left,
            right,
            block,
            [mask, residual],
            [bias],
            axis="x",
            gathered=[0, None],
            interpret=WATCHED,
        )

    found = run_without_races(
        step,
        mesh_of(x=n),
        (P(None, "x"), P("x"), P("x"), P("x"), P()),
        [P(), P("x")],
        left,
        right,
        mask,
        residual,
        bias,
    )
    for got, wanted in zip(found, block(left @ right, mask, residual, bias), strict=True):
        close(got, wanted)


def test_a_product_beside_an_array():
    n = 4
    left, right, terms = draw(n * 16, n * 8), draw(n * 8, 128, seed=1), draw(n, n * 16, 128)

    def step(left, right, term):
        return fused_all_reduce(
            lambda p, t: [p * t],
            [MatmulSummand(left, right), term[0]],
            axis="x",
            gathered=[0],
            interpret=WATCHED,
        )[0]

    found = run_without_races(
        step, mesh_of(x=n), (P(None, "x"), P("x"), P("x")), P(), left, right, terms
    )
    close(found, (left @ right) * terms.sum(0), 1e-3)


def test_two_kernels_one_after_the_other():
    """Gathered in, scattered out: a Megatron block; kernels of one axis share a barrier."""
    n = 4
    x, up, down = draw(n * 16, 64), draw(64, n * 32, seed=1), draw(n * 32, 64, seed=2)

    def step(x, up, down):
        hidden = jax.nn.relu(all_gather_matmul(x, up, axis="x", interpret=WATCHED))
        return matmul_reduce_scatter(hidden, down, axis="x", interpret=WATCHED)

    found = run_without_races(
        step, mesh_of(x=n), (P("x"), P(None, "x"), P("x")), P("x"), x, up, down
    )
    close(found, np.maximum(x @ up, 0) @ down, 1e-3)


def test_one_device():
    left, right = draw(16, 8), draw(8, 40)
    for call in (
        lambda a, b: all_gather_matmul(a, b, axis="x"),
        lambda a, b: matmul_reduce_scatter(a, b, axis="x"),
    ):
        close(run(call, mesh_of(x=1), (P(), P()), P(), left, right), left @ right)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: all_gather_matmul(a, b, axis="x", gathered=("right", 1)), "transpose"),
        (lambda a, b: all_gather_matmul(a, b[1:], axis="x"), "no matrices to multiply"),
        (lambda a, b: all_gather_matmul(a[None], b, axis="x"), "no matrices to multiply"),
        (lambda a, b: matmul_reduce_scatter(a[1:], b, axis="x"), "not cut by 2 devices"),
        (lambda a, b: matmul_reduce_scatter(a[None], b, axis="x"), "no matrices to multiply"),
        (
            lambda a, b: fused_all_reduce(
                lambda s: [s], [MatmulSummand(a, b)], axis="x", gathered=[None], dim=1
            )[0],
            "scattered by its rows",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        run(call, mesh_of(x=2), (P(), P()), P(), draw(16, 8), draw(8, 40))
