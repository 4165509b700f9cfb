"""Random bits beyond what the table of operators can hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.ir.factors import Strategy
from meshwise.ir.mesh import refine_mesh
from meshwise.rules.random import counts_at
from meshwise.rules.registry import REGISTRY
from tests.rules.devices import raw, split_and_join


def random_equation(function: Any, *args: Any) -> Any:
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name in ("random_bits", "random_split")]
    return eqn


def split_in_two(eqn: Any, key: Any) -> np.ndarray:
    rule = REGISTRY.describe(eqn)
    axes = ((("a",),) + ((),) * len(rule.factors.sizes))[: len(rule.factors.sizes)]
    mesh = refine_mesh(("a",), (2,))
    return split_and_join(eqn, rule, Strategy(axes), mesh, [key], compiled=True)[0]


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ((7, 5), (0, 0)),
        ((2**20, 2**20), (2**19 + 3, 12345)),
        ((2**31, 4), (2**31 - 2, 1)),
        ((3, 2**16, 2**17, 5), (2, 65_000, 131_000, 3)),
        ((2**30, 2**34), (2**29, 2**31)),
        ((5, 1, 2**33), (4, 0, 2**32 - 2)),
    ],
)
def test_counts_are_row_major_positions_of_64_bits(shape, offsets):
    sizes = [min(n, 2) for n in shape]
    high, low = counts_at(shape, sizes, [np.uint32(o) if o else None for o in offsets])
    found = (np.asarray(high, np.uint64) << np.uint64(32)) | np.asarray(low, np.uint64)
    for place in np.ndindex(*sizes):
        expected = 0
        for n, offset, p in zip(shape, offsets, place, strict=True):
            expected = expected * n + offset + p
        assert int(found[place]) == expected % 2**64, (place, shape)


def test_bits_of_64():
    with jax.enable_x64(True):
        key = jax.random.key(7)
        eqn = random_equation(lambda k: jax.random.bits(k, (6, 5), "uint64"), key)
        np.testing.assert_array_equal(
            split_in_two(eqn, key), jax.random.bits(key, (6, 5), "uint64")
        )


@pytest.mark.parametrize(
    "function",
    [
        lambda key: jax.random.bits(key, (6,)),
        lambda key: jax.random.split(key, 6),
    ],
)
def test_without_the_flag_bits_come_from_one_counter(function):
    key = jax.random.key(3)
    with jax.threefry_partitionable(False):
        eqn = random_equation(function, key)
        assert REGISTRY.describe(eqn).factors.whole == {0}
        expected = raw(function(key))
    assert REGISTRY.describe(eqn).factors.whole == {0}  # whatever is set where it is planned
    by_position = random_equation(function, key)
    assert not REGISTRY.describe(by_position).factors.whole
    assert (split_in_two(by_position, key) != expected).any()


def test_many_keys_pass_without_the_flag():
    keys = jax.random.split(jax.random.key(3), 5)
    with jax.threefry_partitionable(False):
        function = jax.vmap(lambda key: jax.random.bits(key, (6,)))
        eqn = random_equation(function, keys)
        assert str(REGISTRY.describe(eqn).factors) == "i -> i j | whole=j"
        np.testing.assert_array_equal(split_in_two(eqn, keys), function(keys))


def test_dropout_mask_is_the_same():
    """The bits behind a mask of 1000 by 7, on two devices of 500 rows."""
    key = jax.random.key(0)
    eqn = random_equation(lambda k: jax.random.bits(k, (1000, 7)), key)
    found = jnp.asarray(split_in_two(eqn, key)) >> 9
    np.testing.assert_array_equal(found, jax.random.bits(key, (1000, 7)) >> 9)


def test_what_a_generator_with_a_state_draws_is_the_same_on_all_devices(mesh8):
    def drawn(x):
        first, second = (lax.rng_uniform(0.0, 1.0, (8,)) for _ in range(2))
        x, steps = lax.scan(lambda c, _: (c, lax.rng_uniform(0.0, 1.0, ())), x, None, length=4)
        return first, second, steps, x + first

    fn = mw.jit(drawn, mesh=mesh8, in_shardings=P("x"), out_shardings=P())
    first, second, steps, added = fn(jnp.zeros(8))
    for found in (first, second, steps, added):
        shards = [np.asarray(shard.data) for shard in found.addressable_shards]
        assert all((shard == shards[0]).all() for shard in shards)
    np.testing.assert_array_equal(added, first)
    together = np.concatenate([first, second, steps])
    assert len(set(together.tolist())) == 20
    assert together.min() >= 0
    assert together.max() < 1


@pytest.mark.parametrize("count", [24, 13])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_written_over_keys_at_a_place_that_is_data(mesh8, impl, count):
    keys = jax.random.split(jax.random.key(1, impl=impl), count)

    def written(keys, place):
        return lax.dynamic_update_slice(keys, keys[:3], (place,)), keys.at[3:].set(keys[:-3])

    ours = mw.jit(written, mesh=mesh8, in_shardings=(P("x"), P()))(keys, np.int32(9))
    data = jax.random.key_data
    for found, wanted in zip(ours, written(keys, np.int32(9)), strict=True):
        np.testing.assert_array_equal(data(found), data(wanted))
