"""An annotated program as data: a function for one device, and how its arrays lie on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.sharding import PartitionSpec as P

# One mesh axis or two, as the tables of programs name them.
NONE, X, Y, XY = P(), P("x"), P("y"), P(("x", "y"))
SECOND, GRID = P(None, "x"), P("x", "y")

GROUPS = (
    "matmul",
    "transformer",
    "moe",
    "conv",
    "indexing",
    "ordering",
    "reshape",
    "control flow",
    "pipeline",
    "reshard",
    "science",
)


@dataclass(frozen=True)
class Array:
    """A random argument: normal numbers times `scale`, or integers below `bound`."""

    shape: tuple[int, ...]
    spec: P = NONE
    dtype: str = "float32"
    bound: int = 0
    scale: float = 1.0


def integers(shape: tuple[int, ...], bound: int, spec: P = NONE) -> Array:
    """Random integers from 0 up to `bound`, which is not among them."""
    return Array(shape, spec, "int32", bound)


@dataclass(frozen=True)
class Best:
    """The fewest wire bytes per device that a known program needs, and why in one line."""

    sent: float
    why: str


@dataclass(frozen=True)
class Program:
    """A program of the suite.

    `arguments` and `results` are trees of `Array` and of `PartitionSpec` (a prefix of the results'
    tree). The function takes them as on one device; with `hinted` its first argument is
    `shard(value, spec)`, with which it annotates values inside, the same for every partitioner.
    `reason` says why a row in which we lose is as it is. `tolerance` bounds the largest error of
    a right answer, relative to the largest number of the result.
    """

    group: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Any
    mesh: tuple[int, ...] = (8,)
    best: Best | None = None
    hinted: bool = False
    reason: str = ""
    tolerance: float = 1e-4


def gathered(elements: float, devices: int, itemsize: int = 4) -> float:
    """Bytes a device sends so that each of `devices` has all of an array sharded over them."""
    return (devices - 1) / devices * elements * itemsize


def scattered(elements: float, devices: int, itemsize: int = 4) -> float:
    """Bytes a device sends so that each keeps its part of the sum of arrays of `elements`."""
    return (devices - 1) / devices * elements * itemsize


def reduced(elements: float, devices: int, itemsize: int = 4) -> float:
    """Bytes a device sends so that each has the sum of arrays of `elements`."""
    return 2 * (devices - 1) / devices * elements * itemsize


def exchanged(elements: float, devices: int, itemsize: int = 4) -> float:
    """Bytes a device sends to exchange a local array of `elements` with the others."""
    return (devices - 1) / devices * elements * itemsize


def passed(*shape: int, itemsize: int = 4) -> float:
    """Bytes of a local array, all of which goes to one neighbour."""
    return float(prod(shape) * itemsize)


LOCAL = Best(0, "every device holds what it needs")
