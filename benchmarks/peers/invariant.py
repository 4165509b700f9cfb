"""Collectives in loops that send the same in every trip: XLA's compilers run them once, before.

The partitioned text still has them inside. What leaves a loop is what XLA's own pass of that name
takes out (`while-loop-invariant-code-motion`): an instruction all of whose operands are constants,
parts of the carry that the body hands on as they are, or made of such alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.hlo_text import Instruction
from benchmarks.peers.scattered import Scope

# What is another thing whenever it runs.
_CHANGING = frozenset(
    "rng rng-bit-generator rng-get-and-update-state infeed outfeed recv send custom-call".split()
)

# For each loop around a computation, from the inside: names of what is the same in every trip of it
# and of those before.
Invariant = Sequence[frozenset[str]]


def invariant_in_body(scope: Scope, outside: Invariant) -> Invariant:
    """What is invariant in the body of a loop, given what is so in the computation around it."""
    assert scope.caller is not None, "the body of a loop"
    around, loop = scope.caller
    start = around.computation.instructions[loop.operands[0]]
    stays = _handed_on(scope)
    found = [_made_of(scope, frozenset(stays))]
    for names in outside:
        is_tuple = start.opcode == "tuple"
        same = {name for name, at in stays.items() if is_tuple and start.operands[at] in names}
        found.append(_made_of(scope, frozenset(same)))
    return found


def invariant_in_call(scope: Scope, outside: Invariant) -> Invariant:
    """What is invariant in a computation that is called, or fused."""
    assert scope.caller is not None, "something calls it"
    given = scope.caller[1].operands
    parameters = scope.computation.parameters.items()
    return [
        _made_of(scope, frozenset(p.name for i, p in parameters if given[i] in names))
        for names in outside
    ]


def loops_left(instruction: Instruction, inside: Invariant) -> int:
    """How many of the loops around an instruction it can leave."""
    count = 0
    for names in inside:
        if not set(instruction.operands) <= names:
            break
        count += 1
    return count


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
