"""Run the rounds of an exchange on the local array.

Where a device reads and writes in a round are numbers that differ from device to device: a small
table, in which each looks up its own row. The program is the same for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise.ir.mesh import Axes, Mesh
from meshwise.reshard.rounds import Round
from meshwise.reshard.tiles import Tiles


@dataclass(frozen=True, eq=False)
class Parcel:
    """A local array, and the rounds that bring it from its source tile to its target tile.

    Dims of the array beyond those of the tiles belong to the element.
    """

    array: jax.Array
    rounds: tuple[Round, ...]
    source: Tiles
    target: Tiles


def travel_key(rounds: Sequence[Round]) -> Any:
    """Equal for rounds in which the same devices send to the same: they can travel together."""
    return tuple([tuple(sorted((p.sender, p.receiver) for p in r.pieces)) for r in rounds])


def apply_rounds(parcels: Sequence[Parcel], axes: Axes, mesh: Mesh) -> list[jax.Array]:
    """Each parcel's target tile; devices are numbered over `axes`.

    Parcels are of one dtype and one `travel_key`. In each round their pieces travel end to end.
    """
    numbers = mesh.permute_numbers(axes)
    number = lax.axis_index(axes)
    ways = [_Way(parcel, number) for parcel in parcels]
    for i, each in enumerate(parcels[0].rounds):
        pieces = [way.piece(i) for way in ways]
        if each.is_sent:
            pairs = sorted((numbers[p.sender], numbers[p.receiver]) for p in each.pieces)
            pieces = _send(pieces, mesh.permute_order(axes), pairs)
        for way, piece in zip(ways, pieces, strict=True):
            way.put(i, piece)
    return [way.out for way in ways]


def _send(
    pieces: Sequence[jax.Array], axes: Axes, pairs: Sequence[tuple[int, int]]
) -> list[jax.Array]:
    """Every piece, in one `ppermute`."""
    if len(pieces) == 1:
        return [lax.ppermute(pieces[0], axes, pairs)]
    flat = lax.concatenate([lax.reshape(p, (p.size,)) for p in pieces], 0)
    flat = lax.ppermute(flat, axes, pairs)
    ends = np.cumsum([p.size for p in pieces]).tolist()
    return [
        lax.reshape(lax.slice(flat, (end - p.size,), (end,)), p.shape)
        for p, end in zip(pieces, ends, strict=True)
    ]


class _Way:
    """A parcel on its way: what is cut of the source tile, and the target tile so far."""

    def __init__(self, parcel: Parcel, number: Any):
        """Nothing is put yet."""
        source, target = parcel.source, parcel.target
        self.parcel, self.number = parcel, number
        self.element = parcel.array.shape[len(source.shape) :]
        self.places = [_places(each, source, target) for each in parcel.rounds]
        self.array = parcel.array
        self.out = jnp.zeros((*target.block, *self.element), self.array.dtype)
        self.last: jax.Array | None = None

    def piece(self, i: int) -> jax.Array:
        """What this device sends in a round, or keeps."""
        each, places = self.parcel.rounds[i], self.places[i]
        shape = (*each.shape, *self.element)
        at = self._rows(places.reads)
        if not each.is_sent:
            return _take(self.array, at, shape)
        held = self._held(i)
        if self.last is not None and held is not None:
            return _take(self.out, self._rows(held), shape)
        devices = len(self.parcel.target.starts)
        return _take_after(self.array, at, shape, self.last, self.number, devices)

    def put(self, i: int, piece: jax.Array) -> None:
        """Write what came in a round. In the first, what is written too much is written over."""
        each, places = self.parcel.rounds[i], self.places[i]
        if each.is_sent:
            self.last = piece
        piece = _shifted(piece, places.shifts, self.number)
        if i == 0 and piece.shape == self.out.shape:
            self.out = piece
            return
        at = self._rows(places.writes)
        mask = _mask(each, places, self.parcel.target, self.number, piece.shape) if i else None
        if mask is not None:
            piece = lax.select(mask, piece, _take(self.out, at, piece.shape))
        if piece.shape == self.out.shape:
            self.out = piece
            return
        self.out = lax.dynamic_update_slice(self.out, piece, at, allow_negative_indices=False)

    def _held(self, i: int) -> np.ndarray | None:
        """Where senders have what they send in their new tile; None unless all have put it there.

        Read from there, no piece is cut before the round before has been written.
        """
        rounds, target = self.parcel.rounds, self.parcel.target
        if rounds[0].is_sent:
            return None
        starts = np.zeros(target.lows.shape, np.int32)
        for piece, offset in zip(rounds[i].pieces, self.places[i].sent_offsets, strict=True):
            if target.starts[piece.sender] is None:
                return None
            start = np.array(piece.start)
            low, high = target.lows[piece.sender], target.highs[piece.sender]
            first = start - low - offset
            last = first + rounds[i].shape
            is_inside = (start >= low) & (start + piece.size <= high)
            if not (is_inside & (first >= 0) & (last <= self.out.shape[: len(first)])).all():
                return None
            starts[piece.sender] = first
        return starts

    def _rows(self, starts: np.ndarray) -> list[Any]:
        return _rows(starts, self.number) + [np.int32(0)] * len(self.element)


@dataclass(frozen=True, eq=False)
class _Places:
    """Where each device's buffer of a round begins in its source and in its target tile.

    Both are [devices, rank], zero for no piece. `sent_offsets` is where, in the buffer, each piece
    begins: a smaller piece than the buffer may begin later, so that the buffer ends with the tile.
    Where no place does for both tiles a receiver moves what is in the buffer, by `shifts`
    [devices, rank], before it is written; then pieces begin at `offsets`.
    """

    reads: np.ndarray
    writes: np.ndarray
    shifts: np.ndarray
    sent_offsets: list[np.ndarray]
    offsets: list[np.ndarray]


def _places(each: Round, source: Tiles, target: Tiles) -> _Places:
    reads = np.zeros(source.lows.shape, np.int32)
    writes, shifts = (np.zeros(target.lows.shape, np.int32) for _ in range(2))
    sent_offsets, offsets = [], []
    shape = np.array(each.shape, np.int64)
    last_read, last_write = np.array(source.block) - shape, np.array(target.block) - shape
    for piece in each.pieces:
        start = np.array(piece.start, np.int64)
        read = start - source.lows[piece.sender]
        write = start - target.lows[piece.receiver]
        over = np.maximum(read - last_read, write - last_write)
        offset = np.clip(over, 0, np.minimum(np.minimum(read, write), shape - piece.size))
        begin = np.minimum(read - offset, last_read)
        sent_offset = read - begin
        to = np.clip(write - sent_offset, 0, last_write)
        reads[piece.sender], writes[piece.receiver] = begin, to
        shifts[piece.receiver] = write - sent_offset - to
        sent_offsets.append(sent_offset)
        offsets.append(write - to)
    return _Places(reads, writes, shifts, sent_offsets, offsets)


def _shifted(x: jax.Array, shifts: np.ndarray, number: Any) -> jax.Array:
    """A buffer with its rows as far behind where they were as the device's table says."""
    for dim, column in enumerate(shifts.T):
        before, after = max(0, int(column.max())), max(0, -int(column.min()))
        if not (before or after):
            continue
        ends = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        padded = lax.pad(x, jnp.zeros((), x.dtype), ends)
        starts: list[Any] = [np.int32(0)] * x.ndim
        starts[dim] = _rows(before - column[:, None], number)[0]
        x = _slice(padded, starts, x.shape)
    return x


def _rows(starts: np.ndarray, number: Any) -> list[Any]:
    """The device's own row of a table; a number where all have the same."""
    found: list[Any] = []
    for column in starts.T:
        same = bool(np.all(column == column[0]))
        found.append(
            np.int32(column[0])
            if same
            else lax.reshape(_slice(np.ascontiguousarray(column), [number], (1,)), ())
        )
    return found


def _take(x: jax.Array, starts: list[Any], shape: tuple[int, ...]) -> jax.Array:
    return x if shape == x.shape else _slice(x, starts, shape)


def _slice(x: Any, starts: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    """A slice at a place that counts from the beginning, as all places here do."""
    return lax.dynamic_slice(x, starts, shape, allow_negative_indices=False)


def _take_after(
    x: jax.Array,
    starts: list[Any],
    shape: tuple[int, ...],
    last: jax.Array | None,
    number: Any,
    devices: int,
) -> jax.Array:
    """A piece that is not cut before the last round has ended, so that one is held at a time.

    XLA drops barriers before it orders instructions; then it cuts all pieces first and holds them
    together. What no device does, but XLA cannot know, makes a piece depend on the one before.
    """
    if last is None:
        return _take(x, starts, shape)
    never = lax.ge(number, np.int32(devices))
    if shape == x.shape:
        if last.shape != shape:
            return x
        return lax.select(lax.broadcast(never, shape), last, x)
    dim = next(d for d, (n, m) in enumerate(zip(shape, x.shape, strict=True)) if n < m)
    element = lax.reshape(lax.slice(last, [0] * last.ndim, [1] * last.ndim), ())
    delay = lax.ne(element, jnp.zeros((), last.dtype)) & never
    starts = list(starts)
    starts[dim] = starts[dim] + lax.convert_element_type(delay, np.int32)
    return _take(x, starts, shape)


def _mask(
    each: Round, places: _Places, target: Tiles, number: Any, shape: tuple[int, ...]
) -> jax.Array | None:
    """What to write of the buffer; None for all of it.

    A device that receives nothing writes nothing. Of a buffer that is larger than the piece in it
    the rest is left out, unless it falls on padding.
    """
    receives = np.array([start is None for start in target.starts])
    receives[[piece.receiver for piece in each.pieces]] = True
    firsts = np.zeros(target.lows.shape, np.int32)
    lasts = np.zeros(target.lows.shape, np.int32) + np.array(each.shape, np.int32)
    for piece, offset in zip(each.pieces, places.offsets, strict=True):
        device = piece.receiver
        end = np.array(piece.start) + piece.size
        firsts[device] = offset
        lasts[device] = np.where(end == target.highs[device], each.shape, offset + piece.size)
    masks = []
    if not receives.all():
        masks.append(lax.broadcast(_rows(receives[:, None], number)[0], shape))
    for dim, size in enumerate(each.shape):
        row = lax.broadcasted_iota(np.int32, shape, dim)
        if (firsts[:, dim] > 0).any():
            masks.append(lax.ge(row, _rows(firsts[:, dim, None], number)[0]))
        if (lasts[:, dim] < size).any():
            masks.append(lax.lt(row, _rows(lasts[:, dim, None], number)[0]))
    return reduce(lax.bitwise_and, masks) if masks else None
