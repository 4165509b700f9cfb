"""Which arrays are of the same buffers: one array twice, or one under two shardings."""

from collections import defaultdict
from collections.abc import Hashable, Sequence, Set
from functools import lru_cache
from operator import attrgetter
from typing import Any

from jax._src.random.prng import PRNGKeyArray
from jaxlib._jax import ArrayImpl

_kind = attrgetter("shape", "dtype", "sharding")


def base_array(value: Any) -> Any:
    """The array of numbers that holds a value on the devices; None where none does."""
    base = value._base_array if type(value) is PRNGKeyArray else value
    return base if type(base) is ArrayImpl else None


def sharing(bases: Sequence[Any]) -> list[list[int]]:
    """Positions of arrays that have buffers in common, a list for each; of `base_array`s.

    A program writes every result into buffers of its own. What moves nothing gives an array the
    buffers of another, under another sharding, with shards of the same shape. Where a call has none
    of these, and that is remembered, no buffer is looked at: that takes longer than the call. So
    two arrays of one sharding, of which one was moved there and back, are not found.
    """
    arrays = [x for x in bases if x is not None]
    alike = _alike(frozenset(map(_kind, arrays))) if len(arrays) > 1 else None
    if not alike and len(set(map(id, arrays))) == len(arrays):
        return []
    places: dict[Hashable, list[int]] = defaultdict(list)
    for i, x in enumerate(bases):
        if x is None:
            continue
        looks = alike and _kind(x) in alike and not x.is_deleted()
        for key in {("array", id(x)), *(_pointers(x) if looks else ())}:
            places[key].append(i)
    return [list(at) for at in dict.fromkeys(map(tuple, places.values())) if len(at) > 1]


@lru_cache(1 << 10)
def _alike(kinds: Set[Any]) -> Set[Any]:
    """Those whose arrays' shards are of the same shape and type as those of others."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for shape, dtype, sharding in kinds:
        found[shape, dtype, sharding.shard_shape(shape)].append((shape, dtype, sharding))
    return frozenset(kind for some in found.values() if len(some) > 1 for kind in some)


def _pointers(array: Any) -> list[int]:
    shards = [] if 0 in array.shape else array.addressable_shards
    return [shard.data.unsafe_buffer_pointer() for shard in shards]
