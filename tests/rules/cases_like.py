"""Kernels of mw.like and functions under custom_partitioning: rules that come from elsewhere."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

import meshwise as mw
from tests.rules.case import Case

TABLE = np.linspace(1.0, 2.0, 6, dtype=np.float32)


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def norm(x, gain):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def norm_backward(x, gain, cotangent):
    return jax.vjp(norm, x, gain)[1](cotangent)


def linear(x, w):
    """A product whose reference lays leading dims end to end."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1)


def split_heads(x):
    return jnp.tanh(x.reshape(x.shape[0], -1, 4)).sum(-1)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]


def case(name, reference, arguments, text, **more):
    # The kernel is another function that computes the same.
    kernel = jax.jit(lambda *args: reference(*args))  # noqa: PLW0108
    return Case(f"like {name}", "mw_like", mw.like(kernel, reference), arguments, text, **more)


LIKE = [
    case("element-wise", jnp.tanh, "f32[5,6]", "i j -> i j"),
    case("product", jnp.matmul, "f32[6,6] f32[6,4]", "i j, j k -> i k | sum=j"),
    case("product of rows laid end to end", linear, "f32[4,6,5] f32[5,4]",
         "i j k, k l -> i j l | sum=k"),
    case("product with itself", lambda x: x @ x.T, "f32[5,6]", "i j -> i i | sum=j whole=i"),
    case("product twice", lambda x, y, z: x @ y @ z, "f32[4,6] f32[6,5] f32[5,6]",
         "i j, j k, k l -> i l | sum=j k"),
    case("nonlinear after a product", lambda x, y: jnp.tanh(x @ y), "f32[5,6] f32[6,4]",
         "i j, j k -> i k | whole=j"),
    case("nonlinear before a product", lambda x, y: jnp.tanh(x) @ y, "f32[5,6] f32[6,4]",
         "i j, j k -> i k | sum=j"),
    case("sum", lambda x: x.sum(0), "f32[6,5]", "i j -> j | sum=i"),
    case("maximum", lambda x: x.max(0), "f32[6,5]", "i j -> j | max=i"),
    case("mean, which divides by the size", lambda x: x.mean(0), "f32[6,5]", "i j -> j | whole=i"),
    case("sum, and a maximum of it", lambda x: x.sum(0).max(), "f32[6,5]",
         "i j ->  | max=j whole=i"),
    case("sum and the sum of squares", lambda x: (x.sum(0), (x * x).sum(0)), "f32[6,5]",
         "i j -> j, j | sum=i"),
    case("sum and what is summed", lambda x: (x * 2, x.sum(0)), "f32[6,5]",
         "i j -> i j, j | permute=i"),
    case("largest and what it is of", lambda x: (x * 2, x.max(0)), "f32[6,5]",
         "i j -> i j, j | whole=i"),
    case("row that is filled in beyond the end",
         lambda x: jnp.take(x, np.array([4, 9]), 0, mode="fill", fill_value=7), "f32[5,6]",
         "i j -> k j | whole=i k"),
    case("positions", lambda x: x * jnp.arange(1.0, x.shape[0] + 1)[:, None], "f32[6,5]",
         "i j -> i j | whole=i"),
    case("a table closed over", lambda x: x * TABLE[:, None], "f32[6,5]",
         "i j -> i j | whole=i"),
    case("a size that was written down", lambda x: x / (2.0 if x.shape[0] < 5 else 3.0),
         "f32[6,5]", "i j -> i j | whole=i"),
    case("running sum", lambda x: jnp.cumsum(x, 0), "f32[6,5]", "i j -> i j | whole=i"),
    case("heads of a fixed width", split_heads, "f32[5,24]", "i (j k) -> i j | whole=k"),
    case("dims laid out anew", lambda x: jnp.tanh(x.reshape(-1, 3)), "f32[4,6]",
         "i (j k) -> (i j) k | whole=k"),
    case("product of windows",
         lambda x: lax.reduce_window(x, 1.0, lax.mul, (2, 1), (2, 1), "valid"), "f32[12,5]",
         "i j -> k j | whole=i k"),
    case("reversal", lambda x: x[::-1], "f32[6,5]", "i j -> i j | whole=i"),
    case("halves", lambda x: x[: x.shape[0] // 2], "f32[8,5]", "i j -> k j | whole=i k"),
    case("its two halves exchanged", lambda x: jnp.roll(x, 3, 0), "f32[6,5]",
         "i j -> i j | whole=i"),
    case("a broadcast to a size of another", lambda x, y: jnp.broadcast_to(x, (*y.shape, *x.shape)),
         "f32[6] f32[5]", "i, j -> k i | whole=j k"),
    case("attention", attention, "f32[2,6,4,5] f32[2,6,4,5] f32[2,6,4,5]",
         "i j k l, i m k l, i m k n -> i j k n | whole=j l m"),
    case("normalisation", norm, "f32[4,5,6] f32[6]", "i j k, k -> i j k | whole=k"),
    case("backward pass of a normalisation", norm_backward, "f32[4,6,5] f32[5] f32[4,6,5]",
         "i j k, k, i j k -> i j k, k | whole=k permute=i j"),
    case("cross entropy", cross_entropy, "f32[6,5] i32[6]<5", "i j, i -> i | whole=j"),
    case("scaled sum", lambda x, s: (x * s).sum(0), "f32[6,5] f32[]", "i j,  -> j | sum=i"),
    case("one row", lambda x, y: x + y, "f32[1,6] f32[5,6]", "1 i, j i -> j i"),
    Case("like mapped", "mw_like", jax.vmap(mw.like(norm, norm), (1, None)),
         "f32[4,3,6] f32[6]", "i j k, k -> j i k | whole=k"),
]  # fmt: skip


def custom(function, partition, rule, **kinds):
    found = custom_partitioning(function)
    found.def_partition(partition, sharding_rule=rule, **kinds)
    return found


def transform(x):
    return jnp.fft.fft(x)


def each_its_part(function):
    """A callback of a function that is the same on a part."""

    def partition(mesh, operands, result):
        return mesh, function, result.sharding, tuple(x.sharding for x in operands)

    return partition


def summed_product(mesh, operands, result):
    """A callback that sums over the axes of the contracted dim."""
    axes = operands[0].sharding.spec[1]

    def local(x, y):
        return lax.psum(x @ y, axes) if axes else x @ y

    return mesh, local, result.sharding, tuple(x.sharding for x in operands)


def rule_of_types(mesh, operands, results):
    dims = " ".join(f"d{i}" for i in range(len(operands[0].shape)))
    return f"{dims} -> {dims}"


CUSTOM = [
    Case("custom element-wise", "custom_partitioning",
         custom(jnp.tanh, each_its_part(jnp.tanh), "... -> ..."), "f32[5,6]", "i j -> i j"),
    Case("custom with a rule of types", "custom_partitioning",
         custom(jnp.exp, each_its_part(jnp.exp), rule_of_types), "f32[5,6]", "i j -> i j"),
    Case("custom Fourier transform", "custom_partitioning",
         custom(transform, each_its_part(transform), "... i -> ... i",
                need_replication_factors=("i",)),
         "c64[5,4,6]", "i j k -> i j k | whole=k", unclaimed="0: nothing is known of it"),
    Case("custom product", "custom_partitioning",
         custom(lambda x, y: x @ y, summed_product, "i j, j k -> i k", reduction_factors=("j",)),
         "f32[4,6] f32[6,5]", "i j, j k -> i k | permute=j",
         unclaimed="0 1: nothing is known of it"),
]  # fmt: skip

CASES = [*LIKE, *CUSTOM]
