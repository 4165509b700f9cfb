"""Products of what is turned, read as it lay before: one matrix by rows and by columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from meshwise.flatten import flatten

N24 = AbstractMesh((2, 4), ("x", "y"))


def turned_back(a, b):
    return a.T.T.T @ b


def of_a_batch(a, b):
    """Where what is turned is sharded otherwise, that brings the batch to the front."""
    return jax.vmap(jnp.matmul)(a.transpose(1, 0, 2), b)


def swapped(a, b):
    """Free dims come in another order: the product of what was not turned is another one."""
    return lax.dot_general(a.transpose(1, 0, 2), b, (((2,), (0,)), ((), ())))


CASES = {
    "left": (lambda a, b: a.T @ b, (4, 6), (4, 3), 0),
    "right": (lambda a, b: a @ b.T, (6, 4), (3, 4), 0),
    "both": (lambda a, b: a.T @ b.T, (4, 6), (3, 4), 0),
    "three times": (turned_back, (4, 6), (4, 3), 0),
    "a batch": (of_a_batch, (5, 2, 4), (2, 4, 3), 1),
    "with itself": (lambda a, b: a.T @ a + b, (4, 3), (3, 3), 0),
    "free dims swapped": (swapped, (2, 3, 4), (4, 5), 1),
    "also returned": (lambda a, b: (a.T @ b, a.T), (4, 6), (4, 3), 1),
}


@pytest.mark.parametrize("function, first, second, left", CASES.values(), ids=CASES)
def test_what_is_turned_is_read_as_it_lay(function, first, second, left):
    draw = np.random.default_rng(0)
    args = [draw.normal(size=shape).astype("f") for shape in (first, second)]
    flat = flatten(jax.make_jaxpr(function)(*args))
    assert sum(e.primitive is lax.transpose_p for e in flat.eqns) == left
    found = jax.tree.leaves(_jax.jaxpr_as_fun(flat)(*args))
    for own, one in zip(found, jax.tree.leaves(function(*args)), strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-6)


def powers(a, v):
    def step(v, _):
        v = a.T @ (a @ v)
        return v / jnp.linalg.norm(v, axis=0), None

    return lax.scan(step, v, None, length=4)[0]


def test_a_matrix_is_gathered_once_for_its_rows_and_columns():
    """As long as it was two values, each step gathered and scattered vectors."""
    hints = {"in_shardings": (P("x", "y"), P(None, "x")), "out_shardings": P("y", "x")}
    a, v = (np.random.default_rng(0).normal(size=s).astype("f") for s in ((24, 96), (96, 8)))
    program = mw.jit(powers, mesh=N24, **hints).partition(a, v)
    assert [(c.kind.value, c.count) for c in program.collectives] == [
        ("all_gather", 1),
        ("all_reduce", 4),
        ("all_reduce", 4),
    ]
    np.testing.assert_allclose(program.simulate(a, v), powers(a, v), rtol=1e-4, atol=1e-5)
