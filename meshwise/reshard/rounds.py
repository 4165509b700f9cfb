"""Straight from those who hold it: any tiles to any other tiles, in rounds of `ppermute`.

Each device cuts its new tile where the old tiles end. It holds some of these *pieces* already and
gets every other from a device that holds it. A *round* is one `ppermute`, in which no device sends
or receives twice. So a device receives just the bytes of its new tile that it does not hold yet,
which is the least there is, and nothing on the way is larger than a tile.

The pieces that are left make a bipartite graph of senders and receivers. Its edges fall into as
many matchings as its largest degree (König 1916), so there are as many rounds as the busiest
device has pieces. Each matching is the heaviest there is, which brings large pieces together: a
round takes as long as its largest piece.

Neither a mesh nor an even size is asked for: tiles of different meshes over the same devices, over
more or over fewer, are tiles too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import scipy

from meshwise.reshard.tiles import Tiles

# A program grows with its rounds.
MOST_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a device gets from another, or keeps: its first index and its size."""

    sender: int
    receiver: int
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Pieces that travel together, each in a buffer of `shape`; or those that devices keep."""

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]

    @property
    def is_sent(self) -> bool:
        """Whether any piece travels."""
        return any(piece.sender != piece.receiver for piece in self.pieces)


@lru_cache(maxsize=1 << 13)
def plan_rounds(source: Tiles, target: Tiles, most: int = MOST_ROUNDS) -> tuple[Round, ...] | None:
    """Rounds that bring every device its target tile; None where they would be more than `most`.

    What devices keep comes first, in a round of its own that is not sent. Where the busiest
    device keeps nothing it travels with the others instead, from a device to itself.

    >>> halves, quarters = Tiles((8,), (4,), ((0,), (4,))), Tiles((8,), (8,), ((0,), (0,)))
    >>> [(r.is_sent, r.shape, len(r.pieces)) for r in plan_rounds(halves, quarters)]
    [(False, (4,), 2), (True, (4,), 2)]
    """
    kept, missing = _overlaps(source, target)
    alike = len({size for *_, size in (*kept, *missing)}) == 1
    ways = [
        tuple(map(_round, _matchings(sent, len(source.starts))))
        for sent in (_with_senders(source, missing, by_bytes) for by_bytes in {False, not alike})
        if _busiest(sent) <= most
    ]
    if not ways:
        return None
    sent = min(ways, key=lambda rounds: sum(prod(each.shape) for each in rounds))
    held = [Piece(r, r, start, size) for _, r, start, size in kept]
    some_keep_none = len({r for _, r, _, _ in kept}) < len({r for _, r, _, _ in kept + missing})
    if alike and some_keep_none:
        together = _with_senders(source, missing, False, held)
        if _busiest(together) <= len(sent):
            return tuple(map(_round, _matchings(together, len(source.starts))))
    return (_round(held), *sent) if held else sent


_Need = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def _overlaps(source: Tiles, target: Tiles) -> tuple[list[_Need], list[_Need]]:
    """Boxes of each device's new tile by the old tile they are in: those it holds, and the others.

    A box is (the tile's first holder or, where it holds the tile, the device itself; the device;
    first index; size).
    """
    lows = np.maximum(source.lows[:, None], target.lows[None])
    sizes = np.minimum(source.highs[:, None], target.highs[None]) - lows
    holds, wants = (np.array([s is not None for s in t.starts]) for t in (source, target))
    meets = np.all(sizes > 0, axis=-1) & holds[:, None] & wants[None]
    tile_of = _tile_numbers(source)
    first_holders = [tile_of.index(tile) for tile in sorted(set(tile_of))]
    kept: list[_Need] = []
    missing: list[_Need] = []
    for receiver in range(len(target.starts)):
        for holder in first_holders:
            if not meets[holder, receiver]:
                continue
            start, size = lows[holder, receiver].tolist(), sizes[holder, receiver].tolist()
            is_own = tile_of[holder] == tile_of[receiver]
            need = (receiver if is_own else holder, receiver, tuple(start), tuple(size))
            (kept if is_own else missing).append(need)
    return kept, missing


def _tile_numbers(tiles: Tiles) -> list[int]:
    """Equal for devices that hold the same tile."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(start, len(numbers)) for start in tiles.starts]


def _with_senders(
    source: Tiles, missing: Sequence[_Need], by_bytes: bool, held: Sequence[Piece] = ()
) -> list[Piece]:
    """Pieces with their senders: the least busy of those that hold the tile, near ones first.

    Busy is who sends many pieces, or many bytes; then large pieces are given out first.
    """
    tile_of = _tile_numbers(source)
    holders: dict[int, list[int]] = {}
    for device, tile in enumerate(tile_of):
        holders.setdefault(tile, []).append(device)
    pieces = list(held)
    load = [0] * len(tile_of)
    for piece in held:
        load[piece.sender] += 1
    if by_bytes:
        missing = sorted(missing, key=lambda need: -prod(need[3]))
    for holder, receiver, start, size in missing:
        able = holders[tile_of[holder]]
        sender = min(able, key=lambda d: (load[d], abs(d - receiver)))
        load[sender] += prod(size) if by_bytes else 1
        pieces.append(Piece(sender, receiver, start, size))
    return pieces


def _busiest(pieces: Sequence[Piece]) -> int:
    """The most pieces that a device sends or receives."""
    ends = [[p.sender for p in pieces], [p.receiver for p in pieces]]
    return max((int(np.bincount(end).max()) for end in ends if end), default=0)


def _matchings(pieces: Sequence[Piece], devices: int) -> list[list[Piece]]:
    """Pieces in as few matchings as there can be, the heaviest first.

    Senders and receivers with fewer pieces than the busiest are filled up with empty ones. Then
    every one has equally many, and what is left after a perfect matching has one fewer.
    """
    degree = _busiest(pieces)
    if degree == 1:
        return [list(pieces)]
    piece_of = {(p.sender, p.receiver): p for p in pieces}
    left = np.zeros((devices, devices), np.int64)
    for pair in piece_of:
        left[pair] = 1
    empty = _fill(degree - left.sum(1), degree - left.sum(0))
    weights = np.zeros((devices, devices))
    for pair, piece in piece_of.items():
        weights[pair] = prod(piece.size)
    forbidden = -1.0 - weights.sum()
    found = []
    for _ in range(degree):
        priced = np.where(left > 0, weights, np.where(empty > 0, 0.0, forbidden))
        senders, receivers = scipy.optimize.linear_sum_assignment(priced, maximize=True)
        matching = []
        for pair in zip(senders.tolist(), receivers.tolist(), strict=True):
            if left[pair]:
                left[pair] = 0
                matching.append(piece_of[pair])
            else:
                empty[pair] -= 1
        found.append(matching)
    return sorted(found, key=lambda m: -max(prod(p.size) for p in m))


def _fill(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """A matrix of whole numbers with these sums."""
    filled = np.zeros((len(rows), len(columns)), np.int64)
    rows, columns = rows.copy(), columns.copy()
    row = column = 0
    while row < len(rows) and column < len(columns):
        count = min(rows[row], columns[column])
        filled[row, column] += count
        rows[row] -= count
        columns[column] -= count
        if rows[row]:
            column += 1
        else:
            row += 1
    return filled


def _round(pieces: Sequence[Piece]) -> Round:
    shape = np.array([piece.size for piece in pieces]).max(axis=0)
    return Round(tuple(pieces), tuple(shape.tolist()))
