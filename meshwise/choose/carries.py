"""Where an unreduced sum may travel on, before it is reduced.

A sum travels through linear equations while each value on the way has one use, and is joined with
other sums at an addition: then one reduction after it serves them all. A value with several uses
is where it is reduced, and so is one that the next equation would make larger, or that a loop
would reduce in every step.

What a loop carries along may be such a sum too, where each step only adds to it: then it is reduced
once, after the loop. What it starts from then is one device's term, and the others' are zero.
So may what a loop stacks, row by row. What only goes into these may have several uses, and grow: a
loss that is both added up and stacked, a gradient of few bits added to one of more.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise._jax import JaxprEqn, Literal, Var, next_p, stack_p
from meshwise.ir.program import Program, itemsize_of, shape_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.registry import OpRule

Carry = frozenset[int]
_START: Carry = frozenset({0})


@dataclass(frozen=True)
class Carries:
    """For each equation the operands through which a sum passes together (empty: none).

    `adopting` are values that lie as the sum that is added to them: what a step of a loop adds to,
    and zeros in which terms of that are placed.
    """

    of: tuple[Carry, ...]
    adopting: frozenset[Var]

    def __getitem__(self, equation: int) -> Carry:
        return self.of[equation]


def find_carries(program: Program, rules: Sequence[OpRule]) -> Carries:
    """Where sums may pass in a program."""
    uses = _uses(program)
    zeros = {eqn.outvars[0] for eqn in program.equations if _is_zero(eqn)}
    sums = _accumulators(program, rules, uses)
    while True:
        gathered = _gathered(program, rules, uses, sums)
        carries = _follow(program, rules, uses, sums, zeros, gathered)
        lost = {n for n in sums if not carries[n]}
        if not lost:
            begins = [program.equations[program.carried[n]] for n in sums]
            starts = {eqn.outvars[0] for eqn in begins}
            return Carries(tuple(carries), frozenset(starts | zeros))
        sums -= lost


def _is_zero(eqn: JaxprEqn) -> bool:
    """Whether an equation makes an array of zeros."""
    if eqn.primitive.name != "broadcast_in_dim" or not isinstance(eqn.invars[0], Literal):
        return False
    return np.ndim(eqn.invars[0].val) == 0 and not eqn.invars[0].val


Use = tuple[int, int]  # an equation, and the position of its operand; (-1, k) is the k-th result


def _uses(program: Program) -> dict[Var, list[Use]]:
    """Where each value is read; that what is carried comes round again is no reading of it."""
    uses: dict[Var, list[Use]] = defaultdict(list)
    for index, eqn in enumerate(program.equations):
        for position, atom in enumerate(eqn.invars):
            comes_round = eqn.primitive is next_p and position == 0
            if not isinstance(atom, Literal) and not comes_round:
                uses[atom].append((index, position))
    for position, atom in enumerate(program.outputs):
        if not isinstance(atom, Literal):
            uses[atom].append((-1, position))
    return uses


def _accumulators(
    program: Program, rules: Sequence[OpRule], uses: dict[Var, list[Use]]
) -> set[int]:
    """The `next` marks of what steps only add to, inner loops' first."""
    ends = {begin: end for end, begin in program.carried.items()}
    found: set[int] = set()
    for end in sorted(ends.values()):
        value = program.equations[program.carried[end]].outvars[0]
        while len(uses[value]) == 1:
            index, position = uses[value][0]
            if index == end:
                found.add(end)
            if index in (end, -1):
                break
            inner = ends.get(index)
            if inner is not None and inner in found:
                value = program.equations[inner].outvars[0]
            elif any(position in s for s in rules[index].linear):
                value = program.equations[index].outvars[0]
            else:
                break
    return found


def _gathered(
    program: Program, rules: Sequence[OpRule], uses: dict[Var, list[Use]], sums: Set[int]
) -> dict[Var, int]:
    """Values all of whose uses lead into what loops add up or stack, and in how many steps."""
    found: dict[Var, int] = {}

    def steps(index: int, position: int) -> int:
        eqn = program.equations[index]
        if index < 0:
            return 0
        if eqn.primitive is stack_p or (index in sums and position == 1):
            return eqn.params["control"].trips * found.get(eqn.outvars[0], 1)
        is_linear = any(position in operands for operands in rules[index].linear)
        return found.get(eqn.outvars[0], 0) if is_linear else 0

    for eqn in reversed(program.equations):
        for var in eqn.outvars:
            least = min((steps(*use) for use in uses[var]), default=0)
            if least:
                found[var] = least
    return found


def _follow(
    program: Program,
    rules: Sequence[OpRule],
    uses: dict[Var, list[Use]],
    sums: Iterable[int],
    zeros: Set[Var],
    gathered: Mapping[Var, int],
) -> list[Carry]:
    starts = {program.carried[n] for n in sums}
    ends = set(sums)
    made = {v: n for e, n in zip(program.equations, program.trips, strict=True) for v in e.outvars}
    may_be_unreduced: set[Var] = set()
    carries = []
    for index, (eqn, rule) in enumerate(zip(program.equations, rules, strict=True)):
        carry: Carry = frozenset()
        linear = ((1,),) if index in ends else rule.linear
        stacks = eqn.primitive is stack_p  # each row is as large as what it is made of
        for operands in linear:
            atoms = [eqn.invars[i] for i in operands]
            travels = all(
                not isinstance(a, Literal)
                and (a in may_be_unreduced or (a in zeros and eqn.outvars[0] in gathered))
                and (a in gathered or len(uses[a]) == atoms.count(a))
                and (a in zeros or made[a] >= program.trips[index])
                for a in atoms
            )
            terms = [a for a in atoms if isinstance(a, Literal) or a not in zeros]
            most = _bytes(terms) * gathered.get(eqn.outvars[0], 1) if terms else -1
            if travels and (stacks or _bytes(eqn.outvars) <= most):
                carry = frozenset(operands)
                break
        if index in starts:
            carry = _START
        carries.append(carry)
        if carry or Reduction.SUM in rule.factors.reduction_of.values():
            may_be_unreduced.update(eqn.outvars)
    return carries


def _bytes(atoms: Sequence[Any]) -> int:
    return sum(math.prod(shape_of(a)) * itemsize_of(a) for a in atoms)
