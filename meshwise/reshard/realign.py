"""Rows of an uneven dim that must change shards when the size of its shards changes.

17 rows over 2 shards in blocks of 12 are rows 0-11 and 12-16; in blocks of 9 they are 0-8 and
9-16, so shard 1 needs rows 9-11 of shard 0. One *window* a distance between shards says how many
rows each shard sends at most, and from where.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that shard `r` takes from shard `r - distance`: at most `rows`.

    `starts[r]` is the first of them as a row of the sender, `to[r]` as a row of the receiver, and
    `counts[r]` how many there are; all zero where there is none.
    """

    distance: int
    rows: int
    starts: tuple[int, ...]
    to: tuple[int, ...]
    counts: tuple[int, ...]


@lru_cache(maxsize=1 << 12)
def realign_windows(size: int, shards: int, before: int, after: int) -> tuple[Window, ...]:
    """The windows, nearest first, of `size` rows going from blocks of `before` to `after` rows."""
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for shard in range(shards):
        row, end = shard * after, min((shard + 1) * after, size)
        while row < end:
            sender = row // before
            count = min(end, (sender + 1) * before) - row
            piece = (shard, row - sender * before, row - shard * after, count)
            found.setdefault(shard - sender, []).append(piece)
            row += count
    windows = []
    for distance in sorted(found, key=lambda d: (abs(d), d)):
        starts, to, counts = ([0] * shards for _ in range(3))
        for shard, start, first, count in found[distance]:
            starts[shard], to[shard], counts[shard] = start, first, count
        windows.append(Window(distance, max(counts), tuple(starts), tuple(to), tuple(counts)))
    return tuple(windows)
