"""Mixtures of experts: routing, dispatch, the experts' products, and the way back."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    GRID,
    NONE,
    Array,
    Best,
    Program,
    X,
    exchanged,
    integers,
    reduced,
)

row = partial(Program, "moe")

GROUPS_OF, TOKENS, WIDTH, EXPERTS, INNER, ROOM = 8, 64, 32, 8, 64, 16
ALL_TO_ALL = Best(
    2 * exchanged(EXPERTS * ROOM * WIDTH, 8), "tokens go to their experts and come back"
)


def route(x: Any, gate: Any, room: int) -> Any:
    """Dispatch mask and combine weights of the best expert, [G, S, E, C]."""
    p = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, gate), -1)
    chosen = jax.nn.one_hot(jnp.argmax(p, -1), gate.shape[1])
    place = jnp.cumsum(chosen, 1) * chosen - 1
    mask = jax.nn.one_hot(place.astype(jnp.int32), room) * chosen[..., None]
    return mask, mask * p.max(-1)[..., None, None]


def gshard(x: Any, gate: Any, up: Any, down: Any, room: int = ROOM) -> Any:
    """GShard's layer by einsums, [G, S, M]."""
    mask, weights = route(x, gate, room)
    inside = jnp.einsum("gsec,gsm->egcm", mask, x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inside, up))
    return jnp.einsum("gsec,egcm->gsm", weights, jnp.einsum("egch,ehm->egcm", hidden, down))


def gshard_annotated(shard: Any, x: Any, gate: Any, up: Any, down: Any) -> Any:
    """The same with the experts' tokens annotated, as the paper does."""
    mask, weights = route(x, gate, ROOM)
    inside = shard(jnp.einsum("gsec,gsm->egcm", mask, x), X)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inside, up))
    outside = shard(jnp.einsum("egch,ehm->egcm", hidden, down), X)
    return jnp.einsum("gsec,egcm->gsm", weights, outside)


def by_table(x: Any, expert: Any, up: Any) -> Any:
    """Each token times the matrix of its expert, gathered."""
    return jnp.einsum("tm,tmh->th", x, up[expert])


def dispatched(x: Any, slot: Any) -> Any:
    """Tokens put where a table says, [E C, M], and taken back."""
    inside = jnp.zeros((EXPERTS * ROOM, x.shape[1])).at[slot].set(x)
    return jnp.tanh(inside)[slot]


def ragged(x: Any, w: Any) -> Any:
    sizes = jnp.full((w.shape[0],), x.shape[0] // w.shape[0], jnp.int32)
    return lax.ragged_dot(x, w, sizes)


def ragged_gradient(x: Any, w: Any) -> Any:
    return jax.grad(lambda x, w: (ragged(x, w) ** 2).sum(), (0, 1))(x, w)


def balance(x: Any, gate: Any) -> Any:
    """The auxiliary loss: how evenly experts are used."""
    p = jax.nn.softmax(x @ gate, -1)
    used = jax.nn.one_hot(jnp.argmax(p, -1), gate.shape[1])
    return (p.mean(0) * used.mean(0)).sum() * gate.shape[1]


def two_best(x: Any, gate: Any) -> Any:
    """Weights of the two best experts of each token."""
    values, which = lax.top_k(x @ gate, 2)
    return jax.nn.softmax(values), which


def gradient(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return jax.grad(lambda w: (gshard(x, gate, *w) ** 2).mean())((up, down))


TOKENS_X = Array((GROUPS_OF, TOKENS, WIDTH), X)
GATE = Array((WIDTH, EXPERTS))
UP = Array((EXPERTS, WIDTH, INNER), X, scale=WIDTH**-0.5)
DOWN = Array((EXPERTS, INNER, WIDTH), X, scale=INNER**-0.5)
UP_2, DOWN_2 = (
    Array((EXPERTS, WIDTH, INNER), P("x", None, "y"), scale=WIDTH**-0.5),
    Array((EXPERTS, INNER, WIDTH), P("x", "y"), scale=INNER**-0.5),
)

TABLE = [
    row("GShard layer, not annotated inside", gshard, (TOKENS_X, GATE, UP, DOWN), X,
        best=ALL_TO_ALL),
    row("GShard layer, annotated", gshard_annotated, (TOKENS_X, GATE, UP, DOWN), X,
        best=ALL_TO_ALL, hinted=True),
    row("GShard layer, gradient of the experts", gradient, (TOKENS_X, GATE, UP, DOWN), (X, X),
        best=Best(3 * exchanged(EXPERTS * ROOM * WIDTH, 8),
                  "there, back, and the cotangent there"), tolerance=1e-3),
    row("GShard layer, experts split over two axes, 2x4", gshard,
        (TOKENS_X, GATE, UP_2, DOWN_2), X, (2, 4)),
    row("GShard layer, tokens on both axes, 2x4", gshard,
        (Array((GROUPS_OF, TOKENS, WIDTH), GRID), GATE, UP, DOWN), GRID, (2, 4),
        reason="masks and weights of the routing are computed on gathered tokens"),
    row("expert by a table, tokens sharded", by_table,
        (Array((64, WIDTH), X), integers((64,), EXPERTS, X), Array((EXPERTS, WIDTH, INNER))), X,
        best=Best(0, "the experts are everywhere")),
    row("expert by a table, experts sharded", by_table,
        (Array((64, WIDTH), X), integers((64,), EXPERTS, X), UP), X),
    row("dispatch by a scatter", dispatched,
        (Array((96, WIDTH), X), integers((96,), EXPERTS * ROOM, X)), X),
    row("ragged product, tokens sharded", ragged,
        (Array((256, WIDTH), X), Array((EXPERTS, WIDTH, INNER))), X),
    row("ragged product, experts sharded", ragged, (Array((256, WIDTH), X), UP), X),
    row("gradient of a ragged product, experts sharded", ragged_gradient,
        (Array((256, WIDTH), X), UP), (X, X)),
    row("balance of the experts", balance, (Array((512, WIDTH), X), GATE), NONE,
        best=Best(reduced(EXPERTS, 8) + reduced(1, 8), "a mean, then the sum of products with it")),
    row("two best experts", two_best, (Array((512, WIDTH), X), GATE), (X, X),
        best=Best(0, "every device has its tokens")),
]  # fmt: skip
