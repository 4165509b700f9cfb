"""Convolutions and pooling: halos, strides, groups, gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    LOCAL,
    NONE,
    SECOND,
    Array,
    Best,
    Program,
    X,
    exchanged,
    gathered,
    passed,
    reduced,
)

row = partial(Program, "conv")
TILES, CHANNELS = P(None, "x", "y"), P(None, None, None, "x")


def conv(**options: Any) -> Callable[..., Any]:
    """Images with their channels last."""
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


def gradient(function: Callable[..., Any], which: int = 0) -> Callable[..., Any]:
    """The gradient of one argument; the last operand is the cotangent."""
    return lambda *args: jax.vjp(function, *args[:-1])[1](args[-1])[which]


def max_pool(x: Any) -> Any:
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def pairs_pool(x: Any) -> Any:
    return nn.max_pool(x, (2, 2), (2, 2))


def mean_pool(x: Any) -> Any:
    return nn.avg_pool(x, (2, 2), (2, 2))


def mean_pool_by_count(x: Any) -> Any:
    """What lies outside of the image does not count."""
    return nn.avg_pool(x, (3, 3), (2, 2), "SAME", count_include_pad=False)


def batch_norm(x: Any) -> Any:
    mean = x.mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5)


def residual(x: Any, a: Any, b: Any) -> Any:
    """Two convolutions and a shortcut."""
    return jax.nn.relu(x + SAME(jax.nn.relu(SAME(x, a)), b))


def down_and_up(x: Any, w: Any) -> Any:
    """A level of a U-net: pooled, convolved, repeated, joined with what it came from."""
    h = SAME(mean_pool(x), w)
    return jnp.concatenate([x, jnp.repeat(jnp.repeat(h, 2, 1), 2, 2)], -1)


def on_padded(x: Any, w: Any) -> Any:
    """Padded by `jnp.pad`, and convolved without padding."""
    return conv(padding="VALID")(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), w)


SAME = conv()
STRIDED = conv(window_strides=(2, 2))
WIDE = conv(rhs_dilation=(4, 4))
GROUPED = conv(feature_group_count=2)
DEPTHWISE = conv(feature_group_count=16)
TRANSPOSED = conv(lhs_dilation=(2, 2), padding=((1, 2), (1, 2)))
IMAGE, KERNEL = (4, 64, 64, 16), (3, 3, 16, 16)
ROW = passed(4, 1, 64, 16)  # one row of every image

TABLE = [
    row("batch sharded", SAME, (Array((16, 32, 32, 16), X), Array(KERNEL)), X, best=LOCAL),
    row("rows sharded", SAME, (Array(IMAGE, SECOND), Array(KERNEL)), SECOND,
        best=Best(2 * ROW, "a row to each neighbour")),
    row("rows of a whole image", SAME, (Array(IMAGE), Array(KERNEL)), SECOND, best=LOCAL),
    row("rows of whole images of a batch, twice, 2x4", lambda x, a, b: SAME(SAME(x, a), b),
        (Array(IMAGE, X), Array(KERNEL), Array(KERNEL)), P("x", "y"), (2, 4),
        Best(2 * passed(2, 1, 64, 16), "a row of the first result to each neighbour")),
    row("rows and columns, 2x4", SAME, (Array(IMAGE, TILES), Array(KERNEL)), TILES, (2, 4),
        Best(passed(4, 1, 16, 16) + passed(4, 32, 2, 16) + passed(4, 2, 2, 16),
             "edges to neighbours; on two rows of devices each has one neighbour")),
    row("rows sharded, uneven", SAME, (Array((4, 61, 33, 16), SECOND), Array(KERNEL)), SECOND,
        best=Best(2 * passed(4, 1, 33, 16), "a row to each neighbour")),
    row("kernel wider than a shard", SAME, (Array(IMAGE, SECOND), Array((19, 3, 16, 16))), SECOND,
        best=Best(2 * exchanged(4 * 64 * 64 * 16 / 8, 8) + 2 * passed(4, 64, 1, 16),
                  "to columns and back, a column to each neighbour")),
    row("stride 2", STRIDED, (Array(IMAGE, SECOND), Array(KERNEL)), SECOND,
        best=Best(ROW, "a row to one neighbour")),
    row("padded before, rows sharded", on_padded, (Array(IMAGE, SECOND), Array(KERNEL)), SECOND,
        best=Best(2 * ROW, "a row to each neighbour")),
    row("dilated by 4", WIDE, (Array(IMAGE, SECOND), Array(KERNEL)), SECOND,
        best=Best(8 * ROW, "four rows to each side")),
    row("transposed, doubling", TRANSPOSED,
        (Array((4, 32, 32, 16), SECOND), Array(KERNEL)), SECOND),
    row("input channels sharded", SAME,
        (Array(IMAGE, CHANNELS), Array(KERNEL, P(None, None, "x"))), CHANNELS,
        best=Best(2 * exchanged(4 * 64 * 64 * 16 / 8, 8) + 2 * ROW + gathered(9 * 16 * 16, 8),
                  "to rows and back, a row to each neighbour, the kernel gathered"),
        reason="CPU figures choose a reduce-scatter of large images; without them 1.9 times XLA"),
    row("output channels sharded", SAME, (Array(IMAGE), Array(KERNEL, CHANNELS)), CHANNELS,
        best=LOCAL),
    row("two groups, batch sharded", GROUPED,
        (Array((16, 32, 32, 16), X), Array((3, 3, 8, 16))), X, best=LOCAL),
    row("depthwise, channels sharded", DEPTHWISE,
        (Array(IMAGE, CHANNELS), Array((3, 3, 1, 16), CHANNELS)), CHANNELS, best=LOCAL),
    row("depthwise, rows sharded", DEPTHWISE, (Array(IMAGE, SECOND), Array((3, 3, 1, 16))), SECOND,
        best=Best(2 * ROW, "a row to each neighbour")),
    row("three dims, depth sharded",
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")),
        (Array((2, 16, 16, 16, 8), SECOND), Array((3, 3, 3, 8, 8))), SECOND,
        best=Best(2 * passed(2, 16, 16, 8), "a plane to each neighbour")),
    row("sequence, causal",
        lambda x, w: lax.conv_general_dilated(
            x, w, (1,), ((3, 0),), dimension_numbers=("NWC", "WIO", "NWC")),
        (Array((8, 256, 16), SECOND), Array((4, 16, 16))), SECOND,
        best=Best(passed(8, 3, 16), "three rows to the next")),
    row("gradient of the image, rows sharded", gradient(SAME),
        (Array(IMAGE, SECOND), Array(KERNEL), Array(IMAGE, SECOND)), SECOND,
        best=Best(2 * ROW, "a row to each neighbour")),
    row("gradient of the kernel, rows sharded", gradient(SAME, 1),
        (Array(IMAGE, SECOND), Array(KERNEL), Array(IMAGE, SECOND)), NONE,
        best=Best(2 * ROW + reduced(9 * 16 * 16, 8),
                  "a row to each neighbour, an all-reduce of the gradient")),
    row("gradient of the kernel, batch sharded", gradient(SAME, 1),
        (Array((16, 32, 32, 16), X), Array(KERNEL), Array((16, 32, 32, 16), X)), NONE,
        best=Best(reduced(9 * 16 * 16, 8), "an all-reduce of the gradient")),
    row("gradient through stride 2", gradient(STRIDED),
        (Array(IMAGE, SECOND), Array(KERNEL), Array((4, 32, 32, 16), SECOND)), SECOND),
    row("max pooling", max_pool, (Array(IMAGE, SECOND),), SECOND,
        best=Best(ROW, "a row to one neighbour")),
    row("max pooling, gradient", gradient(max_pool),
        (Array(IMAGE, SECOND), Array((4, 32, 32, 16), SECOND)), SECOND),
    row("max pooling of pairs, gradient", gradient(pairs_pool),
        (Array(IMAGE, SECOND), Array((4, 32, 32, 16), SECOND)), SECOND, best=LOCAL),
    row("mean pooling", mean_pool, (Array(IMAGE, SECOND),), SECOND, best=LOCAL),
    row("mean pooling by count", mean_pool_by_count, (Array(IMAGE, SECOND),), SECOND,
        best=Best(ROW, "a row to one neighbour; counts are known")),
    row("batch norm over a sharded batch", batch_norm, (Array((16, 32, 32, 16), X),), X,
        best=Best(2 * reduced(16, 8), "an all-reduce of two means")),
    row("residual block, rows sharded", residual,
        (Array(IMAGE, SECOND), Array(KERNEL), Array(KERNEL)), SECOND,
        best=Best(4 * ROW, "a row to each neighbour, twice")),
    row("level of a U-net, rows sharded", down_and_up,
        (Array(IMAGE, SECOND), Array(KERNEL)), SECOND,
        best=Best(2 * passed(4, 1, 32, 16), "a pooled row to each neighbour")),
]  # fmt: skip
