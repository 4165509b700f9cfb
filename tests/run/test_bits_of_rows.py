"""Rows of floats that hold something else: their bits arrive as they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw


def rows_one_by_one(x):
    return lax.fori_loop(0, 3, lambda i, kept: kept.at[i].set(x[i]), x[:4])


def filled(x):
    rows = x.at[jnp.array([3, 99, 1, 7])].get(mode="fill", fill_value=1.25)
    return rows.at[:, jnp.array([0, 77, 1])].get(mode="fill", fill_value=3.5)


MOVES = {
    "a row": lambda x: x[3],
    "a few rows": lambda x: x[2:5],
    "a row of a few": lambda x: x[2:5][1],
    "two rows": lambda x: (x[1], x[2]),
    "an element": lambda x: x[3, 2],
    "rows at a place": lambda x: lax.dynamic_slice(x, (jnp.int32(3), jnp.int32(1)), (4, 3)),
    "rows by number": lambda x: x[jnp.array([3, 1, 9, 1])],
    "rows by number, some filled in": filled,
    "the first after the last": lambda x: jnp.concatenate([x, x[:1]]),
    "rows written over others": lambda x: x.at[jnp.array([1, 5])].set(x[7:9]),
    "turned and laid out": lambda x: x[2:4].T.reshape(-1),
    "round a loop": rows_one_by_one,
}
LAYOUTS = {"x": ((8,), P("x")), "x, y": ((2, 4), P("x", "y"))}


def numbers(dtype):
    """The bits of small integers, which are subnormal numbers or NaN, with zeros of both signs."""
    ints = np.random.default_rng(0).integers(-40, 40, (13, 6, np.dtype(dtype).itemsize // 4))
    found = ints.astype(np.int32).view(dtype)[..., 0]
    found.flat[::7] = -0.0
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_what_is_moved_is_as_it_was(name, dtype, layout):
    sizes, spec = LAYOUTS[layout]
    mesh = jax.make_mesh(sizes, ("x", "y")[: len(sizes)])
    x, moved = numbers(dtype), MOVES[name]
    outs = jax.tree.map(
        lambda y: P(*[None] * (y.ndim - 1), "x") if y.ndim else P(), jax.eval_shape(moved, x)
    )
    found = mw.jit(moved, mesh=mesh, in_shardings=spec, out_shardings=outs)(x)
    for got, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.jit(moved)(x)), strict=True
    ):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
