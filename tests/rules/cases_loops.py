"""Loops whose steps do not depend on each other."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.rules.case import Case


def softmax(row):
    return jnp.exp(row) / jnp.exp(row).sum()


def newton(x):
    """A square root, by a loop that ends when its data says so."""

    def goes_on(state):
        step, root = state
        return (jnp.abs(root * root - x) > 1e-3 * jnp.abs(x)) & (step < 20)

    return lax.while_loop(goes_on, lambda s: (s[0] + 1, (s[1] + x / s[1]) / 2), (0, 2 * x))[1]


def mapped(step, **options):
    return lambda *rows: lax.scan(lambda _, row: ((), step(*row)), (), rows, **options)[1]


def projected(w, x):
    return lax.map(lambda row: jnp.sin(row @ w), x)


def sums(w, x):
    """Two sums and a constant carried along, beside what each step makes."""

    def step(carry, row):
        total, same, other = carry
        made = softmax(row @ same)
        return (total + made - row.sum(), same, other - row[:2]), made

    return lax.scan(step, (w[0], w, w[0, :2]), x)


CASES = [
    Case("map", "scan", mapped(softmax), "f32[5,3]", "i j -> i k | whole=j k"),
    Case("map of two, in reverse", "scan", mapped(lambda a, b: (softmax(a) + b, jnp.cumsum(a) * b),
         reverse=True), "f32[7,3] f32[7]", "i j, i -> i k, i l | whole=j k l"),
    Case("map with a constant", "scan", projected, "f32[3,3] f32[6,3]",
         "i j, k l -> k m | whole=i j l m"),
    Case("map of one", "scan", mapped(softmax), "f32[1,3]", "1 i -> 1 j | whole=i j"),
    Case("map of keys", "scan", mapped(lambda key: jax.random.bits(key, (4,))), "key[5]",
         "i -> i j | whole=j"),
    Case("map of steps that end when data says so", "scan", mapped(newton), "f32[5]+",
         "i -> i"),
    Case("sums over steps", "scan", sums, "f32[3,3] f32[5,3]",
         "i j, k, l, m n -> k, l, m o | whole=i j k l n o permute=m"),
]  # fmt: skip
