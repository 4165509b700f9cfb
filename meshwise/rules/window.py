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

from meshwise.ir.mesh import Axes, Mesh
from meshwise.rules.halo import MOST_PIECES, Fetch, fetch_filled, fetch_rows, shard_entry
from meshwise.rules.registry import Exchange


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

    The operand has `size` rows, and the result `rows`.
    """

    dim: int
    axes: Axes
    window: Window
    size: int
    rows: int
    shards: int

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
        return Fetch(min(self.size, self._end), -(-self.size // self.shards), starts, length)

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
    size = fetch.size if everywhere else reading.size  # rows after the last one read were not sent
    beyond = max(fetch.starts) + fetch.length > size
    if reading.reads_outside or (everywhere and (beyond or min(fetch.starts) < 0)):
        return fetch_filled(x, *where, fetch, size, fill)
    return fetch_rows(x, *where, fetch)


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
