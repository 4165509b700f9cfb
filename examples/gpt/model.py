"""A small byte-level GPT and its training step, written for one device.

Nothing here knows of meshes or shardings: what is said about them is said in `hints.py`, from
outside. Shapes in the comments: B batch, S sequence, M model width, N heads, D head width
(M = N D), H hidden width of the MLP, V vocabulary (the 256 byte values).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    """Sizes (in elements) and training settings; the defaults take seconds on two CPU cores."""

    vocabulary: int = 256
    sequence: int = 64
    batch: int = 16
    width: int = 128
    heads: int = 8
    hidden: int = 512
    layers: int = 2
    dropout: float = 0.1
    learning_rate: float = 3e-3
    warmup_steps: int = 8
    weight_decay: float = 0.01
    clip_norm: float = 1.0


DEMO = Config()


class Batch(NamedTuple):
    """Bytes and the bytes that follow them, both int32 [B, S]."""

    tokens: jax.Array
    targets: jax.Array


class State(NamedTuple):
    """All that a training step changes. The step count lives in the optimiser's state."""

    params: Any
    opt_state: optax.OptState


class Attention(nn.Module):
    """Causal multi-head attention, [B, S, M] -> [B, S, M]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        heads, width = self.config.heads, self.config.width
        batch, sequence, _ = x.shape

        def split(flat: jax.Array) -> jax.Array:
            return flat.reshape(batch, sequence, heads, width // heads)

        q = split(nn.Dense(width, name="q")(x))
        k = split(nn.Dense(width, name="k")(x))
        v = split(nn.Dense(width, name="v")(x))
        scores = jnp.einsum("bsnd,btnd->bnst", q, k) * (width // heads) ** -0.5
        causal = jnp.tril(jnp.ones((sequence, sequence), dtype=bool))
        weights = nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
        weights = nn.Dropout(self.config.dropout, deterministic=not train)(weights)
        mixed = jnp.einsum("bnst,btnd->bsnd", weights, v)
        return nn.Dense(width, name="out")(mixed.reshape(batch, sequence, width))


class Mlp(nn.Module):
    """Two dense layers around a gelu, [B, S, M] -> [B, S, H] -> [B, S, M]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.gelu(nn.Dense(self.config.hidden, name="up")(x))
        return nn.Dense(self.config.width, name="down")(hidden)


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy and added to the stream, [B, S, M]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        config = self.config
        drop = nn.Dropout(config.dropout, deterministic=not train)
        mixed = Attention(config, name="attention")(nn.LayerNorm(name="norm_1")(x), train)
        x = x + drop(mixed)
        return x + drop(Mlp(config, name="mlp")(nn.LayerNorm(name="norm_2")(x)))


class Gpt(nn.Module):
    """Logits of the next byte, int32 [B, S] -> float32 [B, S, V]."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        config = self.config
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (config.sequence, config.width)
        )
        x = nn.Embed(config.vocabulary, config.width, name="embed")(tokens) + positions
        x = nn.Dropout(config.dropout, deterministic=not train)(x)
        for layer in range(config.layers):
            x = Block(config, name=f"block_{layer}")(x, train)
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(config.vocabulary, use_bias=False, name="head")(x)


def optimiser(config: Config = DEMO) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, its rate warmed up linearly."""
    rate = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(rate, weight_decay=config.weight_decay),
    )


def init(key: jax.Array, config: Config = DEMO) -> State:
    """The state before the first step."""
    tokens = jnp.zeros((1, config.sequence), jnp.int32)
    params = Gpt(config).init(key, tokens, train=False)["params"]
    return State(params, optimiser(config).init(params))


def loss(params: Any, batch: Batch, key: jax.Array, config: Config = DEMO) -> jax.Array:
    """Mean cross-entropy in nats per byte, with dropout drawn from `key`; a scalar."""
    dropout = {"dropout": key}
    logits: Any = Gpt(config).apply({"params": params}, batch.tokens, train=True, rngs=dropout)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean()


def train_step(
    state: State, batch: Batch, key: jax.Array, config: Config = DEMO
) -> tuple[State, dict[str, jax.Array]]:
    """One step: the next state, and the scalars `loss` and `grad_norm`."""
    value, grads = jax.value_and_grad(loss)(state.params, batch, key, config)
    updates, opt_state = optimiser(config).update(grads, state.opt_state, state.params)
    metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
    return State(optax.apply_updates(state.params, updates), opt_state), metrics
