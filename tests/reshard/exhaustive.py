"""The least cost of a reshard by plain Dijkstra over prime axes: no groups, no bound, even dims.

Written apart from the package's search, to compare with it. A state is the axes of each dim by
name and the axes that are still unreduced.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwise.cost.hardware import Hardware
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.reshard.rounds import plan_rounds
from meshwise.reshard.steps import LARGE_BYTES
from meshwise.reshard.tiles import Tiles, received_bytes, tiles_of
from tests.reshard.cases import all_shardings

Axes = tuple[str, ...]
State = tuple[tuple[Axes, ...], frozenset[str], str]
KINDS = ("all_gather", "minor all_gather", "all_to_all", "ppermute", "round")


class Move(NamedTuple):
    """A move from some state: bytes sent, dims and terms after it, what it is joined with.

    `shards` is in how many the array is cut afterwards. The kind of a slice is empty.
    """

    kind: str
    sent: float
    after: tuple[tuple[Axes, ...], frozenset[str]]
    joins: str
    shards: int


def least_seconds(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
    with_rounds: bool = True,
) -> float:
    """Seconds of the cheapest path through arrays no larger than both ends.

    Rounds may lead from every sharding to every other; the package's search has them only at the
    start or after a reduction, and only to what one all_gather makes the target of. They are left
    out where what devices must receive in them and afterwards costs more than a path without any.
    """
    below = math.inf
    if with_rounds:
        below = least_seconds(shape, itemsize, mesh, source, target, hardware, with_rounds=False)
    least_shards = min(_shards(mesh, s.dims) for s in (source, target))
    free = tuple(a for a in mesh.names if a not in target.unreduced)
    start = (source.dims, frozenset(source.unreduced) - set(target.unreduced), "")
    best = {start: 0.0}
    prices: dict[str, tuple[float, float]] = {}
    queue = [(0.0, 0, start)]
    count = itertools.count(1)
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state[0] == target.dims and not state[1]:
            return cost
        if cost > best[state]:
            continue
        for kind, sent, after, joins, shards in _all_moves(shape, itemsize, mesh, free, state[:2]):
            if shards < least_shards:
                continue
            if kind not in prices:
                start_s = hardware.start_s(kind) if kind else 0.0
                prices[kind] = start_s, hardware.byte_factor(kind) + hardware.bytes_first
            start_s, price = prices[kind]
            launch = 0.0 if _joined(joins, state[2]) else start_s
            seconds = launch + sent * price / hardware.link_bytes_per_s
            reached = (*after, joins)
            if cost + seconds < best.get(reached, math.inf):
                best[reached] = cost + seconds
                heapq.heappush(queue, (best[reached], next(count), reached))
        if state[1] or not with_rounds:
            continue
        ends = state[0], target.dims
        for dims, seconds in _in_rounds(shape, itemsize, mesh, ends, hardware, below - cost):
            reached = (dims, frozenset(), "")
            if _shards(mesh, dims) < least_shards:
                continue
            if cost + seconds < best.get(reached, math.inf):
                best[reached] = cost + seconds
                heapq.heappush(queue, (best[reached], next(count), reached))
    raise AssertionError("the target was not reached")


def _in_rounds(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    ends: tuple[tuple[Axes, ...], tuple[Axes, ...]],
    hardware: Hardware,
    below: float,
) -> Iterator[tuple[tuple[Axes, ...], float]]:
    """Every sharding that pieces sent straight can make of the first of `ends`, with its seconds.

    Those are left out from which the second is not reached in less than `below` seconds, as too
    many bytes are lacking.
    """
    dims, target = ends
    byte_s = (hardware.byte_factor("round") + hardware.bytes_first) / hardware.link_bytes_per_s
    least_byte_s = min(map(hardware.byte_factor, KINDS)) / hardware.link_bytes_per_s
    launch_s = hardware.launch_s if hardware.round_s is None else hardware.round_s
    least = _lacking(shape, mesh, dims) * byte_s + _lacking_to(shape, mesh, target) * least_byte_s
    for k in np.flatnonzero(launch_s + least * itemsize < below):
        after = _even(shape, mesh)[k]
        sent = _sent(shape, mesh, dims, after)
        if sent:
            yield after, len(sent) * launch_s + sum(sent) * itemsize * byte_s


@functools.cache
def _shards(mesh: Mesh, dims: tuple[Axes, ...]) -> int:
    """In how many shards an array is cut."""
    return mesh.size(a for axes in dims for a in axes)


def _joined(move: str, before: str) -> bool:
    """Whether a move needs no launch of its own after one of those that join."""
    return bool(move) and (move == before or f"{before} ".startswith(f"{move} "))


@functools.cache
def _even(shape: tuple[int, ...], mesh: Mesh) -> list[tuple[Axes, ...]]:
    """Every sharding without padding."""
    return [
        s.dims
        for s in all_shardings(mesh, len(shape))
        if all(n % mesh.size(axes) == 0 for n, axes in zip(shape, s.dims, strict=True))
    ]


@functools.cache
def _lacking(shape: tuple[int, ...], mesh: Mesh, dims: tuple[Axes, ...]) -> np.ndarray:
    """Elements that some device must receive for every sharding without padding."""
    held = _tiles(shape, mesh, dims)
    every = _even(shape, mesh)
    return np.array([received_bytes(held, _tiles(shape, mesh, after), 1) for after in every])


@functools.cache
def _lacking_to(shape: tuple[int, ...], mesh: Mesh, dims: tuple[Axes, ...]) -> np.ndarray:
    """Elements that some device must receive of every sharding without padding."""
    held = _tiles(shape, mesh, dims)
    every = _even(shape, mesh)
    return np.array([received_bytes(_tiles(shape, mesh, before), held, 1) for before in every])


@functools.cache
def _sent(
    shape: tuple[int, ...], mesh: Mesh, dims: tuple[Axes, ...], after: tuple[Axes, ...]
) -> list[int]:
    """Elements that travel in each round from one sharding to another; none where too many."""
    rounds = plan_rounds(_tiles(shape, mesh, dims), _tiles(shape, mesh, after))
    return [math.prod(r.shape) for r in rounds or () if r.is_sent]


@functools.cache
def _tiles(shape: tuple[int, ...], mesh: Mesh, dims: tuple[Axes, ...]) -> Tiles:
    return tiles_of(shape, local_shape(shape, Sharding(dims), mesh), dims, mesh.axis_size)


@functools.lru_cache(1024)
def _all_moves(
    shape: tuple[int, ...], itemsize: int, mesh: Mesh, free: Axes, state: tuple
) -> list[Move]:
    found = []
    for kind, sent, after in moves(shape, itemsize, mesh, list(free), (*state, "")):
        joins = kind if kind == "reduce_scatter" else ""
        if kind == "all_gather":  # large gathers of several dims go one by one
            dim = next(d for d, axes in enumerate(after[0]) if axes != state[0][d])
            local = local_shape(shape, Sharding(after[0]), mesh)
            is_large = itemsize * math.prod(local) >= LARGE_BYTES
            joins = f"all_gather {dim}" if is_large else "all_gather"
        found.append(Move(kind, sent, after, joins, _shards(mesh, after[0])))
    return found


def moves(
    shape: tuple[int, ...], itemsize: int, mesh: Mesh, free: list[str], state: State
) -> Iterator[tuple[str, float, tuple[tuple[Axes, ...], frozenset[str]]]]:
    """(kind, bytes, state after) of each move; the kind of a slice is empty."""
    dims, terms, _ = state
    size = mesh.axis_size
    local = itemsize * math.prod(shape) // mesh.size(a for axes in dims for a in axes)
    unused = [a for a in free if a not in terms and all(a not in axes for axes in dims)]

    def fits(new: tuple[Axes, ...]) -> bool:
        return all(n % mesh.size(axes) == 0 for n, axes in zip(shape, new, strict=True))

    def replaced(d: int, axes: Axes) -> tuple[Axes, ...]:
        return (*dims[:d], axes, *dims[d + 1 :])

    for d, axes in enumerate(dims):
        for a in unused:
            if fits(replaced(d, (*axes, a))):
                yield "", 0.0, (replaced(d, (*axes, a)), terms)
        for k in range(len(axes)):
            group = mesh.size(axes[k:])
            yield "all_gather", local * (group - 1), (replaced(d, axes[:k]), terms)
        for a in terms:
            new = replaced(d, (*axes, a))
            if fits(new):
                yield "reduce_scatter", local * (1 - 1 / size[a]), (new, terms - {a})
    for k in range(1, len(terms) + 1):
        for chosen in itertools.combinations(sorted(terms), k):
            sent = 2 * local * (1 - 1 / mesh.size(chosen))
            yield "all_reduce", sent, (dims, terms - set(chosen))
    yield from _exchanges(mesh, dims, terms, local, fits)
    places = [axes for axes in dims]
    pool = [a for axes in dims for a in axes] + unused
    for order in itertools.permutations(pool, sum(map(len, places))):
        names = iter(order)
        new = tuple(tuple(next(names) for _ in axes) for axes in places)
        same = all(mesh.size(a) == mesh.size(b) for a, b in zip(new, dims, strict=True))
        if new != dims and same:
            yield "ppermute", local, (new, terms)


def _exchanges(mesh, dims, terms, local, fits):
    """Suffixes of some dims, appended to other dims in any order, at once."""
    for kept in itertools.product(*(range(len(axes) + 1) for axes in dims)):
        lost = [a for axes, k in zip(dims, kept, strict=True) for a in axes[k:]]
        gaining = [d for d, k in enumerate(kept) if k == len(dims[d])]
        for order in itertools.permutations(lost):
            for where in itertools.product(gaining, repeat=len(lost)):
                if not lost:
                    continue
                new = [axes[:k] for axes, k in zip(dims, kept, strict=True)]
                for a, d in zip(order, where, strict=True):
                    new[d] += (a,)
                if fits(tuple(new)):
                    sent = local * (1 - 1 / mesh.size(lost))
                    yield "all_to_all", sent, (tuple(new), terms)
