"""Memory of a per-device program: arguments, results, and the most that is alive at once.

Kernels run in the order of `kernels.py`, near to the jaxpr's. A value takes memory from the kernel
that writes it to the last that reads it; what a fusion keeps inside takes none. A fusion, an update
in place, an all_reduce, a sort and a loop write a result where an operand of the same size lies
that nobody reads after. Arguments are the caller's and stay, except donated ones, whose memory is
free after their last reader. An all_to_all takes as much again for the pieces that are cut, a
loop's body, beside what the loop reads and carries, what one step takes, and a choice what its
largest branch takes.

XLA orders kernels itself and packs buffers with gaps, so its own figure differs:
`Memory.peak_bytes` is to be compared with `argument + output + temp - alias` of `compiled
.memory_analysis()`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwise._jax import ClosedJaxpr, Jaxpr
from meshwise.cost.kernels import Kernel, KernelBody, KernelProgram, kernels_of
from meshwise.cost.steps import LITERAL
from meshwise.ir.collectives import CollectiveKind


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: of arguments (constants included), of results, and the peak of all.

    `peak_equation` is where in the jaxpr the peak is reached; None where no kernel reaches it.
    """

    argument_bytes: int
    result_bytes: int
    peak_bytes: int
    peak_equation: int | None = None

    @property
    def temporary_bytes(self) -> int:
        """What the peak is above arguments and results together, where it is."""
        return max(0, self.peak_bytes - self.argument_bytes - self.result_bytes)


def peak_memory(
    jaxpr: ClosedJaxpr | Jaxpr,
    axis_sizes: Mapping[str, int],
    *,
    donated: Collection[int] = (),
    fuses: bool = True,
) -> Memory:
    """The memory that one device needs for one call of a per-device program.

    `donated` are positions of arguments whose memory may be used again. Without `fuses` every
    equation's result is written, broadcasts included.
    """
    program = kernels_of(jaxpr, axis_sizes, fuses)
    return _peak(program, frozenset(program.steps.inputs[i] for i in donated))


def _peak(program: KernelProgram, donated: frozenset[int]) -> Memory:
    steps = program.steps
    sizes = [v.bytes for v in steps.values]
    arguments = [*steps.constants, *steps.inputs]
    results = [v for v in steps.outputs if v != LITERAL]
    kept = (frozenset(arguments) - donated) | frozenset(results)
    last = {v: k for k, kernel in enumerate(program.kernels) for v in kernel.reads}

    alive = sum(sizes[v] for v in arguments)
    peak, place = alive, None
    for k, kernel in enumerate(program.kernels):
        dying = [v for v in kernel.reads if last[v] == k and v not in kept]
        written = sum(sizes[v] for v in kernel.writes)
        reused = _reused(kernel, dying, sizes)
        at_once = alive + written - reused + inside_bytes(kernel)
        if at_once > peak:
            peak, place = at_once, kernel.equation
        unread = [v for v in kernel.writes if v not in last and v not in kept]
        alive += written - sum(sizes[v] for v in (*dying, *unread))
    copies = _copies(steps.outputs, frozenset(arguments) - donated)
    result_bytes = sum(sizes[v] for v in results)
    if alive + sum(sizes[v] for v in copies) > peak:
        peak, place = alive + sum(sizes[v] for v in copies), None
    return Memory(sum(sizes[v] for v in arguments), result_bytes, peak, place)


def _copies(outputs: tuple[int, ...], arguments: frozenset[int]) -> list[int]:
    """Results that need memory of their own: arguments as they are, and all but one of equals."""
    copies = []
    for value, count in Counter(v for v in outputs if v != LITERAL).items():
        copies += [value] * (count if value in arguments else count - 1)
    return copies


def _reused(kernel: Kernel, dying: list[int], sizes: list[int]) -> int:
    """Bytes of results that are written where operands lie."""
    free = Counter(sizes[v] for v in dying if v in kernel.replaces)
    reused = 0
    for value in kernel.writes:
        if free[sizes[value]]:
            free[sizes[value]] -= 1
            reused += sizes[value]
    return reused


def inside_bytes(kernel: Kernel) -> int:
    """Bytes that a loop, a choice or an exchange takes beside what it reads and writes."""
    if kernel.is_collective and kernel.collectives[0].kind is CollectiveKind.ALL_TO_ALL:
        return int(kernel.work.written_bytes)
    found = [_body_bytes(body, kernel.is_choice) for body in kernel.bodies]
    return max(found, default=0)


def _body_bytes(body: KernelBody, is_choice: bool) -> int:
    steps = body.program.steps
    constants, carried = body.body.carried
    carries = steps.inputs[constants : constants + carried]
    memory = _peak(body.program, frozenset(carries))
    own = memory.result_bytes if is_choice else 0
    return max(0, memory.peak_bytes - memory.argument_bytes - own)
