"""What is the same in every trip of a loop: XLA's compilers compute and send it once, before.

The partitioned text still has them inside. What leaves a loop is what XLA's own pass of that name
takes out (`while-loop-invariant-code-motion`): an instruction all of whose operands are constants,
parts of the carry that the body hands on as they are, or made of such alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from benchmarks.peers.hlo_text import Instruction
from benchmarks.peers.scattered import Scope

# What is another thing whenever it runs.
_CHANGING = frozenset(
    "rng rng-bit-generator rng-get-and-update-state infeed outfeed recv send custom-call".split()
)

# For each loop around a computation, from the inside: names of what is the same in every trip of it
# and of those before.
Invariant = Sequence[frozenset[str]]


@dataclass(frozen=True)
class Loops:
    """The loops around a computation, from the inside: their trips, and what is invariant in them.

    A branch leaves no loop: `around` are all trips of the loops around the branch.
    """

    trips: tuple[int, ...] = ()
    invariant: Invariant = ()
    around: int = 1

    @property
    def count(self) -> int:
        """How often the computation runs."""
        return prod(self.trips) * self.around

    def count_of(self, instruction: Instruction) -> int:
        """How often an instruction runs once it has left the loops that it can leave."""
        left = 0
        for names in self.invariant:
            if not set(instruction.operands) <= names:
                break
            left += 1
        return prod(self.trips[left:]) * self.around

    def in_body(self, scope: Scope, trips: int) -> Loops:
        """In the body of a loop that is called here."""
        assert scope.caller is not None, "the body of a loop"
        outside, loop = scope.caller
        start = outside.computation.instructions[loop.operands[0]]
        stays = _handed_on(scope)
        found = [_made_of(scope, frozenset(stays))]
        for names in self.invariant:
            is_tuple = start.opcode == "tuple"
            same = {name for name, at in stays.items() if is_tuple and start.operands[at] in names}
            found.append(_made_of(scope, frozenset(same)))
        return Loops((trips, *self.trips), found, self.around)

    def in_call(self, scope: Scope) -> Loops:
        """In a computation that is called, or fused, here."""
        assert scope.caller is not None, "something calls it"
        given = scope.caller[1].operands
        parameters = scope.computation.parameters.items()
        found = [
            _made_of(scope, frozenset(p.name for i, p in parameters if given[i] in names))
            for names in self.invariant
        ]
        return replace(self, invariant=found)

    def in_branch(self) -> Loops:
        """In a branch of a choice that is made here."""
        return Loops(around=self.count)


def _handed_on(scope: Scope) -> Mapping[str, int]:
    """What a body reads of its carry and hands on as it is, and at which place."""
    known, root = scope.computation.instructions, scope.computation.root
    found = {}
    for name, read in known.items():
        if read.opcode != "get-tuple-element" or known[read.operands[0]].opcode != "parameter":
            continue
        place = int(read.attribute("index") or 0)
        if root.opcode == "tuple" and _same(scope, root.operands[place], place):
            found[name] = place
    return found


def _same(scope: Scope, name: str, place: int) -> bool:
    """Whether a value is what stood at a place of the carry."""
    value = scope.computation.instructions[name]
    while value.opcode == "copy":
        value = scope.computation.instructions[value.operands[0]]
    is_read = value.opcode == "get-tuple-element" and value.attribute("index") == str(place)
    return is_read and scope.computation.instructions[value.operands[0]].opcode == "parameter"


def _made_of(scope: Scope, given: frozenset[str]) -> frozenset[str]:
    """What is made of some values and constants alone, in the order of the text."""
    found = set(given)
    for name, instruction in scope.computation.instructions.items():
        changes = instruction.opcode in _CHANGING or instruction.opcode == "parameter"
        if not changes and found.issuperset(instruction.operands):
            found.add(name)
    return frozenset(found)
