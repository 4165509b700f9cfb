"""Every way to sort a sharded dim, whatever it costs, against one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwise.ir.factors import Strategy
from meshwise.ir.mesh import refine_mesh
from meshwise.rules import sorting
from meshwise.rules.network import rounds
from meshwise.rules.registry import REGISTRY
from meshwise.rules.splitters import key_words
from tests.rules.devices import split_and_join

WAYS = ("rows", "splitters", "network")
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, -2.5]
LEAST = [*SPECIAL, 1e-40]


def drawn(kind, shape):
    rng = np.random.default_rng(3)
    found = {
        "special": rng.choice(np.asarray(SPECIAL, np.float32), shape),
        "equal": np.ones(shape, np.float32),
        "few": -np.sort(rng.integers(-1, 2, shape).astype(np.int8), 0),
        "least": rng.choice(np.asarray(LEAST, np.float32), shape),
    }
    return jnp.asarray(found[kind])


def check(monkeypatch, way, operands, keys, mesh, compiled=False):
    """The same to the bit, signs of zeros and places of equals included."""
    function = partial(lax.sort, dimension=0, num_keys=keys)
    (eqn,) = jax.make_jaxpr(function)(operands).jaxpr.eqns
    rule = REGISTRY.describe(eqn)
    place = WAYS.index(way)
    monkeypatch.setattr(sorting, "_best", lambda job: sorting._ways(job)[place])
    axes = (mesh.names, *(() for _ in rule.factors.sizes[1:]))
    found = split_and_join(eqn, rule, Strategy(axes), mesh, operands, compiled)
    for value, want in zip(found, function(operands), strict=True):
        np.testing.assert_array_equal(value, want)
        if want.dtype == np.float32:
            numbers = ~np.isnan(np.asarray(want))
            np.testing.assert_array_equal(np.signbit(value) & numbers, np.signbit(want) & numbers)


@pytest.mark.parametrize("kind", ["special", "equal", "few"])
@pytest.mark.parametrize(("sizes", "shape"), [((4,), (13,)), ((2, 3), (40, 2)), ((8,), (5,))])
@pytest.mark.parametrize("way", WAYS)
def test_equal_to_one_device(monkeypatch, way, sizes, shape, kind):
    x = drawn(kind, shape)
    place = lax.broadcasted_iota(np.int32, shape, 0)
    mesh = refine_mesh("ab"[: len(sizes)], sizes)
    check(monkeypatch, way, (x, place), 1, mesh)


@pytest.mark.parametrize("way", WAYS)
def test_the_least_of_floats_are_zeros(monkeypatch, way):
    """To XLA on a CPU they are equal to zero; not to numpy."""
    x, place = drawn("least", (13,)), np.arange(13, dtype=np.int32)
    check(monkeypatch, way, (x, place), 1, refine_mesh(("a",), (4,)), compiled=True)


@pytest.mark.parametrize("way", WAYS)
def test_several_keys_of_all_sorts(monkeypatch, way):
    rng = np.random.default_rng(1)
    first = jnp.asarray(rng.integers(0, 2, 22), np.bool_)
    second = jnp.asarray(rng.choice([0.0, -1, 2], 22), jnp.float8_e4m3fn)
    third = jnp.asarray(rng.choice([1, 2j, np.nan, 1 - 1j], 22), np.complex64)
    fourth = jnp.asarray(rng.normal(size=22), jnp.bfloat16)
    check(monkeypatch, way, (first, second, third, fourth), 3, refine_mesh(("a",), (3,)))


@pytest.mark.parametrize(
    "dtype", ["int8", "uint16", "int32", "bfloat16", "float16", "float32", "float8_e5m2", "bool"]
)
def test_words_compare_as_keys_do(dtype):
    rng = np.random.default_rng(2)
    if dtype in ("int8", "uint16", "int32"):
        info = np.iinfo(dtype)
        x = jnp.asarray(rng.integers(info.min, info.max, 64, dtype, endpoint=True))
    else:
        x = jnp.asarray(rng.choice([*LEAST, *rng.normal(size=9)], 64)).astype(dtype)
    ((word, _),) = key_words([x])
    np.testing.assert_array_equal(jnp.argsort(word), jnp.argsort(x))


@pytest.mark.parametrize("shards", range(2, 17))
def test_networks_sort(shards):
    """All of zeros and ones, which is enough (Knuth 5.3.4)."""
    inputs = np.arange(2**shards)[:, None] >> np.arange(shards) & 1
    for pairs in rounds(shards):
        assert len({device for pair in pairs for device in pair}) == 2 * len(pairs)
        for a, b in pairs:
            low, high = inputs[:, [a, b]].min(1), inputs[:, [a, b]].max(1)
            inputs[:, a], inputs[:, b] = low, high
    assert (np.diff(inputs) >= 0).all()
    k = (shards - 1).bit_length()
    assert len(rounds(shards)) <= k * (k + 1) / 2
