"""Which instructions XLA on CPU makes in one kernel.

Every kernel has one result. XLA goes from the results back: a kernel takes in what it reads, and
what that reads. What others read as well is made again in each kernel if it is cheap, else written
to memory; so is what it would take more to read than to write, unless each of its readers can take
it in on all ways. So do the passes `InstructionFusion` and `CpuInstructionFusion`.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from meshwise.cost.cpu.instruction import Instruction, Use
from meshwise.cost.steps import Value
from meshwise.cost.work import updates_operand

# What XLA holds to be cheap (`InstructionFusion::IsExpensive`).
CHEAP = frozenset(
    """
    abs add add_any and bitcast_convert_type ceil clamp complex conj convert_element_type copy
    copy_p cos eq floor ge gt imag integer_pow is_finite le lt max min mul ne neg not or
    population_count real reduce_precision round select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin square sub tan xor
    """.split()
)
# What is made of a number, or of few, costs nothing to read.
_SPREAD = ("broadcast_in_dim", "iota")
# XLA has no such bound; where sums run through hundreds of layers the time here would be quadratic.
_MOST_READS = 256
# How often a kernel computes what it reads in several places (`FusionNodeIndexingEvaluation`).
_MOST_TIMES = 15
_LAST = -1  # stands for a kernel's last instruction


@dataclass(frozen=True)
class Fused:
    """A kernel by its last instruction, and how it reads each value from memory."""

    last: Instruction
    reads: dict[int, Use]


def fused(
    instructions: Sequence[Instruction], values: Sequence[Value], results: AbstractSet[int]
) -> list[Fused]:
    """The kernels of instructions, in their order; without what nobody reads."""
    fusion = _Fusion(instructions, values, results, *makers_and_readers(instructions))
    apart = fusion.never_twice()
    kernels = [
        fusion.kernel(n, apart)
        for n in range(len(instructions) - 1, -1, -1)
        if not fusion.is_dead(n)
    ]
    return _without_views(kernels[::-1])


def _without_views(kernels: Sequence[Fused]) -> list[Fused]:
    """The kernels without those that only show what others wrote, which is read in their place."""
    shown: dict[int, int] = {}
    found = []
    for kernel in kernels:
        reads: dict[int, Use] = {}
        for value, use in kernel.reads.items():
            source = shown.get(value, value)
            reads[source] = max(use, reads.get(source, Use.SAME))
        if kernel.last.is_view and list(kernel.reads) == list(kernel.last.reads):
            shown[kernel.last.writes[0]] = next(iter(reads))
        else:
            found.append(Fused(kernel.last, reads))
    return found


def makers_and_readers(
    instructions: Sequence[Instruction],
) -> tuple[dict[int, int], dict[int, set[int]]]:
    """The instruction that makes each value, and those that read it."""
    maker: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for n, own in enumerate(instructions):
        maker.update(dict.fromkeys(own.writes, n))
        for value in own.reads:
            readers.setdefault(value, set()).add(n)
    return maker, readers


@dataclass
class _Fusion:
    """Who makes each value, which instructions read it, and which kernels still do."""

    instructions: Sequence[Instruction]
    values: Sequence[Value]
    results: AbstractSet[int]
    maker: dict[int, int]
    readers: dict[int, set[int]]

    def is_dead(self, n: int) -> bool:
        """Whether all readers of an instruction have made it themselves."""
        own = self.instructions[n]
        is_wanted = any(v in self.results or self.readers.get(v) for v in own.writes)
        return own.is_fusible and not is_wanted

    def kernel(self, n: int, apart: AbstractSet[int]) -> Fused:
        """An instruction with all that it takes in; values of `apart` are never made twice."""
        own = self.instructions[n]
        reads: dict[int, Use] = {}
        places: dict[int, set[int]] = {}  # of each value, by who reads it elsewhere
        times = {_LAST: 1}  # how often each such is computed
        for value, use in zip(own.reads, own.uses, strict=True):
            reads[value] = max(use, reads.get(value, Use.SAME))
            places.setdefault(value, set()).add(_LAST)
        waiting, inside = list(reads), set[int]()
        while waiting and own.fuses and len(reads) < _MOST_READS:
            value = waiting.pop()
            often = sum(times[reader] for reader in places[value])
            if (
                value not in reads
                or often > _MOST_TIMES
                or not self._is_fusible(n, value, reads[value], apart, inside)
            ):
                continue
            use, maker = reads.pop(value), self.maker[value]
            inside.add(value)
            times[value] = often
            self.readers[value].discard(n)
            made = self.instructions[maker]
            for read, how in zip(made.reads, made.uses, strict=True):
                places.setdefault(read, set()).update(places[value] if how is Use.SAME else {value})
                if read not in inside:
                    reads[read] = max(use, how, reads.get(read, Use.SAME))
                    self.readers[read].add(n)
                    waiting.append(read)
            if self.is_dead(maker):
                self._drop(maker)
        return Fused(own, reads)

    def _drop(self, n: int) -> None:
        """Leave out an instruction that nobody reads any more, and what only such read."""
        waiting = [n]
        while waiting:
            dead = waiting.pop()
            for value in self.instructions[dead].reads:
                self.readers[value].discard(dead)
                maker = self.maker.get(value)
                if maker is not None and self.is_dead(maker):
                    waiting.append(maker)

    def _is_fusible(
        self, n: int, value: int, use: Use, apart: AbstractSet[int], inside: AbstractSet[int]
    ) -> bool:
        """Whether a kernel makes a value itself; it makes those `inside` already."""
        if not self._can_take(value, use):
            return False
        if value not in self.results and self.readers[value] <= {n}:
            return True
        made = self.instructions[self.maker[value]]
        return made.is_cheap and not (inside and made.branches) and value not in apart

    def _can_take(self, value: int, use: Use) -> bool:
        """Whether an instruction can be made where its result is read in some way."""
        maker = self.maker.get(value)
        if maker is None or len(self.instructions[maker].writes) > 1:
            return False
        made = self.instructions[maker]
        return made.is_fusible and (made.is_cheap or use is not Use.AGAIN)

    def never_twice(self) -> set[int]:
        """Values that take more to read than to write, and that some reader cannot make."""
        reach = self._reach()
        found: set[int] = set()
        for n, own in enumerate(self.instructions):
            readers = [r for v in own.writes for r in self.readers.get(v, ())]
            is_result = not self.results.isdisjoint(own.writes)  # which is read in memory
            if len(readers) + is_result < 2 or not own.is_fusible or not self._is_more_to_read(own):
                continue
            known = {n: True}
            if is_result or not all(self._is_made(r, reach[n], found, known) for r in readers):
                found.update(own.writes)
        return found

    def _reach(self) -> list[int]:
        """For each instruction those that depend on it, as bits."""
        reach = [0] * len(self.instructions)
        for n in range(len(self.instructions) - 1, -1, -1):
            for value in self.instructions[n].writes:
                for reader in self.readers.get(value, ()):
                    reach[n] |= 1 << reader | reach[reader]
        return reach

    def _is_more_to_read(self, own: Instruction) -> bool:
        made = sum(self.values[v].bytes for v in own.writes)
        elements = max(self.values[v].elements for v in own.writes)
        # To XLA what has as many dims is as large: of an update the window, too.
        least = 2 if updates_operand(own.step.eqn) is not None else elements
        full = [v for v in own.reads if self.values[v].elements >= least and not self._is_spread(v)]
        return len(full) > 1 and sum(self.values[v].bytes for v in {*own.reads}) > made

    def _is_spread(self, value: int) -> bool:
        maker = self.maker.get(value)
        return maker is not None and self.instructions[maker].step.name in _SPREAD

    def _is_made(
        self, reader: int, reach: int, apart: AbstractSet[int], known: dict[int, bool]
    ) -> bool:
        """Whether a reader can make what it reads of what depends on an instruction (`reach`).

        `known` has the instruction itself, and the readers that were asked for: few, so that
        neither time nor the depth of calls grows with a program's length.
        """
        if reader not in known:
            if len(known) > _MOST_READS:
                return False
            known[reader] = False  # until it is decided
            own = self.instructions[reader]
            between = [
                (value, use, maker)
                for value, use in zip(own.reads, own.uses, strict=True)
                if (maker := self.maker.get(value)) is not None
                and (reach >> maker & 1 or known.get(maker))
            ]
            known[reader] = own.fuses and all(
                value not in apart
                and self._can_take(value, use)
                and self._is_made(maker, reach, apart, known)
                for value, use, maker in between
            )
        return known[reader]
