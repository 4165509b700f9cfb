"""Products of two or more arrays: which dim is contracted, and who holds what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    GRID,
    LOCAL,
    NONE,
    SECOND,
    XY,
    Array,
    Best,
    Program,
    X,
    exchanged,
    gathered,
    reduced,
    scattered,
)

row = partial(Program, "matmul")
YX, THIRD = P("y", "x"), P(None, None, "x")


def einsum(text: str) -> Callable[..., Any]:
    return lambda *args: jnp.einsum(text, *args)


def product(x: Any, w: Any) -> Any:
    return x @ w


def mlp(x: Any, up: Any, down: Any) -> Any:
    return jax.nn.gelu(x @ up) @ down


def low_rank(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ w + (x @ a) @ b


def normalised(x: Any, w: Any) -> Any:
    return jax.nn.softmax(x @ w, axis=-1)


def sum_of_two(a: Any, b: Any, c: Any, d: Any) -> Any:
    return a @ b + c @ d


def gradient_of_weight(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: (x @ w).var())(w)


BY_ROWS = exchanged(512 * 256 / 8, 8) + gathered(256 * 128, 8)

TABLE = [
    row("rows of the left operand", product,
        (Array((512, 256), X), Array((256, 128))), X, best=LOCAL),
    row("columns of the right operand", product,
        (Array((512, 256)), Array((256, 128), SECOND)), SECOND, best=LOCAL),
    row("contracted, result whole", product,
        (Array((512, 256), SECOND), Array((256, 128), X)), NONE,
        best=Best(BY_ROWS + gathered(512 * 128, 8),
                  "to rows, the weight gathered, the result gathered")),
    row("contracted, result by rows", product,
        (Array((512, 256), SECOND), Array((256, 128), X)), X,
        best=Best(BY_ROWS, "an all_to_all of the left operand, the weight gathered")),
    row("contracted, result by columns", product,
        (Array((512, 256), SECOND), Array((256, 128), X)), SECOND,
        best=Best(BY_ROWS + exchanged(512 * 128 / 8, 8),
                  "to rows, the weight gathered, the result to columns")),
    row("contracted, operands small", product,
        (Array((512, 8), SECOND), Array((8, 512), X)), X,
        best=Best(exchanged(512, 8) + gathered(8 * 512, 8),
                  "an all_to_all of the left operand, the right one gathered")),
    row("weight gathered", product,
        (Array((4096, 256), X), Array((256, 128), X)), X,
        best=Best(gathered(256 * 128, 8), "each device needs all of the weight for its rows")),
    row("right operand large, by columns", product,
        (Array((64, 512), X), Array((512, 4096), SECOND)), X,
        best=Best(gathered(64 * 512, 8) + exchanged(64 * 512, 8),
                  "the small operand gathered, the result exchanged")),
    row("left whole, right contracted", product,
        (Array((64, 2048)), Array((2048, 64), X)), X,
        best=Best(scattered(64 * 64, 8), "a reduce-scatter of the small result")),
    row("left contracted, right whole", product,
        (Array((64, 2048), SECOND), Array((2048, 64))), NONE,
        best=Best(reduced(64 * 64, 8), "an all-reduce of the small result")),
    row("rows by columns to rows", product,
        (Array((256, 256), X), Array((256, 256), SECOND)), X,
        best=Best(gathered(256 * 256, 8), "the right operand gathered")),
    row("uneven, contracted", product,
        (Array((100, 61), SECOND), Array((61, 36), X)), NONE,
        best=Best(exchanged(104 * 8, 8) + gathered(64 * 36, 8) + gathered(104 * 36, 8),
                  "to rows, the right operand gathered, the result gathered"),
        reason="three exchanges of padded parts where XLA reduces once"),
    row("uneven, rows", product,
        (Array((101, 60), X), Array((60, 36))), X, best=LOCAL,
        reason="an uneven argument is unwrapped in Python: 15 microseconds of 150"),
    row("bfloat16, contracted", product,
        (Array((512, 256), SECOND, "bfloat16"), Array((256, 128), X, "bfloat16")), X,
        best=Best(BY_ROWS / 2, "an all_to_all of the left operand, the weight gathered"),
        tolerance=3e-2),
    row("blocks by blocks, 2x4", product,
        (Array((256, 256), GRID), Array((256, 256), GRID)), GRID, (2, 4),
        Best(gathered(256 * 256 / 2, 4) + gathered(256 * 256 / 4, 2),
             "a row of blocks and a column of blocks (SUMMA)")),
    row("blocks by turned blocks, 2x4", product,
        (Array((256, 256), GRID), Array((256, 256), YX)), GRID, (2, 4),
        Best(gathered(256 * 256 / 4, 2) + scattered(256 * 256 / 2, 4),
             "the right operand's columns gathered, a reduce-scatter of the result")),
    row("contracted over both axes", product,
        (Array((256, 512), P(None, ("x", "y"))), Array((512, 128), XY)), GRID, (2, 4),
        Best(scattered(256 * 128, 8), "a reduce-scatter of the result over all eight")),
    row("three axes, one contracted", product,
        (Array((256, 256), GRID), Array((256, 256), P("y", "z"))), P("x", "z"), (2, 2, 2),
        Best(reduced(256 * 256 / 4, 2), "an all-reduce of a block of the result")),
    row("three axes, result in all", product,
        (Array((256, 256), GRID), Array((256, 256), P("y", "z"))), P(("x", "y"), "z"), (2, 2, 2),
        Best(scattered(256 * 256 / 4, 2), "a reduce-scatter of a block of the result")),
    row("2-D weight, batch over one axis", product,
        (Array((512, 256), X), Array((256, 256), GRID)), GRID, (2, 4),
        Best(gathered(256 * 256 / 4, 2), "the weight's rows gathered over x")),
    row("batch of products", einsum("bij,bjk->bik"),
        (Array((16, 64, 64), X), Array((16, 64, 64), X)), X, best=LOCAL),
    row("batch of products, result by rows", einsum("bij,bjk->bik"),
        (Array((16, 64, 64), X), Array((16, 64, 64), X)), SECOND,
        best=Best(exchanged(16 * 64 * 64 / 8, 8), "an all_to_all of the result")),
    row("batch of products, one operand by batch", einsum("bij,bjk->bik"),
        (Array((16, 64, 8), X), Array((16, 8, 64))), X, best=LOCAL),
    row("attention scores, batch and heads", einsum("bqhd,bkhd->bhqk"),
        (Array((8, 64, 8, 16), P("x", None, "y")), Array((8, 64, 8, 16), P("x", None, "y"))),
        GRID, (2, 4), LOCAL),
    row("attention scores, queries sharded", einsum("bqhd,bkhd->bhqk"),
        (Array((2, 64, 8, 16), SECOND), Array((2, 64, 8, 16), SECOND)), P(None, None, "x"),
        best=Best(2 * exchanged(2 * 64 * 8 * 16 / 8, 8) + exchanged(2 * 8 * 64 * 64 / 8, 8),
                  "both to heads, the scores to queries"),
        reason="three small all_to_alls where XLA gathers once"),
    row("worked example: batch and contracted to batch and rows",
        einsum("bik,bjk->bij"),
        (Array((4, 24, 128), P("x", None, "y")), Array((4, 32, 128), P(None, "x", "y"))),
        P("x", "y"), (2, 4),
        Best(exchanged(4 * 32 * 128 / 8, 2) + scattered(4 * 24 * 32 / 2, 4),
             "an all_to_all of the right operand, a reduce-scatter of the result")),
    row("matrix by vector, blocks", product,
        (Array((512, 512), GRID), Array((512,), P("y"))), X, (2, 4),
        Best(reduced(512 / 2, 4), "an all-reduce of a part of the result")),
    row("matrix by vector, blocks, vector whole", product,
        (Array((512, 512), GRID), Array((512,))), NONE, (2, 4),
        Best(reduced(256, 4) + gathered(512, 2),
             "an all-reduce of a part of the result, then gathered")),
    row("outer product", jnp.outer,
        (Array((512,), X), Array((512,), P("y"))), GRID, (2, 4), LOCAL),
    row("Gram matrix, rows sharded", lambda x: x.T @ x,
        (Array((1024, 64), X),), NONE,
        best=Best(reduced(64 * 64, 8), "an all-reduce of the result")),
    row("sum over a contracted product", lambda x, w: (x @ w).sum(),
        (Array((512, 256), SECOND), Array((256, 128), X)), NONE,
        best=Best(reduced(1, 8), "the sum goes inside: an all-reduce of one number")),
    row("sum of rows of a contracted product", lambda x, w: (x @ w).sum(0),
        (Array((512, 256), SECOND), Array((256, 128), X)), NONE,
        best=Best(reduced(128, 8), "the sum goes inside: an all-reduce of one row")),
    row("gate of a contracted product", lambda a, b, gate: jax.nn.sigmoid(gate) * (a @ b),
        (Array((128, 256), SECOND), Array((256, 128), X), Array((128, 128), X)), X,
        best=Best(scattered(128 * 128, 8), "a reduce-scatter of the product, before the gate")),
    row("gate and residual of a product of blocks, 2x4",
        lambda x, w, gate: x + jax.nn.sigmoid(gate) * (x @ w),
        (Array((128, 128), GRID), Array((128, 128), P("y")), Array((128, 128), GRID)), GRID, (2, 4),
        Best(scattered(64 * 128, 4), "a reduce-scatter of the product, before the gate")),
    row("two contracted products added", sum_of_two,
        (Array((256, 128), SECOND), Array((128, 64), X)) * 2, NONE,
        best=Best(reduced(256 * 64, 8), "added before one all-reduce")),
    row("inner product of blocks", einsum("ij,ij->"),
        (Array((256, 256), GRID), Array((256, 256), GRID)), NONE, (2, 4),
        Best(reduced(1, 8), "an all-reduce of one number")),
    row("tensors, two dims contracted", einsum("abcd,cdef->abef"),
        (Array((16, 16, 16, 16), P(None, None, "x", "y")), Array((16, 16, 16, 16), GRID)), GRID,
        (2, 4), Best(exchanged(16**4 / 8, 2) + gathered(16**4 / 4, 2) + scattered(16**4 / 2, 4),
                     "an all_to_all and a gather over x, a reduce-scatter over y")),
    row("bilinear form", einsum("bi,ijk,bk->bj"),
        (Array((256, 32), X), Array((32, 32, 32)), Array((256, 32), X)), X, best=LOCAL),
    row("three matrices, Megatron", mlp,
        (Array((256, 128)), Array((128, 512), SECOND), Array((512, 128), X)), NONE,
        best=Best(reduced(256 * 128, 8), "an all-reduce of the result")),
    row("three matrices, 2-D finalised", mlp,
        (Array((256, 128), GRID), Array((128, 512), GRID), Array((512, 128), YX)), GRID, (2, 4),
        Best(gathered(256 * 128 / 2, 4) + 2 * gathered(128 * 512 / 4, 2)
             + scattered(256 * 128 / 2, 4),
             "activations gathered and reduce-scattered over y, weights gathered over x")),
    row("low-rank correction, weight by columns", low_rank,
        (Array((256, 256)), Array((256, 256), SECOND), Array((256, 8), X), Array((8, 256), SECOND)),
        SECOND, best=Best(gathered(256 * 8, 8), "the thin matrix gathered")),
    row("softmax over a sharded product", normalised,
        (Array((256, 64)), Array((64, 1024), SECOND)), SECOND,
        best=Best(2 * reduced(256, 8), "the largest and the sum of each row")),
    row("gradient of a weight, batch sharded", gradient_of_weight,
        (Array((1024, 64), X), Array((64, 64))), NONE,
        best=Best(reduced(64 * 64, 8) + 2 * reduced(1, 8),
                  "an all-reduce of the gradient, and of two means")),
    row("gradient of a weight, weight sharded", gradient_of_weight,
        (Array((1024, 64), X), Array((64, 64), X)), X,
        best=Best(2 * gathered(64 * 64, 8) + 2 * reduced(1, 8),
                  "the weight gathered, a reduce-scatter of its gradient, two means")),
]  # fmt: skip
