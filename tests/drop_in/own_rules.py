"""Functions with rules of their own for derivatives, batches, roots and what is saved."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def clipped(x, y):
    return x * jnp.sin(y)


def clipped_forward(x, y):
    return clipped(x, y), (x, y)


def clipped_backward(saved, ct):
    x, y = saved
    return jnp.clip(ct * jnp.sin(y), -0.3, 0.3), ct * x * jnp.cos(y)


clipped.defvjp(clipped_forward, clipped_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(fn, x, power):
    return fn(x) ** power


applied.defvjp(
    lambda fn, x, power: (fn(x) ** power, x),
    lambda fn, power, x, ct: (ct * power * 0.5 * jnp.cos(x),),
)


@jax.custom_jvp
def with_slopes(x, y):
    return x * y + jnp.sin(x)


with_slopes.defjvps(lambda t, out, x, y: t * (y + 2), lambda t, out, x, y: t * x)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def mapped_slope(fn, x):
    return fn(x)


mapped_slope.defjvp(lambda fn, xs, ts: (fn(xs[0]), 3 * ts[0] * jnp.cos(xs[0])))


@jax.custom_jvp
def counts_zeros(x, y):
    return x + 2 * y


@partial(counts_zeros.defjvp, symbolic_zeros=True)
def counts_zeros_jvp(primals, tangents):
    zeros = [type(t) is jax.custom_derivatives.SymbolicZero for t in tangents]
    some = [jnp.zeros_like(p) if z else t for p, t, z in zip(primals, tangents, zeros, strict=True)]
    return counts_zeros(*primals), some[0] + 2 * some[1] + 10.0 * sum(zeros)


@jax.custom_vjp
def perturbed_only(x, y):
    return x * y


def perturbed_forward(x, y):
    return x.value * y.value, (x.value, y.value, x.perturbed, y.perturbed)


def perturbed_backward(saved, ct):
    x, y, of_x, of_y = saved
    return ct * y * (2 if of_x else 1), ct * x * (3 if of_y else 1)


perturbed_only.defvjp(perturbed_forward, perturbed_backward, symbolic_zeros=True)


@jax.custom_batching.custom_vmap
def batched_by_hand(x, y):
    return x @ y


@batched_by_hand.def_vmap
def batched_by_hand_rule(size, is_batched, x, y):
    x, y = (
        v if b else jnp.broadcast_to(v, (size, *v.shape))
        for v, b in zip((x, y), is_batched, strict=True)
    )
    return jnp.einsum("nij,njk->nik", x, y) + 1, True


def saved_names(x, w):
    y = jax.ad_checkpoint.checkpoint_name(jnp.sin(x @ w), "y")
    return (jnp.cos(y) ** 2).sum()


def newton(x):
    return lax.custom_root(
        lambda y: y**3 - x, jnp.ones_like(x),
        lambda f, y: lax.fori_loop(0, 25, lambda _, y: y - f(y) / (3 * y**2), y),
        lambda g, y: y / g(jnp.ones_like(y)))  # fmt: skip


def solved(a, b):
    return lax.custom_linear_solve(
        lambda v: a @ v, b, lambda _, b: jnp.linalg.solve(a, b),
        lambda _, b: jnp.linalg.solve(a.T, b))  # fmt: skip
