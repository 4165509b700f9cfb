"""What kernels in some order hold beside arguments and results, as XLA on CPU packs it.

A value takes memory from the kernel that writes it to the last that reads it. Where a result lies,
other values may lie before, one after the other, the largest first, and of these those that lead to
the first results (XLA's `BufferAssigner`). What is left shares one piece of memory, in which each
value has a place that it keeps. XLA finds these twice, for the largest values first and for those
that live longest, and takes what is smaller (`GlobalDecreasingSizeBestFitHeap`): gaps stay, so that
it is more than what is held at any time.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.cost.cpu.orders import as_wanted
from meshwise.cost.kernels import Kernel, KernelProgram
from meshwise.cost.memory import inside_bytes
from meshwise.cost.steps import LITERAL

_MOST_TRIES = 64  # results that are tried for a value, those of the least memory first
_ALIGNED = 64  # bytes


@dataclass(frozen=True)
class _Life:
    """A value in memory, from one kernel to another."""

    value: int
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class _Place:
    """Values that take one place one after the other: when, in events of taking and freeing."""

    size: int
    spans: tuple[tuple[int, int], ...]

    @property
    def by_size(self) -> tuple[int, int]:
        """The largest first; of these, that which the first value takes longest."""
        (start, end), *_ = self.spans
        return -self.size, start - end

    @property
    def by_time(self) -> tuple[int, int]:
        """What is taken longest first; of these, the largest."""
        return self.spans[0][0] - self.spans[-1][1], -self.size


def held_bytes(program: KernelProgram, order: Sequence[int]) -> int:
    """The most that is held at once where kernels run in an order, in bytes, without gaps."""
    kernels = [program.kernels[k] for k in order]
    return _most(_temporaries(program, kernels), kernels)


def temporary_bytes(program: KernelProgram, order: Sequence[int]) -> int:
    """Bytes of the memory that is taken where kernels run in an order."""
    kernels = [program.kernels[k] for k in order]
    places = _places(_temporaries(program, kernels), kernels)
    orders = sorted(places, key=lambda p: p.by_size), sorted(places, key=lambda p: p.by_time)
    return min(map(_packed, orders))


def _temporaries(program: KernelProgram, kernels: Sequence[Kernel]) -> list[_Life]:
    """The values that lie neither in arguments nor where results come to lie."""
    sizes = [v.bytes for v in program.steps.values]
    results = frozenset(program.steps.outputs) - {LITERAL}
    first = {v: k for k, kernel in enumerate(kernels) for v in kernel.writes}
    last = dict(first)
    for k, kernel in enumerate(kernels):
        last.update((v, k) for v in kernel.reads if v in first)
    lives = [_Life(v, sizes[v], k, last[v]) for v, k in first.items()]
    made = {v: n for n, k in enumerate(as_wanted(program)) for v in program.kernels[k].writes}
    lives.sort(key=lambda life: (-life.size, made[life.value]))
    ends = [life for life in lives if life.value in results]
    others = [life for life in lives if life.value not in results]
    return _beside(ends, others, kernels)


def _beside(
    ends: Sequence[_Life], others: Sequence[_Life], kernels: Sequence[Kernel]
) -> list[_Life]:
    """The values that find no place where a result comes to lie, which is the last one there."""
    places = [[life] for life in ends]
    least = [-life.size for life in ends]
    beside = []
    for life in others:
        enough = bisect_right(least, -life.size)
        for place in reversed(places[max(0, enough - _MOST_TRIES) : enough]):
            at = bisect_left(place, life.first, key=_first)
            is_free = at < len(place) and _is_over(life, place[at], kernels)
            if is_free and (at == 0 or _is_over(place[at - 1], life, kernels)):
                place.insert(at, life)
                break
        else:
            beside.append(life)
    return beside


def _first(life: _Life) -> int:
    return life.first


def _is_over(before: _Life, after: _Life, kernels: Sequence[Kernel]) -> bool:
    """Whether one value is read for the last time when another may take its place."""
    if before.last < after.first:
        return True
    return before.last == after.first and before.value in kernels[after.first].replaces


def _most(held: Sequence[_Life], kernels: Sequence[Kernel]) -> int:
    sizes = {life.value: life.size for life in held}
    last = {life.value: life.last for life in held}
    alive = most = 0
    for k, kernel in enumerate(kernels):
        written = sum(sizes.get(v, 0) for v in kernel.writes)
        dying = [v for v in kernel.reads if last.get(v) == k]
        free = Counter(sizes[v] for v in dying if v in kernel.replaces)
        reused = 0
        for size in (sizes[v] for v in kernel.writes if v in sizes):
            if free[size]:
                free[size] -= 1
                reused += size
        most = max(most, alive + written - reused + inside_bytes(kernel))
        unread = [v for v in kernel.writes if last.get(v) == k]
        alive += written - sum(sizes[v] for v in (*dying, *unread))
    return most


def _places(held: Sequence[_Life], kernels: Sequence[Kernel]) -> list[_Place]:
    """The places that values take, in the order in which they are first taken.

    What a kernel writes is taken before what it read last is freed, but in place of which it
    writes.
    """
    lives = {life.value: life for life in held if life.size}
    taken: dict[int, int] = {}
    place_of: dict[int, int] = {}
    spans: list[list[tuple[int, int]]] = []
    sizes: list[int] = []
    clock = 0

    def new_place(size: int) -> int:
        spans.append([])
        sizes.append(size)
        return len(sizes) - 1

    def free(value: int) -> None:
        nonlocal clock
        spans[place_of[value]].append((taken[value], clock))
        clock += 1

    for k, kernel in enumerate(kernels):
        dying = [v for v in dict.fromkeys(kernel.reads) if v in lives and lives[v].last == k]
        for value in sorted((v for v in kernel.writes if v in lives), key=lambda v: lives[v].last):
            size = lives[value].size
            under = (v for v in dying if v in kernel.replaces and lives[v].size == size)
            before = next(under, None)
            if before is not None:
                dying.remove(before)
                free(before)
            place_of[value] = new_place(size) if before is None else place_of[before]
            taken[value] = clock
            clock += 1
        if inside := inside_bytes(kernel):
            spans[new_place(inside)].append((clock, clock + 1))
            clock += 2
        for value in (*dying, *(v for v in kernel.writes if v in lives and lives[v].last == k)):
            free(value)
    return [_Place(size, tuple(own)) for size, own in zip(sizes, spans, strict=True)]


def _packed(places: Iterable[_Place]) -> int:
    """Bytes in which all places lie, each in the smallest gap that is left for it."""
    found = np.zeros((4, 0), np.int64)  # where each begins and ends, and when it is taken and freed
    most = 0
    for place in places:
        begins, ends, taken, freed = found
        busy = np.zeros(len(begins), bool)
        for start, end in place.spans:
            busy |= (taken <= end) & (freed >= start)
        at = _smallest_gap(begins[busy], ends[busy], place.size)
        most = max(most, at + place.size)
        own = [(at, at + place.size, start, end) for start, end in place.spans]
        found = np.concatenate([found, np.array(own, np.int64).T], axis=1)
    return most


def _smallest_gap(begins: np.ndarray, ends: np.ndarray, size: int) -> int:
    """Where the smallest gap between pieces of memory begins that is large enough."""
    order = np.argsort(begins, kind="stable")
    starts = -(-np.maximum.accumulate(np.append(0, ends[order])) // _ALIGNED) * _ALIGNED
    rooms = np.append(begins[order], np.iinfo(np.int64).max) - starts
    rooms[rooms < size] = np.iinfo(np.int64).max
    return int(starts[-1] if rooms.min() == rooms[-1] else starts[rooms.argmin()])
