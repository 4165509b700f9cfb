"""Two small models in plain JAX and optax, written for one device, and hints beside them.

Every weight has a shape of its own, so that a collective tells which weight it moves.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import meshwise as mw

Params = dict[str, jax.Array]
# Names a value; the hints say what becomes of it.
Mark = Callable[[str, jax.Array], jax.Array]

FEATURES, HIDDEN, CLASSES = 24, 40, 8
SEQUENCE, WIDTH, HEADS, INNER = 8, 32, 8, 64


class State(NamedTuple):
    """Weights and the optimiser's state."""

    params: Params
    opt_state: Any


def unmarked(name: str, x: jax.Array) -> jax.Array:
    """No hint."""
    del name
    return x


def marked(hints: Mapping[str, P]) -> Mark:
    """Hints on the values that have one."""
    return lambda name, x: mw.shard(x, hints[name]) if name in hints else x


def dense(key: jax.Array, *shape: int) -> jax.Array:
    """A weight."""
    return jax.random.normal(key, shape) / shape[0] ** 0.5


def init_mlp(key: jax.Array) -> Params:
    """Two hidden layers."""
    k = jax.random.split(key, 3)
    return {
        "w1": dense(k[0], FEATURES, HIDDEN),
        "b1": jnp.zeros(HIDDEN),
        "w2": dense(k[1], HIDDEN, 2 * HIDDEN),
        "b2": jnp.zeros(2 * HIDDEN),
        "w3": dense(k[2], 2 * HIDDEN, CLASSES),
    }


def dropout(key: jax.Array, x: jax.Array, masks: list[jax.Array]) -> jax.Array:
    """Ordinary dropout; the mask is kept for comparison."""
    mask = jax.random.bernoulli(key, 0.8, x.shape)
    masks.append(mask)
    return jnp.where(mask, x / 0.8, 0)


def mlp_loss(
    params: Params, batch: tuple[jax.Array, jax.Array], key: jax.Array, mark: Mark = unmarked
) -> tuple[jax.Array, list[jax.Array]]:
    """Mean cross-entropy, and the dropout masks."""
    x, labels = batch
    masks: list[jax.Array] = []
    keys = jax.random.split(key)
    h = jax.nn.relu(mark("w1", params["w1"]).T @ x.T + params["b1"][:, None]).T
    h = dropout(keys[0], mark("h1", h), masks)
    h = jax.nn.gelu(h @ mark("w2", params["w2"]) + params["b2"])
    h = dropout(keys[1], mark("h2", h), masks)
    logits = h @ mark("w3", params["w3"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), masks


def init_layer(key: jax.Array) -> Params:
    """One transformer layer."""
    k = jax.random.split(key, 6)
    return {
        "scale1": jnp.ones(WIDTH),
        "scale2": jnp.ones(WIDTH),
        "q": dense(k[0], WIDTH, WIDTH),
        "k": dense(k[1], WIDTH, WIDTH),
        "v": dense(k[2], WIDTH, WIDTH),
        "out": dense(k[3], WIDTH, WIDTH),
        "up": dense(k[4], WIDTH, INNER),
        "down": dense(k[5], INNER, WIDTH),
    }


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square normalisation."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer(params: Params, x: jax.Array, mark: Mark = unmarked) -> jax.Array:
    """Attention and a gelu MLP on the residual stream, [B, S, M] -> [B, S, M]."""
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    y = normed(x, params["scale1"])
    q, k, v = (mark("heads", (y @ params[n]).reshape(heads)) for n in ("q", "k", "v"))
    scores = jnp.einsum("bsnd,btnd->bnst", q, k) * (WIDTH // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    mixed = jnp.einsum("bnst,btnd->bsnd", weights, v).reshape(x.shape)
    x = mark("stream", x + mixed @ params["out"])
    y = normed(x, params["scale2"])
    hidden = mark("hidden", jax.nn.gelu(y @ params["up"]))
    return mark("stream", x + hidden @ params["down"])


def layer_loss(
    params: Params, batch: tuple[jax.Array, jax.Array], key: jax.Array, mark: Mark = unmarked
) -> tuple[jax.Array, list[jax.Array]]:
    """Mean squared distance from a target."""
    del key
    x, target = batch
    return jnp.mean((layer(params, mark("stream", x), mark) - target) ** 2), []


Loss = Callable[..., tuple[jax.Array, list[jax.Array]]]


def train_step(
    loss: Loss, optimiser: optax.GradientTransformation, mark: Mark = unmarked
) -> Callable[..., tuple[State, jax.Array, list[jax.Array]]]:
    """One step: the next state, the loss, the dropout masks."""

    def step(state: State, batch: Any, key: jax.Array) -> tuple[State, jax.Array, list[jax.Array]]:
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, masks), grads = gradient(state.params, batch, key, mark)
        updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value, masks

    return step


def start(params: Params, optimiser: optax.GradientTransformation) -> State:
    """The state before the first step."""
    return State(params, optimiser.init(params))
