"""A reshard in canonical form, so that alike reshards are searched once and with few axes.

Sub-axes that stand together in the same order at both ends become one axis (a *group*), unused
ones are left out or joined, dims that cannot take part are folded into the size of an element,
and axes are numbered in the order in which they appear. Each way to group is a *level*; the first
level whose plan meets the lower bound is final, so most reshards are searched with two or three
axes however large the mesh.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwise.cost.hardware import Hardware
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import Reduction, Sharding
from meshwise.reshard.moves import DimIds, IdPart, Prices, Problem
from meshwise.reshard.plan import Part

# With more prime axes than this, the search runs on groups only.
MAX_SEARCH_AXES = 5

Groups = tuple[Axes, ...]


@dataclass(frozen=True)
class Naming:
    """What the integers of a canonical problem stand for."""

    groups: Groups
    dims: tuple[int, ...]
    rank: int

    def axes(self, ids: tuple[int, ...]) -> Axes:
        """Names of some axes."""
        return tuple(name for i in ids for name in self.groups[i])

    def part(self, part: IdPart) -> Part:
        """A part of a step."""
        ids, dim, to_dim = part
        return Part(self.axes(ids), self._dim(dim), self._dim(to_dim))

    def all_dims(self, dims: DimIds) -> tuple[Axes, ...]:
        """Axes of every dim of the value."""
        named = {d: self.axes(ids) for d, ids in zip(self.dims, dims, strict=True)}
        return tuple(named.get(d, ()) for d in range(self.rank))

    def _dim(self, dim: int | None) -> int | None:
        return None if dim is None else self.dims[dim]


def prices_of(hardware: Hardware) -> Prices:
    """Prices in bytes of the plain link."""
    return Prices(
        hardware.launch_s * hardware.link_bytes_per_s,
        all_gather=hardware.byte_factor("all_gather"),
        all_to_all=hardware.byte_factor("all_to_all"),
        permute=hardware.byte_factor("ppermute"),
        reduce_scatter=hardware.byte_factor("reduce_scatter"),
        all_reduce=hardware.byte_factor("all_reduce"),
    )


def levels(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
) -> Iterator[tuple[Problem, Naming]]:
    """The problem by ever finer groups of axes."""
    terms = tuple(a for a in source.unreduced if a not in target.unreduced)
    used = {a for axes in (*source.dims, *target.dims) for a in axes}.union(terms)
    unused = [a for a in mesh.names if a not in used and a not in target.unreduced]
    runs = _runs(mesh, source, target, terms)
    seen = set()
    for groups in (runs, runs + _joined(unused), _singles(mesh, runs, unused)):
        if groups in seen or len(groups) > max(MAX_SEARCH_AXES, len(runs) + 1):
            continue
        seen.add(groups)
        idle = mesh.size(unused) // mesh.size(a for g in groups for a in g if a not in used)
        yield _number(shape, itemsize, mesh, source, target, terms, groups, idle, prices_of(hardware))


def _number(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    terms: Axes,
    groups: Groups,
    idle: int,
    prices: Prices,
) -> tuple[Problem, Naming]:
    """Axes by number in order of appearance; dims that no group can split folded away."""
    id_of = {group[0]: i for i, group in enumerate(groups)}
    sizes = tuple(mesh.size(group) for group in groups)

    def ids(axes: Axes) -> tuple[int, ...]:
        return tuple(id_of[a] for a in axes if a in id_of)

    kept, folded = [], itemsize
    for d, size in enumerate(shape):
        if source.dims[d] or target.dims[d] or (size > 1 and any(size % g == 0 for g in sizes)):
            kept.append(d)
        else:
            folded *= size
    problem = Problem(
        sizes,
        tuple(shape[d] for d in kept),
        folded,
        tuple(ids(source.dims[d]) for d in kept),
        tuple(ids(target.dims[d]) for d in kept),
        ids(terms),
        source.reduction is Reduction.PROD,
        idle,
        prices,
    )
    return problem, Naming(groups, tuple(kept), len(shape))


def _runs(mesh: Mesh, source: Sharding, target: Sharding, terms: Axes) -> Groups:
    """Maximal runs of used axes that no end separates, in order of appearance."""
    places = [_places(source.dims), _places(target.dims)]

    def follows(a: str, b: str) -> bool:
        for place in places:
            if (a in place) != (b in place):
                return False
            if a in place and place[b] != (place[a][0], place[a][1] + 1):
                return False
        return (a in terms) == (b in terms)

    order = [a for axes in (*source.dims, *target.dims) for a in axes] + list(terms)
    runs: list[Axes] = []
    for axis in dict.fromkeys(order):
        if runs and follows(runs[-1][-1], axis):
            runs[-1] = (*runs[-1], axis)
        else:
            runs.append((axis,))
    return tuple(runs)


def _places(dims: tuple[Axes, ...]) -> dict[str, tuple[int, int]]:
    return {a: (d, i) for d, axes in enumerate(dims) for i, a in enumerate(axes)}


def _joined(unused: list[str]) -> Groups:
    return (tuple(unused),) if unused else ()


def _singles(mesh: Mesh, runs: Groups, unused: list[str]) -> Groups:
    unused = sorted(unused, key=lambda a: mesh.axis_size[a])
    return tuple((a,) for run in runs for a in run) + tuple((a,) for a in unused)
