"""Ragged products on CPU go group after group, without a copy of all rows for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax

Numbers = lax.RaggedDotDimensionNumbers


def ragged(contract, batch, dims, groups):
    numbers = Numbers((contract, batch), dims, groups)
    return lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, numbers)


def in_a_loop(x, w, sizes):
    return lax.fori_loop(0, 2, lambda _, y: y + lax.ragged_dot(y, w, sizes), x)


# What is computed, the shapes of both operands, the sizes of the groups.
CASES = {
    "rows": (lax.ragged_dot, (12, 4), (3, 4, 5), [5, 0, 7]),
    "rows beyond all groups": (lax.ragged_dot, (12, 4), (2, 4, 5), [3, 4]),
    "one group": (lax.ragged_dot, (6, 4), (1, 4, 5), [4]),
    "a batch": (ragged(([2], [2]), ([0], [1]), [1], [0]), (2, 9, 4), (3, 2, 4, 5), [2, 3, 4]),
    "columns before rows": (ragged(([0], [1]), ([], []), [2], [2]), (4, 3, 9), (6, 4, 2), [4, 5]),
    "summed by group": (ragged(([0], [0]), ([], []), [0], []), (12, 4), (12, 5), [5, 0, 7]),
    "summed by group, a batch": (
        ragged(([1], [1]), ([0], [0]), [1], []), (2, 9, 4), (2, 9, 5), [4, 3]
    ),
    "in a loop": (in_a_loop, (8, 4), (2, 4, 4), [3, 5]),
    "a batch that is ragged": (
        ragged(([2], [1]), ([0], [0]), [0], []), (5, 3, 4), (5, 4, 2), [2, 3]
    ),
}  # fmt: skip
AS_IT_IS = "a batch that is ragged"


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_product(case):
    """Also with sizes of a narrow type."""
    function, *shapes, sizes = CASES[case]
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    operands.append(jnp.asarray(sizes, jnp.uint8 if case == "rows" else jnp.int32))
    before = jax.make_jaxpr(function)(*operands)
    after = _jax.as_cpu_compiles(before, {})
    assert ("ragged" in str(after)) == (case == AS_IT_IS)
    (found,) = jax.jit(_jax.jaxpr_as_fun(after))(*operands)
    np.testing.assert_allclose(found, function(*operands), rtol=1e-5, atol=1e-5)


def test_no_copy_of_all_rows_a_group():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 16), (16, 16, 8))]
    shapes.append(jax.ShapeDtypeStruct((16,), jnp.int32))
    before = jax.make_jaxpr(lax.ragged_dot)(*shapes)
    held = [
        jax.jit(_jax.jaxpr_as_fun(jaxpr)).lower(*shapes).compile().memory_analysis()
        for jaxpr in (before, _jax.as_cpu_compiles(before, {}))
    ]
    assert held[0].temp_size_in_bytes > 10 * held[1].temp_size_in_bytes


def test_inside_another_jit(mesh2x4):
    """Where a mesh is in context while the program is made what is compiled."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((12, 4), (4, 4, 5)))
    sizes = jnp.asarray([5, 0, 4, 3])
    specs = P("x"), P("y"), P()
    step = mw.jit(lax.ragged_dot, mesh=mesh2x4, in_shardings=specs, out_shardings=P())
    wanted = lax.ragged_dot(x, w, sizes)
    np.testing.assert_allclose(jax.jit(step)(x, w, sizes), wanted, rtol=1e-5, atol=1e-5)
