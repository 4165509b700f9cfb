"""Arrays of many shapes laid end to end: one flat buffer for each dtype.

What a stage sends, and the parameters of a stage, differ in shapes from stage to stage, but a
program that all devices run has one shape for all. So they travel and lie in flat buffers as long
as the longest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax

Buffers = dict[str, Any]  # one flat array for each dtype, by its name
Lengths = Mapping[str, int]


# Positions that are read while a program runs have 32 bits.
_MOST_POSITION = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Layout:
    """Where each of some arrays lies in the buffer of its dtype: one after the other.

    Typed keys lie there as their data.
    """

    types: tuple[Any, ...]

    @cached_property
    def places(self) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """For each array the buffer, the offset, and the shape there."""
        ends: dict[str, int] = {}
        found = []
        for aval in self.types:
            shape, dtype = _stored(aval)
            start = ends.get(dtype, 0)
            found.append((dtype, start, shape))
            ends[dtype] = start + math.prod(shape)
        return tuple(found)

    @cached_property
    def lengths(self) -> Lengths:
        """The elements of each buffer that are used."""
        ends = {dtype: start + math.prod(shape) for dtype, start, shape in self.places}
        return dict(sorted(ends.items()))

    def pack(self, arrays: Sequence[Any], lengths: Lengths, dtypes: Any = None) -> Buffers:
        """The buffers `[lengths[dtype]]`, zero beyond what is used.

        `dtypes` names for each buffer another dtype in which it is to be, such as that of a sum.
        """
        flat: dict[str, list[Any]] = {dtype: [] for dtype in lengths}
        for array, (dtype, _, _) in zip(arrays, self.places, strict=True):
            flat[dtype].append(jnp.ravel(_jax.without_key_type(array)))
        return {
            dtype: _joined(parts, lengths[dtype], (dtypes or {}).get(dtype, dtype))
            for dtype, parts in flat.items()
        }

    def unpack(self, buffers: Buffers, row: Any = None) -> list[Any]:
        """The arrays; of one row of `[rows, length]` buffers where its number is given."""
        found = []
        for aval, (dtype, start, shape) in zip(self.types, self.places, strict=True):
            buffer, size = buffers[dtype], math.prod(shape)
            if row is None:
                part = lax.slice(buffer, (start,), (start + size,))
            elif start <= _MOST_POSITION:
                part = lax.dynamic_slice(buffer, (row, np.int32(start)), (1, size))
            else:
                columns = lax.slice_in_dim(buffer, start, start + size, axis=1)
                part = lax.dynamic_index_in_dim(columns, row, keepdims=False)
            found.append(_jax.with_key_type(jnp.reshape(part, shape), aval))
        return found


def longest(layouts: Iterable[Layout]) -> Lengths:
    """The length of each buffer that is enough for all of some layouts."""
    found: dict[str, int] = {}
    for layout in layouts:
        for dtype, length in layout.lengths.items():
            found[dtype] = max(length, found.get(dtype, 0))
    return dict(sorted(found.items()))


def size_in_bytes(lengths: Lengths) -> int:
    """Bytes of one set of buffers."""
    return sum(length * np.dtype(jnp.dtype(dtype)).itemsize for dtype, length in lengths.items())


def zeros(lengths: Lengths, leading: tuple[int, ...] = ()) -> Buffers:
    """Empty buffers `[*leading, length]`."""
    return {dtype: jnp.zeros((*leading, n), dtype) for dtype, n in lengths.items()}


def sum_dtype(dtype: Any) -> str:
    """The dtype in which values of a dtype are added up: of 32 bits at least."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return "float32" if is_short else jnp.dtype(dtype).name


def cast(buffers: Buffers) -> Buffers:
    """Buffers of sums in the dtypes that they are sums for."""
    return {dtype: x.astype(dtype) for dtype, x in buffers.items()}


def _stored(aval: Any) -> tuple[tuple[int, ...], str]:
    if _jax.key_impl_name(aval) is None:
        return tuple(aval.shape), jnp.dtype(aval.dtype).name
    data = jax.eval_shape(jax.random.key_data, aval)
    return tuple(data.shape), jnp.dtype(data.dtype).name


def _joined(parts: Sequence[Any], length: int, dtype: str) -> Any:
    used = sum(part.size for part in parts)
    parts = [part.astype(dtype) for part in parts]
    if used < length or not parts:
        parts = [*parts, jnp.zeros(length - used, dtype)]
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)
