"""Arrays with the axes of the mesh that cut them as dims of their own.

Within a stage arrays may be sharded over the other axes of the mesh. The operator of a pipeline
takes such an array with those axes as its first dims, `[axis, ..., *local]`: what follows is the
part of one device, whose shape and place in a buffer are its own affair.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import DimAxes


@dataclass(frozen=True)
class Tiling:
    """An array's shape and type, the user's axes that cut each dim, and how many parts each makes.

    Every dim divides by the sizes of its axes.
    """

    shape: tuple[int, ...]
    dtype: Any
    dims: DimAxes
    sizes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        """Check that dims divide, and that no axis is used twice."""
        assert len(self.axes) == len(set(self.axes)) and len(self.dims) == len(self.shape), self
        assert all(n % self._count(a) == 0 for n, a in zip(self.shape, self.dims, strict=True)), (
            self
        )

    def _count(self, axes: Axes) -> int:
        return math.prod(dict(self.sizes)[a] for a in axes)

    @cached_property
    def axes(self) -> Axes:
        """The axes that cut the array, by dim."""
        return tuple(a for own in self.dims for a in own)

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading dims, one for each axis."""
        return tuple(dict(self.sizes)[a] for a in self.axes)

    @property
    def local(self) -> jax.ShapeDtypeStruct:
        """Type of the part of one device."""
        parts = zip(self.shape, self.dims, strict=True)
        return jax.ShapeDtypeStruct(tuple(n // self._count(a) for n, a in parts), self.dtype)

    @property
    def spec(self) -> PartitionSpec:
        """How the array lies, as a hint."""
        return PartitionSpec(*(axes or None for axes in self.dims))

    def split(self, array: Any) -> Any:
        """`[*shape]` to `[*lead, *local]`."""
        sizes, front, rest = [], [], []
        for n, axes in zip(self.shape, self.dims, strict=True):
            front += range(len(sizes), len(sizes) + len(axes))
            sizes += [dict(self.sizes)[a] for a in axes]
            rest.append(len(sizes))
            sizes.append(n // self._count(axes))
        if not front:
            return array
        return jnp.transpose(jnp.reshape(array, sizes), [*front, *rest])

    def join(self, array: Any) -> Any:
        """`[*lead, *local]` to `[*shape]`."""
        if not self.axes:
            return array
        order, taken = [], 0
        for dim, axes in enumerate(self.dims):
            order += [*range(taken, taken + len(axes)), len(self.axes) + dim]
            taken += len(axes)
        return jnp.reshape(jnp.transpose(array, order), self.shape)


def whole(aval: Any) -> Tiling:
    """An array that nothing cuts."""
    return Tiling(tuple(aval.shape), aval.dtype, ((),) * len(aval.shape))


def tiling(aval: Any, dims: DimAxes, mesh: Mesh) -> Tiling:
    """An array cut as completion says, over a refined mesh.

    Where a dim does not divide, or has a part of one of the user's axes alone, it is whole.
    """
    found = []
    for n, axes in zip(aval.shape, dims, strict=True):
        restored = mesh.restore(axes) or ()
        found.append(restored if n % mesh.size(axes) == 0 else ())
    sizes = tuple((a, mesh.size(mesh.sub_axes[a])) for own in found for a in own)
    return Tiling(tuple(aval.shape), aval.dtype, tuple(found), sizes)


def axes_of(tilings: Sequence[Tiling], mesh_axes: Sequence[str]) -> Axes:
    """Every axis that cuts one of some arrays, in the mesh's order."""
    used = {a for t in tilings for a in t.axes}
    return tuple(a for a in mesh_axes if a in used)
