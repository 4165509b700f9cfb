"""How arrays lie in memory for a kernel, and which part of one a copy or a block is.

The rows of a tile are its first dim; a tile of vectors in lanes is a matrix of 128 columns. An
array of all chunks has the chunk's number as a first dim of its own where it is cut along rows;
where it is cut along another dim it is as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise._jax import pallas as pl
from meshwise.schedule.kernels.blocks import LANES
from meshwise.schedule.kernels.ring import Piece


@dataclass(frozen=True)
class Tile:
    """An array of `shape`, one device's part, or, with `chunks`, all parts along `dim`."""

    shape: tuple[int, ...]
    dtype: Any
    in_lanes: bool
    chunks: int = 0
    dim: int = 0

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of one part in memory."""
        if self.in_lanes:
            return (self.shape[0] // LANES, LANES)
        return (*self.shape, 1) if len(self.shape) == 1 else self.shape

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """The whole array in memory; truth values are numbers there."""
        dtype = jnp.int8 if self.dtype == jnp.bool_ else self.dtype
        shape = self.held
        if self.chunks and self.dim == 0:
            shape = (self.chunks, *shape)
        elif self.chunks:
            shape = _times(shape, self.dim, self.chunks)
        return jax.ShapeDtypeStruct(shape, dtype)

    @property
    def logical(self) -> tuple[int, ...]:
        """The shape that the caller knows."""
        return _times(self.shape, self.dim, self.chunks) if self.chunks else self.shape

    def store(self, array: Any) -> Any:
        """From the caller's array to the one in memory."""
        return array.reshape(self.stored.shape).astype(self.stored.dtype)

    def restore(self, array: Any) -> Any:
        """From the array in memory to the caller's."""
        return array.reshape(self.logical).astype(self.dtype)

    def part(self, ref: Any, piece: Piece, chunk: Any = None) -> Any:
        """A piece of the array in memory: of one chunk where there are several."""
        rows = pl.ds(piece.start, piece.rows)
        if not self.chunks:
            return ref.at[rows]
        if self.dim == 0:
            return ref.at[chunk, rows]
        size = self.shape[self.dim]
        inner: list[Any] = [slice(None)] * len(self.held)
        inner[0] = rows
        inner[self.dim] = pl.ds(pl.multiple_of(chunk * size, size), size)
        return ref.at[tuple(inner)]

    def spec(self, rows: int) -> "pl.BlockSpec":
        """Blocks of some rows of a part."""
        zeros = (0,) * (len(self.held) - 1)
        return pl.BlockSpec((rows, *self.held[1:]), lambda i: (i, *zeros))

    def read(self, block: Any) -> Any:
        """A block as the computation knows it."""
        return block.astype(jnp.int32) != 0 if self.dtype == jnp.bool_ else block

    def written(self, block: Any, rows: int) -> Any:
        """A block of the computation as it is stored."""
        block = jnp.broadcast_to(block, (rows, *self.held[1:]))
        if self.dtype == jnp.bool_:
            block = block.astype(jnp.int32)
        return block.astype(self.stored.dtype)


def _times(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    return tuple(size * count if i == dim else size for i, size in enumerate(shape))
