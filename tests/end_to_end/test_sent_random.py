"""Random numbers of every distribution, sharded: nothing is sent, and the bits are one device's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.end_to_end.sent import mesh_of

Draw = Callable[[Any, int], Any]

# Draws of `n` rows. Of the first, every bit is that of one device; the others take a logarithm, a
# root or the like of such bits, which XLA may round otherwise for an array of another size.
EXACT: dict[str, Draw] = {
    "bits": lambda key, n: random.bits(key, (n, 6)),
    "bits of 8": lambda key, n: random.bits(key, (n, 6), "uint8"),
    "uniform": lambda key, n: random.uniform(key, (n, 6)),
    "uniform in bfloat16": lambda key, n: random.uniform(key, (n, 6), "bfloat16"),
    "bernoulli": lambda key, n: random.bernoulli(key, 0.3, (n, 6)),
    "randint": lambda key, n: random.randint(key, (n, 6), -5, 1000),
    "randint of 8": lambda key, n: random.randint(key, (n, 6), 0, 100, "int8"),
    "rademacher": lambda key, n: random.rademacher(key, (n, 6)),
    "categorical": lambda key, n: random.categorical(key, jnp.arange(5.0), shape=(n, 6)),
    "choice": lambda key, n: random.choice(key, 100, (n,)),
    "choice by weights": lambda key, n: random.choice(key, 4, (n,), p=jnp.arange(4.0) / 6),
    "choice without replacement": lambda key, n: random.choice(key, 100, (n,), replace=False),
    "permutation": random.permutation,
    "permutation of rows": lambda key, n: random.permutation(key, jnp.arange(n * 3).reshape(n, 3)),
    "split": lambda key, n: random.key_data(random.split(key, n)),
    "fold_in": lambda key, n: random.key_data(
        jax.vmap(lambda i: random.fold_in(key, i))(jnp.arange(n))
    ),
    "clone": lambda key, n: random.bits(random.clone(key), (n,)),
    "wrap_key_data": lambda key, n: random.bits(
        random.wrap_key_data(random.key_data(key), impl=random.key_impl(key)), (n,)
    ),
    "geometric": lambda key, n: random.geometric(key, 0.3, (n, 6)),
}
ROUNDED: dict[str, Draw] = {
    "normal": lambda key, n: random.normal(key, (n, 6)),
    "normal in complex64": lambda key, n: random.normal(key, (n, 6), "complex64"),
    "truncated_normal": lambda key, n: random.truncated_normal(key, -1.0, 1.5, (n, 6)),
    "lognormal": lambda key, n: random.lognormal(key, shape=(n, 6)),
    "multivariate_normal": lambda key, n: random.multivariate_normal(
        key, jnp.zeros(3), jnp.eye(3), (n,)
    ),
    "orthogonal": lambda key, n: random.orthogonal(key, 4, (n,)),
    "laplace": lambda key, n: random.laplace(key, (n, 6)),
    "gumbel": lambda key, n: random.gumbel(key, (n, 6)),
    "exponential": lambda key, n: random.exponential(key, (n, 6)),
    "cauchy": lambda key, n: random.cauchy(key, (n, 6)),
    "logistic": lambda key, n: random.logistic(key, (n, 6)),
    "maxwell": lambda key, n: random.maxwell(key, (n, 6)),
    "double_sided_maxwell": lambda key, n: random.double_sided_maxwell(key, 0.0, 1.0, (n, 6)),
    "weibull_min": lambda key, n: random.weibull_min(key, 1.0, 2.0, (n, 6)),
    "pareto": lambda key, n: random.pareto(key, 2.0, (n, 6)),
    "rayleigh": lambda key, n: random.rayleigh(key, 1.0, (n, 6)),
    "triangular": lambda key, n: random.triangular(key, 0.0, 0.5, 1.0, (n, 6)),
    "wald": lambda key, n: random.wald(key, 1.0, (n, 6)),
    "gamma": lambda key, n: random.gamma(key, 2.0, (n, 3)),
    "loggamma": lambda key, n: random.loggamma(key, 0.5, (n, 3)),
    "beta": lambda key, n: random.beta(key, 2.0, 3.0, (n, 3)),
    "dirichlet": lambda key, n: random.dirichlet(key, jnp.ones(3), (n,)),
    "ball": lambda key, n: random.ball(key, 3, 2.0, (n,)),
    "t": lambda key, n: random.t(key, 3.0, (n, 3)),
    "chisquare": lambda key, n: random.chisquare(key, 3.0, (n, 3)),
    "f": lambda key, n: random.f(key, 3.0, 4.0, (n, 3)),
    "generalized_normal": lambda key, n: random.generalized_normal(key, 2.0, (n, 3)),
    "poisson": lambda key, n: random.poisson(key, 3.0, (n, 3)),
    "poisson of many": lambda key, n: random.poisson(key, 30.0, (n, 3)),
    "binomial": lambda key, n: random.binomial(key, 10, 0.4, (n, 3)),
    "multinomial": lambda key, n: random.multinomial(key, 9, jnp.ones((n, 3)) / 3),
}
DRAWS = EXACT | ROUNDED
UNTIL_ACCEPTED = ("binomial", "multinomial")
NO_DRAWS = {"Key", "PRNGKey", "key", "key_data", "key_dtype", "key_impl", "random_gamma_p"}
ONLY_THREEFRY = {"poisson", "poisson of many", "multinomial"}
# What takes long to compile is drawn in the slow tests; its bits are those of the others.
QUICK = (*EXACT, "normal", "truncated_normal", "laplace", "orthogonal", "gamma", "poisson")
KEY = random.key(11)


def test_every_distribution_is_drawn():
    public = {n for n in dir(random) if not n.startswith("_")}
    missing = public - NO_DRAWS - {name.split()[0] for name in DRAWS}
    assert not {n for n in missing if callable(getattr(random, n))}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("rows", [64, 61])
def test_nothing_is_sent(name: str, rows: int):
    for sizes, spec in (((8,), P("x")), ((2, 2, 2), P(("z", "x")))):
        step = mw.jit(lambda key: DRAWS[name](key, rows), mesh=mesh_of(*sizes), out_shardings=spec)
        _sends_nothing(name, step.partition(KEY))


def _sends_nothing(name: str, program: Any) -> None:
    """Some are drawn until all are accepted: then the devices agree on whether to go on."""
    agreed = [c for c in program.collectives if c.shape == () and c.dtype == np.uint8]
    assert not agreed or name in UNTIL_ACCEPTED
    assert len(agreed) == len(program.collectives)


@pytest.mark.parametrize("name", [n for n in DRAWS if n not in ONLY_THREEFRY])
def test_nothing_is_sent_of_other_keys(name: str):
    key = random.key(11, impl="rbg")
    step = mw.jit(lambda key: DRAWS[name](key, 61), mesh=mesh_of(8), out_shardings=P("x"))
    _sends_nothing(name, step.partition(key))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in DRAWS]
)
def test_numbers_are_those_of_one_device(name: str):
    def draw(key: Any) -> Any:
        return DRAWS[name](key, 61)

    wanted = np.asarray(jax.jit(draw)(KEY))
    step = mw.jit(draw, mesh=mesh_of(2, 4, real=True), out_shardings=P(("y", "x")))
    found = np.asarray(step(KEY))
    assert found.dtype == wanted.dtype
    if name in EXACT:
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


PERMUTATIONS: dict[str, Callable[[Any], Any]] = {
    "of each column": lambda key: random.permutation(
        key, jnp.arange(64 * 8).reshape(64, 8), independent=True
    ),
    "long": lambda key: random.permutation(key, 100_000),
    "long choice": lambda key: random.choice(key, 50_000, (10_000,), replace=False),
}


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_permutations_are_sorted_on_each_device(name: str):
    """Every device can make the random numbers, so that none needs to be sent."""
    draw = PERMUTATIONS[name]
    step = mw.jit(draw, mesh=mesh_of(8, real=True), out_shardings=P("x"))
    assert not step.partition(KEY).collectives
    np.testing.assert_array_equal(np.asarray(step(KEY)), draw(KEY))


@pytest.mark.parametrize("name", ["uniform", "normal", "permutation of rows", "binomial"])
def test_numbers_of_other_keys(name: str):
    key = random.key(11, impl="rbg")

    def draw(key: Any) -> Any:
        return DRAWS[name](key, 61)

    step = mw.jit(draw, mesh=mesh_of(2, 4, real=True), out_shardings=P("x"))
    np.testing.assert_allclose(np.asarray(step(key)), jax.jit(draw)(key), rtol=1e-5, atol=1e-6)


def test_each_row_by_a_key_of_its_own():
    keys = random.split(KEY, 13)

    def draw(keys: Any) -> Any:
        return jax.vmap(lambda key: random.bits(key, (5,)))(keys)

    step = mw.jit(draw, mesh=mesh_of(8, real=True), in_shardings=P("x"), out_shardings=P("x"))
    assert not step.partition(keys).collectives
    np.testing.assert_array_equal(np.asarray(step(keys)), draw(keys))


def test_parameters_stay_where_they_are():
    location = np.linspace(-1, 1, 13, dtype=np.float32)

    def draw(key: Any, x: Any) -> Any:
        noise = random.normal(key, (13, 4)) + x[:, None]
        kept = random.bernoulli(key, jax.nn.sigmoid(x), (13,))
        shape = random.gamma(key, jnp.exp(x), (13,))
        label = random.categorical(key, jnp.outer(x, jnp.arange(7.0)))
        return noise, kept, shape, label

    step = mw.jit(draw, mesh=mesh_of(8, real=True), in_shardings=(P(), P("x")),
                  out_shardings=P("x"))  # fmt: skip
    assert not step.partition(KEY, location).collectives
    for found, wanted in zip(step(KEY, location), jax.jit(draw)(KEY, location), strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-5)
