"""Which box of an array each device holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np

from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import Sharding


@dataclass(frozen=True)
class Tiles:
    """The tile of an array that each device holds: `block` from `starts[device]` on.

    What lies beyond the array's `shape` is padding. `starts` is None for a device that holds none.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]
    starts: tuple[tuple[int, ...] | None, ...]

    @cached_property
    def lows(self) -> np.ndarray:
        """First index of each device's tile: [devices, rank]; the end of the array for none."""
        rows = [self.shape if start is None else start for start in self.starts]
        return np.array(rows, np.int64).reshape(len(rows), len(self.shape))

    @cached_property
    def highs(self) -> np.ndarray:
        """The index after the last of each device's tile, padding left out: [devices, rank]."""
        return np.minimum(self.lows + np.array(self.block, np.int64), np.array(self.shape))


def tiles_of(
    shape: Sequence[int],
    block: Sequence[int],
    dims: Sequence[Sequence[Any]],
    sizes: Mapping[Any, int],
    turned: Sequence[Any] = (),
) -> Tiles:
    """Tiles of a sharding: `dims` lists the axes of each dim, `sizes` all axes, major to minor.

    Along `turned` axes the last tile comes first.

    >>> tiles_of((8,), (4,), [["x"]], {"x": 2, "y": 2}).starts
    ((0,), (0,), (4,), (4,))
    """
    place = {axis: i for i, axis in enumerate(sizes)}
    starts = []
    for index in product(*map(range, sizes.values())):
        start = []
        for axes, size in zip(dims, block, strict=True):
            shard = 0
            for axis in axes:
                own = index[place[axis]]
                shard = shard * sizes[axis] + (sizes[axis] - 1 - own if axis in turned else own)
            start.append(shard * size)
        starts.append(tuple(start))
    return Tiles(tuple(shape), tuple(block), tuple(starts))


def tiles_over(
    axes: Axes, shape: Sequence[int], block: Sequence[int], sharding: Sharding, mesh: Mesh
) -> Tiles:
    """Tiles over some axes of the shard that the other axes of a sharding cut out."""
    whole = [
        -(-n // mesh.size(a for a in dim if a not in axes))
        for n, dim in zip(shape, sharding.dims, strict=True)
    ]
    dims = [[a for a in dim if a in axes] for dim in sharding.dims]
    sizes = {axis: mesh.axis_size[axis] for axis in axes}
    return tiles_of(whole, block, dims, sizes, sharding.turned)


def received_bytes(source: Tiles, target: Tiles, itemsize: int) -> int:
    """The least that the device which lacks most must receive: what no reshard goes below.

    >>> halves, whole = (tiles_of((8,), (n,), [axes], {"x": 2}) for n, axes in ((4, "x"), (8, "")))
    >>> received_bytes(halves, whole, 4)
    16
    """
    missing = _volumes(target.lows, target.highs) - _volumes(
        np.maximum(source.lows, target.lows), np.minimum(source.highs, target.highs)
    )
    return int(missing.max(initial=0)) * itemsize


def _volumes(lows: np.ndarray, highs: np.ndarray) -> np.ndarray:
    return np.prod(np.maximum(highs - lows, 0), axis=-1)


# How something lies: the axes of each dim, by their number, and its local size.
Lying = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]


@lru_cache(maxsize=1 << 16)
def elements_received(
    sizes: tuple[int, ...], shape: tuple[int, ...], source: Lying, target: Lying
) -> int:
    """`received_bytes` of shardings, in elements, found dim by dim; each dim's rows are kept.

    `sizes` are those of all axes, major to minor.

    >>> elements_received((2, 2), (8,), (((0,),), (4,)), (((),), (8,)))
    4
    """
    ends = list(zip(shape, *source, *target, strict=True))
    held = math.prod(_rows_held(sizes, *end) for end in ends)
    wanted = math.prod(_rows_held(sizes, n, *own, *own) for n, _, _, *own in ends)
    return int(np.max(wanted - held))


@lru_cache(maxsize=1 << 14)
def _rows_held(
    sizes: tuple[int, ...],
    n: int,
    axes: tuple[int, ...],
    block: int,
    wanted_axes: tuple[int, ...],
    wanted_block: int,
) -> np.ndarray:
    """Of a dim of `n` rows: how many each device holds of those that it wants."""
    low, low_wanted = _shards(sizes, axes) * block, _shards(sizes, wanted_axes) * wanted_block
    high = np.minimum(np.minimum(low + block, low_wanted + wanted_block), n)
    return np.maximum(high - np.maximum(low, low_wanted), 0)


def _shards(sizes: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Which shard of a dim over some axes each device has."""
    devices = np.arange(math.prod(sizes))
    found = np.zeros_like(devices)
    for axis in axes:
        found = found * sizes[axis] + devices // math.prod(sizes[axis + 1 :]) % sizes[axis]
    return found
