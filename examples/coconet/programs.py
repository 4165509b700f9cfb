"""The programs of CoCoNeT's evaluation (section 5), written with layouts and verbs.

Each function makes a program for a mesh. A program says what is computed and what is communicated,
with the straight schedule: an all_reduce, and then the computation on every device. How the two are
better interleaved is said apart, by moves or by `mw.autotune`.
"""

from typing import Any

import jax
import jax.numpy as jnp

import meshwise as mw

# How a tree of weights lies, by Megatron-LM: what goes in is whole, and each device has its part of
# the hidden units, or of the heads, of which the second matrix adds up.
MLP = {
    "up": mw.Sliced(1, "model"),
    "up_bias": mw.Sliced(0, "model"),
    "down": mw.Sliced(0, "model"),
    "bias": mw.Replicated,
    "gain": mw.Replicated,
}
ATTENTION = {
    "query": mw.Sliced(1, "model"),  # width, heads, size of a head
    "key": mw.Sliced(1, "model"),
    "value": mw.Sliced(1, "model"),
    "out": mw.Sliced(0, "model"),  # heads, size of a head, width
    "bias": mw.Replicated,
    "gain": mw.Replicated,
}


def sgd(mesh: Any, rate: float = 0.1) -> Any:
    """Stochastic gradient descent, data parallel: every device has its own gradient."""

    @mw.program(mesh)
    def sgd(gradient: mw.Local, weights: mw.Replicated):
        gradient = mw.all_reduce(gradient) / mesh.size
        return mw.update(weights, weights - rate * gradient)

    return sgd


def adam(mesh: Any, rate: float = 0.1) -> Any:
    """Adam, data parallel."""

    @mw.program(mesh)
    def adam(gradient: mw.Local, weights, mean, square, step):
        gradient = mw.all_reduce(gradient) / mesh.size
        mean = mw.update(mean, 0.9 * mean + 0.1 * gradient)
        square = mw.update(square, 0.999 * square + 0.001 * gradient**2)
        step = mw.update(step, step + 1)
        direction = mean / (1 - 0.9**step)
        length = jnp.sqrt(square / (1 - 0.999**step)) + 1e-6
        return mw.update(weights, weights - rate * direction / length), mean, square, step

    return adam


def lamb(mesh: Any, rate: float = 0.1, decay: float = 0.01) -> Any:
    """LAMB, data parallel: Adam's update, as long as the weights are."""

    @mw.program(mesh)
    def lamb(gradient: mw.Local, weights, mean, square, step):
        gradient = mw.all_reduce(gradient) / mesh.size
        mean = mw.update(mean, 0.9 * mean + 0.1 * gradient)
        square = mw.update(square, 0.999 * square + 0.001 * gradient**2)
        step = mw.update(step, step + 1)
        length = jnp.sqrt(square / (1 - 0.999**step)) + 1e-6
        update = mean / (1 - 0.9**step) / length + decay * weights
        trust = jnp.sqrt(jnp.sum(weights**2)) / jnp.sqrt(jnp.sum(update**2))
        return mw.update(weights, weights - rate * trust * update), mean, square, step

    return lamb


def attention_output(mesh: Any, rate: float = 0.1) -> Any:
    """The end of Megatron's self-attention: the product that adds up heads, and what follows it."""

    @mw.program(mesh)
    def attention_output(heads: mw.Sliced(2), out: mw.Sliced(0), bias, residual, gain, key):
        product = mw.all_reduce(heads @ out)
        return layer_norm(residual + mw.dropout(key, product + bias, rate), gain)

    return attention_output


def mlp(mesh: Any, rate: float = 0.1) -> Any:
    """Megatron's MLP block, tensor parallel over `model`."""

    @mw.program(mesh, axes="model")
    def mlp(weights: MLP, x: mw.Replicated, key):
        return mlp_block(weights, x, key, rate)

    return mlp


def self_attention(mesh: Any, rate: float = 0.1) -> Any:
    """Megatron's self-attention block, its heads parallel over `model`."""

    @mw.program(mesh, axes="model")
    def self_attention(weights: ATTENTION, x: mw.Replicated, key):
        return attention_block(weights, x, key, rate)

    return self_attention


def pipeline_stage(mesh: Any, rate: float = 0.1) -> Any:
    """A GPT layer on each stage, tensor parallel inside, what it makes sent to the next stage."""
    staged = jax.tree.map(
        lambda layout: layout & mw.Local("stage"), (ATTENTION, MLP), is_leaf=_is_layout
    )

    @mw.program(mesh, axes="model", layouts={"weights": staged})
    def pipeline_stage(weights, x: mw.Local("stage"), keys: mw.Local("stage")):
        x = attention_block(weights[0], x, jax.random.fold_in(keys, 0), rate)
        x = mlp_block(weights[1], x, jax.random.fold_in(keys, 1), rate)
        return mw.send(x, "stage")

    return pipeline_stage


def mlp_block(weights: Any, x: jax.Array, key: Any, rate: float) -> jax.Array:
    """Two products, the second one's terms added up; then bias, dropout, residual and norm."""
    hidden = jax.nn.gelu(x @ weights["up"] + weights["up_bias"])
    product = mw.all_reduce(hidden @ weights["down"])
    x = x + mw.dropout(key, product + weights["bias"], rate)
    return layer_norm(x, weights["gain"])


def attention_block(weights: Any, x: jax.Array, key: Any, rate: float) -> jax.Array:
    """Causal self-attention; the product that joins the heads leaves terms that are added up."""
    query, key_, value = (
        jnp.einsum("bsw,whd->bhsd", x, weights[name]) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key_) / query.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    shares = mw.dropout(jax.random.fold_in(key, 0), shares, rate)
    heads = jnp.einsum("bhqk,bhkd->bhqd", shares, value)
    product = mw.all_reduce(jnp.einsum("bhsd,hdw->bsw", heads, weights["out"]))
    x = x + mw.dropout(jax.random.fold_in(key, 1), product + weights["bias"], rate)
    return layer_norm(x, weights["gain"])


def layer_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Each row with mean zero and variance one, times a gain."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def _is_layout(x: Any) -> bool:
    return not isinstance(x, dict | tuple)
