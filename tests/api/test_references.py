"""References of a function's own (`jax.new_ref`) are values, and partitioned as such."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

N24 = AbstractMesh((2, 4), ("x", "y"))


def written(x):
    held = jax.new_ref(x)
    held[0] = x[1]
    return held[...]


def rows_in_turn(x):
    held = jax.new_ref(jnp.zeros_like(x))

    def step(i, scale):
        held[i] = x[i] * scale
        return scale + 1

    lax.fori_loop(0, 5, step, 1.0)
    return held[...]


def running_sum(x):
    total = jax.new_ref(jnp.zeros(x.shape[1]))

    def step(_, row):
        total[...] += row
        return None, total[...]

    return lax.scan(step, None, x)[1]


def where_it_is_so(x):
    held = jax.new_ref(x)

    def replace():
        held[1] = x[2]

    def keep():
        held[2] = x[0] * 2

    lax.cond(x[0, 0] > 0, replace, keep)
    return held[...]


def by_an_inner_function(x):
    held = jax.new_ref(x)

    def inner(row):
        held[0] = row
        return row * 2

    return jax.jit(inner)(x[1]) + held[...]


def in_a_function_inside(x):
    return mw.jit(written, mesh=N24)(x * 2) + 1


def gradient(x):
    return jax.grad(lambda x: (running_sum(jnp.sin(x)) ** 2).sum())(x)


FUNCTIONS = [
    written, rows_in_turn, running_sum, where_it_is_so, by_an_inner_function, in_a_function_inside,
    gradient,
]  # fmt: skip
# A function planned for devices that are not there cannot be called.
BY_ITSELF = {in_a_function_inside: lambda x: written(x * 2) + 1}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rows", [12, 11], ids=["even", "uneven"])
def test_as_one_device(function, rows):
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, 6)), jnp.float32)
    wanted = BY_ITSELF.get(function, function)(x)
    for spec in (P("x"), P("y", "x")):
        step = mw.jit(function, mesh=N24, in_shardings=spec, out_shardings=P("x"))
        np.testing.assert_allclose(step.partition(x).simulate(x), wanted, rtol=1e-5, atol=1e-5)


def test_transformed(mesh8):
    """A call is differentiated and batched as any other."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)
    step = mw.jit(running_sum, mesh=mesh8, in_shardings=P("x"))
    found = jax.grad(lambda x: (step(x) ** 2).sum())(x)
    np.testing.assert_allclose(found, jax.grad(lambda x: (running_sum(x) ** 2).sum())(x), rtol=1e-5)
    many = jnp.stack([x, x + 1, x * 2])
    np.testing.assert_allclose(jax.vmap(step)(many), jax.vmap(running_sum)(many), rtol=1e-5)


def test_a_shared_row_is_written_where_it_lies():
    """Who writes the row has the one that it is made of; the array stays where it is."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = mw.jit(written, mesh=N24, in_shardings=P("x", "y"), out_shardings=P("x", "y"))
    assert program.partition(x).wire_bytes == 0
    values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    found = program.partition(values).simulate(values)
    np.testing.assert_array_equal(np.asarray(found)[:2], values[[1, 1]])
