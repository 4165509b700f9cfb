"""A dim over several axes as several dims, each over some of them.

Rows over `x, y` are a dim over `x`, of as many rows as `x` has devices, and a dim over `y`, of the
rows in each of these parts. Then either axis is the minor one of a dim: it may be gathered, or
move to another dim, without the other. These are the (axis, local) tiles of Rink et al. (arXiv
2112.01075, section 3), cut where the ends of a reshard have use for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import DimAxes


@dataclass(frozen=True)
class Ends:
    """Both ends of a reshard without the axes that they share at the front of a dim.

    `whole` is the global shape, `shape` that of one shard over the shared axes, `prefix`.
    """

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    prefix: DimAxes
    source: DimAxes
    target: DimAxes
    terms: Axes


def taken_apart(ends: Ends, groups: tuple[Axes, ...], mesh: Mesh) -> Ends | None:
    """The ends with dims taken apart between groups of axes; None where none can be."""
    lasts = {group[-1] for group in groups}
    found: list[_Piece] = []
    for d, size in enumerate(ends.shape):
        cuts = _cuts(size, ends.source[d], ends.target[d], lasts, mesh)
        found += _pieces(ends, d, cuts, mesh) if cuts else [_piece(ends, d)]
    if len(found) == len(ends.shape):
        return None
    return Ends(
        tuple(piece.whole for piece in found),
        tuple(piece.size for piece in found),
        tuple(piece.prefix for piece in found),
        tuple(piece.source for piece in found),
        tuple(piece.target for piece in found),
        ends.terms,
    )


class _Piece(NamedTuple):
    """What `Ends` say of a dim."""

    whole: int
    size: int
    prefix: Axes
    source: Axes
    target: Axes


def _piece(ends: Ends, d: int) -> _Piece:
    return _Piece(ends.whole[d], ends.shape[d], ends.prefix[d], ends.source[d], ends.target[d])


def _pieces(ends: Ends, d: int, cuts: list[int], mesh: Mesh) -> Iterator[_Piece]:
    """A dim in pieces, major to minor; cuts say in how many parts each cuts the dim."""
    size = ends.shape[d]
    for above, below in pairwise((1, *cuts, size)):
        prefix = () if above > 1 else ends.prefix[d]
        part = below // above
        last = None if below == size else below
        sides = (_between(axes[d], above, last, mesh) for axes in (ends.source, ends.target))
        yield _Piece(part * mesh.size(prefix), part, prefix, *sides)


def _between(axes: Axes, above: int, below: int | None, mesh: Mesh) -> Axes:
    """The axes that shard a piece: those that cut the dim in more than `above` parts."""
    parts = {axis: mesh.size(axes[: i + 1]) for i, axis in enumerate(axes)}
    return tuple(a for a, n in parts.items() if above < n and (below is None or n <= below))


def _cuts(size: int, source: Axes, target: Axes, lasts: set[str], mesh: Mesh) -> list[int]:
    """Into how many parts an even dim can be cut between groups that shard it at an end.

    At the other end there must be such a border too, or each part must be made of whole shards.
    """
    ends = source, target
    if any(size % mesh.size(axes) for axes in ends):
        return []
    borders = [
        {mesh.size(axes[:i]) for i in range(1, len(axes)) if axes[i - 1] in lasts} for axes in ends
    ]
    return [
        cut
        for cut in sorted(set.union(*borders))
        if size % cut == 0
        and all(
            cut in own or cut % mesh.size(axes) == 0
            for own, axes in zip(borders, ends, strict=True)
        )
    ]
