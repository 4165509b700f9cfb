"""Windows over sharded dims: which rows of an operand a shard of the result reads.

Row `o` of a result reads the *dilated* rows from `o * stride + first` on, `extent` of them; row
`i` of the operand is dilated row `i * dilation`, and between those stand fillers. Convolutions,
pooling, slices with strides, pads (a dilation is interior padding, `first` is negative) and
concatenations are all that, and a sharded dim of any of them is handled here: the rows are
fetched, what lies outside the operand is filled, and the operator then runs on them without
padding or dilation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jax import lax

from meshwise._jax import Border
from meshwise.ir.mesh import Axes, Mesh
from meshwise.rules.halo import (
    MOST_PIECES,
    Fetch,
    fetch_filled,
    fetch_rows,
    mask_rows,
    shard_entry,
)
from meshwise.rules.registry import Exchange, LocalContext


@dataclass(frozen=True, slots=True)
class Window:
    """Which dilated rows one row of a result reads."""

    stride: int = 1
    first: int = 0
    extent: int = 1
    dilation: int = 1


@dataclass(frozen=True)
class Reading:
    """A dim of an operand, sharded over `axes`, as the shards of a result read it.

    The operand has `size` rows, and the result `rows`. Around the operand there may lie a `border`
    of its own rows; dilated it is not then.
    """

    dim: int
    axes: Axes
    window: Window
    size: int
    rows: int
    shards: int
    border: Border | None = None

    @property
    def local_rows(self) -> int:
        """How many rows of the result a shard has."""
        return -(-self.rows // self.shards)

    @property
    def span(self) -> int:
        """How many dilated rows a shard reads."""
        return (self.local_rows - 1) * self.window.stride + self.window.extent

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first dilated row that each shard reads."""
        step = self.local_rows * self.window.stride
        return tuple(self.window.first + shard * step for shard in range(self.shards))

    @cached_property
    def fetch(self) -> Fetch:
        """The rows of the operand that shards need.

        Rows after the last one that any row of the result reads are needed by none, although the
        padding of the last shard would read them.
        """
        dilation = self.window.dilation
        starts = tuple(-(-first // dilation) for first in self.firsts)
        ends = [(first + self.span - 1) // dilation + 1 for first in self.firsts]
        length = max(0, *(end - start for start, end in zip(starts, ends, strict=True)))
        block = -(-self.size // self.shards)
        if self.border is not None and self.border.goes_round(self.size):
            return Fetch(self.size, block, starts, length, wraps=True, needed=self.needed)
        return Fetch(min(self.size, self._end), block, starts, length)

    @property
    def needed(self) -> tuple[int, ...]:
        """How many rows the result's rows of each shard read, of what is not dilated."""
        counts = (self.rows - shard * self.local_rows for shard in range(self.shards))
        own = [min(count, self.local_rows) for count in counts]
        stride, extent = self.window.stride, self.window.extent
        return tuple((count - 1) * stride + extent if count > 0 else 0 for count in own)

    @cached_property
    def around(self) -> tuple["Around", ...]:
        """The rows of a border that shards fill in themselves, of those that they fetched."""
        if self.border is None or self.fetch.wraps:
            return ()
        first = -len(self.border.before)
        rows = [*zip(range(first, 0), self.border.before, strict=True)]
        rows += enumerate(self.border.after, self.size)
        found = (Around.of(self, row, source) for row, source in rows)
        return tuple(one for one in found if any(one.reads))

    @property
    def has_borders(self) -> bool:
        """Whether each shard that reads a row of a border has fetched the row that it is."""
        return all(one.is_fetched for one in self.around)

    @property
    def leads(self) -> tuple[int, ...]:
        """For each shard, how many fillers it reads before its first row."""
        pairs = zip(self.firsts, self.fetch.starts, strict=True)
        return tuple(start * self.window.dilation - first for first, start in pairs)

    @property
    def dilated(self) -> int:
        """How many dilated rows the fetched ones are."""
        return max(0, (self.fetch.length - 1) * self.window.dilation + 1)

    @property
    def reads_outside(self) -> bool:
        """Whether any row of the result reads before or after the operand."""
        return self.fetch.starts[0] < 0 or self._end > self.size

    @property
    def _end(self) -> int:
        """The row after the last one read."""
        w = self.window
        return max((w.first + (self.rows - 1) * w.stride + w.extent - 1) // w.dilation + 1, 0)


@dataclass(frozen=True, slots=True)
class Around:
    """One row of a border: which shards read it, and where in what they fetched; and its source."""

    reads: tuple[bool, ...]
    places: tuple[int, ...]
    sources: tuple[int, ...]
    is_fetched: bool

    @staticmethod
    def of(reading: "Reading", row: int, source: int) -> "Around":
        """A row by its number, which is before the first one or behind the last, and its source."""
        starts, length = reading.fetch.starts, reading.fetch.length
        needed = zip(starts, reading.needed, strict=True)
        reads = tuple(start <= row < start + count for start, count in needed)
        places, sources = (
            tuple(min(max(number - start, 0), length - 1) for start in starts)
            for number in (row, source)
        )
        fetched = (0 <= source - start < length for start in starts)
        held = all(has for is_read, has in zip(reads, fetched, strict=True) if is_read)
        return Around(reads, places, sources, held and 0 <= source < reading.size)

    def filled(self, x: Any, reading: "Reading", mesh: Mesh) -> Any:
        """What was fetched, with the row in its place on the shards that read it."""
        dim, axes = reading.dim, reading.axes
        place, source = (self._entry(table, axes, mesh) for table in (self.places, self.sources))
        new, old = (
            lax.dynamic_slice_in_dim(x, at, 1, dim, allow_negative_indices=False)
            for at in (source, place)
        )
        is_read = lax.ne(shard_entry([*map(int, self.reads)], axes, mesh), np.int32(0))
        row = lax.select(lax.broadcast(is_read, new.shape), new, old)
        return lax.dynamic_update_slice_in_dim(x, row, place, dim)

    def _entry(self, table: Sequence[int], axes: Axes, mesh: Mesh) -> Any:
        """An entry of a table, which matters where the row is read: one for all, if it may be."""
        read = {entry for entry, is_read in zip(table, self.reads, strict=True) if is_read}
        return np.int32(read.pop()) if len(read) == 1 else shard_entry(table, axes, mesh)


def exchanges(
    fetches: Sequence[tuple[int, Fetch]], shape: Sequence[int], itemsize: int
) -> list[Exchange] | None:
    """What fetching rows of dims of a local array sends, one dim after the other.

    None where that would take too many collectives.
    """
    sizes = list(shape)
    found = []
    for dim, fetch in fetches:
        row = math.prod(n for d, n in enumerate(sizes) if d != dim) * itemsize
        found.append(replace(fetch.exchange(row), of_rows=True))
        sizes[dim] = fetch.length
    return all_exchanges([found])


def read_exchanges(
    readings: Sequence[Reading], shape: Sequence[int], itemsize: int
) -> list[Exchange] | None:
    """What reading dims of a local array sends; None where a border is of rows from far away."""
    if not all(reading.has_borders for reading in readings):
        return None
    return exchanges([(reading.dim, reading.fetch) for reading in readings], shape, itemsize)


def all_exchanges(each: Iterable[Sequence[Exchange] | None]) -> list[Exchange] | None:
    """The exchanges of several operands together; None where they are too many collectives."""
    found: list[Exchange] = []
    for own in each:
        if own is None:
            return None
        found += own
    return found if sum(exchange.launches for exchange in found) <= MOST_PIECES else None


def read_rows(x: Any, reading: Reading, mesh: Mesh, fill: Any, everywhere: bool = False) -> Any:
    """The rows that this device's shard of the result reads, not dilated yet.

    What lies outside the operand is filled where rows of the result read it; with `everywhere`,
    also where only their padding does.
    """
    fetch, where = reading.fetch, (reading.dim, reading.axes, mesh)
    if reading.border is not None:
        x = fetch_rows(x, *where, fetch)
        for row in reading.around:
            x = row.filled(x, reading, mesh)
        if not everywhere or min(reading.needed) == fetch.length:
            return x
        needed = shard_entry(reading.needed, reading.axes, mesh)
        return mask_rows(
            x, reading.dim, lax.sub(np.int32(fetch.length), needed), fetch.length, fill
        )
    size = fetch.size if everywhere else reading.size  # rows after the last one read were not sent
    beyond = max(fetch.starts) + fetch.length > size
    if reading.reads_outside or (everywhere and (beyond or min(fetch.starts) < 0)):
        return fetch_filled(x, *where, fetch, size, fill)
    return fetch_rows(x, *where, fetch)


def laid_around(
    context: LocalContext, x: Any, readings: Sequence[Reading]
) -> tuple[Any, list[int]]:
    """An operand with the rows around it along dims of which a device has all; and these dims."""
    read = {reading.dim for reading in readings}
    own = [border for border in context.borders if border.dim not in read]
    for border in own:
        x = border.laid_around(x)
    return x, [border.dim for border in own]


def dilate(x: Any, reading: Reading, mesh: Mesh, fill: Any) -> Any:
    """The dilated rows that this device's shard reads, `reading.span` of them, from the fetched."""
    dim, dilation, leads = reading.dim, reading.window.dilation, reading.leads
    if dilation == 1:
        return x
    config = [(0, 0, 0)] * x.ndim
    missing = reading.span - min(leads) - reading.dilated
    config[dim] = (max(leads), max(missing, 0), dilation - 1)
    x = lax.pad(x, lax.convert_element_type(fill, x.dtype), config)
    start = shard_entry([max(leads) - lead for lead in leads], reading.axes, mesh)
    if isinstance(start, np.integer):
        return lax.slice_in_dim(x, int(start), int(start) + reading.span, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, reading.span, dim, allow_negative_indices=False)
