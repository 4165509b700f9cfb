"""Few elements sorted over many devices: a sorting network of shards.

Batcher's odd-even merge sort (1968) sorts `n` numbers by comparing pairs of places, many of them at
a time. Here a number is a sorted block: the devices of a pair send each other theirs, and one
keeps the smaller half of both, the other the larger (Baudet and Stevenson 1978). With `k` the
logarithm of `n`, rounded up, that takes `k (k + 1) / 2` rounds, each a ppermute of a block.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jax import lax

from meshwise.ir.collectives import CollectiveKind
from meshwise.rules.halo import shard_entry
from meshwise.rules.small_exchanges import Sends, permute_together
from meshwise.rules.sorted_blocks import SortedBlocks

Pairs = tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def rounds(shards: int) -> tuple[Pairs, ...]:
    """The pairs that are compared in each round; the smaller goes to the first of a pair.

    >>> rounds(4)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((1, 2),))
    """
    found = []
    run = 1
    while run < shards:
        distance = run
        while distance:
            places = np.arange(distance % run, shards - distance)
            is_first = (places - distance % run) // distance % 2 == 0
            is_one_run = places // (2 * run) == (places + distance) // (2 * run)
            firsts = places[is_first & is_one_run].tolist()
            found.append(tuple((a, a + distance) for a in firsts))
            distance //= 2
        run *= 2
    return tuple(pairs for pairs in found if pairs)


def send_rounds(job: SortedBlocks, sends: Sends) -> None:
    """Add what the network sends; places travel along, so that equal elements keep their order."""
    dtypes = (*job.dtypes, np.dtype(np.int32))
    times = len(rounds(job.shards))
    sends.add(CollectiveKind.PERMUTE, dtypes, job.block * job.rows, times)


def sort_in_network(job: SortedBlocks, operands: Sequence[Any]) -> list[Any]:
    """The sorted block of each device, from its elements as they are."""
    own = _sorted(job, [*operands, job.places])
    for pairs in rounds(job.shards):
        theirs = permute_together(own, job.axes, job.mesh, [*pairs, *((b, a) for a, b in pairs)])
        both = [lax.concatenate([a, b], 0) for a, b in zip(own, theirs, strict=True)]
        halves = _halves(job, pairs)
        kept = lax.gt(halves, np.int32(0))
        start = lax.max(halves - 1, np.int32(0)) * np.int32(job.block)
        merged = [
            lax.dynamic_slice_in_dim(x, start, job.block, 0, allow_negative_indices=False)
            for x in _sorted(job, both)
        ]
        own = [
            lax.select(lax.broadcast(kept, x.shape), x, y) for x, y in zip(merged, own, strict=True)
        ]
    return own[:-1]


def _halves(job: SortedBlocks, pairs: Pairs) -> Any:
    """Which half of both blocks a device keeps, 1 or 2; 0 where it is in no pair."""
    table = [0] * job.shards
    for first, second in pairs:
        table[first], table[second] = 1, 2
    return lax.max(shard_entry(table, job.axes, job.mesh), np.int32(0))


def _sorted(job: SortedBlocks, operands: Sequence[Any]) -> list[Any]:
    """By padding or not, the keys, and then the places: no two elements are equal."""
    *given, places = operands
    keys, rest = given[: job.keys], given[job.keys :]
    flags = [lax.convert_element_type(places >= job.size, np.uint8)] if job.is_uneven else []
    found = job.sort([*flags, *keys, places, *rest], len(flags) + len(keys) + 1)[len(flags) :]
    return [*found[: job.keys], *found[job.keys + 1 :], found[job.keys]]
