"""A graph convolutional network on one whole graph, and its training step, written for one device.

A layer multiplies every node by a matrix, sends the product along the edges, scaled, and sums what
arrives. `Edges` are in any order; `Parts` know which part of the nodes each lies in, and which
nodes of other parts a part reads. Shapes in the comments: N nodes, E edges, F features; P parts of
n nodes and e edges each, of which at most K nodes are read by another part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp

Params = list[dict[str, jax.Array]]


@dataclass(frozen=True)
class Config:
    """Widths of the values at the nodes, from the features to the classes, and settings."""

    widths: tuple[int, ...] = (34, 16, 2)
    learning_rate: float = 0.3


class Edges(NamedTuple):
    """A graph: for each edge its two nodes and what its value is scaled by, all [E]."""

    senders: jax.Array
    receivers: jax.Array
    scales: jax.Array


class Parts(NamedTuple):
    """A graph in parts. Edges are with the part of their receiver, which is counted in it.

    A sender is counted among the part's n nodes, and then the K of each part that it reads.

    reads: for each part and each other that reads it, which of its nodes, [P, P, K];
    senders, receivers, scales: the edges of each part, [P, e]. An edge of scale 0 is none.
    """

    reads: jax.Array
    senders: jax.Array
    receivers: jax.Array
    scales: jax.Array


class Nodes(NamedTuple):
    """Features [N, F], classes [N], and how much each node counts in the loss, [N].

    With parts, N is P and n.
    """

    features: jax.Array
    classes: jax.Array
    counts: jax.Array


def init(key: jax.Array, config: Config) -> Params:
    """Random matrices, and biases of zero."""
    keys = jax.random.split(key, len(config.widths) - 1)
    return [
        {"kernel": jax.random.normal(k, (m, n)) * (2 / (m + n)) ** 0.5, "bias": jnp.zeros(n)}
        for k, (m, n) in zip(keys, pairwise(config.widths), strict=True)
    ]


def along_edges(x: jax.Array, graph: Edges) -> jax.Array:
    """What arrives at each node, [N, F] -> [N, F]."""
    sent = x[graph.senders] * graph.scales[:, None]
    return jax.ops.segment_sum(sent, graph.receivers, len(x))


def between_parts(x: jax.Array, graph: Parts) -> jax.Array:
    """What arrives at each node, [P, n, F] -> [P, n, F]."""
    parts, nodes, width = x.shape
    read = jax.vmap(lambda own, wanted: own[wanted])(x, graph.reads)  # by owner and reader
    read = read.swapaxes(0, 1).reshape(parts, -1, width)
    known = jnp.concatenate([x, read], 1)
    sent = jax.vmap(lambda own, senders: own[senders])(known, graph.senders)
    total = jax.vmap(partial(jax.ops.segment_sum, num_segments=nodes))
    return total(sent * graph.scales[..., None], graph.receivers)


def forward(params: Params, x: jax.Array, graph: Edges | Parts) -> jax.Array:
    """Logits of every node's class."""
    arriving = along_edges if isinstance(graph, Edges) else between_parts
    for number, p in enumerate(params):
        x = jax.nn.relu(x) if number else x
        x = arriving(x @ p["kernel"], graph) + p["bias"]
    return x


def loss(params: Params, nodes: Nodes, graph: Edges | Parts) -> jax.Array:
    """Mean cross-entropy of the nodes that count."""
    logits = forward(params, nodes.features, graph)
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), nodes.classes[..., None], -1)[..., 0]
    return -(found * nodes.counts).sum() / nodes.counts.sum()


def train_step(
    params: Params, nodes: Nodes, graph: Edges | Parts, config: Config
) -> tuple[Params, jax.Array]:
    """The parameters after a step down the gradient, and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, nodes, graph)
    return jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads), value
