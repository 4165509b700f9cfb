"""jax.random, whose numbers must be those of one device to the bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.drop_in.drawing import Call, Dice
from tests.drop_in.tables.numbers import Row, rows

r = jax.random


def key(d: Dice, shape: tuple[int, ...] = ()) -> Any:
    """A typed key, or an array of keys."""
    impl = d.pick("threefry2x32", "threefry2x32", "rbg", "unsafe_rbg")
    made = r.key(d.integer(0, 10**6), impl=impl)
    return r.split(made, shape) if shape else made


def _drawn(function: Any, *args: Any, types: str = "", **given: Any) -> Row:
    def row(d: Dice) -> Call:
        shape = d.shape()
        more = dict(given)
        if types and d.flag():
            more["dtype"] = d.dtype(types)
        return d.call(lambda k: function(k, *args, shape=shape, **more), key(d))

    return row


def _of_parameters(function: Any, count: int, low: float, high: float) -> Row:
    """Whose parameters are arrays that broadcast to the shape."""

    def row(d: Dice) -> Call:
        shapes = d.together(count + 1, d.shape(0, 3))
        shape = np.broadcast_shapes(*shapes)
        arrays = [d.array(s, dtype="float32", low=low, high=high) for s in shapes[:count]]
        return d.call(lambda k, *a: function(k, *a, shape=shape), key(d), *arrays)

    return row


RANDOM: dict[str, Row] = {
    **rows("random", r, "uniform normal", lambda f: _drawn(f, types="f")),
    "random.normal complex": _drawn(r.normal, dtype=jnp.complex64),
    "random.uniform bounds": lambda d: (lambda s: d.call(
        lambda k, a, b: r.uniform(k, np.broadcast_shapes(*s), minval=a, maxval=b), key(d),
        d.array(s[0], dtype="float32", low=-2, high=0),
        d.array(s[1], dtype="float32", low=1, high=2)))(d.together(2)),
    "random.bits": lambda d: (lambda s, t: d.call(
        lambda k: r.bits(k, s, t), key(d)))(d.shape(), d.pick(jnp.uint8, jnp.uint16, jnp.uint32)),
    "random.bits of keys": lambda d: d.call(
        jax.vmap(lambda k: r.bits(k, (3,))), key(d, (d.integer(1, 9),))),
    **rows("random", r, (
        "cauchy exponential gumbel laplace logistic rademacher maxwell"
    ), _drawn),
    "random.double_sided_maxwell": _drawn(lambda k, shape: r.double_sided_maxwell(
        k, 0.5, 2.0, shape)),
    "random.generalized_normal": _drawn(lambda k, shape: r.generalized_normal(k, 1.5, shape)),
    "random.ball": _drawn(lambda k, shape: r.ball(k, 3, shape=shape)),
    "random.orthogonal": lambda d: d.call(r.orthogonal, key(d), 4, d.pick((), (3,))),
    "random.truncated_normal": _drawn(lambda k, shape: r.truncated_normal(k, -1, 1.5, shape)),
    "random.randint": lambda d: (lambda s, t: d.call(
        lambda k, a: r.randint(k, s, 0, a, t), key(d), np.int32(d.integer(1, 99))))(
            d.shape(), d.pick(jnp.int32, jnp.uint8, jnp.int8)),
    "random.randint bounds": lambda d: (lambda s: d.call(
        lambda k, a, b: r.randint(k, np.broadcast_shapes(*s), a, b), key(d),
        d.array(s[0], dtype="int32"), d.array(s[1], dtype="int32", low=10, high=90)))(
            d.together(2)),
    "random.bernoulli": _of_parameters(r.bernoulli, 1, 0.1, 0.9),
    "random.beta": _of_parameters(r.beta, 2, 0.5, 3),
    "random.gamma": _of_parameters(r.gamma, 1, 0.5, 4),
    "random.loggamma": _of_parameters(r.loggamma, 1, 0.5, 4),
    "random.poisson": lambda d: (lambda s: d.call(
        lambda k, lam: r.poisson(k, lam, np.broadcast_shapes(*s)),
        r.key(d.integer(0, 99)), d.array(s[0], dtype="float32", low=0.5, high=14)))(
            d.together(2, d.shape(0, 3))),
    "random.binomial": lambda d: (lambda s: d.call(
        lambda k, n, p: r.binomial(k, n, p, np.broadcast_shapes(*s)), key(d),
        d.array(s[0], dtype="float32", low=1, high=20),
        d.array(s[1], dtype="float32", low=0.1, high=0.9)))(d.together(2, d.shape(0, 2))),
    "random.chisquare": _of_parameters(r.chisquare, 1, 0.5, 4),
    "random.t": _of_parameters(r.t, 1, 0.5, 4),
    "random.f": _of_parameters(r.f, 2, 0.5, 4),
    "random.geometric": _of_parameters(r.geometric, 1, 0.1, 0.9),
    "random.lognormal": _of_parameters(r.lognormal, 1, 0.1, 0.9),
    "random.pareto": _of_parameters(r.pareto, 1, 0.5, 3),
    "random.rayleigh": _of_parameters(r.rayleigh, 1, 0.5, 3),
    "random.wald": _of_parameters(r.wald, 1, 0.5, 3),
    "random.triangular": _of_parameters(
        lambda k, m, shape: r.triangular(k, 0.0, m, 2.0, shape), 1, 0.2, 1.8),
    "random.weibull_min": _of_parameters(
        lambda k, c, shape: r.weibull_min(k, 1.5, c, shape), 1, 0.5, 3),
    "random.dirichlet": lambda d: d.call(
        r.dirichlet, key(d), d.array(
            (*d.shape(0, 2, 1), 4), dtype="float32", low=0.5, high=3)),
    "random.multinomial": lambda d: d.call(
        lambda k, p: r.multinomial(k, jnp.float32(9), p / p.sum(-1, keepdims=True)), key(d),
        d.array((3, 4), dtype="float32", low=0.5, high=3)),
    "random.multivariate_normal": lambda d: (lambda a: d.call(
        lambda k, m, a: r.multivariate_normal(k, m, a, (5,)), key(d),
        d.ordinary((3,), dtype=a.dtype), a))(d.definite((), 3, "f")),
    "random.categorical": lambda d: (lambda s: d.call(
        lambda k, x: r.categorical(k, x, axis=-1), key(d), d.ordinary(s, dtype="float32")))(
            d.shape(1, 3, 1)),
    "random.categorical without replacement": lambda d: d.call(
        lambda k, x: r.categorical(k, x, replace=False, shape=(3, 4)), key(d), d.ordinary(
            (4, 9), dtype="float32")),
    "random.choice": lambda d: (lambda s: d.call(
        lambda k, x: r.choice(k, x, (4,), replace=False, axis=0), key(d), d.array(s, "fi")))(
            (d.integer(4, 9), *d.shape(0, 1))),
    "random.choice by weights": lambda d: d.call(
        lambda k, x, p: r.choice(k, x, (3, 2), p=p), key(d), d.array((7,), "f"), d.array(
            (7,), dtype="float32", low=0.1, high=1)),
    "random.permutation": lambda d: (lambda s, i: d.call(
        lambda k, x: r.permutation(k, x, axis=0, independent=i), key(d), d.array(s, "fib")))(
            d.shape(1, 3), d.flag(0.3)),
    "random.permutation of a number": lambda d: d.call(lambda k: r.permutation(k, 9), key(d)),
    "random.split": lambda d: (lambda s: d.call(lambda k: r.split(k, s), key(d)))(
        d.pick(2, 5, (3, 4), (2, 2, 3))),
    "random.split of keys": lambda d: d.call(
        jax.vmap(lambda k: r.split(k, 3)), key(d, (d.integer(1, 9),))),
    "random.fold_in": lambda d: d.call(r.fold_in, key(d), np.int32(d.integer(0, 99))),
    "random.fold_in of many": lambda d: d.call(
        jax.vmap(r.fold_in, (None, 0)), key(d), d.array(d.shape(1, 1), dtype="uint32")),
    "random.key": lambda d: d.call(
        lambda s: r.key(s, impl="threefry2x32"), np.int32(d.integer(0, 99))),
    "random.PRNGKey": lambda d: d.call(r.PRNGKey, np.int32(d.integer(0, 99))),
    "random.key_data": lambda d: d.call(r.key_data, key(d, d.shape(0, 2))),
    "random.wrap_key_data": lambda d: d.call(
        r.wrap_key_data, d.array((*d.shape(0, 2), 2), dtype="uint32")),
    "random.clone": lambda d: d.call(r.clone, key(d, d.shape(0, 2))),
    "keys as arrays": lambda d: (lambda s: d.call(
        lambda k: (k[::-1], k.reshape(-1), k[1:], jnp.stack([k, k]), jnp.concatenate([k, k]),
            k.T, jnp.where(True, k, k), jnp.expand_dims(k, 0), k[jnp.array([0, 0])]),
        key(d, s)))(d.shape(1, 2, 1)),
    "keys mapped": lambda d: d.call(
        jax.vmap(lambda k, x: r.normal(k, (2,)) + x), key(d, (6,)), d.ordinary(
            (6,), dtype="float32")),
    "legacy keys": lambda d: d.call(
        lambda k: (r.normal(r.split(k)[0], (4, 5)), r.key_data(r.wrap_key_data(k))),
        r.PRNGKey(d.integer(0, 99))),
}  # fmt: skip
