"""A 3-D U-Net that segments volumes, and its training step, written for one device.

At each level of the way down two convolutions of 3 x 3 x 3, then every other voxel; on the way up
the reverse, beside what the level had on its way down. Shapes in the comments: N volumes of
D x H x W voxels with C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = Any
CONV = ("NDHWC", "DHWIO", "NDHWC")


@dataclass(frozen=True)
class Config:
    """Sizes (volumes, voxels a side, channels) and settings; the defaults take seconds."""

    batch: int = 2
    size: tuple[int, int, int] = (32, 32, 32)
    channels: tuple[int, ...] = (4, 8)  # of each level, the finest first
    learning_rate: float = 0.1


def init(key: jax.Array, config: Config) -> Params:
    """Random parameters: kernels and biases of each level."""
    keys = iter(jax.random.split(key, 6 * len(config.channels)))

    def conv(size: int, before: int, after: int) -> dict[str, jax.Array]:
        scale = (2 / (size**3 * before)) ** 0.5
        kernel = jax.random.normal(next(keys), (size, size, size, before, after)) * scale
        return {"kernel": kernel, "bias": jnp.zeros(after)}

    def level(before: int, width: int) -> dict[str, Any]:
        return {"first": conv(3, before, width), "second": conv(3, width, width)}

    widths = config.channels
    down = [level(b, w) for b, w in zip((1, *widths), widths, strict=False)]
    up = [
        {"raise": conv(2, coarse, fine), **level(2 * fine, fine)}
        for fine, coarse in pairwise(widths)
    ]
    return {"down": down, "up": up, "head": conv(1, widths[0], 1)}


def conv(p: Params, x: jax.Array) -> jax.Array:
    """A convolution that keeps the volume's size."""
    y = lax.conv_general_dilated(x, p["kernel"], (1, 1, 1), "SAME", dimension_numbers=CONV)
    return y + p["bias"]


def block(p: Params, x: jax.Array) -> jax.Array:
    """Two convolutions of 3 x 3 x 3."""
    return jax.nn.relu(conv(p["second"], jax.nn.relu(conv(p["first"], x))))


def halve(x: jax.Array) -> jax.Array:
    """The largest of each 2 x 2 x 2 voxels."""
    window = (1, 2, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def double(p: Params, x: jax.Array) -> jax.Array:
    """Each voxel becomes 2 x 2 x 2 of them."""
    return (
        lax.conv_transpose(x, p["kernel"], (2, 2, 2), "VALID", dimension_numbers=CONV) + p["bias"]
    )


def forward(params: Params, volumes: jax.Array) -> jax.Array:
    """A logit for each voxel, [N, D, H, W, 1] -> [N, D, H, W]."""
    x, skipped = volumes, []
    for number, p in enumerate(params["down"]):
        x = block(p, halve(x) if number else x)
        skipped.append(x)
    x = skipped.pop()
    for p in reversed(params["up"]):
        both = jnp.concatenate([skipped.pop(), double(p["raise"], x)], -1)
        x = block(p, both)
    return conv(params["head"], x)[..., 0]


def loss(params: Params, volumes: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of a voxel being inside, labels of 0 and 1 in [N, D, H, W]."""
    logits = forward(params, volumes)
    return (jax.nn.softplus(logits) - labels * logits).mean()


def train_step(
    params: Params, volumes: jax.Array, labels: jax.Array, config: Config
) -> tuple[Params, jax.Array]:
    """The parameters after a step down the gradient, and the loss before it."""
    value, grads = jax.value_and_grad(partial(loss))(params, volumes, labels)
    return jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads), value


def spheres(key: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Noisy volumes with a few bright spheres each, and which voxels are inside of one."""
    place, radius, noise = jax.random.split(key, 3)
    grid = jnp.stack(jnp.meshgrid(*[jnp.linspace(0, 1, n) for n in config.size], indexing="ij"), -1)
    centres = jax.random.uniform(place, (config.batch, 1, 1, 1, 3, 3))
    distances = jnp.linalg.norm(grid[None, ..., None, :] - centres, axis=-1)
    radii = jax.random.uniform(radius, distances.shape[-1:], minval=0.1, maxval=0.3)
    inside = (distances < radii).any(-1).astype(jnp.float32)
    return (inside + 0.5 * jax.random.normal(noise, inside.shape))[..., None], inside
