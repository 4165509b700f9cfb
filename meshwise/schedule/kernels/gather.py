"""The second half of the ring: every device sends on what it has, until all have all chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from meshwise._jax import pallas_tpu as pltpu
from meshwise.schedule.kernels.ring import Piece, Ring
from meshwise.schedule.kernels.tiles import Tile


@dataclass(frozen=True)
class Gather:
    """Arrays of all chunks in which each device fills its own, then the ring the others.

    No device writes twice to the same place, so nothing needs to be free first.
    """

    ring: Ring
    pieces: Sequence[Piece]
    arrays: Sequence[Tile]
    refs: Sequence[Any]
    sent: Any
    arrived: Any

    def own(self, number: int, piece: Piece) -> Any:
        """Where this device writes its own chunk."""
        return self.arrays[number].part(self.refs[number], piece, self.ring.index())

    def start(self, piece: Piece) -> None:
        """Send a piece of this device's own chunks, which are written."""
        for number in range(len(self.arrays)):
            self._copy(number, piece, 0).start()

    def finish(self) -> None:
        """Send on what arrives, until all is here and all copies have left."""
        if not self.arrays:
            return
        if self.ring.size > 2:
            lax.fori_loop(1, self.ring.size - 1, lambda step, _: self._step(step), None)
        last = self.ring.size - 2
        for piece in self.pieces:
            for number in range(len(self.arrays)):
                self._copy(number, piece, last).wait_recv()
                self._copy(number, piece, last).wait_send()

    def _step(self, step: Any) -> None:
        for piece in self.pieces:
            for number in range(len(self.arrays)):
                self._copy(number, piece, step - 1).wait_recv()
                self._copy(number, piece, step - 1).wait_send()
                self._copy(number, piece, step).start()

    def _copy(self, number: int, piece: Piece, step: Any) -> Any:
        """The copy of a step: to the same place in the neighbour's array."""
        chunk = self.ring.position(-piece.direction * step)
        place = self.arrays[number].part(self.refs[number], piece, chunk)
        return pltpu.make_async_remote_copy(
            place,
            place,
            self.sent.at[number, piece.number],
            self.arrived.at[number, step, piece.number],
            device_id=self.ring.device(piece.direction),
        )


def scratch_of(count: int, pieces: Sequence[Piece], ring: Ring) -> list[Any]:
    """The semaphores of a `Gather` of some arrays: `sent`, `arrived`."""
    copies = pltpu.SemaphoreType.DMA
    return [
        copies((max(count, 1), len(pieces))),
        copies((max(count, 1), ring.size - 1, len(pieces))),
    ]
