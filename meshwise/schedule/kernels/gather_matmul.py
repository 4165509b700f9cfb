"""`all_gather_matmul`: a gathered matrix times another, each chunk used while the next travels.

A device holds two slots: it multiplies (and sends on) what is in one while the next chunk arrives
in the other. A neighbour may write to a slot once its chunk is multiplied and sent on, which a
semaphore tells (`free`). Pieces of rows go round both ways.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwise._jax import pallas as pl
from meshwise._jax import pallas_tpu as pltpu
from meshwise.schedule.kernels.calling import VMEM_LIMIT_BYTES, Interpret, interpreter
from meshwise.schedule.kernels.products import MatmulBlocks, add_product, matmul_blocks
from meshwise.schedule.kernels.ring import (
    Axis,
    Piece,
    Ring,
    barrier_of,
    bytes_of,
    pieces_of,
    ring_along,
)
from meshwise.schedule.kernels.tiles import Tile


def all_gather_matmul(
    left: Any,
    right: Any,
    *,
    axis: Axis,
    gathered: tuple[str, int] = ("left", 0),
    precision: Any = None,
    preferred_element_type: Any = None,
    mesh_axes: Sequence[str] | None = None,
    pieces: int = 2,
    interpret: Interpret = None,
) -> jax.Array:
    """A matrix product of which one operand is gathered: `all_gather(left, axis, 0) @ right`.

    To be called inside `jax.shard_map`, on local arrays, by all devices along `axis`. Nothing is
    gathered whole: a device holds two chunks besides its own.

    Args:
        left: (rows, inner).
        right: (inner, columns).
        axis: one mesh axis, or several that make one ring, major to minor.
        gathered: which operand is this device's chunk, and along which of its dims: ("left", 0),
            whose chunks are rows of the result; ("left", 1) or ("right", 0), whose chunks are parts
            of what is added over: the other operand has all of it, and results are added up in the
            result's type, chunk by chunk.
        precision: as in `jax.numpy.dot`.
        preferred_element_type: the type of the result.
        mesh_axes: the names of all mesh axes, where the caller traces outside of a mesh.
        pieces: into how many parts a chunk is cut; every other one goes round the other way.
        interpret: as in `fused_all_reduce`.

    Raises:
        ValueError: where shapes do not fit; for ("right", 1) transpose both operands.
    """
    ring = ring_along(axis)
    left, right = jnp.asarray(left), jnp.asarray(right)
    kernel = _kernel_of(ring, left, right, gathered, precision, preferred_element_type, pieces)
    if ring.size == 1:
        return jnp.dot(left, right, precision=precision, preferred_element_type=kernel.out.dtype)
    travelling, staying = (left, right) if kernel.is_left else (right, left)
    out, _ = pl.pallas_call(
        kernel.run,
        out_shape=(kernel.out.stored, kernel.slots.stored),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_specs=(pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)),
        scratch_shapes=kernel.scratch_shapes(),
        compiler_params=pltpu.CompilerParams(
            collective_id=barrier_of(ring.axis, mesh_axes),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            has_side_effects=True,
        ),
        cost_estimate=kernel.cost(),
        interpret=interpreter(interpret),
        name="all_gather_matmul",
    )(travelling, staying)
    return kernel.out.restore(out)


@dataclass(frozen=True)
class _Kernel:
    """The kernel as data: what travels, and what it is multiplied with."""

    ring: Ring
    pieces: tuple[Piece, ...]
    is_left: bool
    dim: int
    slots: Tile
    out: Tile
    inner: int
    staying_bytes: int
    sums: Any
    blocks: MatmulBlocks
    precision: Any

    def scratch_shapes(self) -> list[Any]:
        """A block of sums; semaphores of copies sent and arrived, and of slots that are free."""
        copies, count = pltpu.SemaphoreType.DMA, len(self.pieces)
        return [
            pltpu.VMEM((self.blocks.rows, self.blocks.columns), self.sums),
            copies((count,)),
            copies((self.ring.size - 1, count)),
            pltpu.SemaphoreType.REGULAR((count,)),
        ]

    def cost(self) -> "pl.CostEstimate":
        """What the compiler is told of the kernel: the product, and each byte moved once."""
        chunk = bytes_of(self.slots.shape, self.slots.dtype)
        out, size = self.out.stored, self.ring.size
        return pl.CostEstimate(
            flops=2 * math.prod(out.shape) * self.inner,
            transcendentals=0,
            bytes_accessed=2 * size * chunk + self.staying_bytes + bytes_of(out.shape, out.dtype),
            remote_bytes_transferred=(size - 1) * chunk,
        )

    def run(self, *refs: Any) -> None:
        """The kernel, given references."""
        _Run(self, *refs).all()


@dataclass(frozen=True)
class _Run:
    """The kernel while it runs: its references."""

    kernel: _Kernel
    own: Any
    staying: Any
    out: Any
    slots: Any
    sums: Any
    sent: Any
    arrived: Any
    free: Any

    def all(self) -> None:
        """Send and multiply this device's own chunk, then every chunk that arrives."""
        kernel = self.kernel
        kernel.ring.meet_neighbours()
        for piece in kernel.pieces:
            self._copy(piece, 0, self._own(piece)).start()
        for piece in kernel.pieces:
            self._multiply(piece, 0, self._own(piece), is_first=piece.number == 0)
        for piece in kernel.pieces:
            self._copy(piece, 0).wait_send()
        lax.fori_loop(1, kernel.ring.size, lambda step, _: self._step(step), None)

    def _step(self, step: Any) -> None:
        kernel = self.kernel
        last_sent = kernel.ring.size - 2
        for piece in kernel.pieces:
            self._copy(piece, step - 1).wait_recv()

            @pl.when((step >= 2) & (step <= last_sent))
            def _(piece: Piece = piece) -> None:
                pl.semaphore_wait(self.free.at[piece.number], 1)

            @pl.when(step <= last_sent)
            def _(piece: Piece = piece) -> None:
                self._copy(piece, step, self._slot(piece, step - 1)).start()

        for piece in kernel.pieces:
            self._multiply(piece, step, self._slot(piece, step - 1))
        for piece in kernel.pieces:

            @pl.when(step <= last_sent)
            def _(piece: Piece = piece) -> None:
                self._copy(piece, step).wait_send()

            # The slot just used is the one that the neighbour writes to in its next step.
            @pl.when(step + 1 <= last_sent)
            def _(piece: Piece = piece) -> None:
                upstream = kernel.ring.device(-piece.direction)
                pl.semaphore_signal(self.free.at[piece.number], 1, device_id=upstream)

    def _own(self, piece: Piece) -> Any:
        return self.own.at[pl.ds(piece.start, piece.rows)]

    def _slot(self, piece: Piece, step: Any) -> Any:
        """The piece of the slot that is written to in a step."""
        return self.kernel.slots.part(self.slots, piece, lax.rem(step, 2))

    def _copy(self, piece: Piece, step: Any, source: Any = None) -> Any:
        """The copy of a step to the neighbour; for waiting, any source of its size will do."""
        slot = self._slot(piece, step)
        return pltpu.make_async_remote_copy(
            slot if source is None else source,
            slot,
            self.sent.at[piece.number],
            self.arrived.at[step, piece.number],
            device_id=self.kernel.ring.device(piece.direction),
        )

    def _multiply(self, piece: Piece, step: Any, chunk: Any, is_first: bool = False) -> None:
        """Multiply a piece of the chunk that is here in a step, into its part of the result."""
        kernel = self.kernel
        number = kernel.ring.position(-piece.direction * step)
        if kernel.is_left and kernel.dim == 0:
            self._add(chunk, self.staying, None, kernel.out.part(self.out, piece, number))
        elif kernel.is_left:
            inner = kernel.slots.shape[1]
            right = self.staying.at[pl.ds(pl.multiple_of(number * inner, inner), inner)]
            out = kernel.out.part(self.out, piece)
            self._add(chunk, right, None if _is_own(step) else out, out)
        else:
            inner = pl.multiple_of(number * kernel.slots.shape[0] + piece.start, piece.rows)
            left = self.staying.at[:, pl.ds(inner, piece.rows)]
            self._add(left, chunk, None if is_first else self.out, self.out)

    def _add(self, left: Any, right: Any, old: Any, out: Any) -> None:
        kernel = self.kernel
        add_product(left, right, old, out, self.sums, kernel.blocks, kernel.precision)


def _is_own(step: Any) -> bool:
    return isinstance(step, int) and step == 0


def _kernel_of(
    ring: Ring,
    left: Any,
    right: Any,
    gathered: tuple[str, int],
    precision: Any,
    preferred_element_type: Any,
    pieces: int,
) -> _Kernel:
    """The kernel for some operands; raises where their shapes do not fit."""
    side, dim = gathered
    if (side, dim) not in (("left", 0), ("left", 1), ("right", 0)):
        raise ValueError(
            f"gathered={gathered}: kernels gather ('left', 0), ('left', 1) or ('right', 0); for"
            " ('right', 1) transpose: (right.T @ left.T).T"
        )
    is_left = side == "left"
    grown, staying = (left, right) if is_left else (right, left)
    shape = [*grown.shape]
    shape[dim] *= ring.size
    whole_left, whole_right = (shape, right.shape) if is_left else (left.shape, shape)
    if len(whole_left) != 2 or len(whole_right) != 2 or whole_left[1] != whole_right[0]:
        raise ValueError(
            f"{left.shape} and {right.shape}, with {gathered} gathered from {ring.size} devices,"
            f" are {tuple(whole_left)} and {tuple(whole_right)}: no matrices to multiply. Reshape"
            " them before the kernel"
        )
    cut = pieces_of(grown.shape[0], pieces)
    dtype = preferred_element_type or jnp.promote_types(left.dtype, right.dtype)
    wide = jnp.promote_types(dtype, jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else "int32")
    rows, inner = (cut[0].rows, left.shape[1]) if is_left else (left.shape[0], cut[0].rows)
    by_rows = (side, dim) == ("left", 0)
    return _Kernel(
        ring=ring,
        pieces=cut,
        is_left=is_left,
        dim=dim,
        slots=Tile(tuple(grown.shape), grown.dtype, False, 2),
        out=Tile((left.shape[0], right.shape[1]), dtype, False, ring.size if by_rows else 0),
        inner=whole_left[1],
        staying_bytes=bytes_of(staying.shape, staying.dtype),
        sums=wide,
        blocks=matmul_blocks(rows, right.shape[1], inner),
        precision=precision,
    )
