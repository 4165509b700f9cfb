"""Which sums over devices XLA makes one: all of a kind, none of which waits for another.

Then all of them are there before any is sent, and until the last has come: gradients of all
weights, where each could be gone before the next is computed. So does `AllReduceCombiner`; gathers,
scatters and exchanges stay apart.
"""

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import numpy as jnp

from meshwise._jax import is_short_float
from meshwise.cost.cpu.instruction import Instruction

_COMBINED = frozenset({"psum", "pmax", "pmin"})
# XLA has no such bound; for each all instructions are looked at here.
_MOST_GROUPS = 64


def combined(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The instructions with fewer sums over devices, each after what it reads.

    The first sum is joined by all that may join it, in their order; then the first of the others.
    """
    found = list(instructions)
    kinds = {n: kind for n, own in enumerate(found) if (kind := _kind(own)) is not None}
    own_bits = {id(found[n]): 1 << n for n in kinds}
    waiting, groups = list(kinds), 0
    before = _before(found, own_bits)
    while waiting and groups < _MOST_GROUPS:
        group = _with_first(waiting, kinds, [before[id(instructions[n])] for n in waiting])
        waiting = [n for n in waiting if n not in group]
        if len(group) > 1:
            groups += 1
            members = [instructions[n] for n in group]
            one = _joined(members)
            own_bits[id(one)] = sum(1 << n for n in group)
            found = _with_one(found, members, one)
            before = _before(found, own_bits)
    return found


def _kind(own: Instruction) -> Hashable | None:
    """What is alike of sums that may be one; None for what is no sum over devices."""
    if own.step.name not in _COMBINED or own.fuses or not own.writes:
        return None
    given: Any = own.step.eqn.invars[0].aval
    params, dtype = own.step.eqn.params, given.dtype
    if is_short_float(dtype):
        dtype = jnp.dtype(jnp.float32)  # in which they are summed
    return own.step.name, dtype, str(params["axes"]), str(params["axis_index_groups"])


def _before(instructions: Sequence[Instruction], own_bits: Mapping[int, int]) -> dict[int, int]:
    """The sums that each sum waits for, as bits, by its `id`."""
    found: dict[int, int] = {}
    made: dict[int, int] = {}
    for own in instructions:
        bits = 0
        for value in own.reads:
            bits |= made.get(value, 0)
        if id(own) in own_bits:
            found[id(own)] = bits
            bits |= own_bits[id(own)]
        if bits:
            made.update(dict.fromkeys(own.writes, bits))
    return found


def _with_first(
    waiting: Sequence[int], kinds: Mapping[int, Hashable], before: Sequence[int]
) -> list[int]:
    """The first of some sums, and others of its kind that wait for none of those, nor these."""
    first, kind = waiting[0], kinds[waiting[0]]
    group, bits, wanted = [first], 1 << first, before[0]
    for n, needs in zip(waiting[1:], before[1:], strict=True):
        if kinds[n] == kind and not needs & bits and not wanted >> n & 1:
            group.append(n)
            bits |= 1 << n
            wanted |= needs
    return group


def _joined(members: Sequence[Instruction]) -> Instruction:
    reads = tuple(value for own in members for value in own.reads)
    uses = tuple(use for own in members for use in own.uses)
    writes = tuple(value for own in members for value in own.writes)
    return replace(members[0], reads=reads, uses=uses, writes=writes)


def _with_one(
    instructions: Sequence[Instruction], members: Sequence[Instruction], one: Instruction
) -> list[Instruction]:
    """The instructions with one in the place of several, in their order as far as that goes."""
    gone = {id(own) for own in members}
    left = [own for own in instructions if id(own) not in gone] + [one]
    makers = {value: n for n, own in enumerate(left) for value in own.writes}
    waits = [{makers[v] for v in own.reads if v in makers} for own in left]
    readers: dict[int, list[int]] = {}
    for n, others in enumerate(waits):
        for other in others:
            readers.setdefault(other, []).append(n)
    missing = [len(others) for others in waits]
    ready = [n for n, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        n = heapq.heappop(ready)
        order.append(left[n])
        for reader in readers.get(n, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    return order
