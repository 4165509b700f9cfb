"""Orders in which XLA on CPU may run kernels.

By default it runs a kernel as soon as what it reads is there, first come, first served. Told to
hold least it goes from the results back, and makes each value where it is first wanted, of what is
wanted together that first on which more depends; or it runs, of what is ready, what frees most.
"""

import heapq
from collections import deque
from collections.abc import Sequence

from meshwise.cost.kernels import KernelProgram


def as_ready(program: KernelProgram) -> list[int]:
    """First come, first served; what reads arguments alone comes in the order of these."""
    waits, readers = program.waits, program.readers
    given = {v: i for i, v in enumerate((*program.steps.constants, *program.steps.inputs))}
    kernels = program.kernels
    first = [k for k, others in enumerate(waits) if not others]
    first.sort(key=lambda k: max((given.get(v, -1) for v in kernels[k].reads), default=-1))
    missing = [len(others) for others in waits]
    queue, order = deque(first), []
    while queue:
        k = queue.popleft()
        order.append(k)
        for reader in readers[k]:
            missing[reader] -= 1
            if not missing[reader]:
                queue.append(reader)
    return order


def to_hold_least(program: KernelProgram) -> list[list[int]]:
    """The orders that XLA tries where it is told to hold least; of those alike it takes the first.

    It tries one more, from the results back as they come, in which hardly any of the programs that
    were compared was found to be compiled.
    """
    return [_heaviest_first(program), _as_it_frees(program)]


def as_wanted(program: KernelProgram) -> list[int]:
    """From the results back, each value made where it is first wanted."""
    return _back_from(_ends(program), program.waits)


def _heaviest_first(program: KernelProgram) -> list[int]:
    """Of what is wanted together, that first on the way to which more is read elsewhere."""
    kernels, sizes = program.kernels, [v.bytes for v in program.steps.values]
    waits, readers = program.waits, program.readers
    most = len(kernels), sum(sizes)
    weights: list[tuple[int, int]] = []
    for k, others in enumerate(waits):
        again = max(0, len(readers[k]) - 1) + sum(weights[other][0] for other in others)
        size = sum(sizes[v] for v in kernels[k].writes) + sum(weights[other][1] for other in others)
        weights.append((min(again, most[0]), min(size, most[1])))

    def heaviest(found: Sequence[int]) -> list[int]:
        return sorted(found, key=lambda k: weights[k], reverse=True)

    return _back_from(heaviest(_ends(program)), [heaviest(others) for others in waits])


def _ends(program: KernelProgram) -> list[int]:
    """The kernels that make results, in their order."""
    makers = {v: k for k, kernel in enumerate(program.kernels) for v in kernel.writes}
    return list(dict.fromkeys(makers[v] for v in program.steps.outputs if v in makers))


def _back_from(ends: Sequence[int], waits: Sequence[Sequence[int]]) -> list[int]:
    """Each after all that it waits for, in the order in which that is listed."""
    seen: set[int] = set()
    order: list[int] = []
    for end in (*ends, *range(len(waits))):
        waiting = [(end, iter(waits[end]))] if end not in seen else []
        seen.add(end)
        while waiting:
            k, others = waiting[-1]
            found = next((other for other in others if other not in seen), None)
            if found is None:
                order.append(k)
                waiting.pop()
            else:
                seen.add(found)
                waiting.append((found, iter(waits[found])))
    return order


def _as_it_frees(program: KernelProgram) -> list[int]:
    """Of what is ready, each time what frees most beside what it writes."""
    kernels, sizes = program.kernels, [v.bytes for v in program.steps.values]
    waits, readers = program.waits, program.readers
    reading: dict[int, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for value in kernel.reads:
            reading.setdefault(value, []).append(k)
    kept = {*program.steps.outputs, *program.steps.inputs, *program.steps.constants}
    unread = {v: len(found) for v, found in reading.items() if v not in kept}
    more = [sum(sizes[v] for v in kernel.writes) for kernel in kernels]
    for k, kernel in enumerate(kernels):
        more[k] -= sum(sizes[v] for v in kernel.reads if unread.get(v) == 1)
    missing = [len(others) for others in waits]
    ready = [(more[k], -len(readers[k]), k) for k, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    is_done = [False] * len(kernels)
    while ready:
        bytes_more, _, k = heapq.heappop(ready)
        if is_done[k] or bytes_more != more[k]:
            continue  # run, or listed again since it frees more
        is_done[k] = True
        order.append(k)
        found = []
        for value in kernels[k].reads:
            if value in unread:
                unread[value] -= 1
            if unread.get(value) == 1:
                (last,) = (other for other in reading[value] if not is_done[other])
                more[last] -= sizes[value]
                found += [last] if not missing[last] else []
        for reader in readers[k]:
            missing[reader] -= 1
            found += [reader] if not missing[reader] else []
        for other in found:
            heapq.heappush(ready, (more[other], -len(readers[other]), other))
    return order
