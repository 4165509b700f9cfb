"""The first half of the ring: every device ends with the sum of one chunk, its own.

A sum travels round the ring and each device adds its term: chunk c sets out from the device after
c's and arrives, all but c's own term added, at c's. A device holds two slots: it adds to one while
the next sum arrives in the other. A neighbour may write to a slot once what was in it has left,
which a semaphore tells (`free`). Pieces go round independently, half of them each way, so that
some travel while others are added to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshwise._jax import pallas as pl
from meshwise._jax import pallas_tpu as pltpu
from meshwise.schedule.kernels.pipelines import pipeline
from meshwise.schedule.kernels.products import MatmulBlocks, add_product
from meshwise.schedule.kernels.ring import Piece, Ring
from meshwise.schedule.kernels.tiles import Tile


@dataclass(frozen=True)
class ArrayTerm:
    """This device's term of a sum, an array of all chunks."""

    ref: Any
    array: Tile

    def set_out(self, piece: Piece, chunk: Any, slot: Any) -> Any:
        """Where the term of a chunk lies, to be sent."""
        return self.array.part(self.ref, piece, chunk)

    def add(self, piece: Piece, chunk: Any, slot: Any, rows: int) -> None:
        """Add the term of a chunk to the sum in a slot."""

        def body(old: Any, term: Any, new: Any) -> None:
            new[...] = add(old[...], term[...])

        spec = self.array.spec(rows)
        refs = [slot, self.array.part(self.ref, piece, chunk), slot]
        pipeline(body, (piece.rows // rows,), [spec, spec], [spec], refs)

    def rest(self, piece: Piece, chunk: Any) -> list[Any]:
        """What is still to be added to the last slot, by whoever reads it."""
        return [self.array.part(self.ref, piece, chunk)]


@dataclass(frozen=True)
class ProductTerm:
    """This device's term of a sum, a matrix product computed chunk by chunk."""

    left: Any
    left_array: Tile
    right: Any
    sums: Any
    blocks: MatmulBlocks
    precision: Any

    def set_out(self, piece: Piece, chunk: Any, slot: Any) -> Any:
        """Compute the term of a chunk into a slot, to be sent."""
        self._multiply(piece, chunk, None, slot)
        return slot

    def add(self, piece: Piece, chunk: Any, slot: Any, rows: int) -> None:
        """Add the term of a chunk to the sum in a slot."""
        self._multiply(piece, chunk, slot, slot)

    def rest(self, piece: Piece, chunk: Any) -> list[Any]:
        """Nothing: the last slot holds the whole sum."""
        return []

    def _multiply(self, piece: Piece, chunk: Any, old: Any, new: Any) -> None:
        left = self.left_array.part(self.left, piece, chunk)
        add_product(left, self.right, old, new, self.sums, self.blocks, self.precision)


def add(left: Any, right: Any) -> Any:
    """A sum in the type of its terms, rounded once."""
    if left.dtype.itemsize >= 4:
        return left + right
    wide = "int32" if jnp.issubdtype(left.dtype, jnp.integer) else "float32"
    return (left.astype(wide) + right.astype(wide)).astype(left.dtype)


Term = ArrayTerm | ProductTerm


@dataclass(frozen=True)
class Scatter:
    """The ring's first half, for several sums at once: references, in the order of the sums."""

    ring: Ring
    pieces: Sequence[Piece]
    block_rows: int
    terms: Sequence[Term]
    slots: Sequence[Tile]
    refs: Sequence[Any]
    sent: Any
    arrived: Any
    free: Any

    def run(self) -> None:
        """All but the arrival of the last sums, and what is then still to be added."""
        self._start()
        if self.ring.size > 2:
            lax.fori_loop(1, self.ring.size - 1, lambda step, _: self._step(step), None)

    def wait(self, piece: Piece) -> None:
        """Wait for a piece of the last sums, and for this device's last copy of it to be gone."""
        last = self.ring.size - 2
        for number, term in enumerate(self.terms):
            self._copy(number, piece, last).wait_recv()
            self._copy(number, piece, last).wait_send()
            if isinstance(term, ProductTerm):
                slot = self.slot(number, piece, last)
                term.add(piece, self.ring.index(), slot, self.block_rows)

    def result(self, number: int, piece: Piece) -> list[Any]:
        """Arrays of which the sum of this device's chunk is the sum."""
        slot = self.slot(number, piece, self.ring.size - 2)
        return [slot, *self.terms[number].rest(piece, self.ring.index())]

    def slot(self, number: int, piece: Piece, step: Any) -> Any:
        """The piece of a slot that is written to in a step."""
        return self.slots[number].part(self.refs[number], piece, lax.rem(step, 2))

    def _start(self) -> None:
        for piece in self.pieces:
            for number, term in enumerate(self.terms):
                chunk = self.ring.position(-piece.direction)
                source = term.set_out(piece, chunk, self.slot(number, piece, 1))
                self._copy(number, piece, 0, source).start()

    def _step(self, step: Any) -> None:
        """Add to the sums that arrived in the step before, and send them on."""
        for piece in self.pieces:
            upstream = self.ring.device(-piece.direction)
            for number, term in enumerate(self.terms):
                # What left in the step before lay where the neighbour writes in this one.
                free = self.free.at[number, piece.number]
                self._copy(number, piece, step - 1).wait_send()
                pl.semaphore_signal(free, 1, device_id=upstream)
                self._copy(number, piece, step - 1).wait_recv()
                chunk = self.ring.position(-piece.direction * (step + 1))
                slot = self.slot(number, piece, step - 1)
                term.add(piece, chunk, slot, self.block_rows)
                pl.semaphore_wait(free, 1)
                self._copy(number, piece, step, slot).start()

    def _copy(self, number: int, piece: Piece, step: Any, source: Any = None) -> Any:
        """The copy of a step to the neighbour; for waiting, any source of its size will do."""
        slot = self.slot(number, piece, step)
        return pltpu.make_async_remote_copy(
            slot if source is None else source,
            slot,
            self.sent.at[number, piece.number],
            self.arrived.at[number, step, piece.number],
            device_id=self.ring.device(piece.direction),
        )


def scratch_of(count: int, pieces: Sequence[Piece], ring: Ring) -> list[Any]:
    """The semaphores of a `Scatter` of some sums: `sent`, `arrived`, `free`."""
    copies = pltpu.SemaphoreType.DMA
    return [
        copies((count, len(pieces))),
        copies((count, ring.size - 1, len(pieces))),
        pltpu.SemaphoreType.REGULAR((count, len(pieces))),
    ]
