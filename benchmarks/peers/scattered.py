"""All-reduces of which each device keeps a part: reduce-scatters, had the compiler formed them.

XLA's partitioner writes a reduce-scatter as an all-reduce and a dynamic-slice at a place computed
from the partition's number; TPU and GPU compilers join the two later, the CPU compiler never does.
Here the place is computed for every device, so that nothing is credited that is not one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.hlo_text import Computation, Instruction, Module
from benchmarks.peers.replica_groups import Groups

# What changes the form of a value and not which device holds which part of it. A second
# all-reduce is among them: both can be reduce-scatters if the slice follows the second.
RESHAPED = frozenset({"bitcast", "convert", "copy", "reshape"})
TRANSPARENT = RESHAPED | {
    "all-reduce",
    "all-reduce-done",
    "get-tuple-element",
    "opt-barrier",
    "transpose",
}
ARITHMETIC: dict[str, Callable[..., NDArray[np.int64]]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.floor_divide,
    "remainder": np.remainder,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "clamp": lambda low, value, high: np.clip(value, low, high),
}


@dataclass(frozen=True)
class Scope:
    """A computation, and the instruction that called it, where values can be followed out of it."""

    module: Module
    computation: Computation
    caller: tuple[Scope, Instruction] | None = None

    def called(self, instruction: Instruction) -> Scope:
        """The scope of the computation that a fusion or call runs."""
        return Scope(
            self.module, self.module.computations[instruction.called[0]], (self, instruction)
        )


@dataclass(frozen=True)
class Slice:
    """A per-device part of a value: where it starts on each device, [devices, dims]."""

    starts: NDArray[np.int64]
    whole: tuple[int, ...]
    part: tuple[int, ...]


def scatter_ways(scope: Scope, name: str, element: int, groups: Groups) -> int:
    """In how many different parts a group takes the result of all-reduce `name`; 1 if it is kept.

    `element` is the operand's number in an all-reduce of several.
    """
    slices = _slices(scope, name, element)
    if not slices:
        return 1
    first = slices[0]
    same = all(s.whole == first.whole and np.array_equal(s.starts, first.starts) for s in slices)
    if not same:
        return 1
    # Devices of one group with the same start want the same part of the sum.
    ways = {len({tuple(first.starts[device]) for device in group}) for group in groups}
    parts = int(np.prod(first.whole)) // max(1, int(np.prod(first.part)))
    return min(*ways, parts) if len(ways) > 1 else min(ways.pop(), parts)


def _slices(scope: Scope, name: str, element: int | None = None) -> list[Slice] | None:
    """Every slice that reads a value; None if anything else does."""
    found: list[Slice] = []
    instruction = scope.computation.instructions[name]
    if instruction.is_root:
        if scope.caller is None or scope.caller[1].opcode == "while":
            return None
        above = _slices(scope.caller[0], scope.caller[1].name)
        if above is None:
            return None
        found += above
    several = element is not None and len(instruction.shapes) > 1
    for user in scope.computation.users[name]:
        if several and user.attribute("index") != str(element):
            continue
        below = _slices_in(scope, user, name)
        if below is None:
            return None
        found += below
    return found


def _slices_in(scope: Scope, user: Instruction, name: str) -> list[Slice] | None:
    """The slices of value `name` in one instruction that reads it, or behind it."""
    if user.opcode in TRANSPARENT:
        return _slices(scope, user.name)
    if user.opcode in ("fusion", "call") and user.called:
        inner, found = scope.called(user), list[Slice]()
        for number, operand in enumerate(user.operands):
            if operand == name:
                below = _slices(inner, inner.computation.parameters[number].name)
                if below is None:
                    return None
                found += below
        return found
    if user.opcode != "dynamic-slice" or user.operands[0] != name:
        return None
    places = [evaluate(scope, operand) for operand in user.operands[1:]]
    if any(place is None for place in places):
        return None
    devices = scope.module.devices
    starts = np.stack([np.asarray(place).reshape(devices) for place in places], axis=1)
    whole = scope.computation.instructions[name].shapes[0].dims
    return [Slice(starts, whole, user.shapes[0].dims)]


def evaluate(scope: Scope, name: str) -> NDArray[np.int64] | None:
    """An integer value on every device, [devices, *dims]; None if it depends on anything else."""
    instruction = scope.computation.instructions[name]
    devices = scope.module.devices
    opcode = instruction.opcode
    if opcode == "partition-id":
        return np.arange(devices) % scope.module.partitions
    if opcode == "replica-id":
        return np.arange(devices) // scope.module.partitions
    if opcode == "constant":
        return _constant(instruction, devices)
    if opcode == "parameter":
        if scope.caller is None or scope.caller[1].opcode == "while":
            return None
        return evaluate(scope.caller[0], scope.caller[1].operands[int(instruction.arguments)])
    if opcode == "get-tuple-element":
        return _carried(scope, instruction)
    if opcode in ("fusion", "call") and instruction.called:
        inner = scope.called(instruction)
        return evaluate(inner, inner.computation.root.name)
    if opcode not in RESHAPED | ARITHMETIC.keys() | {"dynamic-slice"}:
        return None
    values = [evaluate(scope, operand) for operand in instruction.operands]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if opcode in RESHAPED:
        return known[0].reshape(devices, *instruction.shapes[0].dims)
    if opcode == "dynamic-slice":
        return _look_up(known[0], known[1:], instruction.shapes[0].dims)
    return ARITHMETIC[opcode](*known)


def _carried(scope: Scope, read: Instruction) -> NDArray[np.int64] | None:
    """What a loop's body reads from its carry, where it hands the same on to the next trip."""
    if scope.caller is None or scope.caller[1].opcode != "while":
        return None
    known, place = scope.computation.instructions, int(read.attribute("index") or 0)
    handed_on = known[scope.computation.root.operands[place]]
    same = handed_on.attribute("index") == str(place) and handed_on.opcode == read.opcode
    if known[read.operands[0]].opcode != "parameter" or not same:
        return None
    outer, loop = scope.caller
    start = outer.computation.instructions[loop.operands[0]]
    return evaluate(outer, start.operands[place]) if start.opcode == "tuple" else None


def _look_up(
    table: NDArray[np.int64], starts: list[NDArray[np.int64]], part: tuple[int, ...]
) -> NDArray[np.int64]:
    """Each device's part of its table; starts are clamped, as HLO does."""

    def rows() -> Iterator[NDArray[np.int64]]:
        for device, whole in enumerate(table):
            window = []
            for start, length, size in zip(starts, part, whole.shape, strict=True):
                low = int(np.clip(start.reshape(-1)[device], 0, size - length))
                window.append(slice(low, low + length))
            yield whole[tuple(window)]

    return np.stack(list(rows()))


def _constant(instruction: Instruction, devices: int) -> NDArray[np.int64] | None:
    """The same integers on every device; None where the text leaves them out or has others."""
    shape = instruction.shapes[0]
    text = instruction.arguments
    numbers = [int(number) for number in re.findall(r"-?\d+", text)]
    if shape.dtype[0] not in "su" or len(numbers) != shape.elements:
        return None
    return np.broadcast_to(np.array(numbers).reshape(shape.dims), (devices, *shape.dims))
