"""Where sorted blocks must be cut so that each shard gets exactly its share of them all.

Every device has its elements sorted. The block of shard `d` begins with the element that has rank
`d * block` of all; a *splitter* is that element's key, and a *cut* how many of a device's elements
come before it. Splitters are found four bits at a time, for all shards together: of the sixteen
keys that the next bits may begin, each device counts its own smaller elements, and the counts
are added up over the devices. So the number of collectives depends on the bits of the keys alone,
and their size not on the elements. Elements that are equal to a splitter are cut in the order of
the shards, so that equal elements keep their order.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise.ir.collectives import CollectiveKind
from meshwise.rules.small_exchanges import Sends, as_words, gather_together, take_rows
from meshwise.rules.sorted_blocks import SortedBlocks

DIGIT = 4  # bits of a key that are found at a time


def send_counts(job: SortedBlocks, sends: Sends) -> None:
    """Add what finding the cuts sends."""
    splitters = (job.shards - 1) * job.rows
    digits = sum(bits // DIGIT for dtype in job.dtypes[: job.keys] for _, bits in _kinds(dtype))
    counts = splitters * (2**DIGIT - 1)
    sends.add(CollectiveKind.ALL_REDUCE, [np.int32], counts, times=digits)
    sends.add(CollectiveKind.ALL_GATHER, [np.int32, np.int32], splitters)


def find_cuts(job: SortedBlocks, operands: Sequence[Any]) -> Any:
    """How many elements of each device go to shards before each one.

    `operands` are this device's, sorted. The result is `[shards, shards + 1, rows]`: of a device,
    elements `cut[d]` up to `cut[d + 1]` go to shard `d`.
    """
    shards, rows = job.shards, job.rows
    valid = np.clip(job.size - np.arange(shards) * job.block, 0, job.block).astype(np.int32)
    own = lax.dynamic_index_in_dim(
        valid, job.index, 0, keepdims=False, allow_negative_indices=False
    )
    ranks = np.minimum(np.arange(1, shards) * job.block, job.size).astype(np.int32)
    ranks = lax.broadcast_in_dim(ranks, (shards - 1, rows), (0,))
    smaller, notgreater = lax.full_like(ranks, 0), lax.broadcast(own, ranks.shape)
    for word, bits in key_words(operands[: job.keys]):
        splitter = _splitters(job, word, bits, (smaller, notgreater), ranks)
        low, high, wanted = (lax.broadcast(x, (2,)) for x in (smaller, notgreater, splitter))
        or_equal = lax.broadcast_in_dim(np.array([False, True]), wanted.shape, (0,))
        both = _count(word, low, high, wanted, or_equal)
        smaller, notgreater = (lax.index_in_dim(both, k, 0, keepdims=False) for k in (0, 1))
    return _shared_out(job, gather_together([smaller, notgreater], job.axes), ranks, valid)


def _shared_out(job: SortedBlocks, gathered: Sequence[Any], ranks: Any, valid: Any) -> Any:
    """Elements equal to a splitter are dealt in the order of the shards."""
    shape = job.shards, job.shards - 1, job.rows
    smaller, notgreater = (lax.reshape(x, shape) for x in gathered)
    equal = notgreater - smaller
    before = lax.cumsum(equal, 0) - equal
    missing = ranks - lax.reduce_sum(smaller, (0,)) - before
    cuts = smaller + lax.clamp(np.int32(0), lax.min(missing, equal), np.int32(job.block))
    ends = (job.shards, 1, job.rows)
    first, last = lax.full(ends, 0, np.int32), lax.broadcast_in_dim(valid, ends, (0,))
    return lax.concatenate([first, cuts, last], 1)


def _splitters(job: SortedBlocks, word: Any, bits: int, bounds: tuple[Any, Any], ranks: Any) -> Any:
    """The largest keys that no more elements than the ranks say are smaller than."""
    found = lax.full(ranks.shape, 0, word.dtype)
    digits = lax.broadcasted_iota(word.dtype, (2**DIGIT - 1, *ranks.shape), 0)
    digits = digits + np.ones((), word.dtype)
    low, high = (lax.broadcast_in_dim(x, digits.shape, (1, 2)) for x in bounds)

    def with_digit(place: Any, found: Any) -> Any:
        by = lax.convert_element_type(bits - DIGIT * (place + 1), word.dtype)
        tried = found | lax.shift_left(digits, lax.broadcast(by, digits.shape))
        below = lax.psum(_count(word, low, high, tried), job.axes)
        digit = lax.reduce_sum(lax.convert_element_type(below <= ranks, word.dtype), (0,))
        return found | lax.shift_left(digit, lax.broadcast(by, digit.shape))

    return lax.fori_loop(0, bits // DIGIT, with_digit, found)


def _count(word: Any, low: Any, high: Any, wanted: Any, or_equal: Any = None) -> Any:
    """How many elements are smaller than some keys, or equal to those that say so, by bisection.

    The elements from `low` up to `high` are sorted; those before are smaller.
    """
    length, rows = word.shape
    shape = low.shape

    def halve(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = state
        middle = lax.shift_right_logical(low + high, lax.full_like(low, 1))
        found = take_rows(word, lax.reshape(middle, (middle.size // rows, rows)))
        found = lax.reshape(found, shape)
        is_before = lax.lt(found, wanted)
        if or_equal is not None:
            is_before |= or_equal & lax.eq(found, wanted)
        is_before &= low < high
        is_after = lax.bitwise_not(is_before)
        return lax.select(is_before, middle + 1, low), lax.select(is_after, middle, high)

    # Where nothing is left, `middle` is both bounds.
    return lax.fori_loop(0, length.bit_length(), halve, (low, high))[0]


def key_words(keys: Sequence[Any]) -> list[tuple[Any, int]]:
    """Unsigned integers that compare, in turn, as `lax.sort` compares the keys; and their bits.

    Zeros are equal, NaNs are equal and last, complex numbers are compared by their real parts and
    then by the others.
    """
    parts: list[Any] = []
    for key in keys:
        is_complex = issubdtype(key.dtype, np.complexfloating)
        parts += [lax.real(key), lax.imag(key)] if is_complex else [key]
    kinds = [kind for key in keys for kind in _kinds(key.dtype)]
    return [(_word(x, dtype), bits) for x, (dtype, bits) in zip(parts, kinds, strict=True)]


def _kinds(dtype: Any) -> list[tuple[Any, int]]:
    """For each word of a key, the dtype it is made from and how many bits say something."""
    if issubdtype(dtype, np.complexfloating):
        part = np.dtype(f"float{np.dtype(dtype).itemsize * 4}")
        return [(part, part.itemsize * 8)] * 2
    if dtype == np.bool_:
        return [(np.dtype(np.uint8), DIGIT)]
    if np.dtype(dtype).itemsize > 1:
        return [(dtype, np.dtype(dtype).itemsize * 8)]
    if issubdtype(dtype, np.floating):  # formats with and without infinities and zeros of a sign
        return [(np.dtype(np.float32), 32)]
    signed = jnp.iinfo(dtype).min < 0
    return [(np.dtype(np.int8 if signed else np.uint8), 8)]


def _word(x: Any, dtype: Any) -> Any:
    x = lax.convert_element_type(x, dtype)
    bits = np.dtype(dtype).itemsize * 8
    unsigned = np.dtype(f"uint{bits}")
    sign = np.asarray(1 << (bits - 1), unsigned)
    if issubdtype(dtype, np.unsignedinteger):
        return x
    if issubdtype(dtype, np.integer):
        return as_words(x) ^ sign
    x = lax.select(lax.eq(x, lax.full_like(x, 0)), lax.full_like(x, 0), x)
    word = as_words(x)
    is_negative = lax.ge(word, lax.full_like(word, sign))
    word = lax.select(is_negative, lax.bitwise_not(word), word ^ sign)
    return lax.select(lax.ne(x, x), lax.full_like(word, -1 % (1 << bits)), word)
