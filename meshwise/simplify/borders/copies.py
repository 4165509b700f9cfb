"""Copies of rows: counted by a dim of their own before they are laid end to end, or of one row.

In `tile(x, 4)` the four copies of sharded rows are interleaved with no sharding. Where the copies
are told apart again right after, to be added up or compared, they need never be laid end to end:
nothing is sent for them.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from jax import lax

from meshwise._jax import JaxprEqn
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import Makers, equations_of, maker_of
from meshwise.simplify.borders.shifts import single_row
from meshwise.simplify.counts import Counts


def merge_reshape(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A reshape that tells apart the copies that a tile laid end to end."""
    tile = maker_of(eqn.invars[0], makers, "tile")
    sizes = eqn.params["new_sizes"]
    if tile is None or 0 in sizes:
        return None
    reps, shape = tile.params["reps"], shape_of(tile.invars[0])
    apart = [n for pair in zip(reps, shape, strict=True) for n in pair]
    ends = list(accumulate(apart, mul))
    if not {ends[2 * d] for d, n in enumerate(reps) if n > 1} <= set(accumulate(sizes, mul)):
        return None
    return equations_of(eqn, tile.invars, lambda x: lax.reshape(_copied(x, reps), sizes))


def repeat_row(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A row that is repeated along a new dim, which is joined with that of the row: along this."""
    shape, beside = shape_of(eqn.outvars[0]), makers.beside([eqn])
    rows = (single_row(eqn.outvars[0], dim, beside) for dim in range(len(shape)))
    row = next((row for row in rows if row is not None), None)
    if row is None:
        return None
    return equations_of(eqn, [row], lambda x: lax.broadcast_in_dim(x, shape, range(x.ndim)))


def _copied(x: Any, reps: Sequence[int]) -> Any:
    """An array with a dim of copies before each of its own."""
    shape = [n for pair in zip(reps, x.shape, strict=True) for n in pair]
    return lax.broadcast_in_dim(x, shape, range(1, len(shape), 2))
