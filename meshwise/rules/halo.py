"""Rows of a sharded dim that devices need of each other: halos, borders, shifts, reversals.

A `Fetch` says which rows each shard holds (`block` of them, the last ones perhaps fewer) and
which it needs: `length` rows from `starts[r]` on, some of which may lie outside the dim. Windows,
strides, dilations, pads, slices, concatenations, rolls and reshapes of sharded dims differ in
nothing but these numbers.

Rows travel by `ppermute`, a *piece* each, in which no shard sends or receives twice. Two ways to
make pieces are tried, and the one that sends less is taken: one piece for each distance between
sender and receiver (a window's halo, GSPMD arXiv 2105.04663 section 4.2), or, where the distance
grows along the mesh because shards of different sizes line up, few matchings of all that overlap.
How many there are depends on how many shards one overlaps, not on how many there are.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise.ir.collectives import CollectiveKind
from meshwise.ir.mesh import Axes, Mesh
from meshwise.rules.registry import Exchange, shard_index

# So many pieces of one operator are worth writing; where a shard needs rows of hundreds, a program
# would grow with the mesh.
MOST_PIECES = 16
# How many times as long as what a shard needs a row may be that it is cut from.
LONGER = 1.5


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows that `receiver` needs of `sender`, `round` shards on: `rows` from `start`, to `to`."""

    sender: int
    receiver: int
    start: int
    to: int
    rows: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Overlaps that travel together: no shard sends or receives twice.

    Each sender's piece is `rows` long, from row `starts[k]` on for the overlap `k`.
    """

    overlaps: tuple[Overlap, ...]
    rows: int
    starts: tuple[int, ...]

    @property
    def is_sent(self) -> bool:
        """Whether it travels, or is what shards keep."""
        return self.overlaps[0].sender != self.overlaps[0].receiver

    @property
    def places(self) -> tuple[int, ...]:
        """The rows at which it begins at a receiver: one for all, or as many as they differ in."""
        begins = (o.to - o.start + s for o, s in zip(self.overlaps, self.starts, strict=True))
        return tuple(sorted(set(begins)))


@dataclass(frozen=True)
class Fetch:
    """Rows of a dim that shards hold, and those they need.

    Where it `wraps`, rows before the first are the last ones, and `needed` says how many are.
    """

    size: int
    block: int
    starts: tuple[int, ...]
    length: int
    wraps: bool = False
    needed: tuple[int, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What is sent, and what each shard keeps, by the cheaper way."""
        return _pieces(self)

    def has_zeros_outside(self, size: int) -> bool:
        """Whether rows outside of the first `size` come as zeros, what who receives nothing has.

        So it is where pieces have places of their own, and none of them reaches outside: neither
        those that are sent nor those that are kept, which every shard lays in their place.
        """
        if self.wraps or not _tiles(self):
            return False
        everyone = range(len(self.starts))
        placed = (
            (self.starts[shard] + place, piece.rows)
            for piece in self.pieces
            for place in piece.places
            for shard in ((o.receiver for o in piece.overlaps) if piece.is_sent else everyone)
        )
        return all(first >= 0 and first + rows <= size for first, rows in placed)

    def exchange(self, row_bytes: float) -> Exchange:
        """The collectives it takes, for rows of so many bytes."""
        sent = [piece.rows for piece in self.pieces if piece.is_sent]
        return Exchange(CollectiveKind.PERMUTE, sum(sent) * row_bytes, len(sent))


@lru_cache(maxsize=1 << 12)
def realignment(size: int, shards: int, before: int, after: int) -> Fetch:
    """The rows of a dim whose shards change from blocks of `before` to blocks of `after` rows."""
    return Fetch(size, before, tuple(shard * after for shard in range(shards)), after)


@lru_cache(maxsize=1 << 12)
def _pieces(fetch: Fetch) -> tuple[Piece, ...]:
    overlaps = _overlaps(fetch)
    ways = (
        _grouped(overlaps, [o.receiver - o.sender - o.round for o in overlaps], fetch.block),
        _grouped(overlaps, _matchings(overlaps), fetch.block),
    )
    # A piece more is worth a row less.
    return min(ways, key=lambda pieces: sum(p.rows + 1 for p in pieces if p.is_sent))


def _overlaps(fetch: Fetch) -> list[Overlap]:
    """Every pair of shards that share rows."""
    found: list[Overlap] = []
    for receiver, first in enumerate(fetch.starts):
        row, end = max(first, 0), min(first + fetch.length, fetch.size)
        if fetch.wraps:
            row, end = first, first + fetch.needed[receiver]
        while row < end:
            turns, at = divmod(row, fetch.size)
            sender, start = divmod(at, fetch.block)
            rows = min(end - row, fetch.block - start, fetch.size - at)
            on = turns * len(fetch.starts)
            found.append(Overlap(sender, receiver, start, row - first, rows, on))
            row += rows
    return found


def _matchings(overlaps: Sequence[Overlap]) -> list[int]:
    """A number for each overlap: the first that neither its sender nor its receiver has yet."""
    sends: dict[int, set[int]] = defaultdict(set)
    receives: dict[int, set[int]] = defaultdict(set)
    numbers = []
    for overlap in overlaps:
        sent, received = sends[overlap.sender], receives[overlap.receiver]
        number = next(k for k in count() if k not in sent and k not in received)
        sent.add(number)
        received.add(number)
        numbers.append(number)
    return numbers


def _grouped(overlaps: Sequence[Overlap], colours: Sequence[int], block: int) -> tuple[Piece, ...]:
    """A piece for each colour; what shards keep of their own is a piece apart."""
    groups: dict[tuple[int, bool], list[Overlap]] = defaultdict(list)
    for overlap, colour in zip(overlaps, colours, strict=True):
        groups[colour, overlap.sender == overlap.receiver].append(overlap)
    return tuple(_piece(group, block) for group in groups.values())


def _piece(group: Sequence[Overlap], block: int) -> Piece:
    if len({o.to - o.start for o in group}) > 1:
        rows = max(o.rows for o in group)
        # A slice is kept inside the sender's rows.
        return Piece(tuple(group), rows, tuple(min(o.start, block - rows) for o in group))
    first = min(o.start for o in group)
    rows = max(o.start + o.rows for o in group) - first
    return Piece(tuple(group), rows, (first,) * len(group))


def fetch_rows(x: Any, dim: int, axes: Axes, mesh: Mesh, fetch: Fetch) -> Any:
    """The rows a device needs, `fetch.length` of them, from the local array `x` of its own.

    Rows outside the dim are undefined: overwrite them with `mask_rows` where they are read.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = fetch_rows(jax.random.key_data(x), dim, axes, mesh, fetch)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not fetch.pieces or 0 in x.shape:
        shape = (*x.shape[:dim], fetch.length, *x.shape[dim + 1 :])
        return lax.full(shape, 0, x.dtype)
    if _tiles(fetch):
        return _laid_end_to_end(x, dim, axes, mesh, fetch)
    row = _row(fetch)
    if row is not None:
        arrived = {p: _arrived(x, dim, axes, mesh, p) if p.is_sent else x for p in fetch.pieces}
        parts = [arrived[piece] for piece in row.pieces]
        joined = parts[0] if len(parts) == 1 else lax.concatenate(parts, dim)
        return _cut(joined, dim, fetch.length, row.starts, axes, mesh)
    return _placed_by_number(x, dim, axes, mesh, fetch)


def turn_blocks(x: Any, axes: Axes, mesh: Mesh) -> Any:
    """The local array of the device as far from the end of some axes as this one from their start.

    Whole blocks of reversed dims change places so, of several dims in one step.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = turn_blocks(jax.random.key_data(x), axes, mesh)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    number = mesh.permute_numbers(axes)
    pairs = list(zip(number, reversed(number), strict=True))
    return lax.ppermute(x, mesh.permute_order(axes), pairs)


def fetch_filled(
    x: Any, dim: int, axes: Axes, mesh: Mesh, fetch: Fetch, size: int, fill: Any
) -> Any:
    """The rows a device needs; `fill` for those outside of the first `size` rows of the dim."""
    rows = fetch_rows(x, dim, axes, mesh, fetch)
    if min(fetch.starts) >= 0 and max(fetch.starts) + fetch.length <= size:
        return rows
    if fetch.has_zeros_outside(size) and _is_zero(fill):
        return rows
    return mask_rows(rows, dim, shard_entry(fetch.starts, axes, mesh), size, fill)


def _is_zero(fill: Any) -> bool:
    return not isinstance(fill, jax.Array) and not any(np.asarray(fill).tobytes())


def mask_rows(x: Any, dim: int, first: Any, size: int, value: Any) -> Any:
    """Overwrite what lies outside a dim of `size` rows; `x` begins with row number `first`."""
    row = lax.add(lax.broadcasted_iota(np.int32, x.shape, dim), lax.full(x.shape, first, np.int32))
    after, before = lax.full_like(row, -1), lax.full_like(row, size)
    inside = lax.bitwise_and(lax.gt(row, after), lax.lt(row, before))
    return lax.select(inside, x, lax.full_like(x, value))


def take_rows(x: Any, rows: Any, dim: int) -> Any:
    """Rows of a local dim by number; numbers outside are brought inside."""
    others = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.GatherDimensionNumbers(others, (dim,), (dim,))
    sizes = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    index = lax.broadcast_in_dim(rows, (*rows.shape, 1), (0,))
    return lax.gather(x, index, numbers, sizes, mode=lax.GatherScatterMode.CLIP)


def shard_entry(table: Sequence[int], axes: Axes, mesh: Mesh) -> Any:
    """The entry of a table that belongs to this device's shard (int32 scalar)."""
    if len(set(table)) == 1:
        return np.int32(table[0])
    numbers = np.asarray(table, np.int32)
    index = shard_index(axes, mesh)
    return lax.dynamic_slice(numbers, (index,), (1,), allow_negative_indices=False).reshape(())


def _tiles(fetch: Fetch) -> bool:
    """Whether every piece has places of its own, the same for all receivers, and not too many.

    So it is of a window's halo, also between two devices that send each other one border: it
    stands before and behind the rows that each has, and one of the two lies outside the dim.
    """
    placed = _placed(fetch)
    if len(placed) > MOST_PIECES:
        return False
    ends = [0, *(begin + piece.rows for begin, piece in placed)]
    begins = [*(begin for begin, _ in placed), fetch.length]
    return all(end <= begin for end, begin in zip(ends, begins, strict=True))


def _placed(fetch: Fetch) -> list[tuple[int, Piece]]:
    """The pieces in order of the rows at which they begin, each as often as it has places."""
    placed = [(place, piece) for piece in fetch.pieces for place in piece.places]
    return sorted(placed, key=lambda each: each[0])


def _laid_end_to_end(x: Any, dim: int, axes: Axes, mesh: Mesh, fetch: Fetch) -> Any:
    arrived = {piece: _arrived(x, dim, axes, mesh, piece) for piece in fetch.pieces}
    parts: list[Any] = []
    at = 0
    for place, piece in _placed(fetch):
        parts += [*_nothing(x, dim, place - at), arrived[piece]]
        at = place + piece.rows
    parts += _nothing(x, dim, fetch.length - at)
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, dim)


def _nothing(x: Any, dim: int, rows: int) -> list[Any]:
    return [lax.full((*x.shape[:dim], rows, *x.shape[dim + 1 :]), 0, x.dtype)] if rows else []


def _arrived(x: Any, dim: int, axes: Axes, mesh: Mesh, piece: Piece) -> Any:
    """A piece's rows of the local array `x`, sent where they are needed."""
    if len(set(piece.starts)) == 1:
        part = lax.slice_in_dim(x, piece.starts[0], piece.starts[0] + piece.rows, axis=dim)
    else:
        starts = [0] * mesh.size(axes)
        for o, start in zip(piece.overlaps, piece.starts, strict=True):
            starts[o.sender] = start
        first = shard_entry(starts, axes, mesh)
        part = lax.dynamic_slice_in_dim(x, first, piece.rows, dim, allow_negative_indices=False)
    if not piece.is_sent:
        return part
    number = mesh.permute_numbers(axes)
    pairs = [(number[o.sender], number[o.receiver]) for o in piece.overlaps]
    return lax.ppermute(part, mesh.permute_order(axes), pairs)


@dataclass(frozen=True, slots=True)
class _Row:
    """Pieces laid end to end, and from where on each shard finds what it needs, all in a row.

    What devices send each other stands twice: before the rows of one and behind those of the other.
    """

    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def _row(fetch: Fetch) -> _Row | None:
    """The row that has what each shard needs in order, unless it is much longer than that.

    So it is where blocks change their sizes a little: rows cut off at the front of a dim, or added.
    """
    if fetch.wraps:
        return None
    end, begins = 0, defaultdict[int, set[int]](set)
    order = sorted(_sides(fetch.pieces), key=lambda each: each[1])
    for piece, side in order:
        for o, start in zip(piece.overlaps, piece.starts, strict=True):
            if np.sign(o.sender - o.receiver) == np.sign(side):
                first = o.start - start if piece.is_sent else o.start
                begins[o.receiver].add(end + first - o.to)
        end += piece.rows if piece.is_sent else fetch.block
    starts = [min(begins[shard], default=0) for shard in range(len(fetch.starts))]
    padded = max(end, *(s + fetch.length for s in starts)) - min(0, *starts)
    if any(len(each) > 1 for each in begins.values()) or padded > LONGER * fetch.length:
        return None
    return _Row(tuple(piece for piece, _ in order), tuple(starts))


def _sides(pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """Each piece once a side of its receivers, with how far that is at least; 0 if it is kept."""
    away: dict[tuple[Piece, float], list[int]] = defaultdict(list)
    for piece in pieces:
        for o in piece.overlaps:
            away[piece, np.sign(o.sender - o.receiver)].append(o.sender - o.receiver)
    return [(piece, min(distances)) for (piece, _), distances in away.items()]


def _placed_by_number(x: Any, dim: int, axes: Axes, mesh: Mesh, fetch: Fetch) -> Any:
    """Each piece's rows brought to where this device needs them, and chosen among the others'.

    Rows of one piece are brought at a time: laid end to end the pieces would take memory of their
    own.
    """
    shards = len(fetch.starts)
    found = None
    for piece in fetch.pieces:
        shifts, to, ends = ([0] * shards for _ in range(3))
        for o, start in zip(piece.overlaps, piece.starts, strict=True):
            shifts[o.receiver] = o.start - o.to - (start if piece.is_sent else 0)
            to[o.receiver], ends[o.receiver] = o.to, o.to + o.rows
        part = _arrived(x, dim, axes, mesh, piece) if piece.is_sent else x
        part = _moved(part, dim, fetch.length, shifts, axes, mesh)
        if found is None:
            found = part
            continue
        rows = lax.iota(np.int32, fetch.length)
        first, end = (lax.full_like(rows, shard_entry(table, axes, mesh)) for table in (to, ends))
        mine = lax.bitwise_and(lax.ge(rows, first), lax.lt(rows, end))
        found = lax.select(lax.broadcast_in_dim(mine, part.shape, (dim,)), part, found)
    return found


def _moved(x: Any, dim: int, length: int, shifts: Sequence[int], axes: Axes, mesh: Mesh) -> Any:
    """So many rows from the place that each shard's shift tells; those outside are undefined.

    They are gathered by number: pads would take memory of their own where several kernels read
    what is fetched. Of the last dim that is number by number, and takes four times as long as a
    slice of what is padded.
    """
    if dim == x.ndim - 1:
        return _cut(x, dim, length, shifts, axes, mesh)
    rows = lax.iota(np.int32, length)
    return take_rows(x, lax.add(rows, lax.full_like(rows, shard_entry(shifts, axes, mesh))), dim)


def _cut(x: Any, dim: int, length: int, starts: Sequence[int], axes: Axes, mesh: Mesh) -> Any:
    """So many rows from each shard's start on, which may lie outside; those are undefined."""
    before, after = max(0, -min(starts)), max(0, max(starts) + length - x.shape[dim])
    if before or after:
        padding = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        x = lax.pad(x, np.zeros((), x.dtype), padding)
    start = shard_entry([before + first for first in starts], axes, mesh)
    return lax.dynamic_slice_in_dim(x, start, length, dim, allow_negative_indices=False)
