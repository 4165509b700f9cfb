"""From one sharding to another and nothing else; alone, or between two element-wise steps."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.suite.devices import AXES
from benchmarks.suite.program import (
    GRID,
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
)

row = partial(Program, "reshard")
FLAT, CUBE = (512, 256), (128, 64, 16)
PART = 512 * 256 / 8
YX = P(("y", "x"))


def same(x: Any) -> Any:
    return x + 1


def lacking(
    shape: tuple[int, ...], source: P, target: P, mesh: tuple[int, ...]
) -> float:  # fmt: skip
    """Bytes of its new part that a device does not hold: the most of any, whatever way is taken."""
    worst = 0
    for place in product(*map(range, mesh)):
        held, wanted = (_rows(shape, spec, mesh, place) for spec in (source, target))
        both = prod(
            max(0, min(a.stop, b.stop) - max(a.start, b.start))
            for a, b in zip(held, wanted, strict=True)
        )
        worst = max(worst, prod(map(len, wanted)) - both)
    return 4.0 * worst


def _rows(
    shape: tuple[int, ...], spec: P, mesh: tuple[int, ...], place: tuple[int, ...]
) -> list[range]:
    """What a device holds of each dim."""
    found = []
    for size, entry in zip(shape, [*spec, *[None] * len(shape)], strict=False):
        number, shards = 0, 1
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            where = AXES.index(axis)
            number, shards = number * mesh[where] + place[where], shards * mesh[where]
        part = -(-size // shards)
        found.append(range(number * part, (number + 1) * part))
    return found


def moved(
    name: str,
    source: P,
    target: P,
    mesh: tuple[int, ...] = (8,),
    shape: tuple[int, ...] = FLAT,
    reason: str = "",
) -> Program:
    """A reshard alone; what is padded on the way is not known to be needed."""
    even = all(size % prod(mesh) == 0 for size in shape)
    best = Best(lacking(shape, source, target, mesh), "what one device lacks of its part")
    arguments = (Array(shape, source),)
    return row(name, same, arguments, target, mesh, best if even else None, reason=reason)


def there_and_back(shard: Any, x: Any) -> Any:
    """A value annotated otherwise in the middle."""
    return jnp.tanh(shard(jnp.exp(x / 4), SECOND)) * 2


def two_uses(shard: Any, x: Any) -> Any:
    """One value wanted by columns twice."""
    return shard(x, SECOND).sum(0), shard(x, SECOND).max(0)


def all_gathered(tree: Any) -> Any:
    """Several arrays, each gathered."""
    return jax.tree.map(lambda x: x + 1, tree)


TABLE = [
    moved("rows to columns", X, SECOND),
    moved("rows to everywhere", X, NONE),
    moved("everywhere to rows", NONE, X),
    moved("rows to columns, uneven", X, SECOND, shape=(509, 253)),
    moved("rows to everywhere, uneven", X, NONE, shape=(509, 253)),
    moved("blocks to turned blocks, 2x4", GRID, P("y", "x"), (2, 4)),
    moved("rows over x to columns over y, 2x4", X, P(None, "y"), (2, 4)),
    moved("rows over x to rows over y, 2x4", X, Y, (2, 4)),
    moved("rows over both to blocks, 2x4", XY, GRID, (2, 4)),
    moved("blocks to rows over both, 2x4", GRID, XY, (2, 4)),
    moved("rows over both to the other order, 2x4", XY, YX, (2, 4)),
    moved("rows over both to columns over both, 2x4", XY, P(None, ("x", "y")), (2, 4)),
    moved("rows over both to columns over x, 2x4", XY, SECOND, (2, 4)),
    moved("blocks to columns over both, 2x4", GRID, P(None, ("x", "y")), (2, 4)),
    moved("blocks to everywhere, 2x4", GRID, NONE, (2, 4)),
    moved("blocks to rows over x, 2x4", GRID, X, (2, 4)),
    moved("rows over y to blocks, 4x2", Y, GRID, (4, 2)),
    moved("first and last dim to the middle, 2x4", P("y", None, "x"), P(None, ("x", "y")), (2, 4),
          CUBE),
    moved("three dims, each axis one on, 2x2x2", P("x", "y", "z"), P("z", "x", "y"), (2, 2, 2),
          CUBE),
    moved("rows over x and y to columns over y and z, 2x2x2", XY, P(None, ("y", "z")), (2, 2, 2),
        reason="an all_to_all holds what it cuts; XLA sends 1.7 times as much"),
    moved("three axes on rows to one on each dim, 2x2x2", P(("x", "y", "z")), P("x", "y", "z"),
          (2, 2, 2), CUBE),
    row("there and back inside", there_and_back, (Array((512, 256), X),), X, hinted=True,
        best=Best(2 * exchanged(PART, 8), "an all_to_all there and one back")),
    row("two uses of one reshard", two_uses, (Array((512, 256), X),), (X, X), hinted=True,
        best=Best(exchanged(PART, 8), "one all_to_all serves both")),
    row("a tree of parameters gathered", all_gathered,
        ({"a": Array((512, 64), X), "b": Array((64,), X), "c": Array((64, 8, 8), X)},),
        {"a": NONE, "b": NONE, "c": NONE},
        best=Best(gathered(512 * 64 + 64 + 64 * 64, 8), "each gathered")),
]  # fmt: skip
