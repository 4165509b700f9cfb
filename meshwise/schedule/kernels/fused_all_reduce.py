"""`fused_all_reduce` and `matmul_reduce_scatter`: sums over devices and what is made of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshwise import _jax
from meshwise._jax import ClosedJaxpr
from meshwise.schedule.kernels.fused import VMEM_BLOCK_BYTES, VMEM_LIMIT_BYTES, Fused, Product
from meshwise.schedule.kernels.passes import Passes, dry_run, passes_of
from meshwise.schedule.kernels.products import matmul_blocks
from meshwise.schedule.kernels.ring import (
    Axis,
    Piece,
    Ring,
    barrier_of,
    bytes_of,
    pieces_of,
    ring_along,
    rows_of_block,
)
from meshwise.schedule.kernels.tiles import Tile

Computation = Callable[..., Any] | ClosedJaxpr
Interpret = bool | pltpu.InterpretParams | None


@dataclass(frozen=True)
class MatmulSummand:
    """A summand `left @ right` that the kernel computes chunk by chunk as the ring needs it."""

    left: Any
    right: Any
    precision: Any = None
    preferred_element_type: Any = None

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


def fused_all_reduce(
    computation: Computation,
    summands: Sequence[Any],
    tiles: Sequence[Any] = (),
    wholes: Sequence[Any] = (),
    *,
    axis: Axis,
    gathered: Sequence[int | None],
    dim: int = 0,
    mesh_axes: Sequence[str] | None = None,
    pieces: int = 4,
    interpret: Interpret = None,
) -> list[Any]:
    """Sum over devices, compute on the chunk that this device holds, gather results: one kernel.

    To be called inside `jax.shard_map`, on local arrays, by all devices along `axis`. The same as

        chunks = [lax.psum_scatter(s, axis, scatter_dimension=dim, tiled=True) for s in summands]
        results = computation(*chunks, *tiles, *wholes)
        results = [r if g is None else lax.all_gather(r, axis, axis=g, tiled=True)
                   for r, g in zip(results, gathered)]

    Args:
        computation: a function, or a jaxpr, of this device's chunks of the sums, then `tiles`, then
            `wholes`. It may hold whatever can be done on blocks of rows (`kernels.ELEMENTWISE`
            and the rules of `kernels/blocks.py`), reductions over rows and other dims, and
            `psum`, `pmax`, `pmin` over `axis` of what such reductions result in.
        summands: arrays of the same shape but for their dtype, or `MatmulSummand`s (`dim` 0).
        tiles: arrays whose first dim goes with the first dim of the chunks; read in blocks.
        wholes: any other operands: scalars, biases. All of each is kept in fast memory.
        axis: one mesh axis, or several that make one ring, major to minor.
        gathered: for each result the dim along which it is gathered, or None to keep it as it is.
        dim: the dim along which the sums are scattered.
        mesh_axes: the names of all mesh axes, where the caller traces outside of a mesh.
        pieces: into how many parts a chunk is cut so that some travel while others are computed.
        interpret: None is the kernel on a TPU and its interpreter elsewhere; False compiles the
            kernel whatever the machine; or `pltpu.InterpretParams`, to look for races.

    Returns:
        The results, in the computation's order.

    Raises:
        ValueError: where a kernel cannot do this; the message names the equation and the way out.
    """
    ring = ring_along(axis)
    summands = [s if isinstance(s, MatmulSummand) else jnp.asarray(s) for s in summands]
    tiles, wholes = [jnp.asarray(t) for t in tiles], [jnp.asarray(w) for w in wholes]
    chunks = [_chunk(s, ring, dim) for s in summands]
    closed = _traced(computation, [*chunks, *tiles, *wholes])
    if ring.size == 1:
        sums = [_as_array(s) for s in summands]
        return _jax.jaxpr_as_fun(closed)(*sums, *tiles, *wholes)
    passes = passes_of(closed, len(summands) + len(tiles), ring.axis)
    fused = _fused(ring, passes, summands, wholes, dim, gathered, pieces)
    env = passes.before(wholes)
    return _call(fused, summands, tiles, env, barrier_of(ring.axis, mesh_axes), interpret)


def matmul_reduce_scatter(
    left: Any,
    right: Any,
    computation: Computation | None = None,
    tiles: Sequence[Any] = (),
    wholes: Sequence[Any] = (),
    *,
    axis: Axis,
    gathered: Sequence[int | None] | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    mesh_axes: Sequence[str] | None = None,
    pieces: int = 2,
    interpret: Interpret = None,
) -> Any:
    """`psum_scatter(left @ right, axis)` along dim 0, products and sums overlapped, in one kernel.

    Each device computes the chunk that the ring needs next while sums travel. With a `computation`
    of the chunk (and `tiles` and `wholes`) the same kernel goes on with it, and gathers what
    `gathered` says: then the list of its results is returned. Everything else as in
    `fused_all_reduce`.

    Args:
        left: (n * rows, inner), whose rows are all chunks.
        right: (inner, columns).
    """
    summand = MatmulSummand(left, right, precision, preferred_element_type)
    results = fused_all_reduce(
        computation or (lambda chunk: [chunk]),
        [summand],
        tiles,
        wholes,
        axis=axis,
        gathered=[None] if gathered is None else gathered,
        mesh_axes=mesh_axes,
        pieces=pieces,
        interpret=interpret,
    )
    return results if computation else results[0]


def _as_array(summand: Any) -> Any:
    if not isinstance(summand, MatmulSummand):
        return summand
    return jnp.dot(
        summand.left,
        summand.right,
        precision=summand.precision,
        preferred_element_type=summand.dtype,
    )


def _chunk(summand: Any, ring: Ring, dim: int) -> jax.ShapeDtypeStruct:
    """The shape of this device's part of a sum."""
    shape = list(summand.shape)
    if isinstance(summand, MatmulSummand) and dim:
        raise ValueError("a matrix product is scattered by its rows (dim=0): transpose it")
    if dim >= len(shape) or shape[dim] % ring.size:
        raise ValueError(
            f"dim {dim} of a summand of shape {tuple(shape)} is not cut by {ring.size} devices:"
            " pad it before the kernel"
        )
    shape[dim] //= ring.size
    return jax.ShapeDtypeStruct(tuple(shape), summand.dtype)


def _traced(computation: Computation, operands: Sequence[Any]) -> ClosedJaxpr:
    """The computation as a jaxpr, whose results are a list."""
    if isinstance(computation, ClosedJaxpr):
        return computation
    return jax.make_jaxpr(lambda *args: jax.tree.leaves(computation(*args)))(*operands)


def _fused(
    ring: Ring,
    passes: Passes,
    summands: Sequence[Any],
    wholes: Sequence[Any],
    dim: int,
    gathered: Sequence[int | None],
    pieces: int,
) -> Fused:
    """The kernel as data."""
    in_lanes = passes.blocks.in_lanes
    tiles = tuple(_tile(v.aval, in_lanes) for v in passes.tiles)
    cut = pieces_of(passes.blocks.block_rows, pieces)
    block_rows = _block_rows(passes, tiles, cut)
    exchanges = dry_run(passes, wholes, lambda i, rows: (rows, *tiles[i].held[1:]), block_rows)
    kept = jax.eval_shape(lambda w: _kept(passes, w), wholes)
    results = tuple(_result(passes, i, tiles) for i in range(len(passes.results)))
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
        return _tile(_chunk(summand, ring, dim), in_lanes, ring.size, dim)
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


def _result(passes: Passes, number: int, tiles: Sequence[Tile]) -> Tile | jax.ShapeDtypeStruct:
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
    return Tile(result.shape, result.dtype, result.in_lanes, ring.size, dim)


def _block_rows(passes: Passes, tiles: Sequence[Tile], pieces: Sequence[Piece]) -> int:
    """How many rows are computed on at a time: as many as fit in fast memory with their copies."""
    results = [v.aval for i, v in enumerate(passes.results) if passes.is_tile(i)]
    stored = [*tiles, *(_tile(a, passes.blocks.in_lanes) for a in results)]
    bytes_of_row = sum(2 * bytes_of(t.held[1:], t.stored.dtype) for t in stored)
    # What is computed on the way lies there too.
    steps = [e for e in passes.closed.jaxpr.eqns if passes.places[e.outvars[0]].is_blocked]
    widest = max(math.prod(t.held[1:]) for t in tiles)
    bytes_of_row += 4 * widest * min(len(steps), 8)
    rows = rows_of_block(pieces[0].rows, max(1, VMEM_BLOCK_BYTES // bytes_of_row))
    if not rows:
        raise ValueError(
            f"one block of rows of the tiles {[t.shape for t in tiles]} does not fit in fast"
            f" memory ({VMEM_BLOCK_BYTES >> 20} MiB): give vectors, or tiles of narrower rows"
        )
    return rows


def _call(
    fused: Fused,
    summands: Sequence[Any],
    tiles: Sequence[Any],
    env: Any,
    barrier: int,
    interpret: Interpret,
) -> list[Any]:
    """Store the operands as the kernel wants them, call it, restore the results."""
    given: list[list[Any]] = []
    for summand, known in zip(summands, fused.summands, strict=True):
        if isinstance(known, Product):
            given.append([known.left.store(summand.left), summand.right])
        else:
            given.append([known.store(summand)])
    own = [t.store(a) for t, a in zip(fused.tiles[len(summands) :], tiles, strict=True)]
    arrays = [env[v].array for v in fused.passes.kept()]
    kept = [a.astype(jnp.int32) if a.dtype == jnp.bool_ else a for a in arrays]
    results, _ = pl.pallas_call(
        fused.kernel,
        out_shape=fused.out_shape(),
        in_specs=fused.in_specs(),
        out_specs=fused.out_specs(),
        scratch_shapes=fused.scratch_shapes(),
        compiler_params=pltpu.CompilerParams(
            collective_id=barrier, vmem_limit_bytes=VMEM_LIMIT_BYTES, has_side_effects=True
        ),
        interpret=interpreter(interpret),
        name="fused_all_reduce",
    )(given, own, kept)
    return [_restored(fused, i, r) for i, r in enumerate(results)]


def _restored(fused: Fused, number: int, array: Any) -> Any:
    result = fused.gathered[number] or fused.results[number]
    if isinstance(result, Tile):
        return result.restore(array)
    aval = fused.passes.results[number].aval
    return array.reshape(aval.shape).astype(aval.dtype)


def interpreter(interpret: Interpret) -> Any:
    """What `pallas_call` takes: False compiles a kernel, parameters interpret it."""
    if interpret is None:
        interpret = jax.default_backend() != "tpu"
    return pltpu.InterpretParams() if interpret is True else interpret
