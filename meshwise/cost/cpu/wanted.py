"""The order in which XLA has the instructions of a program, whatever the order they come in.

It writes them from the results back: each behind what it reads, that of the first operand first.
What several read is read in that order, too, and so it is fused, combined, and run.
"""

from collections.abc import Iterator, Sequence

from meshwise.cost.cpu.instruction import Instruction


def wanted_first(instructions: Sequence[Instruction], results: Sequence[int]) -> list[Instruction]:
    """The instructions from the results back; behind these what leads to none of them."""
    maker = {value: n for n, own in enumerate(instructions) for value in own.writes}
    ends = [maker[value] for value in results if value in maker]
    order: dict[int, Instruction] = {}
    seen: set[int] = set()
    for end in (*ends, *range(len(instructions))):
        waiting: list[tuple[int, Iterator[int]]] = []
        if end not in seen:
            seen.add(end)
            waiting.append((end, iter(instructions[end].reads)))
        while waiting:
            n, reads = waiting[-1]
            missing = (maker[value] for value in reads if value in maker)
            found = next((other for other in missing if other not in seen), None)
            if found is None:
                order[n] = instructions[n]
                waiting.pop()
            else:
                seen.add(found)
                waiting.append((found, iter(instructions[found].reads)))
    return list(order.values())
