"""Small models in stages: equal and unequal ones, tied weights, values that skip stages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshwise as mw

WIDTH, WORDS, LENGTH = 8, 12, 5


@dataclass(frozen=True)
class Model:
    """A loss function of (params, batch) with a number of stages, and what it is called with."""

    name: str
    stages: int
    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Callable[[int], Any]


def chain(stage: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The loss of one stage after another, each of a value and a parameter of its own."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for i, w in enumerate(params):
            x = stage(mw.stage_boundary(x) if i else x, w)
        return ((x - batch["y"]) ** 2).mean()

    return loss


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Any:
    return np.asarray(rng.standard_normal(shape) / np.sqrt(max(shape[0], 1)), dtype)


def rows(count: int) -> dict[str, np.ndarray]:
    """Vectors to map to vectors."""
    rng = np.random.default_rng(count)
    return {"x": normal(rng, count, WIDTH) * 3, "y": normal(rng, count, WIDTH) * 3}


def sentences(count: int) -> dict[str, np.ndarray]:
    """Words in rows, and the next words."""
    rng = np.random.default_rng(count)
    words = rng.integers(0, WORDS, (count, LENGTH + 1)).astype(np.int32)
    return {"words": words[:, :-1], "next": words[:, 1:]}


def _layers(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"w": normal(rng, WIDTH, WIDTH), "b": normal(rng, WIDTH)} for _ in range(count)]


def layer(p: dict[str, Any], x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"])


def mlp(stages: int) -> Model:
    """As many equal layers as stages."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for i, p in enumerate(params):
            x = layer(p, mw.stage_boundary(x) if i else x)
        return ((x - batch["y"]) ** 2).mean()

    return Model(f"mlp of {stages}", stages, loss, _layers(stages), rows)


def language_model(stages: int, tied: bool) -> Model:
    """An embedding with the first of some residual layers, a head with the last.

    A mask that is made at the beginning is needed by all, labels by the last; the layers of a stage
    differ in number and shape, and each adds to the loss. With `tied` weights the head is the
    embedding.
    """
    rng = np.random.default_rng(1)
    params = {
        "embedding": normal(rng, WORDS, WIDTH) * 3,
        "layers": [
            {"up": normal(rng, WIDTH, 4 + 3 * i), "down": normal(rng, 4 + 3 * i, WIDTH)}
            for i in range(stages)
        ],
        "gain": 1 + normal(rng, WIDTH),
    }
    if not tied:
        params["head"] = normal(rng, WORDS, WIDTH)

    @jax.checkpoint
    def residual(p: Any, x: Any, mask: Any) -> Any:
        mixed = jnp.where(mask[None, :, :, None], x[:, None], 0).sum(2) / LENGTH
        return x + jax.nn.gelu(mixed @ p["up"]) @ p["down"]

    @jax.jit
    def forward(params: Any, words: Any) -> Any:
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        x, extra = params["embedding"][words], 0.0
        for i, p in enumerate(params["layers"]):
            if i:
                x, mask = mw.stage_boundary((x, mask))
            x = residual(p, x, mask)
            extra += 1e-2 * (x**2).mean()
        x = x * params["gain"]
        return x @ params["embedding" if tied else "head"].T, extra

    def loss(params: Any, batch: Any) -> Any:
        logits, extra = forward(params, batch["words"])
        chosen = jax.nn.one_hot(batch["next"], WORDS)
        return -(jax.nn.log_softmax(logits) * chosen).sum(-1).mean() + extra

    kind = "tied" if tied else "untied"
    return Model(f"{kind} language model of {stages}", stages, loss, params, sentences)


def skips(stages: int) -> Model:
    """What the first stage makes, in float16 and as integers too, is read by the last alone."""
    params = {"layers": _layers(stages, 2), "unused": normal(np.random.default_rng(0), 3)}

    def loss(params: Any, batch: Any) -> Any:
        x = first = layer(params["layers"][0], batch["x"])
        small, signs = first.astype(jnp.float16), (first > 0).astype(jnp.int32)
        for p in params["layers"][1:]:
            x = mw.stage_boundary(x)
            x = layer(p, x)
        x = x + small.astype(jnp.float32) * signs + first
        return ((x - batch["y"]) ** 2).mean()

    return Model(f"skips over {stages}", stages, loss, params, rows)


def mixed(stages: int) -> Model:
    """Parameters of two dtypes, cast where they are used."""
    params = [
        {"w": p["w"].astype(jnp.bfloat16), "b": p["b"], "s": np.float32(1 + i)}
        for i, p in enumerate(_layers(stages, 3))
    ]

    def loss(params: Any, batch: Any) -> Any:
        cast = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        x = batch["x"]
        for i, p in enumerate(cast):
            x = mw.stage_boundary(x) if i else x
            x = p["s"] * layer(p, x)
        return ((x - batch["y"]) ** 2).mean()

    return Model(f"mixed of {stages}", stages, loss, params, rows)
