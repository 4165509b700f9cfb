"""A sort along a sharded dim: what the ways to do it have in common.

Each shard holds a block of rows, of which the last ones may be padding, and gets the block of the
sorted rows that stands at its place. Arrays are `[length, rows]` here: the sorted dim, and all
others, each of which is sorted for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from meshwise.ir.mesh import Axes, Mesh
from meshwise.rules.registry import shard_index


@dataclass(frozen=True)
class SortedBlocks:
    """A sort of `rows` times `size` elements over some axes, by the first `keys` operands."""

    size: int
    rows: int
    keys: int
    is_stable: bool
    dtypes: tuple[Any, ...]
    axes: Axes
    mesh: Mesh

    @property
    def shards(self) -> int:
        """In how many blocks the dim is cut."""
        return self.mesh.size(self.axes)

    @property
    def block(self) -> int:
        """Elements of a block, padding included."""
        return -(-self.size // self.shards)

    @property
    def is_uneven(self) -> bool:
        """Whether there is padding."""
        return self.block * self.shards != self.size

    @property
    def index(self) -> Any:
        """Which block this device holds (int32 scalar)."""
        return shard_index(self.axes, self.mesh)

    @property
    def places(self) -> Any:
        """The places of this device's elements in the whole dim, `[block, rows]` of int32."""
        own = lax.broadcasted_iota(np.int32, (self.block, self.rows), 0)
        return own + self.index * np.int32(self.block)

    def sort_own(self, operands: Sequence[Any]) -> list[Any]:
        """This device's elements sorted, equal ones in the order they are in, padding last."""
        if not self.is_uneven:
            return self.sort(operands, self.keys)
        padding = lax.convert_element_type(self.places >= self.size, np.uint8)
        return self.sort([padding, *operands], self.keys + 1)[1:]

    def sort(self, operands: Sequence[Any], keys: int, is_stable: bool = True) -> list[Any]:
        """Arrays sorted along the first dim."""
        return list(lax.sort(tuple(operands), dimension=0, is_stable=is_stable, num_keys=keys))
