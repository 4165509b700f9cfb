"""What kernels in some order hold beside arguments and results, as XLA on CPU packs it.

A value takes memory from the kernel that writes it to the last that reads it. Where a result lies,
other values may lie before, one after the other, the largest first (XLA's `BufferAssigner`). What
is left shares one piece of memory; gaps in it are not counted.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.cost.kernels import Kernel, KernelProgram
from meshwise.cost.memory import inside_bytes
from meshwise.cost.steps import LITERAL

_MOST_TRIES = 64  # results that are tried for a value, those of the least memory first


@dataclass(frozen=True)
class _Life:
    """A value in memory, from one kernel to another."""

    value: int
    size: int
    first: int
    last: int


def temporary_bytes(program: KernelProgram, order: Sequence[int]) -> int:
    """The most that is held at once where kernels run in an order, in bytes."""
    kernels = [program.kernels[k] for k in order]
    sizes = [v.bytes for v in program.steps.values]
    results = frozenset(program.steps.outputs) - {LITERAL}
    first = {v: k for k, kernel in enumerate(kernels) for v in kernel.writes}
    last = dict(first)
    for k, kernel in enumerate(kernels):
        last.update((v, k) for v in kernel.reads if v in first)
    lives = [_Life(v, sizes[v], k, last[v]) for v, k in first.items()]
    lives.sort(key=lambda life: (-life.size, life.first))
    ends = [life for life in lives if life.value in results]
    others = [life for life in lives if life.value not in results]
    held = _beside(ends, others, kernels)
    return _most(held, kernels)


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
