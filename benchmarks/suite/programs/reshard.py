"""From one sharding to another and nothing else; alone, or between two element-wise steps."""

from __future__ import annotations

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
    Y,
    exchanged,
    gathered,
    passed,
)

row = partial(Program, "reshard")
SIZE = 512 * 256
PART = SIZE / 8
YX = P(("y", "x"))


def same(x: Any) -> Any:
    return x + 1


def moved(
    name: str, source: P, target: P, mesh: tuple[int, ...] = (8,), best: Best | None = None,
    shape: tuple[int, ...] = (512, 256),
) -> Program:  # fmt: skip
    return row(name, same, (Array(shape, source),), target, mesh, best)


def there_and_back(shard: Any, x: Any) -> Any:
    """A value annotated otherwise in the middle."""
    return jnp.tanh(shard(jnp.exp(x / 4), SECOND)) * 2


def two_uses(shard: Any, x: Any) -> Any:
    """One value wanted by columns twice."""
    return shard(x, SECOND).sum(0), shard(x, SECOND).max(0)


def parts_gathered(shard: Any, tree: Any) -> Any:
    """Several arrays, all gathered."""
    return jax.tree.map(lambda x: x + 1, tree)


TABLE = [
    moved("rows to columns", X, SECOND, best=Best(exchanged(PART, 8), "an all_to_all")),
    moved("rows to everywhere", X, NONE, best=Best(gathered(SIZE, 8), "an all_gather")),
    moved("everywhere to rows", NONE, X, best=LOCAL),
    moved("rows to columns, uneven", X, SECOND, shape=(509, 253)),
    moved("rows to everywhere, uneven", X, NONE, shape=(509, 253)),
    moved("blocks to turned blocks, 2x4", GRID, P("y", "x"), (2, 4)),
    moved("rows over x to columns over y, 2x4", X, P(None, "y"), (2, 4)),
    moved("rows over x to rows over y, 2x4", X, Y, (2, 4)),
    moved("rows over both to blocks, 2x4", XY, GRID, (2, 4),
          Best(exchanged(PART, 4), "an all_to_all over y")),
    moved("blocks to rows over both, 2x4", GRID, XY, (2, 4),
          Best(exchanged(PART, 4), "an all_to_all over y")),
    moved("rows over both to the other order, 2x4", XY, YX, (2, 4),
          Best(PART * 4, "each shard to another device")),
    moved("rows over both to columns over both, 2x4", XY, P(None, ("x", "y")), (2, 4),
          Best(exchanged(PART, 8), "an all_to_all over both")),
    moved("rows over both to columns over x, 2x4", XY, SECOND, (2, 4)),
    moved("blocks to columns over both, 2x4", GRID, P(None, ("x", "y")), (2, 4),
          Best(exchanged(PART, 2), "an all_to_all over x")),
    moved("blocks to everywhere, 2x4", GRID, NONE, (2, 4),
          Best(gathered(SIZE, 8), "an all_gather over both")),
    moved("blocks to rows over x, 2x4", GRID, X, (2, 4),
          Best(gathered(SIZE / 2, 4), "an all_gather over y")),
    moved("rows over y to blocks, 4x2", Y, GRID, (4, 2)),
    moved("first and last dim to the middle, 2x4", P("y", None, "x"), P(None, ("x", "y")), (2, 4),
          Best(exchanged(128 * 64 * 16 / 8, 4) + exchanged(128 * 64 * 16 / 8, 2),
               "two all_to_alls at most"), (128, 64, 16)),
    moved("three dims, each axis one on, 2x2x2", P("x", "y", "z"), P("z", "x", "y"), (2, 2, 2),
          Best(passed(128 * 64 * 16 // 8), "each shard to another device at most"), (128, 64, 16)),
    moved("rows over x and y to columns over y and z, 2x2x2", XY, P(None, ("y", "z")), (2, 2, 2)),
    moved("three axes on rows to one on each dim, 2x2x2", P(("x", "y", "z")), P("x", "y", "z"),
          (2, 2, 2), shape=(128, 64, 16)),
    row("there and back inside", there_and_back, (Array((512, 256), X),), X, hinted=True,
        best=Best(2 * exchanged(PART, 8), "an all_to_all there and one back")),
    row("two uses of one reshard", two_uses, (Array((512, 256), X),), (X, X), hinted=True,
        best=Best(exchanged(PART, 8), "one all_to_all serves both")),
    row("a tree of parameters gathered", parts_gathered,
        ({"a": Array((512, 64), X), "b": Array((64,), X), "c": Array((64, 8, 8), X)},),
        {"a": NONE, "b": NONE, "c": NONE}, hinted=True,
        best=Best(gathered(512 * 64 + 64 + 64 * 64, 8), "each gathered")),
]  # fmt: skip
