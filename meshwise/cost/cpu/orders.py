"""Orders in which XLA on CPU may run kernels.

By default it runs a kernel as soon as what it reads is there, first come, first served. Told to
hold least it goes from the results back, and makes each value where it is first wanted, of what is
wanted together that first on which more depends.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from meshwise.cost.kernels import Kernel, KernelProgram


def as_ready(program: KernelProgram) -> list[int]:
    """First come, first served; what reads arguments alone comes in the order of these.

    Of several values that a kernel writes, the readers wait until each has had its turn.
    """
    kernels = program.kernels
    readers: dict[int, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for value in kernel.reads:
            readers.setdefault(value, []).append(k)
    given = program.steps.constants + program.steps.inputs
    known = {*given, *(v for kernel in kernels for v in kernel.writes)}
    missing = [len(known.intersection(kernel.reads)) for kernel in kernels]
    # Kernels by their numbers, values as numbers below 0.
    queue = deque([*(k for k, n in enumerate(missing) if not n), *(-1 - v for v in given)])
    order = []
    while queue:
        first = queue.popleft()
        shown = [-1 - first] if first < 0 else kernels[first].writes
        if first >= 0:
            order.append(first)
        if len(shown) > 1:
            queue += [-1 - v for v in shown]
            continue
        for reader in (k for v in shown for k in readers.get(v, ())):
            missing[reader] -= 1
            if not missing[reader]:
                queue.append(reader)
    return order


def as_wanted(program: KernelProgram) -> list[int]:
    """From the results back, each value made where it is first wanted."""
    return _back_from(_ends(program), program.waits)


def to_hold_least(program: KernelProgram) -> list[int]:
    """From the results back; of what is wanted together that first on which more depends.

    So does the `DFSMemoryScheduler`, which is all that XLA on CPU has for it.
    """
    weights = _weights(program)

    def heaviest(found: Sequence[int]) -> list[int]:
        return sorted(found, key=lambda k: weights[k], reverse=True)

    return _back_from(heaviest(_ends(program)), [heaviest(others) for others in program.waits])


def _weights(program: KernelProgram) -> dict[int, tuple[int, int]]:
    """How often more than once what leads to each kernel is read, and the bytes that it writes.

    What is reached in several ways counts as often, though no more than all kernels, nor than the
    bytes of all that come before. Of what writes several values each is read by itself.
    """
    kernels, sizes = program.kernels, [v.bytes for v in program.steps.values]
    makers = {v: k for k, kernel in enumerate(kernels) for v in kernel.writes}
    readers = Counter(v for kernel in kernels for v in kernel.reads)
    readers.update({v for v in program.steps.outputs if v in makers})
    several = sum(len(kernel.writes) for kernel in kernels if len(kernel.writes) > 1)
    given = len(program.steps.constants) + len(program.steps.inputs)
    most, written = len(kernels) + several + given + 1, 0
    found: dict[int, tuple[int, int]] = {}
    for k in as_wanted(program):
        own = sum(sizes[v] for v in kernels[k].writes)
        written += own
        again, size = max(0, _read(kernels[k], readers) - 1), own
        for v in (v for v in kernels[k].reads if makers.get(v, k) != k):
            before = found[makers[v]]
            is_one = len(kernels[makers[v]].writes) == 1
            again += min(most, before[0] + (0 if is_one else max(0, readers[v] - 1)))
            size += before[1]
        found[k] = min(again, most), min(size, written)
    return found


def _read(kernel: Kernel, readers: Mapping[int, int]) -> int:
    """How many read what a kernel writes; of several values, one each."""
    written = kernel.writes
    return readers[written[0]] if len(written) == 1 else len(written)


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
