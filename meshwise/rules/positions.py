"""Positions that are data: where global ones lie on a device, and whether it owns them.

Positions come with any integer dtype. They are clamped, or found out of range, in that dtype and
as global positions, as one device does; what is left is small enough for a signed one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from meshwise.rules.registry import LocalContext, shard_index

# What becomes of positions out of range: nothing is read or written there, or the last ones are.
FILL = lax.GatherScatterMode.FILL_OR_DROP
CLIP = lax.GatherScatterMode.CLIP


def clamp_position(given: Any, upper: int) -> Any:
    """Positions brought into `0..upper`, as signed integers."""
    dtype = start_dtype(given.dtype)
    if isinstance(given, np.ndarray | np.generic):  # known while tracing
        return np.clip(given, 0, upper).astype(dtype)
    bound = min(upper, int(np.iinfo(given.dtype).max))
    inside = lax.clamp(given.dtype.type(0), given, given.dtype.type(bound))
    return lax.convert_element_type(inside, dtype)


def start_dtype(dtype: Any) -> np.dtype:
    """The signed integer dtype for positions that were given with some other one."""
    return np.dtype(np.int64 if np.dtype(dtype).itemsize == 8 else np.int32)


def inside_starts(
    context: LocalContext, starts: Sequence[Any], windows: Sequence[int]
) -> list[Any]:
    """Starts of a window of the first operand, global, brought to where all of it is inside.

    XLA brings them there as well, but not where it makes one slice of two (openxla/xla#49121),
    and a reshard may slice before or after. Literals among the starts get their dtype back.
    """
    avals: list[Any] = [v.aval for v in context.eqn.invars[len(context.eqn.invars) - len(starts) :]]
    found = []
    for given, aval, n, window in zip(starts, avals, context.global_shape(0), windows, strict=True):
        start = given if hasattr(given, "dtype") else np.asarray(given, aval.dtype)
        zero = start_dtype(aval.dtype).type(0)
        found.append(zero if n == window else clamp_position(start, n - window))
    return found


def signed_positions(given: Any) -> Any:
    """Positions as signed integers of at least 32 bits; too large ones stay too large.

    XLA's CPU backend reads an unsigned byte as signed where a scatter writes a single window,
    which a device may do where the whole program writes several.
    """
    dtype = np.dtype(given.dtype)
    if dtype.itemsize == 8 or dtype == np.int32:
        return given
    if dtype == np.uint32:
        given = lax.min(given, np.uint32(np.iinfo(np.int32).max))
    return lax.convert_element_type(given, np.int32)


def in_bounds(position: Any, upper: int) -> Any:
    """Which positions are in `0..upper`."""
    bound = min(upper, int(np.iinfo(position.dtype).max))
    return lax.bitwise_and(
        lax.ge(position, position.dtype.type(0)), lax.le(position, position.dtype.type(bound))
    )


def from_offset(context: LocalContext, factor: int, position: Any) -> Any:
    """Global positions counted from this device's first one along a factor."""
    return lax.sub(position, lax.convert_element_type(context.offset(factor), position.dtype))


def all_of(masks: Sequence[Any]) -> Any:
    """The conjunction of some masks."""
    joined = masks[0]
    for mask in masks[1:]:
        joined = lax.bitwise_and(joined, mask)
    return joined


def is_first_shard(context: LocalContext, factors: Sequence[int]) -> Any:
    """Whether this device holds the first shard along each of some sharded factors."""
    numbers = [shard_index(context.axes(f), context.mesh) for f in factors]
    return all_of([lax.eq(number, np.int32(0)) for number in numbers])


def local_start(context: LocalContext, factor: int, start: Any, rows: int = 1) -> tuple[Any, Any]:
    """Where some rows from a global position on, signed and inside, lie here, and whether they do.

    One device has all of them; on the others what is found is inside as well, as XLA does not bring
    it there where it makes one slice of two (openxla/xla#49121).
    """
    position = from_offset(context, factor, start)
    end = context.local_size(factor) - rows
    owned = in_bounds(position, end)
    return lax.clamp(position.dtype.type(0), position, position.dtype.type(end)), owned


def local_window(context: LocalContext, factor: int, start: Any, window: int) -> tuple[Any, Any]:
    """Where to read a window of global positions that starts, inside, at `start`.

    A device reads as many rows as the window has, or all of its own, from the first number on;
    the window begins as many rows after these as the second number says, or before them.
    """
    local = context.local_size(factor)
    rows = min(window, local)
    position = from_offset(context, factor, start)
    zero = position.dtype.type(0)
    begin = lax.clamp(zero, position, position.dtype.type(local - rows))
    return begin, lax.clamp(zero - window, lax.sub(position, begin), zero + rows)


def dims_of_windows(rank: int, single: Sequence[int], dims: Sequence[int]) -> dict[int, int]:
    """For the operand's dims of which windows are kept, the dims of the result or the updates."""
    kept = [d for d in range(rank) if d not in single]
    return dict(zip(kept, dims, strict=True))


class IndexVectors:
    """The index vectors of a gather or scatter on one device.

    Component `c` indexes the operand's dim `dims[c]`, of which `windows[dims[c]]` positions are
    read or written. `factors` maps the components whose dim is sharded, and not taken in full, to
    the dim's factor. Where such a window is of more than one position, each position gets an index
    vector of its own, because devices may own a part of a window: the window is *spread*.

    `kept` maps the operand's dims of which windows are kept to the dims of the result or the
    updates, which has `rank` dims. Of these, `places` are the ones that index vectors stand for,
    spread windows included. They are `is_out_of_order` where a spread window comes before what
    was given: index vectors then come in another order than the given ones.
    """

    def __init__(
        self,
        context: LocalContext,
        indices: Any,
        dims: Sequence[int],
        windows: Sequence[int],
        kept: Mapping[int, int],
        rank: int,
    ) -> None:
        self.context, self.indices, self.dims, self.kept = context, indices, tuple(dims), kept
        shape = context.global_shape(0)
        self.upper = [shape[d] - windows[d] for d in dims]
        found = [context.rule.operands[0][d] for d in dims]
        self.factors = {
            c: dim[0]
            for c, (d, dim) in enumerate(zip(dims, found, strict=True))
            if windows[d] != shape[d] and context.is_split(dim)
        }
        self.spread = {c: dims[c] for c in self.factors if windows[dims[c]] > 1}
        given = [p for p in range(rank) if p not in kept.values()]
        sizes = dict(zip(given, indices.shape, strict=False))
        sizes |= {kept[d]: windows[d] for d in self.spread.values()}
        self.places = sorted(sizes)
        self.sizes = [sizes[p] for p in self.places]
        self.batch = [self.places.index(p) for p in given]
        self._at = {c: self.places.index(kept[d]) for c, d in self.spread.items()}
        self.is_out_of_order = any(a < b for a in self._at.values() for b in self.batch)

    @property
    def spread_dims(self) -> list[int]:
        """The operand's dims whose windows are spread."""
        return list(self.spread.values())

    def given(self, c: int) -> Any:
        """One component of all index vectors, as given."""
        last = self.indices.ndim - 1
        column = self.indices
        if len(self.upper) > 1:
            column = lax.slice_in_dim(column, c, c + 1, axis=last)
        return lax.squeeze(column, (last,))

    def shifted(self, c: int) -> Any:
        """A component, clamped, counted from this device's first position."""
        position = self.widened(clamp_position(self.given(c), self.upper[c]))
        if c in self.spread:
            count = lax.broadcasted_iota(position.dtype, position.shape, self._at[c])
            position = lax.add(position, count)
        if c not in self.factors:
            return position
        return from_offset(self.context, self.factors[c], position)

    def owned(self) -> Any:
        """Which index vectors, clamped, point into this device's part."""
        return all_of(
            [
                in_bounds(self.shifted(c), self.context.local_size(factor) - 1)
                for c, factor in self.factors.items()
            ]
        )

    def in_range(self) -> Any:
        """Which index vectors are in range in every component, with all of their window."""
        return self.widened(self.given_in_range())

    def given_in_range(self) -> Any:
        """The same of the index vectors as given, of which windows are not spread."""
        if not self.upper:  # windows at the start, whatever is given
            return lax.full(self.indices.shape[:-1], True)
        return all_of([in_bounds(self.given(c), upper) for c, upper in enumerate(self.upper)])

    def local(self, place: Callable[[Any, int], Any]) -> Any:
        """Index vectors for the local operand.

        `place(position, size)` says what becomes of positions along a sharded dim of a local
        size: those of other devices must be brought inside, or sent outside.
        """
        last = len(self.sizes)
        columns = []
        for c in range(len(self.upper)):
            position = self.shifted(c)
            if c in self.factors:
                position = place(position, self.context.local_size(self.factors[c]))
            columns.append(lax.expand_dims(position, (last,)))
        return self.joined(columns)

    def joined(self, columns: Sequence[Any]) -> Any:
        """Index vectors of their components, each `[..., 1]`."""
        if not columns:
            return lax.full((*self.sizes, 0), 0, self.indices.dtype)
        return lax.concatenate(columns, len(self.sizes)) if len(columns) > 1 else columns[0]

    def widened(self, column: Any) -> Any:
        """One entry for each index vector, from one for each that was given."""
        return lax.broadcast_in_dim(column, self.sizes, self.batch) if self.spread else column
