"""The least cost of a reshard by plain Dijkstra over prime axes: no groups, no bound, even dims.

Written apart from the package's search, to compare with it. A state is the axes of each dim by
name and the axes that are still unreduced.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator

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
    cap = max(
        mesh.device_count // mesh.size(a for d in s.dims for a in d) for s in (source, target)
    )
    free = tuple(a for a in mesh.names if a not in target.unreduced)
    start = (source.dims, frozenset(source.unreduced) - set(target.unreduced), "")
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    count = itertools.count(1)
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state[0] == target.dims and not state[1]:
            return cost
        if cost > best[state]:
            continue
        for kind, sent, after in _all_moves(shape, itemsize, mesh, free, state[:2]):
            dim = next((d for d, axes in enumerate(after[0]) if axes != state[0][d]), None)
            is_large = (
                itemsize * math.prod(local_shape(shape, Sharding(after[0]), mesh)) >= LARGE_BYTES
            )
            joins = kind if kind == "reduce_scatter" else ""
            if kind == "all_gather":  # large gathers of several dims go one by one
                joins = f"all_gather {dim}" if is_large else "all_gather"
            launch = 0.0 if not kind or _joined(joins, state[2]) else hardware.start_s(kind)
            price = hardware.byte_factor(kind) + hardware.bytes_first
            seconds = launch + sent * price / hardware.link_bytes_per_s
            reached = (*after, joins)
            if mesh.device_count // mesh.size(a for axes in after[0] for a in axes) > cap:
                continue
            if cost + seconds < best.get(reached, math.inf):
                best[reached] = cost + seconds
                heapq.heappush(queue, (best[reached], next(count), reached))
        if state[1] or not with_rounds:
            continue
        ends = state[0], target.dims
        for dims, seconds in _in_rounds(shape, itemsize, mesh, ends, hardware, below - cost):
            reached = (dims, frozenset(), "")
            if mesh.device_count // mesh.size(a for axes in dims for a in axes) > cap:
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
    for after in _even(shape, mesh):
        least = _lacking(shape, mesh, dims, after) * byte_s
        least += _lacking(shape, mesh, after, target) * least_byte_s
        if launch_s + least * itemsize >= below:
            continue
        sent = _sent(shape, mesh, dims, after)
        if sent:
            yield after, len(sent) * launch_s + sum(sent) * itemsize * byte_s


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
def _lacking(
    shape: tuple[int, ...], mesh: Mesh, dims: tuple[Axes, ...], after: tuple[Axes, ...]
) -> int:
    """Elements that some device must receive, whatever way is taken."""
    return received_bytes(_tiles(shape, mesh, dims), _tiles(shape, mesh, after), 1)


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
) -> list[tuple[str, float, tuple[tuple[Axes, ...], frozenset[str]]]]:
    return list(moves(shape, itemsize, mesh, list(free), (*state, "")))


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
