"""Elements sent to shards that only the data tells, in exchanges of fixed size.

A program's shapes are fixed, but how many elements one device has for another is known only when
it runs, and may be anything from none to all. What is fixed is the sum: a device sends a block and
gets one. So elements go by way of a third device (Valiant 1982). Those that shard `d` gets have
an order there; the one at place `q` of it goes by way of device `q mod n`. Of `c` elements that a
device has for `d`, none in between gets more than `c/n` rounded up, so that an all_to_all of a
block and a little, `n - 1` elements a pair, has room for the worst case; and in a second one of
exactly a block, every element arrives at the place where it belongs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from meshwise.ir.collectives import CollectiveKind
from meshwise.rules.small_exchanges import Sends, exchange_together, take_rows
from meshwise.rules.sorted_blocks import SortedBlocks


def send_blocks(job: SortedBlocks, sends: Sends) -> None:
    """Add what routing sends."""
    for length in (_capacity(job), _share(job)):
        elements = job.shards * length * job.rows
        sends.add(CollectiveKind.ALL_TO_ALL, job.dtypes, elements)


def route(job: SortedBlocks, operands: Sequence[Any], cuts: Any) -> list[Any]:
    """Send elements `cuts[s, d]` up to `cuts[s, d + 1]` of each device `s` to shard `d`.

    They arrive in the order of the devices. `cuts` is `[shards, shards + 1, rows]`, the same on
    all devices; shards that get less than a block have anything in the rest.
    """
    shards, rows = job.shards, job.rows
    counts = _from(cuts, 1, 1) - _from(cuts, 0, 1)
    arrive = lax.cumsum(counts, 0) - counts  # the place of the first that `s` has for `d`
    index = job.index
    leaving = _leaving(job, _at(cuts, index), _at(counts, index), _at(arrive, index))
    found = [take_rows(x, leaving) for x in operands]
    found = exchange_together(found, job.axes, cut=0, join=0)
    passing = _passing(job, counts, arrive)
    found = [take_rows(x, passing) for x in found]
    found = exchange_together(found, job.axes, cut=0, join=0)
    share = _share(job)
    ordered = [
        lax.reshape(lax.transpose(lax.reshape(x, (shards, share, rows)), (1, 0, 2)), x.shape)
        for x in found
    ]
    return [lax.slice_in_dim(x, 0, job.block) for x in ordered]


def _capacity(job: SortedBlocks) -> int:
    """The most elements that a device sends by way of one other."""
    return min(job.block, job.block // job.shards + job.shards - 1)


def _share(job: SortedBlocks) -> int:
    """The most elements of one shard that go by way of one device."""
    return -(-job.block // job.shards)


def _turn(places: Any, way: Any, shards: int) -> Any:
    """How many places before some go by way of a device: those that are `way` modulo `shards`."""
    return lax.div(places + (np.int32(shards - 1) - way), lax.full_like(places, shards))


def _leaving(job: SortedBlocks, cuts: Any, counts: Any, arrive: Any) -> Any:
    """Which of this device's elements it sends by way of each device, `[shards * capacity, rows]`.

    By way of `m` go its elements for shard 0, then for shard 1, and so on, every `n`-th of each.
    """
    shards, rows, capacity = job.shards, job.rows, _capacity(job)
    shape = (shards, shards, rows)  # shard, way, row
    way = lax.broadcasted_iota(np.int32, shape, 1)
    first, after = (lax.broadcast_in_dim(x, shape, (0, 2)) for x in (arrive, arrive + counts))
    first, after = _turn(first, way, shards), _turn(after, way, shards)
    start = lax.cumsum(after - first, 0) - (after - first)
    offset = lax.broadcast_in_dim(_from(cuts, 0, 0) - arrive, shape, (0, 2))
    element = offset + (first - start) * np.int32(shards) + way
    found = _steps(start, element, capacity)
    found = found + lax.broadcasted_iota(np.int32, found.shape, 0) * np.int32(shards)
    return lax.reshape(lax.transpose(found, (1, 0, 2)), (shards * capacity, rows))


def _passing(job: SortedBlocks, counts: Any, arrive: Any) -> Any:
    """Which of the elements that a device got it sends on to each shard, `[shards * share, rows]`.

    Those of one sender lie together, in the order in which `_leaving` sends them.
    """
    shards, rows, share = job.shards, job.rows, _share(job)
    way = lax.broadcast(job.index, counts.shape)
    first, after = _turn(arrive, way, shards), _turn(arrive + counts, way, shards)
    start = lax.cumsum(after - first, 1) - (after - first)
    sender = lax.broadcasted_iota(np.int32, counts.shape, 0)
    element = sender * np.int32(_capacity(job)) + start - first
    found = _steps(first, element, share)
    found = found + lax.broadcasted_iota(np.int32, found.shape, 0)
    return lax.reshape(lax.transpose(found, (1, 0, 2)), (shards * share, rows))


def _steps(starts: Any, values: Any, length: int) -> Any:
    """`[length, ...]` numbers that are `values[k]` from `starts[k]` on, up to the next start.

    Each is written over those before, in a loop: running sums of what is scattered to the starts
    take ten times as many kernels, which XLA on CPU compiles for half a second, and positions that
    are searched for hold three times as much.
    """
    place = lax.broadcasted_iota(np.int32, (length, *starts.shape[1:]), 0)

    def step(found: Any, at: tuple[Any, Any]) -> tuple[Any, None]:
        start, value = (lax.broadcast(x, (length,)) for x in at)
        return lax.select(lax.ge(place, start), value, found), None

    return lax.scan(step, lax.full_like(place, 0), (starts, values))[0]


def _from(x: Any, start: int, dim: int, length: int | None = None) -> Any:
    """A part of a dim, of all but one by default."""
    taken = x.shape[dim] - 1 if length is None else length
    return lax.slice_in_dim(x, start, start + taken, axis=dim)


def _at(table: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(table, index, 0, keepdims=False, allow_negative_indices=False)
