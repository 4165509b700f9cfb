"""The axis of the mesh along which the stages of a pipeline lie."""

from collections.abc import Mapping

from meshwise.errors import MeshError, message


def check_axis(name: str, axis: str, sizes: Mapping[str, int]) -> None:
    """An error where a mesh has axes, and not this one. `name` is what is to be pipelined."""
    if sizes and axis not in sizes:
        raise MeshError(
            message(
                f"{name} is to be pipelined along an axis that the mesh has not",
                [f"axis {axis!r}; the mesh has {', '.join(map(repr, sizes))}"],
                "The stages of a pipeline lie along one axis of the mesh.",
                "Name one of its axes.",
            )
        )
