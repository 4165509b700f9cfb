"""Parameters of a pipeline: each device's own in one row, or an ordinary tree on all devices.

A *row* holds the parameters of one stage, laid end to end for each dtype, and is as long as the
longest stage's. A leaf that several stages read stands in the row of each; its gradient is the sum
of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.pipeline.packing import Buffers, Layout, Lengths, longest, sum_dtype
from meshwise.pipeline.tiles import Tiling


@dataclass(frozen=True)
class Rows:
    """Which leaves lie in which stage's row. Stage k is chunk `k // devices` of its device.

    `types` are those of all leaves, `stages` the leaves of each stage in the order of its row.
    """

    types: tuple[Any, ...]
    stages: tuple[tuple[int, ...], ...]
    devices: int

    @property
    def layouts(self) -> list[Layout]:
        """How each row is laid out."""
        return [Layout(tuple(self.types[i] for i in leaves)) for leaves in self.stages]

    @property
    def lengths(self) -> Lengths:
        """The length of all rows."""
        return longest(self.layouts)

    @property
    def tied(self) -> tuple[int, ...]:
        """Leaves that several stages read."""
        read = [i for leaves in self.stages for i in leaves]
        return tuple(sorted({i for i in read if read.count(i) > 1}))

    def pack(self, leaves: Sequence[Any]) -> Buffers:
        """The rows of all devices: `[S, V, length]` for each dtype."""
        devices = [self.pack_device(leaves, device) for device in range(self.devices)]
        return {dtype: jnp.stack([d[dtype] for d in devices]) for dtype in self.lengths}

    def pack_device(self, leaves: Sequence[Any], device: int) -> Buffers:
        """The rows of one device: `[V, length]` for each dtype."""
        lengths = self.lengths
        rows = [
            self.layouts[k].pack([leaves[i] for i in self.stages[k]], lengths)
            for k in range(device, len(self.stages), self.devices)
        ]
        return {dtype: jnp.stack([row[dtype] for row in rows]) for dtype in lengths}

    def unpack(self, buffers: Buffers) -> list[Any]:
        """The leaves, each from the first row that has it; zero where none does."""
        found: dict[int, Any] = {}
        for leaf, value in self._parts(buffers):
            found.setdefault(leaf, value)
        return self._all(found)

    def unpack_sums(self, buffers: Buffers) -> list[Any]:
        """The leaves, each the sum over the rows that have it; zero where none does.

        It is added up in 32 bits at least, of parts that were sent in the dtypes of the leaves.
        """
        found: dict[int, Any] = {}
        for leaf, value in self._parts(buffers):
            more = value.astype(sum_dtype(value.dtype))
            found[leaf] = found[leaf] + more if leaf in found else more
        return [x.astype(t.dtype) for x, t in zip(self._all(found), self.types, strict=True)]

    def _parts(self, buffers: Buffers) -> list[tuple[int, Any]]:
        """(leaf, array) of everything in `[S, V, length]` buffers."""
        found: list[tuple[int, Any]] = []
        for number, (leaves, layout) in enumerate(zip(self.stages, self.layouts, strict=True)):
            chunk, device = divmod(number, self.devices)
            row = {dtype: x[device, chunk] for dtype, x in buffers.items()}
            found += zip(leaves, layout.unpack(row), strict=True)
        return found

    def _all(self, found: dict[int, Any]) -> list[Any]:
        return [
            found[i] if i in found else jnp.zeros(t.shape, t.dtype)
            for i, t in enumerate(self.types)
        ]

    def tied_parts(self, rows: Buffers, device: int) -> list[Any]:
        """What the `[V, length]` rows of one device, sums of gradients, add to each tied leaf."""
        tied = {i: self.types[i] for i in self.tied}
        sums = {i: jnp.zeros(t.shape, sum_dtype(t.dtype)) for i, t in tied.items()}
        for chunk, layout, leaves in self._own(device):
            values = layout.unpack({dtype: x[chunk] for dtype, x in rows.items()})
            for leaf, value in zip(leaves, values, strict=True):
                if leaf in sums:
                    sums[leaf] += value
        return [sums[i] for i in self.tied]

    def with_tied(self, rows: Buffers, tied: Sequence[Any], device: int) -> Buffers:
        """The `[V, length]` rows of one device with the tied leaves written over."""
        value_of = dict(zip(self.tied, tied, strict=True))
        for chunk, layout, leaves in self._own(device):
            for leaf, (dtype, start, _) in zip(leaves, layout.places, strict=True):
                if leaf in value_of:
                    flat = jnp.ravel(value_of[leaf])[None]
                    new = lax.dynamic_update_slice(rows[dtype], flat, (chunk, start))
                    rows = {**rows, dtype: new}
        return rows

    def _own(self, device: int) -> list[tuple[int, Layout, tuple[int, ...]]]:
        """(chunk, layout, leaves) of the rows of one device."""
        numbers = range(device, len(self.stages), self.devices)
        return [(c, self.layouts[k], self.stages[k]) for c, k in enumerate(numbers)]


@dataclass(frozen=True)
class Packing:
    """All parameters in rows, of each device its part of each.

    `tilings` say how the leaves lie over the axes `others` (with their sizes) that cut some of
    them; a leaf that an axis does not cut is there once for each of its devices.
    """

    rows: Rows
    tilings: tuple[Tiling, ...]
    others: tuple[tuple[str, int], ...] = ()

    def pack(self, leaves: Sequence[Any]) -> Buffers:
        """The rows `[S, V, *others, length]` of whole leaves."""
        pack = self.rows.pack
        for _ in self.others:
            pack = jax.vmap(pack)
        spread = [self._spread(t, x) for t, x in zip(self.tilings, leaves, strict=True)]
        found, count = pack(spread), len(self.others)
        order = (count, count + 1, *range(count), count + 2)
        return {dtype: jnp.transpose(x, order) for dtype, x in found.items()}

    def spec(self, axis: str) -> PartitionSpec:
        """How rows lie of which each device along an axis has its own."""
        return PartitionSpec(axis, None, *(other for other, _ in self.others))

    def _spread(self, tiling: Tiling, leaf: Any) -> Any:
        """`[*shape]` to `[*others, *local]`."""
        array, rank = tiling.split(jnp.asarray(leaf)), len(tiling.shape)
        order = [tiling.axes.index(a) for a, _ in self.others if a in tiling.axes]
        array = jnp.transpose(array, (*order, *range(len(order), array.ndim)))
        kept = [n if a in tiling.axes else 1 for a, n in self.others]
        local = array.shape[array.ndim - rank :]
        sizes = (*(n for _, n in self.others), *local)
        return jnp.broadcast_to(jnp.reshape(array, (*kept, *local)), sizes)

    def unpack(self, buffers: Buffers) -> list[Any]:
        """The whole leaves of rows."""
        unpack, count = self.rows.unpack, len(self.others)
        for _ in self.others:
            unpack = jax.vmap(unpack)
        order = (*range(2, 2 + count), 0, 1, 2 + count)
        rows = {dtype: _of_auto_axes(x) for dtype, x in buffers.items()}
        leaves = unpack({dtype: jnp.transpose(x, order) for dtype, x in rows.items()})
        return [self._gather(t, x) for t, x in zip(self.tilings, leaves, strict=True)]

    def _gather(self, tiling: Tiling, array: Any) -> Any:
        """`[*others, *local]` to `[*shape]`."""
        array = array[tuple(slice(None) if a in tiling.axes else 0 for a, _ in self.others)]
        present = [a for a, _ in self.others if a in tiling.axes]
        order = [present.index(a) for a in tiling.axes]
        return tiling.join(jnp.transpose(array, (*order, *range(len(order), array.ndim))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedParams:
    """Parameters in rows: `[S, V, ..., length]` for each dtype, a device's own under its number.

    Made by `pack` of what `mw.pipeline_value_and_grad` returns. It is a tree of a few arrays: an
    optimizer that works element by element takes it as it takes the parameters themselves, and its
    state then lies on the devices in the same way. What no stage reads is not in it. Leaves that
    several stages read are there several times, and their gradients are equal.
    """

    buffers: Buffers
    packing: Packing = field(metadata={"static": True})
    tree: Any = field(metadata={"static": True})

    @property
    def types(self) -> tuple[Any, ...]:
        """Types of the whole leaves."""
        return tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in self.packing.tilings)

    def unpack(self) -> Any:
        """The tree of parameters (or of gradients); zero where no stage reads a leaf."""
        return jax.tree.unflatten(self.tree, self.packing.unpack(self.buffers))


def _of_auto_axes(array: Any) -> Any:
    """The array whole on every device, where its type says how it lies: no part is cut then."""
    mesh = jax.typeof(array).sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.sharding.reshard(array, whole) if _jax.is_explicit(mesh) else array
