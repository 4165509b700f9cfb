"""Move arrays from one placement to another on real devices, many in one program.

Where both placements are on one mesh, or on meshes that refine to one, the program is the steps of
each array's plan (`within.py`). Between other meshes the devices of both become one list, and the
program is the rounds of each array's `RemeshPlan` (`between.py`), then a reshard on the target's
mesh. Arrays go in batches, so that little memory is held twice: donated sources are freed before
the next batch begins.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwise.errors import MemoryLimitError, message
from meshwise.run.between import devices_of_both, move_between, plan_between
from meshwise.run.padding import pad_array
from meshwise.run.processes import laid, refuse_others_of_each
from meshwise.run.transfers import (
    KEPT_ANSWERS,
    Array,
    Limits,
    Transfer,
    held_by,
    placed_anew,
    shown_as,
    transfer_of,
)
from meshwise.run.uneven import UnevenArray
from meshwise.run.within import move_within, plan_within

# Bytes a device that one program moves, where a single array is not more.
_BATCH_BYTES = 1 << 28


def transfer_all(
    arrays: Sequence[Array],
    targets: Sequence[NamedSharding],
    limits: Limits,
    donate: bool = False,
    kept: Sequence[Array] = (),
) -> list[Array]:
    """Every array in its new placement; donated ones that had to move are gone afterwards.

    A donated array is freed when the last batch has read it, unless a result or one of `kept`
    lies in its buffers.

    Raises MemoryLimitError, before anything is moved, where one needs more than `max_bytes`.
    """
    transfers = [transfer_of(a, t) for a, t in zip(arrays, targets, strict=True)]
    refuse_others_of_each(arrays, transfers)
    ways: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for i, transfer in enumerate(transfers):
        ways[_way(transfer, limits)].append(i)
    batches = [
        (kind, batch)
        for (kind, *_), members in ways.items()
        for batch in _batches(members, transfers, limits.max_bytes or _BATCH_BYTES)
    ]
    moved: dict[int, Array] = {}
    for place, (kind, batch) in enumerate(batches):
        some = [arrays[i] for i in batch]
        new = _MOVE[kind](some, [transfers[i] for i in batch], limits)
        moved.update(zip(batch, new, strict=True))
        if donate:
            later = [arrays[i] for _, rest in batches[place + 1 :] for i in rest]
            _free(some, [*kept, *later, *moved.values()])
    return [moved[i] for i in range(len(arrays))]


@lru_cache(KEPT_ANSWERS)
def _way(transfer: Transfer, limits: Limits) -> tuple[Hashable, ...]:
    """How an array gets to its place; equal for those that one program can move."""
    if transfer.stays:
        return ("stays",)
    if 0 in transfer.shape or transfer.is_of_each:
        return ("put",)
    if plan_within(transfer, limits) is not None:
        return "within", getattr(transfer.source, "mesh", None), transfer.target.mesh
    if plan_between(transfer, limits) is not None:
        return "between", devices_of_both(transfer)
    if limits.max_bytes is not None:
        raise MemoryLimitError(
            message(
                f"mw.reshard of shape {list(transfer.shape)} to {transfer.target} in at most "
                f"{limits.max_bytes:,} bytes a device",
                ["it takes more rounds of pieces than a program may have"],
                "What JAX does instead has no bound.",
                "Leave max_bytes out, or go by way of a sharding over more axes.",
            )
        )
    return ("put",)


def _batches(
    members: Sequence[int], transfers: Sequence[Transfer], most: int
) -> Iterator[list[int]]:
    """Members in order, as many at a time as have at most so many bytes a device together."""
    batch: list[int] = []
    held = 0
    for i in members:
        size = transfers[i].moved_bytes
        if batch and held + size > most:
            yield batch
            batch, held = [], 0
        batch.append(i)
        held += size
    if batch:
        yield batch


def _stay(arrays: Sequence[Array], transfers: Sequence[Transfer], limits: Limits) -> list[Array]:
    """The same buffers, placed in the target's words."""
    return [
        a
        if a.sharding == t.target
        else shown_as(placed_anew(held_by(a), t.target_padded, t.target), t.shape)
        for a, t in zip(arrays, transfers, strict=True)
    ]


def _within(arrays: Sequence[Array], transfers: Sequence[Transfer], limits: Limits) -> list[Array]:
    return move_within(arrays, transfers, limits)


def _between(arrays: Sequence[Array], transfers: Sequence[Transfer], limits: Limits) -> list[Array]:
    """Fetched by rounds; what is left is a reshard on the target's mesh."""
    fetched = move_between(arrays, transfers, limits)
    some = [shown_as(held, t.shape) for held, t in fetched]
    return transfer_all(some, [t.target for _, t in fetched], limits, donate=True)


def _put(arrays: Sequence[Array], transfers: Sequence[Transfer], limits: Limits) -> list[Array]:
    """By `jax.device_put`, where rounds would be too many for a program, or from the host."""
    put: list[Array] = []
    for array, t in zip(arrays, transfers, strict=True):
        value: Any = array.value if isinstance(array, UnevenArray) else array
        if t.is_of_each or not array.size:
            put.append(laid(array, t))
        elif t.target_padded == t.shape:
            put.append(jax.device_put(value, t.target))
        else:
            put.append(shown_as(pad_array(value, t.target_padded, t.target), t.shape))
    return put


def _free(old: Sequence[Array], used: Sequence[Array]) -> None:
    """Free the sources whose buffers nothing else uses; some have none in this process."""
    kept = {pointer for array in used for pointer in _buffers(array)}
    themselves = {id(held_by(array)) for array in used}
    for array in old:
        if array.is_deleted() or id(held_by(array)) in themselves:
            continue
        if kept.isdisjoint(_buffers(array)):
            held_by(array).delete()


def _buffers(array: Array) -> list[int]:
    """Where the numbers of an array stand in the memory of this process's devices."""
    held = held_by(array)
    if held.is_deleted():
        return []
    if jax.numpy.issubdtype(held.dtype, jax.dtypes.prng_key):
        held = jax.random.key_data(held)
    return [shard.data.unsafe_buffer_pointer() for shard in held.addressable_shards]


_MOVE: dict[Any, Any] = {"stays": _stay, "within": _within, "between": _between, "put": _put}
