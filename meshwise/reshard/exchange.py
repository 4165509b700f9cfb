"""Run the rounds of an exchange on the local array.

Where a device reads and writes in a round are numbers that differ from device to device: a small
table, in which each looks up its own row. The program is the same for all of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise.ir.mesh import Axes, Mesh
from meshwise.reshard.rounds import Round
from meshwise.reshard.tiles import Tiles


def apply_rounds(
    x: jax.Array, rounds: Sequence[Round], source: Tiles, target: Tiles, axes: Axes, mesh: Mesh
) -> jax.Array:
    """The device's target tile from its source tile; devices are numbered over `axes`.

    Dims of `x` beyond those of the tiles belong to the element.
    """
    element = x.shape[len(source.shape) :]
    numbers = mesh.permute_numbers(axes)
    number = lax.axis_index(axes)
    extents = _extents(rounds, target)
    x = _pad_to(x, _extents(rounds, source))
    out = jnp.zeros((*extents, *element), x.dtype)
    last = None
    for i, each in enumerate(rounds):
        reads, writes = _starts(each, source, True), _starts(each, target, False)
        shape = (*each.shape, *element)
        if not each.is_sent:
            piece = _take(x, _rows(reads, number, x), shape)
        else:
            if last is not None and _all_keep(each, rounds, target):
                held = _rows(_starts(each, target, True), number, x)
                piece = _take(out, held, shape)
            else:
                piece = _take_after(x, _rows(reads, number, x), shape, last, number, len(numbers))
            pairs = sorted((numbers[p.sender], numbers[p.receiver]) for p in each.pieces)
            piece = last = lax.ppermute(piece, mesh.permute_order(axes), pairs)
        if i == 0 and shape == out.shape:
            out = piece
            continue
        at = _rows(writes, number, x)
        if i > 0:
            mask = _mask(each, target, number, shape)
            if mask is not None:
                piece = lax.select(mask, piece, _take(out, at, shape))
        out = lax.dynamic_update_slice(out, piece, at)
    return _cut_to(out, target.block)


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


def _rows(starts: np.ndarray, number: Any, x: jax.Array) -> list[Any]:
    """The device's own row of a table, as start indices of `x`."""
    found: list[Any] = []
    for column in starts.T:
        same = bool(np.all(column == column[0]))
        found.append(
            np.int32(column[0])
            if same
            else lax.dynamic_index_in_dim(jnp.asarray(column), number, keepdims=False)
        )
    return found + [np.int32(0)] * (x.ndim - starts.shape[1])


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
    receives = np.all(sizes > 0, axis=-1)
    if not receives.all():
        mask = lax.broadcast(_rows(receives[:, None], number, jnp.zeros((0,)))[0], shape)
    for dim, size in enumerate(each.shape):
        counts = np.where(receives, sizes[:, dim], size).astype(np.int32)
        if (counts < size).any():
            own = _rows(counts[:, None], number, jnp.zeros((0,)))[0]
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
