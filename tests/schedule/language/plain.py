"""The examples' programs as plain functions of one device, and arguments for both."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RATE = 0.1


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    return np.abs(random(*shape, seed=seed)) + np.float32(0.1)


def sgd(gradients, weights):
    return weights - RATE * gradients.mean(0)


def adam(gradients, weights, mean, square, step):
    gradient = gradients.mean(0)
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    step = step + 1
    update = mean / (1 - 0.9**step) / (jnp.sqrt(square / (1 - 0.999**step)) + 1e-6)
    return weights - RATE * update, mean, square, step


def lamb(gradients, weights, mean, square, step):
    moved, mean, square, step = adam(gradients, weights, mean, square, step)
    update = (weights - moved) / RATE + 0.01 * weights
    trust = jnp.linalg.norm(weights) / jnp.linalg.norm(update)
    return weights - RATE * trust * update, mean, square, step


def norm(x, gain):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * gain


def drop(key, x, rate: float):
    if not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def attention_output(heads, out, bias, residual, gain, key):
    return norm(residual + drop(key, heads @ out + bias, RATE), gain)


def mlp(weights: Any, x, key, rate: float = RATE):
    hidden = jax.nn.gelu(x @ weights["up"] + weights["up_bias"])
    made = drop(key, hidden @ weights["down"] + weights["bias"], rate)
    return norm(x + made, weights["gain"])


def self_attention(weights: Any, x, key, rate: float = RATE):
    q, k, v = (jnp.einsum("bsw,whd->bhsd", x, weights[n]) for n in ("query", "key", "value"))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(np.float32)
    rows, columns = np.indices(scores.shape[-2:])
    shares = jax.nn.softmax(jnp.where(columns <= rows, scores, -jnp.inf))
    shares = drop(jax.random.fold_in(key, 0), shares, rate)
    made = jnp.einsum("bhqk,bhkd,hdw->bqw", shares, v, weights["out"])
    x = x + drop(jax.random.fold_in(key, 1), made + weights["bias"], rate)
    return norm(x, weights["gain"])


def pipeline_stage(weights: Any, x, keys, rate: float = RATE):
    """What every stage makes of its own activation, moved on by one stage."""
    made = []
    for stage in range(x.shape[0]):
        own: Any = jax.tree.map(lambda w, i=stage: w[i], weights)
        y = self_attention(own[0], x[stage], jax.random.fold_in(keys[stage], 0), rate)
        made.append(mlp(own[1], y, jax.random.fold_in(keys[stage], 1), rate))
    return jnp.stack([jnp.zeros_like(made[0]), *made[:-1]])


def mlp_weights(width: int, hidden: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {
        "up": random(width, hidden, seed=seed + 1, scale=0.3),
        "up_bias": random(hidden, seed=seed + 2),
        "down": random(hidden, width, seed=seed + 3, scale=0.3),
        "bias": random(width, seed=seed + 4),
        "gain": random(width, seed=seed + 5),
    }


def attention_weights(width: int, heads: int, head: int, seed: int = 0) -> dict[str, np.ndarray]:
    names = ("query", "key", "value")
    weights = {n: random(width, heads, head, seed=seed + i, scale=0.3) for i, n in enumerate(names)}
    return weights | {
        "out": random(heads, head, width, seed=seed + 6, scale=0.3),
        "bias": random(width, seed=seed + 7),
        "gain": random(width, seed=seed + 8),
    }
