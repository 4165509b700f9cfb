"""A reshard in canonical form, so that alike reshards are searched once and with few axes.

What both ends share at the front of a dim stays where it is and is left out. Sub-axes that stand
together in the same order at both ends become one axis (a *group*), unused ones are left out or
joined, dims that cannot take part are folded into the size of an element (of those whole at both
ends all but a few), and axes are numbered in the order in which they appear. Each way to group is a
*level*, from few groups to more; the first level whose plan meets the lower bound tells the price,
so most reshards are searched with two or three axes however large the mesh. The last cuts groups
where another group, or two together, could take the place of a part: 32 of 64 may change places
with another axis of 32.

Where an end shards a dim over several groups, the dim is first *taken apart* (`apart`): rows over
`x, y` are a dim over `x` and a dim over `y`, and each may leave without the other.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from meshwise.cost.hardware import Hardware
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import DimAxes, Reduction
from meshwise.reshard.apart import Ends, taken_apart
from meshwise.reshard.places import DimIds, IdPart
from meshwise.reshard.plan import Part, Reshard
from meshwise.reshard.problem import MAX_FREE_SEARCH, Prices, Problem

Groups = tuple[Axes, ...]

# Dims that are whole at both ends are places that axes may pass through. With so many dims that
# axes are of or may pass through others are folded away, as are those that no axis divides.
ENOUGH_DIMS = 5

# A plan this close to the lower bound tells the price: finer groups of axes are not tried for it.
# Not closer, as the bound prices every byte as the cheapest kind does. Where bytes come first, all
# that send least are this close, and the fastest is looked for.
_CLOSE = 1.03


@dataclass(frozen=True)
class Naming:
    """What the integers of a canonical problem stand for."""

    groups: Groups
    dims: tuple[int, ...]
    ends: Ends

    def axes(self, ids: tuple[int, ...]) -> Axes:
        """Names of some axes."""
        return tuple(name for i in ids for name in self.groups[i])

    def part(self, part: IdPart) -> Part:
        """A part of a step."""
        ids, dim, to_dim = part
        return Part(self.axes(ids), self._dim(dim), self._dim(to_dim))

    @property
    def source(self) -> DimAxes:
        """Axes of every dim at the start."""
        ends = self.ends
        return tuple(shared + own for shared, own in zip(ends.prefix, ends.source, strict=True))

    def all_dims(self, dims: DimIds) -> DimAxes:
        """Axes of every dim of the value."""
        named = {d: self.axes(ids) for d, ids in zip(self.dims, dims, strict=True)}
        return tuple(axes + named.get(d, ()) for d, axes in enumerate(self.ends.prefix))

    def local_shape(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Local size of every dim of the value."""
        named = dict(zip(self.dims, blocks, strict=True))
        return tuple(named.get(d, n) for d, n in enumerate(self.ends.shape))

    def _dim(self, dim: int | None) -> int | None:
        return None if dim is None else self.dims[dim]


class Level(NamedTuple):
    """A problem, and the same where some dims are several; None where no dim can be."""

    whole: tuple[Problem, Naming]
    apart: tuple[Problem, Naming] | None


@lru_cache(maxsize=1 << 8)
def prices_of(hardware: Hardware) -> Prices:
    """Prices in bytes of the plain link."""
    launch_s, rate = hardware.launch_s, hardware.link_bytes_per_s

    def price(kind: str) -> float:
        return hardware.byte_factor(kind) + hardware.bytes_first

    return Prices(
        launch_s * rate,
        (launch_s if hardware.round_s is None else hardware.round_s) * rate,
        all_gather=price("all_gather"),
        all_to_all=price("all_to_all"),
        permute=price("ppermute"),
        reduce_scatter=price("reduce_scatter"),
        all_reduce=price("all_reduce"),
        round=price("round"),
        minor_all_gather=price("minor all_gather"),
        slice=hardware.byte_factor("slice"),
        close=1.0 if hardware.bytes_first else _CLOSE,
        slack=0.5 if hardware.bytes_first else 0.0,  # half a byte is no difference in bytes
        launch_factors=hardware.launch_factors,
    )


def levels(asked: Reshard) -> Iterator[Level]:
    """The problem by ever finer groups of axes, as it is and with dims taken apart."""
    _, itemsize, mesh, source, target, hardware = asked
    ends = strip(asked)
    used = {a for axes in (*ends.source, *ends.target) for a in axes}.union(ends.terms)
    fixed = {a for axes in ends.prefix for a in axes}.union(target.unreduced)
    unused = tuple(a for a in mesh.names if a not in used and a not in fixed)
    prices = prices_of(hardware)
    gathers_terms = source.reduction is Reduction.PROD
    seen: set[Groups] = set()
    for groups in _groupings(mesh, ends, unused):
        if groups in seen:
            continue
        seen.add(groups)
        idle = mesh.size(unused) // mesh.size(a for g in groups for a in g if a not in used)
        apart = taken_apart(ends, groups, mesh) if len(groups) <= MAX_FREE_SEARCH else None
        whole, inner = (
            each and _number(each, itemsize, mesh, groups, idle, gathers_terms, prices)
            for each in (ends, apart)
        )
        assert whole is not None
        yield Level(whole, inner)


def strip(asked: Reshard) -> Ends:
    """Leave out what both ends share: equal dims whole, even ones up to where they differ."""
    shape, _, mesh, source, target, _ = asked
    sizes, prefix, before, after = [], [], [], []
    for n, mine, wanted in zip(shape, source.dims, target.dims, strict=True):
        shared = 0
        if mine == wanted:
            shared = len(mine)
        elif n % mesh.size(mine) == 0 == n % mesh.size(wanted):
            while shared < min(len(mine), len(wanted)) and mine[shared] == wanted[shared]:
                shared += 1
        sizes.append(-(-n // mesh.size(mine[:shared])))
        prefix.append(mine[:shared])
        before.append(mine[shared:])
        after.append(wanted[shared:])
    terms = tuple(a for a in source.unreduced if a not in target.unreduced)
    return Ends(shape, tuple(sizes), tuple(prefix), tuple(before), tuple(after), terms)


def _groupings(mesh: Mesh, ends: Ends, unused: Axes) -> Iterator[Groups]:
    runs = _runs(ends)
    yield runs
    with_unused = runs + ((unused,) if unused else ())
    yield with_unused
    for with_pairs in (True, False):
        cut = _cut(mesh, with_unused, with_pairs)
        if len(cut) <= MAX_FREE_SEARCH:
            yield cut
            return


def _number(
    ends: Ends,
    itemsize: int,
    mesh: Mesh,
    groups: Groups,
    idle: int,
    gathers_terms: bool,
    prices: Prices,
) -> tuple[Problem, Naming]:
    """Axes by number in order of appearance; dims that no group can split folded away."""
    id_of = {group[0]: i for i, group in enumerate(groups)}
    sizes = tuple(mesh.size(group) for group in groups)

    def ids(axes: Axes) -> tuple[int, ...]:
        return tuple(id_of[a] for a in axes if a in id_of)

    taking_part = _taking_part(ends, sizes)
    kept, folded, before, between = [], itemsize, [], 1
    for d, size in enumerate(ends.shape):
        if d in taking_part:
            kept.append(d)
            before.append(between)
            between = 1
        else:
            folded *= size
            between *= size
    if prices.minor_all_gather == prices.all_gather:
        before = [1] * len(kept)  # it makes no difference, so that more problems are alike
    problem = Problem(
        sizes,
        tuple(ends.shape[d] for d in kept),
        folded,
        tuple(ids(ends.source[d]) for d in kept),
        tuple(ids(ends.target[d]) for d in kept),
        ids(ends.terms),
        gathers_terms,
        idle,
        prices,
        tuple(before),
    )
    return problem, Naming(groups, tuple(kept), ends)


def _taking_part(ends: Ends, sizes: Sequence[int]) -> set[int]:
    """Dims that have axes at an end, and the largest few of those that others may pass through.

    One more of two rows is of no use, and an array of ten such dims would be searched for minutes.
    """
    dims = range(len(ends.shape))
    used = {d for d in dims if ends.source[d] or ends.target[d]}
    able = [d for d in dims if d not in used and _may_be_split(ends.shape[d], sizes)]
    most = max(1, ENOUGH_DIMS - len(used))
    return used.union(sorted(able, key=lambda d: -ends.shape[d])[:most])


def _may_be_split(rows: int, sizes: Sequence[int]) -> bool:
    return rows > 1 and any(rows % size == 0 for size in sizes)


def _runs(ends: Ends) -> Groups:
    """Maximal runs of used axes that no end separates, in order of appearance."""
    places = [_places(ends.source), _places(ends.target)]
    terms = ends.terms

    def follows(a: str, b: str) -> bool:
        for place in places:
            if (a in place) != (b in place):
                return False
            if a in place and place[b] != (place[a][0], place[a][1] + 1):
                return False
        return (a in terms) == (b in terms)

    order = [a for axes in (*ends.source, *ends.target) for a in axes] + list(terms)
    runs: list[Axes] = []
    for axis in dict.fromkeys(order):
        if runs and follows(runs[-1][-1], axis):
            runs[-1] = (*runs[-1], axis)
        else:
            runs.append((axis,))
    return tuple(runs)


def _places(dims: DimAxes) -> dict[str, tuple[int, int]]:
    return {a: (d, i) for d, axes in enumerate(dims) for i, a in enumerate(axes)}


def _cut(mesh: Mesh, groups: Groups, with_pairs: bool) -> Groups:
    """Groups cut where the first part has a common divisor with other groups as its size."""
    sizes = [mesh.size(group) for group in groups]
    pieces: list[Axes] = []
    for i, group in enumerate(groups):
        others = sizes[:i] + sizes[i + 1 :]
        if with_pairs:
            others += [a * b for a, b in combinations(others, 2)]
        wanted = {math.gcd(other, sizes[i]) for other in others}
        pieces += _pieces(mesh, group, wanted)
    return tuple(pieces)


def _pieces(mesh: Mesh, group: Axes, cuts: Iterable[int]) -> list[Axes]:
    pieces: list[Axes] = [()]
    total = 1
    for axis in group:
        if pieces[-1] and total in cuts:
            pieces.append(())
        pieces[-1] = (*pieces[-1], axis)
        total *= mesh.axis_size[axis]
    return pieces
