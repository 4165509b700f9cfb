"""A transformer whose every other layer is a mixture of experts, written for one device.

Shapes in the comments: G sequences, each a group of tokens for the experts, S tokens of each,
M model width, N heads, D head width (M = N D), H hidden width, V vocabulary (the byte values).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from examples.moe.experts import dropless, mixture

Params = Any


@dataclass(frozen=True)
class Config:
    """Sizes (in elements) and settings; the defaults take seconds on two CPU cores."""

    experts: int = 8
    width: int = 32
    hidden: int = 256
    heads: int = 4
    layers: int = 2
    vocabulary: int = 256
    batch: int = 8
    sequence: int = 64
    factor: float = 1.0
    dropless: bool = False
    learning_rate: float = 0.1

    @property
    def capacity(self) -> int:
        """Places of an expert in a group: its share of two choices a token, times `factor`."""
        return max(1, round(2 * self.factor * self.sequence / self.experts))

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's two products are a mixture of experts: every other one is."""
        return layer % 2 == 1


def init(key: jax.Array, config: Config) -> Params:
    """Random parameters: a dict of arrays for each layer, and of those around them."""
    keys = iter(jax.random.split(key, 8 * config.layers + 2))
    m, h, v = config.width, config.hidden, config.vocabulary

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    def layer(number: int) -> dict[str, jax.Array]:
        attention = {name: normal(m, m) for name in ("query", "key", "value", "out")}
        if not config.is_sparse(number):
            return {**attention, "up": normal(m, h), "down": normal(h, m)}
        experts = {"up": normal(config.experts, m, h), "down": normal(config.experts, h, m)}
        return {**attention, "gate": normal(m, config.experts), **experts}

    embedding = {"embed": normal(v, m) * v**0.5, "head": normal(m, v)}
    return {**embedding, "layers": [layer(number) for number in range(config.layers)]}


def norm(x: jax.Array) -> jax.Array:
    """Root mean square normalisation over the last dim."""
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def attention(p: Params, x: jax.Array, config: Config) -> jax.Array:
    """Causal attention of several heads, [G, S, M] -> [G, S, M]."""
    q, k, v = (
        (x @ p[name]).reshape(*x.shape[:2], config.heads, -1) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("gsnd,gtnd->gnst", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("gnst,gtnd->gsnd", weights, v).reshape(x.shape) @ p["out"]


def forward(params: Params, tokens: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Logits of the next token, [G, S] -> [G, S, V], and the sum of the layers' uneven loads."""
    x, uneven = params["embed"][tokens], jnp.zeros(())
    for number, p in enumerate(params["layers"]):
        x = x + attention(p, norm(x), config)
        if config.is_sparse(number):
            if config.dropless:
                out, load = dropless(p, norm(x))
            else:
                out, load = mixture(p, norm(x), config.capacity)
            uneven += load
        else:
            out = jax.nn.relu(norm(x) @ p["up"]) @ p["down"]
        x = x + out
    return norm(x) @ params["head"], uneven


def loss(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Mean cross-entropy of each token after the first, and a little for uneven loads."""
    logits, uneven = forward(params, tokens[:, :-1], config)
    log_share = jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(log_share, tokens[:, 1:, None], -1)
    return -found.mean() + 0.01 * uneven


def train_step(params: Params, tokens: jax.Array, config: Config) -> tuple[Params, jax.Array]:
    """The parameters after a step down the gradient, and the loss before it."""
    value, grads = jax.value_and_grad(partial(loss, config=config))(params, tokens)
    return jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads), value
