"""Orders in which XLA on CPU may run kernels.

By default it runs a kernel as soon as what it reads is there, first come, first served. Told to
hold least it goes from the results back, and makes each value where it is first wanted, of what is
wanted together that first on which more depends.
"""

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


def as_wanted(program: KernelProgram) -> list[int]:
    """From the results back, each value made where it is first wanted."""
    return _back_from(_ends(program), program.waits)


def to_hold_least(program: KernelProgram) -> list[int]:
    """From the results back; of what is wanted together that first on which more depends.

    XLA tries two more where it is told to hold least: what frees most first, and from the results
    back as they come. Which it takes is not known from here; this one tells most.
    """
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
