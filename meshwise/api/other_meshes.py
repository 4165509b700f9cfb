"""Other meshes of the same devices, in the sub-axes of a program's mesh."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from meshwise import _jax
from meshwise.ir.mesh import Axes, Mesh, refine_mesh
from meshwise.run.placement import on_devices_of


@dataclass
class OtherMeshes:
    """The meshes that a program for one of them names besides; `found` once one was."""

    ours: Any
    refined: Mesh
    known: dict[Any, Mapping[str, Axes] | None] = field(default_factory=dict)

    def axes_of(self, theirs: Any) -> Mapping[str, Axes] | None:
        """For each axis of a mesh the axes of the program's that it is; None where it is none."""
        if theirs not in self.known:
            self.known[theirs] = axes_on(theirs, self.ours, self.refined)
        return self.known[theirs]

    @property
    def meshes(self) -> list[Any]:
        """The program's mesh, and those others of its devices in its order, as they were named."""
        in_order = [
            theirs
            for theirs, axes in self.known.items()
            if axes is not None
            and self.refined.refine(sum(axes.values(), ())) == self.refined.names
        ]
        return [self.ours, *(on_devices_of(theirs, self.ours) for theirs in in_order)]

    @property
    def found(self) -> bool:
        """Whether a mesh with other axes than the program's was asked for."""
        return any(axes and not _jax.is_same(axes) for axes in self.known.values())


def axes_on(theirs: Any, ours: Any, refined: Mesh) -> Mapping[str, Axes] | None:
    """For each axis of a mesh the axes of ours that it is, the user's own where they are the same.

    None where it is no such mesh: of other devices, or of the same in an order that no order of our
    sub-axes is. A mesh without devices is taken to have ours.
    """
    positions = _positions(theirs, ours)
    if positions is None:
        return None
    same = (theirs.axis_names, theirs.axis_sizes) == (ours.axis_names, ours.axis_sizes)
    if same and (positions == np.arange(ours.size)).all():
        return {name: (name,) for name in theirs.axis_names}
    primes = refine_mesh(theirs.axis_names, theirs.axis_sizes)
    own_axes = zip(refined.names, refined.sizes, strict=True)
    strides = dict(zip(_strides(refined), own_axes, strict=True))
    grid = positions.reshape(primes.sizes)
    found: dict[str, str] = {}
    wanted = np.zeros_like(grid) + grid.flat[0]
    for axis, (name, size) in enumerate(zip(primes.names, primes.sizes, strict=True)):
        step = int(np.moveaxis(grid, axis, 0)[1].flat[0] - grid.flat[0])
        own, own_size = strides.get(step, ("", 0))
        if own_size != size:
            return None
        found[name] = own
        wanted = wanted + np.moveaxis(
            (np.arange(size) * step).reshape(size, *[1] * (grid.ndim - 1)), 0, axis
        )
    if not (grid == wanted).all():
        return None
    return {name: tuple([found[sub] for sub in subs]) for name, subs in primes.user_axes}


def _positions(theirs: Any, ours: Any) -> np.ndarray | None:
    """Where in our mesh each device of theirs stands."""
    if theirs.size != ours.size:
        return None
    if isinstance(theirs, AbstractMesh) or isinstance(ours, AbstractMesh):
        return np.arange(ours.size)
    place = {device: i for i, device in enumerate(ours.devices.flat)}
    found = [place.get(device, -1) for device in theirs.devices.flat]
    return None if -1 in found else np.array(found)


def _strides(mesh: Mesh) -> list[int]:
    sizes = mesh.sizes
    return [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
