"""Pipelines as people write them in plain JAX: a row of stages and a shift (GSPMD section 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import NONE, SECOND, Array, Best, Program, X, passed

row = partial(Program, "pipeline")


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w / 8)


def mlp(h: Any, w: Any) -> Any:
    up, down = w
    return h + jax.nn.relu(h @ up / 8) @ down / 8


def shifted(one: Callable[[Any, Any], Any], annotate: bool = False) -> Callable[..., Any]:
    """Every stage at work on another microbatch; the state moves on by one stage a step."""

    def function(shard: Any, weights: Any, batches: Any) -> Any:
        stages = jax.tree.leaves(weights)[0].shape[0]
        count = batches.shape[0]

        def step(state: Any, x: Any) -> Any:
            state = jnp.roll(state, 1, axis=0).at[0].set(x)
            state = jax.vmap(one)(state, weights)
            state = shard(state, X) if annotate else state
            return state, state[-1]

        idle = jnp.zeros((stages - 1, *batches.shape[1:]))
        start = jnp.zeros((stages, *batches.shape[1:]))
        _, outs = lax.scan(step, start, jnp.concatenate([batches, idle]))
        return outs[stages - 1 : stages - 1 + count]

    return function


def circular(shard: Any, weights: Any, batches: Any) -> Any:
    """Two rounds through the stages: weights [rounds, stages, D, D], a microbatch a stage."""
    rounds, stages = weights.shape[:2]

    def step(state: Any, t: Any) -> Any:
        which = (t - jnp.arange(stages)) % (rounds * stages) // stages
        w = jax.vmap(lambda ws, i: ws[i], (1, 0))(weights, which)
        return jnp.roll(jax.vmap(layer)(state, w), 1, axis=0), None

    return lax.scan(step, batches, jnp.arange(rounds * stages))[0]


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of the mean square, with respect to the weights."""

    def found(shard: Any, weights: Any, batches: Any) -> Any:
        return jax.grad(lambda w: (function(shard, w, batches) ** 2).mean())(weights)

    return found


def stages_in_turn(weights: Any, x: Any) -> Any:
    """Stages one after the other, as the model is written."""
    return lax.scan(lambda h, w: (layer(h, w), None), x, weights)[0]


STAGES, COUNT, ROWS, WIDTH = 8, 12, 16, 64
STEPS = COUNT + STAGES - 1
WEIGHTS = Array((STAGES, WIDTH, WIDTH), X)
BATCHES = Array((COUNT, ROWS, WIDTH))
PAIR = (
    Array((STAGES, WIDTH, 2 * WIDTH), X),
    Array((STAGES, 2 * WIDTH, WIDTH), X),
)
PAIR_2 = (
    Array((4, WIDTH, 2 * WIDTH), P("x", None, "y")),
    Array((4, 2 * WIDTH, WIDTH), P("x", "y")),
)

TABLE = [
    row("a shift a step", shifted(layer), (WEIGHTS, BATCHES), NONE, hinted=True),
    row("a shift a step, annotated", shifted(layer, True), (WEIGHTS, BATCHES), NONE, hinted=True),
    row("a shift a step, microbatches sharded", shifted(layer),
        (WEIGHTS, Array((COUNT, ROWS, WIDTH), SECOND)), SECOND, hinted=True),
    row("gradient", gradient(shifted(layer)), (WEIGHTS, BATCHES), X, hinted=True),
    row("gradient, annotated", gradient(shifted(layer, True)), (WEIGHTS, BATCHES), X, hinted=True),
    row("stages of two matrices, data as well, 4x2", shifted(mlp),
        ((Array((4, WIDTH, 128), X), Array((4, 128, WIDTH), X)),
         Array((COUNT, ROWS, WIDTH), P(None, "y"))), P(None, "y"), (4, 2), hinted=True),
    row("stages of two matrices, tensors as well, 4x2", shifted(mlp), (PAIR_2, BATCHES), NONE,
        (4, 2), hinted=True),
    row("gradient of it, 4x2", gradient(shifted(mlp)), (PAIR_2, BATCHES),
        (P("x", None, "y"), P("x", "y")), (4, 2), hinted=True),
    row("stages of two matrices", shifted(mlp), (PAIR, BATCHES), NONE, hinted=True),
    row("circular, two rounds", circular,
        (Array((2, STAGES, WIDTH, WIDTH), SECOND), Array((STAGES, ROWS, WIDTH), X)), X,
        hinted=True, best=Best(16 * passed(ROWS, WIDTH), "an activation to the next, every step")),
    row("stages in turn, weights by stage", stages_in_turn, (WEIGHTS, Array((ROWS, WIDTH))), NONE),
]  # fmt: skip
