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
from dataclasses import dataclass, field, replace

from meshwise._jax import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from meshwise.cost.kernels import Kernel, KernelBody, KernelProgram, kernels_of
from meshwise.cost.steps import LITERAL, Step, Steps
from meshwise.ir.collectives import CollectiveKind


@dataclass(frozen=True, eq=False)
class Held:
    """Memory that is taken at the peak, arguments apart, by a `value` of an equation.

    Of a loop's result `made_by` is the equation in it that makes what is stacked or carried, else
    the equation itself. Without a value it is what the equation takes beside what it reads and
    writes: a loop, a choice or an exchange. `inside` is then what takes it in the step or branch
    that needs most, with results that lie where the step's own operands did.
    """

    bytes: int
    equation: JaxprEqn
    made_by: JaxprEqn
    value: Var | None = None
    inside: tuple["Held", ...] = ()


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: of arguments (constants included), of results, and the peak of all.

    `peak_equation` is where in the jaxpr the peak is reached; None where no kernel reaches it.
    `held` is what takes memory there, arguments apart, largest first: together with arguments that
    are not free yet it is the peak.
    """

    argument_bytes: int
    result_bytes: int
    peak_bytes: int
    peak_equation: int | None = None
    held: tuple[Held, ...] = field(default=(), compare=False)

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
    return memory_of_kernels(kernels_of(jaxpr, axis_sizes, fuses), donated)


def memory_of_kernels(program: KernelProgram, donated: Collection[int] = ()) -> Memory:
    """The same of a program whose kernels are known."""
    free = frozenset(program.steps.inputs[i] for i in donated)
    memory, at = _peak(program, free)
    return replace(memory, held=_held(program, free, at))


def _peak(program: KernelProgram, donated: frozenset[int]) -> tuple[Memory, int]:
    """Memory of a call, and the kernel at its peak: -1 before the first, or one past the last."""
    steps = program.steps
    sizes = [v.bytes for v in steps.values]
    arguments = [*steps.constants, *steps.inputs]
    results = [v for v in steps.outputs if v != LITERAL]
    kept, last = _kept(steps, donated), _last_reads(program)

    alive = sum(sizes[v] for v in arguments)
    peak, at = alive, -1
    for k, kernel in enumerate(program.kernels):
        dying = [v for v in kernel.reads if last.get(v) == k and v not in kept]
        written = sum(sizes[v] for v in kernel.writes)
        reused = sum(sizes[v] for v in _replaced(kernel, dying, sizes))
        at_once = alive + written - reused + inside_bytes(kernel)
        if at_once > peak:
            peak, at = at_once, k
        unread = [v for v in kernel.writes if v not in last and v not in kept]
        alive += written - sum(sizes[v] for v in (*dying, *unread))
    result_bytes = sum(sizes[v] for v in results)
    copies = _copies(steps.outputs, frozenset(arguments) - donated)
    if alive + sum(sizes[v] for v in copies) > peak:
        peak, at = alive + sum(sizes[v] for v in copies), len(program.kernels)
    place = program.kernels[at].equation if 0 <= at < len(program.kernels) else None
    return Memory(sum(sizes[v] for v in arguments), result_bytes, peak, place), at


def _kept(steps: Steps, donated: frozenset[int]) -> frozenset[int]:
    """Values that are not free after their last reader: results, and arguments of the caller."""
    arguments = frozenset((*steps.constants, *steps.inputs))
    return (arguments - donated).union(v for v in steps.outputs if v != LITERAL)


def _last_reads(program: KernelProgram) -> dict[int, int]:
    """The last kernel that reads each value in memory; numbers written in the program are not."""
    steps, kernels = program.steps, program.kernels
    made = {*steps.constants, *steps.inputs, *(v for kernel in kernels for v in kernel.writes)}
    return {v: k for k, kernel in enumerate(kernels) for v in kernel.reads if v in made}


def _held(program: KernelProgram, donated: frozenset[int], at: int) -> tuple[Held, ...]:
    """What takes memory while one kernel runs, arguments apart, largest first."""
    kept, last = _kept(program.steps, donated), _last_reads(program)
    steps, sizes = program.steps.steps, [v.bytes for v in program.steps.values]
    maker = {v: (s, i) for s in steps for i, v in enumerate(s.writes)}
    written = [(v, k) for k, kernel in enumerate(program.kernels[: at + 1]) for v in kernel.writes]
    alive = [v for v, k in written if v in kept or last.get(v, k) >= at]
    found = list[Held]()
    if 0 <= at < len(program.kernels):
        kernel = program.kernels[at]
        dying = [v for v in kernel.reads if last.get(v) == at and v not in kept]
        replaced = _replaced(kernel, dying, sizes)
        alive = [v for v in alive if v not in replaced]
        if beside := inside_bytes(kernel):
            step = next(
                s for s in steps if (s.equation, s.writes) == (kernel.equation, kernel.writes)
            )
            found.append(Held(beside, step.eqn, step.eqn, inside=_held_inside(kernel)))
    for value in alive:
        step, output = maker[value]
        found.append(Held(sizes[value], step.eqn, _made_by(step, output), step.eqn.outvars[output]))
    return tuple(sorted(found, key=lambda one: -one.bytes))


def _made_by(step: Step, output: int) -> JaxprEqn:
    """The equation that makes a result, in a loop that of its body."""
    while step.bodies and not step.is_choice:
        body = step.bodies[-1].steps
        value = body.outputs[output]
        inner = next((s for s in body.steps if value in s.writes), None)
        if inner is None:
            break
        step, output = inner, inner.writes.index(value)
    return step.eqn


def _copies(outputs: tuple[int, ...], arguments: frozenset[int]) -> list[int]:
    """Results that need memory of their own: arguments as they are, and all but one of equals."""
    copies = []
    for value, count in Counter(v for v in outputs if v != LITERAL).items():
        copies += [value] * (count if value in arguments else count - 1)
    return copies


def _replaced(kernel: Kernel, dying: list[int], sizes: list[int]) -> list[int]:
    """Operands that nobody reads after, and where a result of their size is written."""
    free = [v for v in dying if v in kernel.replaces]
    replaced = []
    for value in kernel.writes:
        place = next((v for v in free if sizes[v] == sizes[value]), None)
        if place is not None:
            free.remove(place)
            replaced.append(place)
    return replaced


def inside_bytes(kernel: Kernel) -> int:
    """Bytes that a loop, a choice or an exchange takes beside what it reads and writes."""
    if kernel.is_collective and kernel.collectives[0].kind is CollectiveKind.ALL_TO_ALL:
        return int(kernel.work.written_bytes)
    found = [_body_bytes(body, kernel.is_choice) for body in kernel.bodies]
    return max(found, default=0)


def _body_bytes(body: KernelBody, is_choice: bool) -> int:
    memory, _ = _peak(body.program, _carries(body))
    own = memory.result_bytes if is_choice else 0
    return max(0, memory.peak_bytes - memory.argument_bytes - own)


def _held_inside(kernel: Kernel) -> tuple[Held, ...]:
    """What takes memory in the body that needs most; of an exchange nothing with a name."""
    if not kernel.bodies:
        return ()
    body = max(kernel.bodies, key=lambda one: _body_bytes(one, kernel.is_choice))
    free = _carries(body)
    return _held(body.program, free, _peak(body.program, free)[1])


def _carries(body: KernelBody) -> frozenset[int]:
    """What a loop's step is handed on, and may write in place."""
    constants, carried = body.body.carried
    return frozenset(body.program.steps.inputs[constants : constants + carried])
