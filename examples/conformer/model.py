"""A Conformer-like model: narrow, deep, with convolutions, its layers in a pipeline.

As in GSPMD's experiments with pipelines (arXiv 2105.04663, section 5.4) layers are equal and lie in
stages along one axis of the mesh. Shapes in the comments: S stages, R times round, B sequences of
T frames, F features, M model width, N heads, H hidden width, K taps of the convolution, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import meshwise as mw

Params = Any


@dataclass(frozen=True)
class Config:
    """Sizes (in elements) and settings; the defaults take seconds on two CPU cores.

    `repeat` above one is a circular pipeline. `axis` is the mesh axis of the stages.
    """

    layers: int = 8
    stages: int = 4
    repeat: int = 1
    microbatches: int = 8
    axis: str = "stage"
    width: int = 32
    hidden: int = 128
    heads: int = 4
    taps: int = 5
    features: int = 16
    classes: int = 24
    batch: int = 16
    frames: int = 24
    learning_rate: float = 0.1


def init(key: jax.Array, config: Config) -> Params:
    """Random parameters; those of the layers are dealt out to the stages."""
    m, h = config.width, config.hidden
    keys = iter(jax.random.split(key, 12))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    stacked = partial(normal, config.layers)
    layers = {
        "first": {"up": stacked(m, h), "down": stacked(h, m)},
        "attention": {"in": stacked(m, 3 * m), "out": stacked(m, m)},
        "convolution": {
            "in": stacked(m, 2 * m),
            "taps": stacked(config.taps, m),
            "out": stacked(m, m),
        },
        "second": {"up": stacked(m, h), "down": stacked(h, m)},
    }
    return {
        "stem": normal(config.features, m),
        "layers": mw.stack_stages(layers, config.stages, config.repeat),
        "head": normal(m, config.classes),
    }


def normalise(x: jax.Array) -> jax.Array:
    """Zero mean and unit variance, [B, T, M]."""
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def feed_forward(x: jax.Array, w: Params) -> jax.Array:
    """Half a step of an MLP, [B, T, M] -> [B, T, H] -> [B, T, M]."""
    return x + 0.5 * (jax.nn.silu(normalise(x) @ w["up"]) @ w["down"])


def attention(x: jax.Array, w: Params, heads: int) -> jax.Array:
    """Attention of N heads over all frames, [B, T, M] -> [B, T, M]."""
    batch, frames, width = x.shape
    qkv = (normalise(x) @ w["in"]).reshape(batch, frames, 3, heads, width // heads)
    q, k, v = (qkv[:, :, i] for i in range(3))
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) * (width // heads) ** -0.5
    mixed = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores), v)
    return x + mixed.reshape(x.shape) @ w["out"]


def convolution(x: jax.Array, w: Params) -> jax.Array:
    """A gate, a convolution of each channel along the frames, a product, [B, T, M]."""
    gate, value = jnp.split(normalise(x) @ w["in"], 2, -1)
    y = lax.conv_general_dilated(
        jax.nn.sigmoid(gate) * value,
        w["taps"][:, None, :],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )
    return x + jax.nn.silu(normalise(y)) @ w["out"]


def block(w: Params, x: jax.Array, config: Config) -> jax.Array:
    """One layer, [B, T, M] -> [B, T, M]."""
    x = feed_forward(x, w["first"])
    x = attention(x, w["attention"], config.heads)
    x = convolution(x, w["convolution"])
    return normalise(feed_forward(x, w["second"]))


def loss(params: Params, frames: jax.Array, labels: jax.Array, config: Config) -> jax.Array:
    """Mean cross-entropy in nats a frame, [B, T, F] and int32 [B, T] -> a scalar."""
    x = frames @ params["stem"]
    # A microbatch has rows of every part of the batch, so where that is sharded all devices have
    # their share of each.
    x = x.reshape(-1, config.microbatches, *x.shape[1:]).swapaxes(0, 1)
    x = mw.pipeline(
        lambda layers, x: layers.apply(partial(block, config=config), x),
        params["layers"],
        x,
        axis=config.axis,
        schedule="circular" if config.repeat > 1 else "gpipe",
        repeat=config.repeat,
    )
    x = x.swapaxes(0, 1).reshape(*frames.shape[:2], -1)
    scores = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(scores, labels[..., None], -1).mean()


def train_step(
    params: Params, frames: jax.Array, labels: jax.Array, config: Config
) -> tuple[Params, jax.Array]:
    """One step of gradient descent: the next parameters, and the loss."""
    value, grads = jax.value_and_grad(loss)(params, frames, labels, config)
    return jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads), value
