"""What is one number everywhere is made as that number, spread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from meshwise.cost.memory import peak_memory
from meshwise.flatten import flatten

T = np.float32(1.5)


def padded(t):
    return jnp.pad(jnp.zeros((4, 6)), ((1, 2), (0, 3)))


def shifted(t):
    return jnp.roll(jnp.full((4, 6), t), 1, 0)


def joined_in_two_ways(t):
    return jnp.concatenate([jnp.full((2, 3), t), jnp.full((3, 2), t).T])


def cut_where_told(t):
    return lax.dynamic_slice(jnp.full((4, 6), t), (t.astype(int), 0), (2, 6))[::-1].reshape(3, 4)


def one_of_them(t):
    return lax.copy_p.bind(jnp.full((1, 1), t).reshape(()))[None]


def of_a_pad(t):
    return jnp.pad(jnp.pad(jnp.full((2,), t), 1, constant_values=t), 2, constant_values=t)


def in_a_loop(t):
    return lax.fori_loop(0, 3, lambda i, x: x + of_a_pad(t).sum() * i, t)


def padded_with_another(t):
    return jnp.pad(jnp.zeros((4, 6)), 1, constant_values=1)


def padded_with_the_other_zero(t):
    return lax.pad(jnp.zeros((4, 6)), np.float32(-0.0), ((1, 1, 0), (0, 0, 2)))


def joined_of_two(t):
    return jnp.concatenate([jnp.zeros((2, 3)), jnp.ones((2, 3))])


def of_an_argument(t):
    return jnp.pad(jnp.stack([t, t]), 1)


def rows_of_a_unit_matrix(t):
    return jnp.eye(6).sum(0) * t


def pairs_of_each(t):
    """How many others there are, and the largest place, of booleans and integers."""
    places = jnp.arange(5)
    return (places[:, None] != places).sum(1) * jnp.full((5, 5), places).max(1)


def counted_to_each(t):
    return jnp.tril(jnp.ones((5, 5))).sum(1) * t


def of_what_is_inexact(t):
    return jnp.full((5, 5), jnp.float32(0.1)).sum(1) * t


def of_zeros_of_both_signs(t):
    return jnp.where(jnp.eye(5, dtype=bool), 0.0, jnp.float32(-0.0)).max(0) * t


def hinted(t):
    return jnp.pad(mw.shard(jnp.zeros((8, 6)), P("x")), 1)


@pytest.mark.parametrize(
    "function", [padded, shifted, joined_in_two_ways, cut_where_told, of_a_pad]
)
def test_what_is_one_number_is_spread(function):
    assert written(function) == ["broadcast_in_dim"]


def counts(t):
    return jnp.arange(6) + lax.convert_element_type(t, int)


def times_nought(t):
    return counts(t) * 0


def nought_of_all(t):
    return jnp.zeros(6, np.uint8) & counts(t).astype(np.uint8)


def none_of_all(t):
    return (counts(t) > 2) & jnp.zeros(6, bool)


def floats_times_nought(t):
    """Of NaN that is NaN, and -0.0 of what is negative."""
    return jnp.stack([t, -t, t * jnp.inf, t * jnp.nan]) * 0.0


def complex_times_nought(t):
    return (jnp.stack([t, -t, t * jnp.inf]) * 0j).imag


def some_of_all(t):
    return (counts(t) > 2) & jnp.ones(6, bool)


def times_one(t):
    return counts(t) * 1


def all_or_nought(t):
    return counts(t) | 0


@pytest.mark.parametrize("function", [times_nought, nought_of_all, none_of_all])
def test_integers_times_nought_are_that(function):
    assert written(function) == ["broadcast_in_dim"]


@pytest.mark.parametrize("function", [rows_of_a_unit_matrix, pairs_of_each])
def test_reductions_of_known_numbers(function):
    assert not {"reduce_sum", "reduce_max", "eq", "ne"} & {*written(function)}


@pytest.mark.parametrize(
    "function, move",
    [
        (padded_with_another, "pad"),
        (padded_with_the_other_zero, "pad"),
        (joined_of_two, "concatenate"),
        (of_an_argument, "pad"),
        (hinted, "pad"),
        (one_of_them, "copy"),
        (counted_to_each, "reduce_sum"),
        (of_what_is_inexact, "reduce_sum"),
        (of_zeros_of_both_signs, "reduce_max"),
        (floats_times_nought, "mul"),
        (complex_times_nought, "mul"),
        (some_of_all, "and"),
        (times_one, "mul"),
        (all_or_nought, "or"),
    ],
)
def test_what_is_more_is_left(function, move):
    assert move in written(function)


def test_in_a_loop():
    assert "scan" in written(in_a_loop)
    entered = flatten(jax.make_jaxpr(in_a_loop)(T), _jax.has_bodies)
    assert "pad" not in [eqn.primitive.name for eqn in entered.jaxpr.eqns]
    jitted = mw.jit(in_a_loop, mesh=AbstractMesh((8,), ("x",)), in_shardings=P(), out_shardings=P())
    np.testing.assert_allclose(jitted.partition(T).simulate(T), in_a_loop(T), rtol=1e-6)


def written(function):
    """The operators that are left of a function, which makes what it did; casts aside."""
    closed = jax.make_jaxpr(function)(T)
    flat = flatten(closed)
    (found,), (wanted,) = _jax.jaxpr_as_fun(flat)(T), _jax.jaxpr_as_fun(closed)(T)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    names = [eqn.primitive.name for eqn in flat.jaxpr.eqns]
    return [name for name in names if name != "convert_element_type"]


def test_no_device_makes_all_of_a_first_guess():
    def around(u):
        p = jnp.pad(u, 1)
        return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u

    def step(f):
        return around(f - around(jnp.zeros_like(f)))

    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    jitted = mw.jit(step, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
    found = jitted.partition(jax.ShapeDtypeStruct((256, 512), jnp.float32)).per_device
    memory = peak_memory(found.jaxpr, found.mesh.axis_size)
    shard = 256 * 512 * 4 // 8
    assert memory.argument_bytes == memory.result_bytes == shard
    assert memory.temporary_bytes < 1.5 * shard
