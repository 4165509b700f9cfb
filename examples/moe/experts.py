"""A mixture of experts in the place of a layer's two products, written for one device.

Each token goes through two experts. In `mixture` an expert has so many places for the tokens of a
group (GShard's capacity), and tokens without a place are left out; in `dropless` the rows of a
group are sorted by expert, and products of ragged groups of rows take what comes. Shapes in the
comments: G groups, S tokens of each, M model width, H hidden width, E experts, C places.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

Weights = Mapping[str, jax.Array]  # gate [M, E], up [E, M, H], down [E, H, M]


def gate(p: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two experts a token and their weights, both [G, S, 2], and how uneven their load is."""
    share = jax.nn.softmax(x @ p["gate"])
    weights, chosen = lax.top_k(share, 2)
    first = jax.nn.one_hot(chosen[..., 0], share.shape[-1])
    load = (share.mean(1) * first.mean(1)).sum(-1).mean() * share.shape[-1]
    return weights / weights.sum(-1, keepdims=True), chosen, load


def places(weights: jax.Array, chosen: jax.Array, experts: int, capacity: int) -> jax.Array:
    """The weight of each token in each place of each expert, [G, S, E, C]; no place, no weight."""
    combine, taken = 0, 0
    for choice in range(2):
        mask = jax.nn.one_hot(chosen[..., choice], experts, dtype=jnp.int32)
        before = jnp.cumsum(mask, 1) - mask + taken
        taken = taken + mask.sum(1, keepdims=True)
        place = jax.nn.one_hot((before * mask).sum(-1), capacity)  # zeros beyond the last
        combine += jnp.einsum("gs,gse,gsc->gsec", weights[..., choice], mask * 1.0, place)
    return combine


def mixture(p: Weights, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Each token through two experts, as far as they have places, [G, S, M] -> [G, S, M]."""
    weights, chosen, load = gate(p, x)
    combine = places(weights, chosen, p["gate"].shape[1], capacity)
    dispatch = (combine > 0).astype(x.dtype)
    rows = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", rows, p["up"]))
    outputs = jnp.einsum("egch,ehm->egcm", hidden, p["down"])
    return jnp.einsum("gsec,egcm->gsm", combine, outputs), load


def dropless(p: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same without places: a group's rows in the order of their experts, as ragged products."""
    weights, chosen, load = gate(p, x)
    experts = chosen.reshape(len(x), -1)  # two rows a token
    order = jnp.argsort(experts)
    sizes = jax.nn.one_hot(experts, p["gate"].shape[1], dtype=jnp.int32).sum(1)
    rows = jnp.take_along_axis(x, order[..., None] // 2, 1)
    hidden = jax.nn.relu(ragged(rows, p["up"], sizes))
    outputs = ragged(hidden, p["down"], sizes)
    back = jnp.take_along_axis(outputs, jnp.argsort(order)[..., None], 1)
    return jnp.einsum("gsk,gskm->gsm", weights, back.reshape(*weights.shape, -1)), load


def ragged(rows: jax.Array, experts: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each group's rows, the first `sizes[0]` of them times the first expert and so on."""
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), [1], [0])
    return lax.ragged_dot_general(rows, experts, sizes, numbers)
