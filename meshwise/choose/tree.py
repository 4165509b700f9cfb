"""The cheapest way to have one value in every sharding its users want.

A value is produced in one sharding; its users want others. Copies share: a slice of something
already gathered is free, two users of one gather pay once. The tree of reshards is grown from
the produced sharding, once adding the cheapest wish first and once the dearest, and the cheaper
tree is kept. What lies turned is first brought to where its shards belong, in the sharding in which
it lies or in one that is wanted, and the tree grows from there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations

from meshwise.cost.hardware import Hardware
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import Reduction, Sharding
from meshwise.reshard.plan import Reshard
from meshwise.reshard.search import reshard_bound, reshard_cost

Edge = tuple[Sharding, Sharding]
IMPOSSIBLE = float("inf")
# Of so many axes at most all orders are looked at.
MOST_PERMUTED = 4


@lru_cache(maxsize=1 << 18)
def reshard_tree(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    produced: Sharding,
    wanted: frozenset[Sharding],
    hardware: Hardware,
) -> tuple[float, tuple[Edge, ...]]:
    """Seconds, and the edges (from, to) in an order in which each source exists."""
    targets = sorted(wanted - {produced}, key=str)
    if not targets:
        return 0.0, ()
    if produced.turned:
        return _straightened(shape, itemsize, mesh, produced, targets, hardware)

    def cost(source: Sharding, target: Sharding) -> float:
        if not _reachable(source, target):
            return IMPOSSIBLE
        return reshard_cost(Reshard(shape, itemsize, mesh, source, target, hardware))

    if len(targets) == 1:
        return cost(produced, targets[0]), ((produced, targets[0]),)
    direct = {t: cost(produced, t) for t in targets}
    if IMPOSSIBLE in direct.values():
        return IMPOSSIBLE, ()
    cheapest_first = _grow(produced, sorted(targets, key=lambda t: direct[t]), cost)
    dearest_first = _grow(produced, sorted(targets, key=lambda t: -direct[t]), cost)
    return min(cheapest_first, dearest_first, key=lambda tree: tree[0])


def _straightened(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    produced: Sharding,
    wanted: Sequence[Sharding],
    hardware: Hardware,
) -> tuple[float, tuple[Edge, ...]]:
    """The tree of a value that lies turned: one step, and the tree from where that leads."""
    terms = produced.unreduced, produced.reduction
    ends = [produced.straight, *(s for s in wanted if (s.unreduced, s.reduction) == terms)]
    ends += _with_axes_elsewhere(produced.straight, mesh)
    found: list[tuple[float, tuple[Edge, ...]]] = []
    for end in dict.fromkeys(ends):
        seconds = reshard_cost(Reshard(shape, itemsize, mesh, produced, end, hardware))
        rest, edges = reshard_tree(shape, itemsize, mesh, end, frozenset(wanted), hardware)
        found.append((seconds + rest, ((produced, end), *edges)))
    return min(found, key=lambda tree: tree[0])


def _with_axes_elsewhere(sharding: Sharding, mesh: Mesh) -> list[Sharding]:
    """Shardings with shards as large, and the same axes in other places: one permute away."""
    axes = [axis for own in sharding.dims for axis in own]
    if len(axes) > MOST_PERMUTED:
        return []
    found = []
    for order in permutations(axes):
        if all(mesh.size((a,)) == mesh.size((b,)) for a, b in zip(axes, order, strict=True)):
            left = iter(order)
            dims = tuple(tuple(next(left) for _ in own) for own in sharding.dims)
            found.append(replace(sharding, dims=dims))
    return found


@lru_cache(maxsize=1 << 18)
def tree_bound(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    produced: Sharding,
    wanted: frozenset[Sharding],
    hardware: Hardware,
) -> float:
    """Seconds that no tree from what is produced to all that is wanted is below: its longest way.

    Far cheaper to find than the tree. `wanted` without `produced`.
    """
    if not all(_reachable(produced, target) for target in wanted):
        return IMPOSSIBLE
    what = shape, itemsize, mesh, produced
    return max([reshard_bound(Reshard(*what, target, hardware)) for target in wanted])


def _grow(produced: Sharding, targets: Iterable[Sharding], cost) -> tuple[float, tuple[Edge, ...]]:  # type: ignore[no-untyped-def]
    copies = [produced]
    total = 0.0
    edges = []
    for target in targets:
        source = min(copies, key=lambda copy: cost(copy, target))
        total += cost(source, target)
        edges.append((source, target))
        copies.append(target)
    return total, tuple(edges)


def _reachable(source: Sharding, target: Sharding) -> bool:
    """A value that is whole can become one term of a sum, not of another reduction."""
    if target.unreduced and target.reduction is not Reduction.SUM:
        within = set(target.unreduced) <= set(source.unreduced)
        return within and source.reduction is target.reduction
    return True
