"""What a kernel is to be, before it is called: pieces, blocks, and how arrays lie in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise.schedule.kernels.calling import VMEM_BLOCK_BYTES
from meshwise.schedule.kernels.fused import Fused, Product
from meshwise.schedule.kernels.passes import Passes, dry_run
from meshwise.schedule.kernels.products import matmul_blocks
from meshwise.schedule.kernels.ring import Piece, Ring, bytes_of, pieces_of, rows_of_block
from meshwise.schedule.kernels.tiles import Tile


@dataclass(frozen=True)
class MatmulSummand:
    """A summand `left @ right` that the kernel computes chunk by chunk as the ring needs it."""

    left: Any
    right: Any
    precision: Any = None
    preferred_element_type: Any = None

    def __post_init__(self):
        left, right = self.left.shape, self.right.shape
        if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
            raise ValueError(
                f"{left} and {right} are no matrices to multiply: reshape them before the kernel"
            )

    @property
    def dtype(self) -> Any:
        """The type of the product, and of what travels."""
        if self.preferred_element_type is not None:
            return jnp.dtype(self.preferred_element_type)
        return jnp.promote_types(self.left.dtype, self.right.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The product's shape."""
        return (self.left.shape[0], self.right.shape[1])


def chunk_of(summand: Any, ring: Ring, dim: int) -> jax.ShapeDtypeStruct:
    """The shape of this device's part of a sum."""
    shape = list(summand.shape)
    if isinstance(summand, MatmulSummand) and dim % len(shape):
        raise ValueError("a matrix product is scattered by its rows (dim=0): transpose it")
    if not -len(shape) <= dim < len(shape) or shape[dim] % ring.size:
        raise ValueError(
            f"dim {dim} of a summand of shape {tuple(shape)} is not cut by {ring.size} devices:"
            " pad it before the kernel"
        )
    shape[dim] //= ring.size
    return jax.ShapeDtypeStruct(tuple(shape), summand.dtype)


def plan(
    ring: Ring,
    passes: Passes,
    summands: Sequence[Any],
    wholes: Sequence[Any],
    dim: int,
    gathered: Sequence[int | None],
    pieces: int,
) -> Fused:
    """The kernel as data."""
    in_lanes, dim = passes.blocks.in_lanes, dim % len(summands[0].shape)
    tiles = tuple(_tile(v.aval, in_lanes) for v in passes.tiles)
    cut = pieces_of(passes.blocks.block_rows, pieces)
    block_rows = _block_rows(passes, tiles, cut)
    exchanges = dry_run(passes, wholes, lambda i, rows: (rows, *tiles[i].held[1:]), block_rows)
    kept = jax.eval_shape(lambda w: _kept(passes, w), wholes)
    results = tuple(_result(passes, i) for i in range(len(passes.results)))
    return Fused(
        ring=ring,
        passes=passes,
        pieces=cut,
        block_rows=block_rows,
        summands=tuple(_summand(s, ring, dim, in_lanes, cut) for s in summands),
        tiles=tiles,
        wholes=tuple(kept),
        results=results,
        gathered=tuple(
            _gathered(i, result, g, ring)
            for i, (result, g) in enumerate(zip(results, gathered, strict=True))
        ),
        exchanges=tuple(tuple(e) for e in exchanges),
    )


def _tile(aval: Any, in_lanes: bool, chunks: int = 0, dim: int = 0) -> Tile:
    return Tile(tuple(aval.shape), jnp.dtype(aval.dtype), in_lanes, chunks, dim)


def _kept(passes: Passes, wholes: Sequence[Any]) -> list[Any]:
    """The whole values that the kernel is given, as it holds them."""
    env = passes.before(wholes)
    arrays = [env[v].array for v in passes.kept()]
    return [a.astype(jnp.int32) if a.dtype == jnp.bool_ else a for a in arrays]


def _summand(
    summand: Any, ring: Ring, dim: int, in_lanes: bool, pieces: Sequence[Piece]
) -> Tile | Product:
    if not isinstance(summand, MatmulSummand):
        return _tile(chunk_of(summand, ring, dim), in_lanes, ring.size, dim)
    rows, inner = summand.left.shape
    left = jax.ShapeDtypeStruct((rows // ring.size, inner), summand.left.dtype)
    right = _tile(summand.right, False)
    is_float = jnp.issubdtype(summand.dtype, jnp.floating)
    wide = jnp.promote_types(summand.dtype, jnp.float32) if is_float else jnp.dtype("int32")
    return Product(
        _tile(left, False, ring.size),
        right,
        wide,
        matmul_blocks(pieces[0].rows, summand.right.shape[1], inner),
        summand.precision,
    )


def _result(passes: Passes, number: int) -> Tile | jax.ShapeDtypeStruct:
    aval = passes.results[number].aval
    if passes.is_tile(number):
        return _tile(aval, passes.blocks.in_lanes)
    shape = (1,) * (2 - len(aval.shape)) + tuple(aval.shape)
    dtype = jnp.int32 if aval.dtype == jnp.bool_ else aval.dtype
    return jax.ShapeDtypeStruct(shape, dtype)


def _gathered(number: int, result: Any, dim: int | None, ring: Ring) -> Tile | None:
    if dim is None:
        return None
    if not isinstance(result, Tile):
        raise ValueError(
            f"result {number} has no rows of the tiles, so it is the same everywhere or small:"
            " it cannot be gathered inside the kernel; gather it after, or keep it (None)"
        )
    rank = len(result.shape)
    if not -rank <= dim < rank:
        raise ValueError(f"result {number} has {rank} dims, so none is dim {dim}")
    return Tile(result.shape, result.dtype, result.in_lanes, ring.size, dim % rank)


def _block_rows(passes: Passes, tiles: Sequence[Tile], pieces: Sequence[Piece]) -> int:
    """How many rows are computed on at a time: as many as fit in fast memory with their copies."""
    results = [v.aval for i, v in enumerate(passes.results) if passes.is_tile(i)]
    stored = [*tiles, *(_tile(a, passes.blocks.in_lanes) for a in results)]
    bytes_of_row = sum(2 * bytes_of(t.held[1:], t.stored.dtype) for t in stored)
    # What is computed on the way lies there too.
    steps = [e for e in passes.closed.jaxpr.eqns if passes.places[e.outvars[0]].is_blocked]
    widest = max(math.prod(t.held[1:]) for t in tiles)
    bytes_of_row += 4 * widest * min(len(steps), 8)
    rows = rows_of_block(pieces[0].rows, VMEM_BLOCK_BYTES // bytes_of_row)
    if not rows:
        raise ValueError(
            f"one block of rows of the tiles {[t.shape for t in tiles]} does not fit in fast"
            f" memory ({VMEM_BLOCK_BYTES >> 20} MiB): give vectors, or tiles of narrower rows"
        )
    return rows
