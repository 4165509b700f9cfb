"""What is said to `mw.jit`, besides the function."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwise import _jax
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.errors import ArgumentError, MeshError, message
from meshwise.run.options import Compiling


@dataclass(frozen=True)
class Choices:
    """How a program is to be partitioned, whatever its function and hints."""

    completion: str = "improved"
    strict: bool = False
    hardware: Hardware | str = GENERIC
    hoist_bytes: int | None = None
    schedule: Any = None


class _Alone:
    """Equal to nothing else."""


def _is_nothing(leaf: Any) -> bool:
    return leaf is None


@dataclass(frozen=True)
class Options:
    """What was said to `mw.jit`, besides the function."""

    mesh: Any
    in_shardings: Any
    out_shardings: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    choices: Choices
    keep_unused: bool = False
    inline: bool = False
    device: Any = None
    backend: str | None = None
    compiler_options: dict[str, Any] | None = None

    @property
    def names_shardings(self) -> bool:
        """Whether anything is said of arguments or results."""
        said = self.in_shardings, self.out_shardings
        return any(not _jax.is_unspecified(s) for s in jax.tree.leaves(said))

    @property
    def is_for_one_device(self) -> bool:
        """Whether a device was chosen, by `jax.jit`'s deprecated arguments."""
        return self.device is not None or self.backend is not None

    @property
    def compiling(self) -> Compiling:
        """What is passed on when the program is compiled."""
        return Compiling(self.keep_unused, tuple((self.compiler_options or {}).items()))

    @cached_property
    def key(self) -> Any:
        """Equal where everything that was said is; of these options alone where it has no hash."""
        said: list[Any] = []
        for field in fields(self):
            leaves, tree = jax.tree.flatten(getattr(self, field.name), is_leaf=_is_nothing)
            said += [tuple(leaves), tree]
        try:
            hash(tuple(said))
        except TypeError:
            return _Alone()
        return tuple(said)

    @property
    def passed(self) -> dict[str, Any]:
        """The arguments of `jax.jit` that say nothing of shardings, in its words."""
        names = (
            *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
            *("keep_unused", "inline", "device", "backend", "compiler_options"),
        )
        return {name: getattr(self, name) for name in names}


def check_flags(asked: str, **given: Any) -> None:
    """An error for what is neither so nor not, nor None. `asked` is what it was given to."""
    is_left = bool | np.bool_ | None
    offenders = [f"{k}={v!r:.60}" for k, v in given.items() if not isinstance(v, is_left)]
    if offenders:
        raise ArgumentError(
            message(
                f"{asked} was given what is neither so nor not",
                offenders,
                "It is True or False; text, as of a file of settings, is neither.",
                "Give one of the two, or leave it out.",
            )
        )


def check_is_function(fn: Any, asked: str) -> None:
    """An error for what cannot be called. `asked` is what it was given to."""
    if not callable(fn):
        raise ArgumentError(
            message(
                f"{asked} was given no function",
                [f"{fn!r:.60} is {type(fn).__name__}"],
                "A program is made of what a function of arrays does.",
                "Give the function itself, not its result.",
            )
        )


def check_is_mesh(mesh: Any, asked: str = "mw.jit") -> None:
    """An error for what is no mesh that a program can be for, nor None.

    `asked` is what it was given to.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise ArgumentError(
            message(
                f"{asked} was given a mesh that is none",
                [f"mesh={mesh!r:.60}"],
                "A mesh is a jax.sharding.Mesh or, to plan without devices, an AbstractMesh.",
                "Make one with jax.make_mesh(sizes, names).",
            )
        )
    nameless = [a for a in (mesh.axis_names if mesh is not None else ()) if not isinstance(a, str)]
    if nameless:
        raise MeshError(
            message(
                f"{asked} was given a mesh whose axes have no names",
                [f"axis {axis!r} is {type(axis).__name__}" for axis in nameless],
                "Axes are named by text; XLA's shardings have no other names.",
                "Make the mesh with such: jax.make_mesh(sizes, ('data', 'model')).",
            )
        )
    if isinstance(mesh, Mesh) and AxisType.Manual in mesh.axis_types:
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        raise MeshError(
            message(
                f"{asked} was given a mesh with manual axes",
                [f"axis {axis!r}" for axis, kind in kinds if kind == AxisType.Manual],
                "Axes are manual inside of jax.shard_map alone, where arrays are parts of others.",
                "Make the mesh with AxisType.Auto or AxisType.Explicit.",
            )
        )
