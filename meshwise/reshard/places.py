"""Ways for axes to change places: all exchanges and all permutations of a sharding.

Axes are small integers, `dims` lists for each dim its axes major to minor, `sizes` the size of
each axis. Local sizes do not matter here, so what is found serves every shape.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

Ids = tuple[int, ...]
DimIds = tuple[Ids, ...]
IdPart = tuple[Ids, int | None, int | None]


class Exchange(NamedTuple):
    """One all_to_all: the dims after it, its parts, and by how much dims grow and shrink.

    `lost` and `gained` list (dim, product of the sizes of the axes that it loses or gains).
    """

    dims: DimIds
    parts: tuple[IdPart, ...]
    lost: tuple[tuple[int, int], ...]
    gained: tuple[tuple[int, int], ...]


@lru_cache(maxsize=1 << 14)
def exchanges(dims: DimIds, sizes: Ids, target: DimIds | None = None) -> tuple[Exchange, ...]:
    """Every way to move minor axes of some dims to be minor axes of others, in one all_to_all.

    A dim loses or gains axes, never both: what it gains would have to split rows that others
    hold. With a target, only one dim loses and what another gains is as in the target.
    """
    found = []
    for kept in product(*(range(len(axes), -1, -1) for axes in dims)):
        lost = [(a, d) for d, k in enumerate(kept) for a in dims[d][k:]]
        losing = [d for d, k in enumerate(kept) if k < len(dims[d])]
        gaining = [d for d, k in enumerate(kept) if k == len(dims[d])]
        if not lost or not gaining or (target and len(losing) > 1):
            continue
        if target:
            options = _direct(dims, [axis for axis, _ in lost], gaining, target)
        else:
            options = _distributions([axis for axis, _ in lost], gaining)
        home = dict(lost)
        lost_sizes = tuple((d, _product(dims[d][kept[d] :], sizes)) for d in losing)
        left = [axes[:k] for axes, k in zip(dims, kept, strict=True)]
        for gains in options:
            new = left.copy()
            for d, axes in gains.items():
                new[d] += axes
            parts = _exchange_parts(dims, home, gains)
            gained_sizes = tuple([(d, _product(axes, sizes)) for d, axes in gains.items()])
            found.append(Exchange(tuple(new), parts, lost_sizes, gained_sizes))
    return tuple(found)


def _direct(
    dims: DimIds, axes: Sequence[int], gaining: Sequence[int], target: DimIds
) -> Iterator[dict[int, Ids]]:
    """The dims that have just these axes next in the target."""
    for dim in gaining:
        held = len(dims[dim])
        added = target[dim][held : held + len(axes)]
        if target[dim][:held] == dims[dim] and sorted(added) == sorted(axes):
            yield {dim: added}


def _distributions(axes: Sequence[int], dims: Sequence[int]) -> Iterator[dict[int, Ids]]:
    """Every way to give each axis to a dim, in every order."""
    if not axes:
        yield {}
        return
    for rest in _distributions(axes[1:], dims):
        for dim in dims:
            had = rest.get(dim, ())
            for place in range(len(had) + 1):
                yield {**rest, dim: (*had[:place], axes[0], *had[place:])}


def _exchange_parts(
    dims: DimIds, dim_of: dict[int, int], gains: dict[int, Ids]
) -> tuple[IdPart, ...]:
    """Parts of an exchange: runs of axes that stay together make one part."""
    parts: list[IdPart] = []
    for to_dim, axes in gains.items():
        start = 0
        for end in range(1, len(axes) + 1):
            dim = dim_of[axes[start]]
            home, run = dims[dim], axes[start : end + 1]
            place = home.index(run[0])
            if end == len(axes) or home[place : place + len(run)] != run:
                parts.append((axes[start:end], dim, to_dim))
                start = end
    return tuple(parts)


@lru_cache(maxsize=1 << 14)
def arrangements(
    dims: DimIds, free: Ids, sizes: Ids, target: DimIds | None = None
) -> tuple[DimIds, ...]:
    """Every other way to put axes in the places of `dims` that keeps each local size.

    Axes of a dim may change order, and change place with axes of the same size in other dims or
    unused. With a target, only the target itself.
    """
    axes = tuple(a for d in dims for a in d) + free
    if target:
        sames = (
            _product(a, sizes) == _product(b, sizes) for a, b in zip(dims, target, strict=True)
        )
        fits = all(sames) and {a for d in target for a in d} <= set(axes)
        return (target,) if fits and target != dims else ()
    found = set(_fill(dims, axes, sizes))
    found.discard(dims)
    return tuple(sorted(found))


def _fill(dims: DimIds, axes: Ids, sizes: Ids) -> Iterator[DimIds]:
    if not dims:
        yield ()
        return
    for first in _orders(_product(dims[0], sizes), axes, sizes):
        rest = tuple(a for a in axes if a not in first)
        for others in _fill(dims[1:], rest, sizes):
            yield (first, *others)


def _orders(shards: int, axes: Ids, sizes: Ids) -> Iterator[Ids]:
    """Ordered choices of axes that make so many shards."""
    if shards == 1:
        yield ()
        return
    for axis in axes:
        if shards % sizes[axis] == 0:
            rest = tuple(a for a in axes if a != axis)
            for others in _orders(shards // sizes[axis], rest, sizes):
                yield (axis, *others)


def moved_axes(before: DimIds, after: DimIds, sizes: Ids) -> Ids:
    """Axes whose place differs, in increasing order.

    A place is a dim and a place value: how many shards further the axis's next index is.
    """
    old, new = _places(before, sizes), _places(after, sizes)
    return tuple(a for a in sorted(old.keys() | new.keys()) if old.get(a) != new.get(a))


def _places(dims: DimIds, sizes: Ids) -> dict[int, tuple[int, int]]:
    places = {}
    for dim, axes in enumerate(dims):
        value = 1
        for axis in reversed(axes):
            places[axis] = dim, value
            value *= sizes[axis]
    return places


def _product(axes: Ids, sizes: Ids) -> int:
    return math.prod([sizes[a] for a in axes])
