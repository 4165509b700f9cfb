"""Programs at the sizes of real use, for compilers of devices that are not there.

No array of theirs is ever made. The suite's own are small, so that it can run them; what a
compiler makes of small arrays (whole tiles, memory outside of the cores) is not what it makes of
large ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    GRID,
    NONE,
    SECOND,
    Array,
    Best,
    Program,
    X,
    exchanged,
    integers,
    reduced,
)
from benchmarks.suite.programs.convolution import residual
from benchmarks.suite.programs.moe import gshard
from benchmarks.suite.programs.science import heat, many, poisson
from benchmarks.suite.programs.transformer import (
    MEGATRON,
    SEQUENCE,
    ZERO,
    ZERO_MEGATRON,
    Sizes,
    cross_entropy,
    train,
)

GROUP = "real sizes"
MODEL = Sizes(batch=16, length=512, width=1024, heads=16, head=64, inner=4096)
LAYERS = 6
TILES = P(None, "x", "y")

row = partial(Program, GROUP)
layers = partial(train, stack=LAYERS, remat=True, sizes=MODEL)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal, of queries, keys and values with their heads apart."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def mean_square(x: jax.Array) -> jax.Array:
    return (x.astype("float32") ** 2).mean()


TOKENS, GATE = Array((8, 512, 1024), X), Array((1024, 8))
EXPERTS = Array((8, 1024, 2048), X), Array((8, 2048, 1024), X)
IMAGES, KERNEL = Array((8, 256, 256, 64), TILES), Array((3, 3, 64, 64))
HEADS = Array((8, 1024, 16, 64), P("x", None, "y"), "bfloat16")
CACHE = Array((8, 8192, 16, 64), SECOND, "bfloat16")
ROOM = 128

TABLE = tuple(replace(program, group=GROUP) for program in (
    layers("ZeRO-3, six layers", ZERO, (8,)),
    layers("Megatron, six layers, 2x4", MEGATRON, (2, 4)),
    layers("sequence parallel, six layers, 2x4", SEQUENCE, (2, 4)),
    layers("ZeRO-3 and Megatron, six layers, 2x4", ZERO_MEGATRON, (2, 4)),
    row("attention, gradient, batch and heads, 2x4",
        jax.grad(lambda qkv: mean_square(attention(*qkv))), ((HEADS,) * 3,),
        (P("x", None, "y"),) * 3, (2, 4), Best(0, "every device has its heads")),
    row("token with a cache by position", attention,
        (Array((8, 1, 16, 64), NONE, "bfloat16"), CACHE, CACHE), NONE),
    row("loss and table's gradient, vocabulary sharded", cross_entropy,
        (Array((32768, 1024), X), Array((4096, 1024)), integers((4096,), 32768)), (NONE, X), (8,),
        Best(2 * reduced(4096, 8) + reduced(1, 8),
             "largest and sum of each row; of the labels' logits only the sum")),
    row("GShard layer", partial(gshard, room=ROOM), (TOKENS, GATE, *EXPERTS), X, (8,),
        Best(2 * exchanged(8 * ROOM * 1024, 8), "tokens go to their experts and come back")),
    row("GShard layer, gradient of the experts",
        lambda x, gate, up, down: jax.grad(
            lambda w: mean_square(gshard(x, gate, *w, room=ROOM)))((up, down)),
        (TOKENS, GATE, *EXPERTS), (X, X), (8,),
        Best(3 * exchanged(8 * ROOM * 1024, 8), "there, back, and the cotangent there")),
    row("residual block, rows and columns, 2x4", residual, (IMAGES, KERNEL, KERNEL),
        TILES, (2, 4)),
    row("gradient of a residual block, rows and columns, 2x4",
        lambda x, *w: jax.grad(lambda w: mean_square(residual(x, *w)))(w),
        (IMAGES, KERNEL, KERNEL), (NONE, NONE), (2, 4)),
    row("heat, 20 steps, 2x4", many(heat, 20), (Array((8192, 8192), GRID),), GRID,
        (2, 4)),
    row("Poisson by FFT, rows sharded", poisson, (Array((4096, 4096), X),), X),
    row("rows in order, columns sharded", lambda x: jax.numpy.sort(x, -1),
        (Array((1024, 16384), SECOND),), SECOND),
    row("cumulative sum of a long dim", lambda x: jax.numpy.cumsum(x, 0),
        (Array((65536, 256), X),), X, (8,),
        Best(2 * exchanged(256, 8), "the shards' sums by columns to devices, and back")),
    row("blocks, 2x4", jax.numpy.dot,
        (Array((4096, 4096), GRID), Array((4096, 4096), GRID)), GRID, (2, 4)),
))  # fmt: skip
