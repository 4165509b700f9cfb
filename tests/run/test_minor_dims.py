"""What is gathered or scattered along a minor dim on CPU goes along a leading one, unchanged."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax

SIZES = {"x": 2, "y": 4}
GROUPS = [[0, 2], [1, 3]]


def gather(axes, dim, **how):
    return lambda x: lax.all_gather(x, axes, axis=dim, **how)


def scatter(axes, dim, **how):
    return lambda x: lax.psum_scatter(x, axes, scatter_dimension=dim, **how)


def in_a_loop(per_device):
    def function(x):
        return lax.fori_loop(0, 2, lambda _, y: y + per_device(y).sum(), x)

    return function


# What each device computes, its local shape, the type.
CASES = {
    "gather": (gather("y", 1, tiled=True), (3, 4), jnp.float32),
    "gather, a new dim": (gather("y", 1), (3, 4), jnp.float32),
    "gather, the last of three": (gather(("x", "y"), 2, tiled=True), (2, 3, 5), jnp.bfloat16),
    "gather, between": (gather(("y", "x"), 1, tiled=True), (2, 3, 5), jnp.int8),
    "gather in groups": (gather("y", 1, tiled=True, axis_index_groups=GROUPS), (3, 4), jnp.int32),
    "gather of bits": (gather("y", 1, tiled=True), (3, 4), jnp.bool_),
    "scatter": (scatter("y", 1, tiled=True), (3, 8), jnp.float32),
    "scatter, a dim that goes": (scatter("y", 1), (3, 4, 2), jnp.float32),
    "scatter, the last of three": (scatter(("y", "x"), 2, tiled=True), (2, 3, 16), jnp.int32),
    "scatter in groups": (scatter("y", 1, tiled=True, axis_index_groups=GROUPS), (3, 4), jnp.int32),
    "in a loop": (in_a_loop(gather("y", 1, tiled=True)), (3, 4), jnp.float32),
}
# Nothing comes between the parts, or there are none.
AS_THEY_ARE = {
    "leading": (gather("y", 0, tiled=True), (3, 4)),
    "behind dims of one": (scatter("y", 1, tiled=True), (1, 8)),
    "empty": (gather("y", 1, tiled=True), (0, 4)),
}


def traced(per_device, shape, dtype=jnp.float32):
    return jax.make_jaxpr(per_device, axis_env=[*SIZES.items()])(jax.ShapeDtypeStruct(shape, dtype))


def run(closed, x, mesh):
    mapped = jax.shard_map(
        lambda x: _jax.jaxpr_as_fun(closed)(x)[0],
        mesh=mesh,
        in_specs=P(("x", "y")),
        out_specs=P(("x", "y")),
        check_vma=False,
    )
    return jax.jit(mapped)(x)


@pytest.mark.parametrize("per_device, shape, dtype", CASES.values(), ids=CASES)
def test_the_same_arrives(per_device, shape, dtype, mesh2x4):
    before = traced(per_device, shape, dtype)
    after = _jax.as_cpu_compiles(before, SIZES)
    dims = re.findall(r"(?:all_gather|scatter)_dimension=(\d+)", str(after))
    assert set(dims) == {"0"}
    assert before.out_avals == after.out_avals
    local = np.random.default_rng(0).normal(size=(8, *shape)) * 3
    x = jnp.asarray(local.reshape(8 * shape[0], *shape[1:])).astype(dtype)

    found, wanted = (run(closed, x, mesh2x4) for closed in (after, before))
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-6)  # sums may be in another order


def test_small_numbers_which_xla_joins_wrong(mesh2x4):
    together = gather("y", 1, tiled=True)
    x = jnp.asarray(np.random.default_rng(0).integers(-2, 2, (24, 4)), jnp.int8)
    small = traced(lambda x: together(x.astype(jnp.int2)).astype(jnp.int8), (3, 4), jnp.int8)
    wanted = run(traced(together, (3, 4), jnp.int8), x, mesh2x4)
    np.testing.assert_array_equal(run(_jax.as_cpu_compiles(small, SIZES), x, mesh2x4), wanted)


@pytest.mark.parametrize("per_device, shape", AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_what_lies_together_is_left_as_it_is(per_device, shape):
    before = traced(per_device, shape)
    assert _jax.as_cpu_compiles(before, SIZES) is before


def test_gradients_and_batches_pass_through(mesh8):
    def twice(x):
        return 2 * mw.shard(x, P())

    program = mw.jit(twice, mesh=mesh8, in_shardings=P(None, "x"), out_shardings=P())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 16)), jnp.float32)
    partitioned = program.partition(x)
    assert {c.kind.value for c in partitioned.collectives} == {"all_gather"}
    np.testing.assert_allclose(jax.grad(lambda x: (partitioned(x) ** 2).sum())(x), 8 * x, rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(partitioned)(jnp.stack([x, -x])), jnp.stack([2 * x, -2 * x])
    )
