"""A dense transformer whose layers are a loop over stacked weights, written for one device.

As in the experiments of GSPMD (arXiv 2105.04663, section 5.1) the MLP is gated, and a layer keeps
nothing for its gradient but what it read. Shapes in the comments: L layers, B sequences of S
tokens, M model width, N heads, D head width, H hidden width, V vocabulary (the byte values).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes (in elements) and settings; the defaults take seconds on two CPU cores."""

    layers: int = 4
    width: int = 64
    hidden: int = 256
    heads: int = 8
    head_width: int = 8
    vocabulary: int = 256
    batch: int = 16
    sequence: int = 32
    learning_rate: float = 0.3


def init(key: jax.Array, config: Config) -> Params:
    """Random parameters; those of all layers are stacked, [L, ...]."""
    keys = iter(jax.random.split(key, 8))
    m, h, n, d = config.width, config.hidden, config.heads, config.head_width

    def normal(width: int, *shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * width**-0.5

    def stacked(width: int, *shape: int) -> jax.Array:
        return normal(width, config.layers, *shape)

    return {
        "embed": normal(m, config.vocabulary, m),
        "layers": {
            "query": stacked(m, m, n, d),
            "key": stacked(m, m, n, d),
            "value": stacked(m, m, n, d),
            "out": stacked(n * d, n, d, m),
            "up": stacked(m, m, h),
            "gate": stacked(m, m, h),
            "down": stacked(h, h, m),
            "norm_1": jnp.ones((config.layers, m)),
            "norm_2": jnp.ones((config.layers, m)),
        },
        "norm": jnp.ones(m),
    }


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide by the root mean square, [B, S, M]."""
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attention(x: jax.Array, w: Params) -> jax.Array:
    """Causal attention of N heads, [B, S, M] -> [B, S, M]."""
    q, k, v = (jnp.einsum("bsm,mnd->bsnd", x, w[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    mixed = jnp.einsum("bnst,btnd->bsnd", weights, v)
    return jnp.einsum("bsnd,ndm->bsm", mixed, w["out"])


def mlp(x: jax.Array, w: Params) -> jax.Array:
    """A gated hidden layer, [B, S, M] -> [B, S, H] -> [B, S, M]."""
    return (jax.nn.gelu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


@jax.checkpoint
def block(x: jax.Array, w: Params) -> jax.Array:
    """One layer, recomputed for its gradient."""
    x = x + attention(normalise(x, w["norm_1"]), w)
    return x + mlp(normalise(x, w["norm_2"]), w)


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """Scores of the next token, int32 [B, S] -> [B, S, V]."""
    x = params["embed"][tokens]
    x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
    return normalise(x, params["norm"]) @ params["embed"].T


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats a token, int32 [B, S + 1] -> a scalar."""
    scores = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


def train_step(params: Params, tokens: jax.Array, config: Config) -> tuple[Params, jax.Array]:
    """One step of gradient descent: the next parameters, and the loss."""
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads), value
