"""Rows of one of several arrays that were joined are read from that array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from meshwise.flatten import flatten
from tests.meshes import mesh_of

X = np.arange(8 * 4, dtype=np.float32).reshape(8, 4) / 8
MESH = mesh_of(x=8)


def loss_of_two(x):
    return jnp.stack([x.sum(), jnp.sort(x, 0).max()])[0]


def last_of_features(x):
    """The others are rows of neighbours."""
    return jnp.concatenate([jnp.roll(x, 1, 0), jnp.roll(x, 2, 0), x], 1)[:, -1]


def stacked_and_told_apart(x):
    _, own = jnp.unstack(jnp.stack([jnp.roll(x, 1, 0), x], 1), axis=1)
    return own * 2


def split_where_joined(x):
    _, own, again = jnp.split(jnp.concatenate([jnp.roll(x, 1, 0), x, x], 1), [4, 8], 1)
    return own * 2 + again


def split_within_one(x):
    return jnp.split(jnp.concatenate([x, jnp.roll(x, 1, 0)], 1), 4, 1)[1]


def joined_twice(x):
    two = jnp.concatenate([x, jnp.roll(x, 1, 0)], 1)
    return jnp.concatenate([two, jnp.roll(x, 2, 0)], 1)[:, 1:3]


def row_of_a_stack(x):
    return jnp.stack([jnp.roll(x, 1, 0), x])[1:2, :, 1:]


def one_dim_of_a_join(x):
    joined = jnp.concatenate([x[:, None, :1], jnp.roll(x, 1, 0)[:, None, 1:]], 2)
    return jnp.unstack(joined, axis=2)[0]


def in_a_loop(x):
    return lax.fori_loop(0, 3, lambda _, x: jnp.stack([jnp.roll(x, 1, 0), x])[1] * 2, x)


UNREAD = [
    loss_of_two, last_of_features, stacked_and_told_apart, split_where_joined, split_within_one,
    joined_twice, row_of_a_stack, one_dim_of_a_join, in_a_loop,
]  # fmt: skip


def of_both(x):
    return jnp.concatenate([x, x * 2], 1)[:, 3:5]


def split_across(x):
    return jnp.split(jnp.concatenate([x, x * 2], 1), [3, 5], 1)


def each_second(x):
    return jnp.concatenate([x, x * 2], 1)[:, :4:2]


def nothing(x):
    return jnp.concatenate([x, x * 2], 1)[:, 4:4]


def of_numbers(x):
    return jnp.stack([jnp.float32(2), x[0, 0]])[0] + x


def rolled_on(x):
    return jnp.roll(jnp.roll(x, 1, 0), 1, 0)


def rolled_round(x):
    """A sum of all rows, as it goes round a ring."""
    total = x
    for _ in range(3):
        x = jnp.roll(x, 1, 0)
        total += x
    return total


def difference_of_rolled(x):
    padded = jnp.pad(jnp.roll(x, 1, 0), ((1, 1), (0, 0)), mode="edge")
    return padded[2:] - padded[:-2]


MOVED = {rolled_on: 1, rolled_round: 3, difference_of_rolled: 3}


@pytest.mark.parametrize("function", UNREAD)
def test_parts_that_nobody_reads_are_not_sent(function):
    program = mw.jit(function, mesh=MESH, in_shardings=P("x")).partition(X)
    sent = 2 * 7 * 4 / 8 if function is loss_of_two else 0
    assert program.wire_bytes == sent
    names = {e.primitive.name for e in flatten(jax.make_jaxpr(function)(X)).jaxpr.eqns}
    assert not names & {"concatenate", "stack", "split", "unstack", "sort"}


@pytest.mark.parametrize(("function", "rows"), MOVED.items())
def test_a_join_that_is_moved_is_moved_as_one(function, rows):
    program = mw.jit(function, mesh=MESH, in_shardings=P("x")).partition(X)
    assert program.wire_bytes == rows * X[0].nbytes


@pytest.mark.parametrize(
    "function", [*UNREAD, *MOVED, of_both, split_across, each_second, nothing, of_numbers]
)
def test_the_numbers_are_the_same(function):
    flat = _jax.jaxpr_as_fun(flatten(jax.make_jaxpr(function)(X)))
    for found, wanted in zip(flat(X), jax.tree.leaves(function(X)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    found = mw.jit(function, mesh=MESH, in_shardings=P("x")).partition(X).simulate(X)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(function(X)), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)


def test_a_part_is_of_the_type_of_the_join():
    """One array of a join may have a weak type, which gives way to others; the join has none."""

    def first_of_both(s):
        return lax.concatenate([jnp.broadcast_to(s, (8,)), jnp.ones(8)], 0)[:8]

    program = mw.jit(first_of_both, mesh=MESH).partition(2.0)
    assert not program.simulate(2.0).weak_type
    assert not jax.eval_shape(mw.jit(first_of_both, mesh=MESH), 2.0).weak_type
