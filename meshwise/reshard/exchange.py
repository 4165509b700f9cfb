"""Run the rounds of an exchange on the local array.

Where a device reads and writes in a round are numbers that differ from device to device: a small
table, in which each looks up its own row. The program is the same for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    return [way.result for way in ways]


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
        rounds, source, target = parcel.rounds, parcel.source, parcel.target
        self.parcel, self.number = parcel, number
        self.element = parcel.array.shape[len(source.shape) :]
        self.array = _pad_to(parcel.array, _extents(rounds, source))
        extents = _extents(rounds, target)
        self.out = jnp.zeros((*extents, *self.element), self.array.dtype)
        self.last: jax.Array | None = None

    @property
    def result(self) -> jax.Array:
        """The target tile, when all rounds have been put."""
        return _cut_to(self.out, self.parcel.target.block)

    def piece(self, i: int) -> jax.Array:
        """What this device sends in a round, or keeps."""
        each, target = self.parcel.rounds[i], self.parcel.target
        shape = (*each.shape, *self.element)
        at = self._rows(_starts(each, self.parcel.source, True))
        if not each.is_sent:
            return _take(self.array, at, shape)
        if self.last is not None and _all_keep(each, self.parcel.rounds, target):
            return _take(self.out, self._rows(_starts(each, target, True)), shape)
        devices = len(target.starts)
        return _take_after(self.array, at, shape, self.last, self.number, devices)

    def put(self, i: int, piece: jax.Array) -> None:
        """Write what came in a round. In the first, what is written too much is written over."""
        each, target = self.parcel.rounds[i], self.parcel.target
        if each.is_sent:
            self.last = piece
        if i == 0 and piece.shape == self.out.shape:
            self.out = piece
            return
        at = self._rows(_starts(each, target, False))
        mask = _mask(each, target, self.number, piece.shape) if i else None
        if mask is not None:
            piece = lax.select(mask, piece, _take(self.out, at, piece.shape))
        self.out = lax.dynamic_update_slice(self.out, piece, at)

    def _rows(self, starts: np.ndarray) -> list[Any]:
        return _rows(starts, self.number) + [np.int32(0)] * len(self.element)


def _starts(each: Round, tiles: Tiles, is_sender: bool) -> np.ndarray:
    """Where each device's piece begins in its own tile: [devices, rank]; zero for no piece."""
    starts = np.zeros(tiles.lows.shape, np.int32)
    for piece in each.pieces:
        device = piece.sender if is_sender else piece.receiver
        starts[device] = np.array(piece.start) - tiles.lows[device]
    return starts


def _extents(rounds: Sequence[Round], tiles: Tiles) -> tuple[int, ...]:
    """Local sizes with room for every buffer: a piece may be smaller than its round's."""
    extents = np.array(tiles.block)
    for each in rounds:
        for piece in each.pieces:
            for device in (piece.sender, piece.receiver):
                if tiles.starts[device] is not None:
                    start = np.array(piece.start) - tiles.lows[device]
                    is_inside = (start >= 0) & (start < np.array(tiles.block))
                    if is_inside.all():
                        extents = np.maximum(extents, start + np.array(each.shape))
    return tuple(extents.tolist())


def _rows(starts: np.ndarray, number: Any) -> list[Any]:
    """The device's own row of a table; a number where all have the same."""
    found: list[Any] = []
    for column in starts.T:
        same = bool(np.all(column == column[0]))
        found.append(
            np.int32(column[0])
            if same
            else lax.dynamic_index_in_dim(jnp.asarray(column), number, keepdims=False)
        )
    return found


def _take(x: jax.Array, starts: list[Any], shape: tuple[int, ...]) -> jax.Array:
    return x if shape == x.shape else lax.dynamic_slice(x, starts, shape)


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


def _all_keep(each: Round, rounds: Sequence[Round], target: Tiles) -> bool:
    """Whether senders have what they send in their new tile, where they have put it first."""
    if rounds[0].is_sent:
        return False
    for piece in each.pieces:
        if target.starts[piece.sender] is None:
            return False
        start = np.array(piece.start)
        low, high = target.lows[piece.sender], target.highs[piece.sender]
        if (start < low).any() or (start + np.array(piece.size) > high).any():
            return False
    return True


def _mask(each: Round, target: Tiles, number: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """What to write of the buffer; None for all of it.

    A device that receives nothing writes nothing. Of a buffer that is larger than the piece in it
    the rest is left out, unless it falls on padding.
    """
    sizes = np.zeros(target.lows.shape, np.int32)
    for piece in each.pieces:
        device = piece.receiver
        reaches_end = np.array(piece.start) + piece.size == target.highs[device]
        sizes[device] = np.where(reaches_end, each.shape, piece.size)
    idle = [target.starts[d] is None for d in range(len(sizes))]
    sizes[idle] = each.shape
    mask = None
    receives = np.array(idle)
    receives[[piece.receiver for piece in each.pieces]] = True
    if not receives.all():
        mask = lax.broadcast(_rows(receives[:, None], number)[0], shape)
    for dim, size in enumerate(each.shape):
        counts = np.where(receives, sizes[:, dim], size).astype(np.int32)
        if (counts < size).any():
            own = _rows(counts[:, None], number)[0]
            inside = lax.lt(lax.broadcasted_iota(np.int32, shape, dim), own)
            mask = inside if mask is None else mask & inside
    return mask


def _pad_to(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    missing = [(0, n - size, 0) for n, size in zip(sizes, x.shape, strict=False)]
    missing += [(0, 0, 0)] * (x.ndim - len(missing))
    if not any(high for _, high, _ in missing):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), missing)


def _cut_to(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    limits = (*sizes, *x.shape[len(sizes) :])
    return x if x.shape == limits else lax.slice(x, [0] * x.ndim, limits)
