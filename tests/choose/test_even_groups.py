"""Groups lie over the devices that divide them, and columns are gathered once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

COLUMNS = P(None, "x")
WHOLE = 16 * 96 * 4  # bytes of rows of 96 columns


def in_groups(function, groups):
    """A function of each group of columns by itself."""
    return lambda x: function(x.reshape(16, groups, -1)).reshape(16, -1)


def over_largest(x):
    """Each number as a part of its group's largest."""
    return x / x.max(-1, keepdims=True)


CASES = {  # a function, groups, devices, and bytes that are sent
    # Pairs of devices have three groups, and a device lacks half of their columns.
    "parts of the largest": (over_largest, 12, 8, WHOLE / 8),
    "sorted": (lambda x: jnp.sort(x, -1), 12, 8, WHOLE / 8),
    "summed up": (lambda x: jnp.cumsum(x, -1), 12, 8, WHOLE / 8),
    "over four": (over_largest, 6, 4, WHOLE / 4),
    "groups that divide": (over_largest, 8, 8, 0),
    # Two groups for each of two halves: rows there and back send less than three quarters of all.
    "few groups": (lambda x: jnp.sort(x, -1), 6, 8, 2 * 7 / 8 * WHOLE / 8),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_are_gathered_over_what_does_not_divide(case):
    function, groups, devices, sent = CASES[case]
    function = in_groups(function, groups)
    step = mw.jit(function, mesh=mesh_of(x=devices), in_shardings=COLUMNS, out_shardings=COLUMNS)
    x = np.random.default_rng(0).normal(size=(16, 96)).astype(np.float32)
    program = step.partition(x)
    assert program.wire_bytes == sent
    np.testing.assert_allclose(program.simulate(x), function(x), rtol=1e-4, atol=1e-4)


def test_products_are_not_repeated_for_them():
    """Six heads over four: each of two halves of the devices would do all of its heads' product."""

    def normed(x, w):
        heads = (x @ w).reshape(8, 16, 6, 8)
        heads = heads * jax.lax.rsqrt((heads**2).mean(-1, keepdims=True) + 1e-6)
        return heads.reshape(8, 16, 48)

    out = P("x", None, "y")
    step = mw.jit(
        normed, mesh=mesh_of(x=2, y=4), in_shardings=(P("x"), P(None, "y")), out_shardings=out
    )
    random = np.random.default_rng(0)
    args = [random.normal(size=shape).astype(np.float32) for shape in ((8, 16, 16), (16, 48))]
    program = step.partition(*args)
    (product,) = (e for e in program.jaxpr.eqns if e.primitive.name == "dot_general")
    assert product.outvars[0].aval.size == 8 * 16 * 48 // 8
    np.testing.assert_allclose(program.simulate(*args), normed(*args), rtol=1e-3, atol=1e-4)


def test_a_hint_on_groups_stays():
    """Twelve heads over eight devices are two for each of six, as the hint says."""

    def attended(z, w):
        heads = mw.shard((z @ w).reshape(2, 8, 12, 8), P(None, None, "x"))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads, heads))
        return jnp.einsum("bhqk,bkhd->bqhd", scores, heads).reshape(2, 8, 96) @ w.T

    random = np.random.default_rng(0)
    args = [random.normal(size=shape).astype(np.float32) for shape in ((2, 8, 48), (48, 96))]
    program = mw.jit(attended, mesh=mesh_of(x=8), in_shardings=(P(), P())).partition(*args)
    (index,) = program.plan.program.hints
    (hinted,) = program.plan.equations[index].results
    assert program.plan.program.mesh.size(hinted.dims[2]) == 8
    np.testing.assert_allclose(program.simulate(*args), attended(*args), rtol=1e-3, atol=1e-2)
