"""Meshes without devices, for programs that are partitioned and not run."""

from jax.sharding import AbstractMesh, AxisType


def mesh_of(**axes: int) -> AbstractMesh:
    """A mesh of axes of some sizes."""
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def mesh_of_sizes(*sizes: int) -> AbstractMesh:
    """A mesh of axes `x`, `y` and `z`, as many as there are sizes."""
    return mesh_of(**dict(zip("xyz", sizes, strict=False)))
