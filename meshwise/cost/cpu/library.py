"""What XLA on CPU leaves to a library of kernels, and what that makes in one.

A kernel of the library begins with a long sum or extreme. It grows by what it reads, if nobody else
does; by who reads it, if that is one; and so on from there, as long as the library knows what is
found, which must be long too. Kernels that meet are one, products among them. So does XLA's pass
`LibraryRewriter`, before it makes anything twice.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from meshwise.cost.cpu.fusion import makers_and_readers
from meshwise.cost.cpu.instruction import Instruction, Use

_MOST = 98  # instructions in a kernel; XLA counts what is given, too, to a hundred


def with_library(
    instructions: Sequence[Instruction], results: AbstractSet[int]
) -> list[Instruction]:
    """The instructions, those that the library makes together as one that takes in nothing more."""
    library = _Library(instructions, results, *makers_and_readers(instructions))
    for n in range(len(instructions) - 1, -1, -1):
        if instructions[n].begins and n not in library.kernel_of:
            library.grow(n)
    kernels = {kernel.last: kernel for kernel in library.kernel_of.values()}
    return [
        library.made(kernels[n]) if n in kernels else own
        for n, own in enumerate(instructions)
        if n in kernels or n not in library.kernel_of
    ]


@dataclass(eq=False)
class _Kernel:
    """Instructions that are made together; what the last writes is all that others read."""

    members: set[int]
    last: int


@dataclass
class _Library:
    """Who makes and who reads each value, and the kernels that instructions are in."""

    instructions: Sequence[Instruction]
    results: AbstractSet[int]
    maker: dict[int, int]
    readers: dict[int, set[int]]
    kernel_of: dict[int, _Kernel] = field(default_factory=dict)

    def grow(self, first: int) -> None:
        """Begin a kernel, and add to it what is next to it until there is nothing more."""
        kernel = self.kernel_of[first] = _Kernel({first}, first)
        while self._grown(kernel):
            pass

    def _grown(self, kernel: _Kernel) -> bool:
        """Whether something was added, in one search that begins at all of the kernel."""
        before = len(kernel.members)
        waiting = deque([(n, True) for n in self._alone_read(kernel, kernel.members)])
        waiting += [(n, False) for n in self._alone_reading(kernel.last)]
        seen = {n for n, _ in waiting}
        while waiting and len(kernel.members) < _MOST:
            n, is_read = waiting.popleft()
            if n in self.kernel_of:
                self._join(kernel, self.kernel_of[n], is_read)
                continue
            if not self.instructions[n].of_library:
                continue
            self.kernel_of[n] = kernel
            kernel.members.add(n)
            if not is_read:
                kernel.last = n
            near = self._alone_read(kernel, (n,)) if is_read else self._alone_reading(n)
            found = [other for other in near if other not in seen]
            seen.update(found)
            waiting += [(other, is_read) for other in found]
        return len(kernel.members) > before

    def _join(self, kernel: _Kernel, other: _Kernel, is_read: bool) -> None:
        if other is kernel or len(kernel.members) + len(other.members) > _MOST:
            return
        kernel.members |= other.members
        kernel.last = kernel.last if is_read else other.last
        self.kernel_of.update(dict.fromkeys(other.members, kernel))

    def _alone_read(self, kernel: _Kernel, members: Iterable[int]) -> list[int]:
        """What some of a kernel read, and nobody outside of it."""
        reads = dict.fromkeys(v for n in sorted(members) for v in self.instructions[n].reads)
        return [
            self.maker[value]
            for value in reads
            if value in self.maker
            and self.maker[value] not in kernel.members
            and value not in self.results
            and self.readers[value] <= kernel.members
        ]

    def _alone_reading(self, n: int) -> Iterator[int]:
        """Who reads all that an instruction writes, if it is one."""
        (value, *more) = self.instructions[n].writes
        readers = self.readers.get(value, set())
        if not more and value not in self.results and len(readers) == 1:
            yield from readers

    def made(self, kernel: _Kernel) -> Instruction:
        """All instructions of a kernel as one."""
        parts = [self.instructions[n] for n in sorted(kernel.members)]
        inside = {value for own in parts for value in own.writes}
        reads = tuple(dict.fromkeys(v for own in parts for v in own.reads if v not in inside))
        last = self.instructions[kernel.last]
        return Instruction(last.step, reads, (Use.AGAIN,) * len(reads), last.writes)
