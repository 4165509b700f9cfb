"""Collectives over the shards of a dim, written and priced together.

Operators that go along a dim in order exchange several small arrays at once: values and their
positions, totals of every row. Here arrays of one shape that have elements of one width travel in
one collective, side by side, and `Sends` lists what that costs without tracing anything.

An array is `[length, rows]` here: the dim that is sharded, and all others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.ir.mesh import Axes, Mesh
from meshwise.rules.registry import Exchange, shard_index

# What starting a collective is worth in bytes, where a rule has the choice between fewer bytes and
# fewer collectives. Far less than on any machine, as in `GENERIC` of `cost/hardware.py`.
LAUNCH_BYTES = 128


@dataclass
class Sends:
    """Collectives over a group of devices, as they would be emitted."""

    group: int
    found: list[Exchange] = field(default_factory=list)

    def add(
        self, kind: CollectiveKind, dtypes: Sequence[Any], elements: int, times: int = 1
    ) -> None:
        """Arrays of so many elements each (of the local operand), sent together `times` times."""
        for width in dict.fromkeys(map(_width, dtypes)):
            own = [np.dtype(d).itemsize for d in dtypes if _width(d) == width]
            operand = float(sum(own) * elements)
            sent = wire_bytes(kind, operand, operand * self.group, self.group)
            self.found.append(Exchange(kind, sent * times, times))

    @property
    def cost(self) -> float:
        """Bytes, launches included, by which ways are compared."""
        return sum(e.wire_bytes + LAUNCH_BYTES * e.launches for e in self.found)


def _width(dtype: Any) -> str:
    """What arrays that travel side by side have in common; those without words travel as such."""
    dtype = np.dtype(dtype)
    return f"{dtype.itemsize} bytes" if has_words(dtype) else str(dtype)


def has_words(dtype: Any) -> bool:
    """Whether elements are as wide as some unsigned integer: not so complex ones, nor int4."""
    if dtype == np.bool_:
        return True
    if issubdtype(dtype, np.integer):
        return jnp.iinfo(dtype).bits == np.dtype(dtype).itemsize * 8
    return issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits == np.dtype(dtype).itemsize * 8


def as_words(x: Any) -> Any:
    """The bits of an array as unsigned integers."""
    if x.dtype == np.bool_:
        return lax.convert_element_type(x, np.uint8)
    return lax.bitcast_convert_type(x, np.dtype(f"uint{x.dtype.itemsize * 8}"))


def _from_words(words: Any, dtype: Any) -> Any:
    if words.dtype == dtype:
        return words
    if dtype == np.bool_:
        return lax.convert_element_type(words, np.bool_)
    return lax.bitcast_convert_type(words, dtype)


def send_together(arrays: Sequence[Any], send: Callable[[Any], Any]) -> list[Any]:
    """Send arrays of one shape; `send` gets several of them on a new leading dim.

    It must treat that dim as a batch.
    """
    found: list[Any] = [None] * len(arrays)
    for width in dict.fromkeys(_width(x.dtype) for x in arrays):
        own = [i for i, x in enumerate(arrays) if _width(x.dtype) == width]
        if len(own) == 1:
            found[own[0]] = lax.squeeze(send(lax.expand_dims(arrays[own[0]], (0,))), (0,))
            continue
        alike = [as_words(arrays[i]) if has_words(arrays[i].dtype) else arrays[i] for i in own]
        received = send(lax.concatenate([lax.expand_dims(x, (0,)) for x in alike], 0))
        for place, i in enumerate(own):
            part = lax.index_in_dim(received, place, 0, keepdims=False)
            found[i] = _from_words(part, arrays[i].dtype)
    return found


def gather_together(arrays: Sequence[Any], axes: Axes) -> list[Any]:
    """Arrays `[length, rows]` of all shards one after the other."""
    return send_together(arrays, lambda x: lax.all_gather(x, axes, axis=1, tiled=True))


def exchange(x: Any, axes: Axes, cut: int, join: int) -> Any:
    """An all_to_all: dim `cut` is cut in parts, those received are joined along `join`."""
    return lax.all_to_all(x, axes, split_axis=cut, concat_axis=join, tiled=True)


def exchange_together(arrays: Sequence[Any], axes: Axes, cut: int, join: int) -> list[Any]:
    """The same of several arrays of one shape."""
    return send_together(arrays, lambda x: exchange(x, axes, cut + 1, join + 1))


def permute_together(
    arrays: Sequence[Any], axes: Axes, mesh: Mesh, pairs: Sequence[tuple[int, int]]
) -> list[Any]:
    """Arrays from shard to shard; who gets none has zeros."""
    number = mesh.permute_numbers(axes)
    numbered = [(number[a], number[b]) for a, b in pairs]
    order = mesh.permute_order(axes)
    return send_together(arrays, lambda x: lax.ppermute(x, order, numbered))


def rows_last(x: Any, axis: int) -> Any:
    """An array as `[length, rows]`: a dim first, all others behind it as one."""
    order = (axis, *(d for d in range(x.ndim) if d != axis))
    return lax.reshape(lax.transpose(x, order), (x.shape[axis], x.size // max(1, x.shape[axis])))


def rows_back(x: Any, axis: int, shape: Sequence[int]) -> Any:
    """The opposite of `rows_last`; `shape` has the other dims, and any size along the axis."""
    others = [n for d, n in enumerate(shape) if d != axis]
    x = lax.reshape(x, (x.shape[0], *others))
    order = [d + 1 if d < axis else 0 if d == axis else d for d in range(len(shape))]
    return lax.transpose(x, order)


def take_rows(x: Any, places: Any) -> Any:
    """Of `[length, rows]`, in each row the elements at some places, `[after, rows]`."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
        operand_batching_dims=(1,),
        start_indices_batching_dims=(1,),
    )
    index = lax.expand_dims(places, (2,))
    return lax.gather(x, index, numbers, (1, 1), mode=lax.GatherScatterMode.CLIP)


def row_count(shape: Sequence[int], axis: int) -> int:
    """How many rows `rows_last` makes of a shape."""
    return int(np.prod([n for d, n in enumerate(shape) if d != axis], dtype=np.int64))


def pad_rows(x: Any, rows: int) -> Any:
    """Zeros after the last row, up to so many rows."""
    return lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), (0, rows - x.shape[1], 0)])


def own_part(x: Any, axes: Axes, mesh: Mesh, length: int, dim: int = 0) -> Any:
    """The part of a dim that belongs to this device's shard."""
    start = lax.mul(shard_index(axes, mesh), np.int32(length))
    return lax.dynamic_slice_in_dim(x, start, length, dim, allow_negative_indices=False)


@dataclass(frozen=True)
class Meeting:
    """Arrays `[length, rows]` of all shards that are combined, row by row; all get the result.

    Every device gathers all rows and combines them itself; or, where that sends less, each gets
    a part of the rows from all others, combines that, and the results are gathered: as an
    all_reduce is a reduce_scatter and an all_gather, the bytes do not grow with the devices then.

    `before` and `after` are the lengths and dtypes of what is combined and of the result.
    """

    shards: int
    rows: int
    before: tuple[int, tuple[Any, ...]]
    after: tuple[int, tuple[Any, ...]]

    @property
    def sends(self) -> Sends:
        """The collectives of the cheaper way."""
        return min(self._gathered, self._dealt, key=lambda sends: sends.cost)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to combine."""
        return not self.rows or not self.before[0]

    @property
    def _gathered(self) -> Sends:
        sends = Sends(self.shards)
        if not self.is_empty:
            sends.add(CollectiveKind.ALL_GATHER, self.before[1], self.before[0] * self.rows)
        return sends

    @property
    def _dealt(self) -> Sends:
        sends = Sends(self.shards)
        if not self.is_empty:
            share = -(-self.rows // self.shards)
            elements = self.before[0] * share * self.shards
            sends.add(CollectiveKind.ALL_TO_ALL, self.before[1], elements)
            sends.add(CollectiveKind.ALL_GATHER, self.after[1], self.after[0] * share)
        return sends

    def hold(self, arrays: Sequence[Any], axes: Axes, combine: Callable[..., Any]) -> list[Any]:
        """The result; `combine` gets the arrays of all shards, `[shards * length, rows]`."""
        if self.is_empty:
            shape = (self.shards * self.before[0], self.rows)
            return list(combine(*[lax.full(shape, 0, x.dtype) for x in arrays]))
        if self._gathered.cost <= self._dealt.cost:
            return list(combine(*gather_together(arrays, axes)))
        share = -(-self.rows // self.shards)
        padded = [pad_rows(x, share * self.shards) for x in arrays]
        own = combine(*exchange_together(padded, axes, cut=1, join=0))
        found = send_together(own, lambda x: lax.all_gather(x, axes, axis=2, tiled=True))
        return [lax.slice_in_dim(x, 0, self.rows, axis=1) for x in found]
