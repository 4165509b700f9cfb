"""Collectives as XLA on TPU compiles them for what they are: other shapes, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwise import _jax
from meshwise._jax.on_tpu import as_tpu_compiles, as_tpu_runs


def gather(dim, axes="x"):
    return lambda x: lax.all_gather(x, axes, axis=dim, tiled=True)


def scatter(dim, axes="x"):
    return lambda x: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


BOTH = ("y", "x")
# A function of local arrays, its operand's local shape, and the collectives that are compiled.
CASES = {
    "a row that is no whole tiles": (gather(0), (13,), {"all_gather": (1, 1, 13)}),
    "of two axes": (gather(0, BOTH), (5,), {"all_gather": (1, 1, 5)}),
    "with dims of one": (gather(1), (1, 13, 1), {"all_gather": (1, 1, 13)}),
    "a row of whole tiles": (gather(0), (128,), {"all_gather": (128,)}),
    "rows": (gather(0), (3, 5), {"all_gather": (3, 5)}),
    "few numbers": (scatter(0), (24,), {"all_to_all": (2, 12)}),
    "few, over two axes": (scatter(0, BOTH), (24,), {"all_to_all": (8, 3)}),
    "a few columns": (scatter(1), (3, 8, 5), {"all_to_all": (2, 3, 4, 5)}),
    "a long row": (scatter(0), (2 * 4096,), {"reduce_scatter": (2, 32, 128)}),
    "a long row that is padded": (scatter(0), (2 * 19_999,), {"reduce_scatter": (2, 160, 128)}),
    "columns that are padded": (scatter(1), (200, 202), {"reduce_scatter": (2, 160, 128)}),
    "whole tiles": (scatter(0), (64, 128), {"reduce_scatter": (64, 128)}),
    "whole tiles, turned": (scatter(0), (512, 8), {"reduce_scatter": (512, 8)}),
    "an odd number of tiles": (scatter(0), (2 * 1000, 128), {"reduce_scatter": (2, 1008, 128)}),
    "nothing": (scatter(0), (4, 0), {"reduce_scatter": (4, 0)}),
}
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter")


@pytest.fixture(scope="module")
def grid():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def on_all(grid, closed, x):
    """The results of a jaxpr of local arrays on the rows of an array, a row for each device."""
    run = _jax.jaxpr_as_fun(closed)
    specs = {"in_specs": P(("x", "y")), "out_specs": P(("x", "y"))}
    mapped = jax.shard_map(lambda x: run(x[0])[0][None], mesh=grid, **specs, check_vma=False)
    return jax.jit(mapped)(x)


@pytest.mark.parametrize("function, shape, sent", CASES.values(), ids=CASES)
def test_the_same_numbers_in_other_shapes(grid, function, shape, sent):
    closed = jax.make_jaxpr(function, axis_env=[("x", 2), ("y", 4)])(jnp.zeros(shape))
    compiled = as_tpu_compiles(closed)
    eqns = [e for e in compiled.jaxpr.eqns if e.primitive.name in COLLECTIVES]
    assert {e.primitive.name: e.invars[0].aval.shape for e in eqns} == sent
    assert [v.aval for v in compiled.jaxpr.outvars] == [v.aval for v in closed.jaxpr.outvars]

    x = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
    found, wanted = (on_all(grid, each, x) for each in (compiled, closed))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int32"])
def test_few_numbers_of_other_types(dtype):
    closed = jax.make_jaxpr(scatter(0), axis_env=[("x", 2)])(jnp.zeros(24, dtype))
    compiled = as_tpu_compiles(closed)
    assert compiled.out_avals == closed.out_avals


def test_a_loop_is_entered():
    def loop(x):
        return lax.fori_loop(0, 3, lambda _, h: h + gather(0)(h)[: len(h)], x)

    closed = jax.make_jaxpr(loop, axis_env=[("x", 2)])(jnp.zeros(13))
    assert "f32[1,1,13]" in str(as_tpu_compiles(closed))


def test_what_nothing_is_said_of_is_left():
    closed = jax.make_jaxpr(gather(0), axis_env=[("x", 2)])(jnp.zeros((3, 5)))
    assert as_tpu_compiles(closed) is closed


def test_a_function_of_local_arrays(grid):
    def both(x, y):
        return [gather(0)(x), scatter(0)(y) * 2]

    specs = {"in_specs": (P("x"), P()), "out_specs": [P(), P("x")]}
    draw = np.random.default_rng(0)
    args = [draw.normal(size=n).astype(np.float32) for n in (26, 24)]
    found, wanted = (
        jax.jit(jax.shard_map(f, mesh=grid, **specs, check_vma=False))(*args)
        for f in (as_tpu_runs(both), both)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", ["a row that is no whole tiles", "few numbers"])
def test_types_say_nothing_of_a_mesh_in_context(grid, name):
    function, shape, _ = CASES[name]
    closed = jax.make_jaxpr(function, axis_env=[("x", 2), ("y", 4)])(jnp.zeros(shape))
    with jax.sharding.use_abstract_mesh(grid.abstract_mesh):
        compiled = as_tpu_compiles(closed)
    assert len(compiled.jaxpr.eqns) > 1
    made = [var.aval for eqn in compiled.jaxpr.eqns[:-1] for var in eqn.outvars]
    assert all(aval.sharding.mesh.empty for aval in made)
