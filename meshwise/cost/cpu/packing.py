"""What kernels in some order hold beside arguments and results, as XLA on CPU packs it.

A value takes memory from the kernel that writes it to the last that reads it. Where a result lies,
other values may lie before, one after the other, the largest first, and of these those that lead to
the first results (XLA's `BufferAssigner`). What is left shares one piece of memory, in which each
value has a place that it keeps. XLA finds these twice, for the largest values first and for those
that live longest, and takes what is smaller (`GlobalDecreasingSizeBestFitHeap`): gaps stay, so that
it is more than what is held at any time.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from meshwise.cost.kernels import Kernel, KernelProgram
from meshwise.cost.memory import inside_bytes

_MOST_TRIES = 64  # results that are tried for a value, those of the least memory first
_ALIGNED = 64  # bytes
_FAR = np.iinfo(np.int64).max


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


def temporaries(program: KernelProgram, order: Sequence[int], wanted: Mapping[int, int]) -> int:
    """Bytes that kernels hold in an order neither in arguments nor where results will lie, packed.

    `wanted` numbers them from what results first want on.
    """
    kernels = [program.kernels[k] for k in order]
    lives = _lives(program, kernels)
    lives.sort(key=lambda life: (-life.size, wanted[order[life.first]]))
    results = frozenset(program.steps.outputs)
    ends = [life for life in lives if life.value in results]
    others = [life for life in lives if life.value not in results]
    places = _places(_beside(ends, others, kernels), kernels)
    by_size = sorted(places, key=lambda place: place.by_size)
    by_time = sorted(places, key=lambda place: place.by_time)
    return min(_packed(by_size), _packed(by_time))


def _lives(program: KernelProgram, kernels: Sequence[Kernel]) -> list[_Life]:
    """What kernels write, each value from there to the last that reads it."""
    sizes = [v.bytes for v in program.steps.values]
    first = {v: k for k, kernel in enumerate(kernels) for v in kernel.writes}
    last = dict(first)
    for k, kernel in enumerate(kernels):
        last.update((v, k) for v in kernel.reads if v in first)
    return [_Life(v, sizes[v], k, last[v]) for v, k in first.items()]


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


def _places(held: Sequence[_Life], kernels: Sequence[Kernel]) -> list[_Place]:
    """The places that values take, in the order in which they are first taken.

    What a kernel writes is taken before what it read last is freed, but in place of which it
    writes. What it holds inside is a value that nobody else has: it has a number below 0.
    """
    lives = {life.value: life for life in held if life.size}
    sizes = {value: life.size for value, life in lives.items()}
    taken: dict[int, int] = {}
    freed: dict[int, int] = {}
    first: dict[int, int] = {}  # of the values that lie in one place, the first
    clock = count()
    for k, kernel in enumerate(kernels):
        dying = [v for v in kernel.reads if v in lives and lives[v].last == k]
        for value in sorted((v for v in kernel.writes if v in lives), key=lambda v: lives[v].last):
            same = (v for v in dying if v in kernel.replaces and sizes[v] == sizes[value])
            before = next(same, None)
            if before is not None:
                dying.remove(before)
                freed[before] = next(clock)
            first[value] = value if before is None else first[before]
            taken[value] = next(clock)
        if inside := inside_bytes(kernel):
            own = -1 - k
            sizes[own], first[own] = inside, own
            taken[own], freed[own] = next(clock), next(clock)
        unread = (v for v in kernel.writes if v in lives and lives[v].last == k)
        freed.update((value, next(clock)) for value in (*dying, *unread))
    end = next(clock)  # of what outlives the kernels
    spans: dict[int, list[tuple[int, int]]] = {}
    for value, start in taken.items():
        spans.setdefault(first[value], []).append((start, freed.get(value, end)))
    return [_Place(sizes[value], tuple(own)) for value, own in spans.items()]


def _packed(places: Iterable[_Place]) -> int:
    """Bytes in which all places lie, each in the smallest gap that is left for it."""
    places = list(places)
    # Where each lies: from where to where, and when it is taken and freed.
    found = np.empty((4, sum(len(place.spans) for place in places)), np.int64)
    most = count = 0
    for place in places:
        begins, ends, taken, freed = found[:, :count]
        busy = np.zeros(count, bool)
        for start, end in place.spans:
            busy |= (taken <= end) & (freed >= start)
        at = _smallest_gap(begins[busy], ends[busy], place.size)
        most = max(most, at + place.size)
        for start, end in place.spans:
            found[:, count] = at, at + place.size, start, end
            count += 1
    return most


def _smallest_gap(begins: np.ndarray, ends: np.ndarray, size: int) -> int:
    """Where the smallest gap between pieces of memory begins that is large enough."""
    if not len(begins):
        return 0
    order = np.argsort(begins, kind="stable")
    starts = np.zeros(len(begins) + 1, np.int64)
    np.maximum.accumulate(ends[order], out=starts[1:])
    starts = -(-starts // _ALIGNED) * _ALIGNED
    rooms = -starts
    rooms[:-1] += begins[order]
    rooms[-1] += _FAR
    rooms[rooms < size] = _FAR
    return int(starts[rooms.argmin()])
