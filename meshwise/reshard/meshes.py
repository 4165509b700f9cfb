"""Two meshes over the same devices as one: the axes of both are products of its axes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.ir.mesh import Axes, Mesh, refine_mesh, sub_names

NamedSizes = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class CommonMesh:
    """A refined mesh, and what the axes of two meshes are in it."""

    mesh: Mesh
    source_axes: tuple[tuple[str, Axes], ...]
    target_axes: tuple[tuple[str, Axes], ...]


def common_mesh(source: NamedSizes, target: NamedSizes) -> CommonMesh | None:
    """The mesh that both refine to, where devices are numbered alike; None where there is none.

    2x4 and 4x2 are both 2x2x2; 2x3 and 3x2 have no mesh in common, as neither divides the other.

    >>> found = common_mesh([("x", 2), ("y", 4)], [("a", 4), ("b", 2)])
    >>> found.mesh.sizes, found.target_axes
    ((2, 2, 2), (('a', ('x', 'y.0')), ('b', ('y.1',))))
    """
    if tuple(source) == tuple(target):
        mesh = refine_mesh(*zip(*source, strict=True)) if source else refine_mesh((), ())
        return CommonMesh(mesh, mesh.user_axes, mesh.user_axes)
    total = math.prod(size for _, size in source)
    if total != math.prod(size for _, size in target):
        return None
    cuts = sorted({*_cuts(source), *_cuts(target)}, reverse=True)
    if any(a % b for a, b in itertools.pairwise(cuts)):
        return None
    pieces = [
        (above, below, refine_mesh(("p",), (above // below,)).sizes)
        for above, below in itertools.pairwise(cuts)
    ]
    names: list[str] = []
    sizes: list[int] = []
    ours: list[tuple[str, Axes]] = []
    places: list[tuple[int, str]] = []
    for (name, size), (high, low) in zip(source, _spans(source), strict=True):
        primes = [
            (above // math.prod(split[:i]), prime)
            for above, below, split in pieces
            if low <= below < above <= high
            for i, prime in enumerate(split)
        ]
        subs = sub_names(name, len(primes), [other for other, _ in source])
        assert size == math.prod(prime for _, prime in primes), (source, target)
        names += subs
        sizes += [prime for _, prime in primes]
        places += [(above, sub) for (above, _), sub in zip(primes, subs, strict=True)]
        ours.append((name, subs))
    theirs = [
        (name, tuple(sub for above, sub in places if low < above <= high))
        for (name, _), (high, low) in zip(target, _spans(target), strict=True)
    ]
    return CommonMesh(Mesh(tuple(names), tuple(sizes), tuple(ours)), tuple(ours), tuple(theirs))


def _cuts(axes: NamedSizes) -> list[int]:
    """How many devices there are below each axis, and all of them."""
    return [1, *(high for high, _ in _spans(axes))]


def _spans(axes: NamedSizes) -> list[tuple[int, int]]:
    """For each axis the devices that it and those after it span, and those after it."""
    sizes = [size for _, size in axes]
    return [(math.prod(sizes[i:]), math.prod(sizes[i + 1 :])) for i in range(len(sizes))]
