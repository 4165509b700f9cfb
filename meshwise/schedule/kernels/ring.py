"""A ring of devices along mesh axes, and the pieces in which an array travels round it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from meshwise._jax import pallas as pl
from meshwise._jax import pallas_tpu as pltpu

Axis = str | tuple[str, ...]

# Rows of a block are a multiple of this where they can be: the tallest register tile of a dtype.
TILE_ROWS = 32


@dataclass(frozen=True)
class Ring:
    """The devices that differ along `axis` only; the other axes of the mesh stay where they are."""

    axis: Axis
    size: int

    def index(self) -> jax.Array:
        """This device's position."""
        return lax.axis_index(self.axis)

    def position(self, offset: Any) -> jax.Array:
        """The position `offset` places on, going round; `offset` is at least minus the size."""
        return lax.rem(self.index() + offset + self.size, self.size)

    def device(self, offset: Any) -> Any:
        """The mesh coordinates of the device `offset` places on."""
        return {self.axis: self.position(offset)}

    def meet_neighbours(self) -> None:
        """Wait until both neighbours have entered the kernel, so that they may be written to.

        No device leaves a kernel before all have entered it (each result needs a term of every
        device), so kernels on the same axis may share a barrier.
        """
        barrier = pltpu.get_barrier_semaphore()
        for offset in (-1, 1):
            pl.semaphore_signal(barrier, 1, device_id=self.device(offset))
        pl.semaphore_wait(barrier, 2)


def ring_along(axis: Axis) -> Ring:
    """The ring of the mesh that the caller is inside of (`shard_map`)."""
    axis = axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis
    return Ring(axis, lax.axis_size(axis))


def barrier_of(axis: Axis, mesh_axes: Sequence[str] | None = None) -> int:
    """The number of the barrier that kernels along `axis` share: another for every set of axes.

    `mesh_axes` names all axes of the mesh; None reads them from the mesh in context.
    """
    names = tuple(mesh_axes or jax.sharding.get_abstract_mesh().axis_names)
    chosen = (axis,) if isinstance(axis, str) else axis
    if not set(chosen) <= set(names):
        raise ValueError(
            f"the mesh of axes {names} has no axes {chosen}: call kernels inside shard_map, or give"
            " mesh_axes"
        )
    return sum(1 << names.index(name) for name in chosen)


@dataclass(frozen=True)
class Piece:
    """Rows `[start, start + rows)` of a tile, sent round in one direction: 1 up, -1 down."""

    number: int
    start: int
    rows: int
    direction: int


def pieces_of(rows: int, count: int) -> tuple[Piece, ...]:
    """The rows of a tile in at most `count` equal pieces, every other one sent the other way.

    While one piece is computed with, the others travel. Pieces are a multiple of `TILE_ROWS` rows;
    a tile that cannot be cut so is one piece.
    """
    count = next(
        c for c in range(count, 0, -1) if c == 1 or (rows % c == 0 and rows // c % TILE_ROWS == 0)
    )
    size = rows // count
    return tuple(Piece(i, i * size, size, -1 if i % 2 else 1) for i in range(count))


def rows_of_block(rows: int, most: int) -> int:
    """The most rows, not above `most`, of equal blocks of `rows` rows: whole register tiles.

    Zero where even the smallest block of whole register tiles is above.
    """
    for unit in (TILE_ROWS, TILE_ROWS // 2, TILE_ROWS // 4):
        fitting = [b for b in range(unit, min(rows, most) + 1, unit) if rows % b == 0]
        if fitting:
            return fitting[-1]
    return rows if rows <= most else 0


def bytes_of(shape: Sequence[int], dtype: Any) -> int:
    """The bytes of an array."""
    return math.prod(shape) * jax.numpy.dtype(dtype).itemsize
