"""What the library that XLA on CPU calls makes together with a long reduction.

What is made of a reduction alone and of what is reduced, as a softmax begins, is one kernel with
it. Such a kernel takes in what nobody else reads, products too, and writes nothing in place.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from meshwise.cost.cpu.instructions import Instruction, Takes, Use
from meshwise.cost.steps import Value

# What may stand between a reduction and what is made of it: maxima with the least number, too.
# To divide by one XLA multiplies with its reciprocal, in a kernel of its own.
_SPREADING = frozenset({"broadcast_in_dim", "max"})


def with_reductions(
    instructions: Sequence[Instruction], values: Sequence[Value], results: AbstractSet[int]
) -> list[Instruction]:
    """The instructions, those that the library makes with a reduction as one."""
    readers: dict[int, list[int]] = {}
    for n, own in enumerate(instructions):
        for value in dict.fromkeys(own.reads):
            readers.setdefault(value, []).append(n)
    found = dict(enumerate(instructions))
    used: set[int] = set()
    for n, own in enumerate(instructions):
        chain = _chain(n, instructions, values, readers, results) if own.takes is Takes.OWN else []
        if not chain or not used.isdisjoint(chain):
            continue
        for k in (n, *chain[:-1]):
            del found[k]
        found[chain[-1]] = _joined([own, *(instructions[k] for k in chain)])
        used.update(chain)
    return list(found.values())


def _chain(
    reduction: int,
    instructions: Sequence[Instruction],
    values: Sequence[Value],
    readers: Mapping[int, Sequence[int]],
    results: AbstractSet[int],
) -> list[int]:
    """What is made of a reduction, each read by the next alone; none if not of what it reduces."""
    (value,), reduced = instructions[reduction].writes, instructions[reduction].reads
    chain: list[int] = []
    while value not in results and len(following := readers.get(value, ())) == 1:
        reader = instructions[following[0]]
        is_whole = all(_elements(reader.writes, values) == values[v].elements for v in reduced)
        is_spread = len(reader.reads) == 1 and reader.step.name in _SPREADING
        is_made = reader.of_library and reader.is_taken and reader.step.name != "div"
        if not is_made or not (is_whole or is_spread):
            break
        chain += following
        (value,) = reader.writes
    return chain if any(v in instructions[k].reads for k in chain for v in reduced) else []


def _elements(writes: Sequence[int], values: Sequence[Value]) -> int:
    return max(values[v].elements for v in writes)


def _joined(parts: Sequence[Instruction]) -> Instruction:
    """Several instructions as one, that is the last's."""
    inside = {value for own in parts for value in own.writes}
    reads = tuple(dict.fromkeys(v for own in parts for v in own.reads if v not in inside))
    last = parts[-1]
    return Instruction(last.step, reads, (Use.AGAIN,) * len(reads), last.writes, Takes.OWN)
