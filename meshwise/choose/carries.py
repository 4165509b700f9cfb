"""Where an unreduced sum may travel on, before it is reduced.

A sum travels through linear equations while each value on the way has one use, and is joined with
other sums at an addition: then one reduction after it serves them all. A value with several uses
is where it is reduced, and so is one that the next equation would make larger, or that a loop
would reduce in every step. Uses in several branches of a conditional are as one: one of them runs.

What is picked out of a dim in shards is a sum too, of one term, and travels as far as that term
stays what it is (`rules/picked.py`).

Something whole may be added to a sum on its way: one device adds it to its term. So it does where
a sum over dims follows that leaves less to be reduced, as the mean of a loss does.

What a loop carries along may be such a sum too, where each step only adds to it: then it is reduced
once, after the loop. What it starts from then is one device's term, and the others' are zero.
So may what a loop stacks, row by row. What only goes into these may have several uses, and grow: a
loss that is both added up and stacked, a gradient of few bits added to one of more.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from meshwise._jax import JaxprEqn, Literal, Var, next_p, stack_p
from meshwise.ir.bodies import never_both, read_in
from meshwise.ir.program import Program, bytes_of, makes_zeros
from meshwise.ir.sharding import Reduction
from meshwise.rules.picked import keeps_picked
from meshwise.rules.registry import OpRule

Carry = frozenset[int]
_START: Carry = frozenset({0})
_NEVER = 2**40  # steps whose sums are reduced once, where that is never


@dataclass(frozen=True)
class Carries:
    """For each equation the operands through which a sum passes together (empty: none).

    `adopting` are values that lie as the sum that is added to them: what a step of a loop adds to,
    zeros in which terms of that are placed, and what is whole.
    """

    of: tuple[Carry, ...]
    adopting: frozenset[Var]

    def __getitem__(self, equation: int) -> Carry:
        return self.of[equation]


def find_carries(program: Program, rules: Sequence[OpRule]) -> Carries:
    """Where sums may pass in a program."""
    uses = uses_of(program)
    zeros = {eqn.outvars[0] for eqn in program.equations if makes_zeros(eqn)}
    once = _read_once(program, uses)
    sums = _accumulators(program, rules, uses, once)
    while True:
        gathered = _gathered(program, rules, uses, sums)
        carries, wholes = _follow(program, rules, uses, once, sums, zeros, gathered)
        lost = {n for n in sums if not carries[n]}
        if not lost:
            begins = [program.equations[program.carried[n]] for n in sums]
            starts = {eqn.outvars[0] for eqn in begins}
            return Carries(tuple(carries), frozenset(starts | zeros | wholes))
        sums -= lost


Use = tuple[int, int]  # an equation, and the position of its operand; (-1, k) is the k-th result


def uses_of(program: Program) -> dict[Var, list[Use]]:
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


def _read_once(program: Program, uses: Mapping[Var, Sequence[Use]]) -> set[Var]:
    """Values that a step reads at one place: of several uses each is in a branch of its own."""
    eqns, read = program.equations, read_in(program.equations)
    found: set[Var] = set()
    for var, places in uses.items():
        scopes = [read(*place) for place in places if place[0] >= 0]
        is_inside = len(scopes) == len(places)
        apart = is_inside and all(never_both(eqns, *pair) for pair in combinations(scopes, 2))
        if len(places) == 1 or apart:
            found.add(var)
    return found


def _accumulators(
    program: Program, rules: Sequence[OpRule], uses: dict[Var, list[Use]], once: Set[Var]
) -> set[int]:
    """The `next` marks of what steps only add to."""
    eqns = program.equations
    ends = {begin: end for end, begin in program.carried.items()}
    leads: dict[Var, int | None] = {}  # the `next` mark that a value reaches, only added to

    def leads_to(index: int, position: int) -> int | None:
        if index < 0:
            return None
        eqn = eqns[index]
        if eqn.primitive is next_p:
            return index
        if index in ends:
            inner = ends[index]
            adds_only = leads.get(eqn.outvars[0]) == inner
            return leads.get(eqns[inner].outvars[0]) if adds_only else None
        return leads.get(eqn.outvars[0]) if _passes_on(rules[index], position) else None

    for eqn in reversed(eqns):
        for var in eqn.outvars:
            found = {leads_to(*use) for use in uses[var]} if var in once else {None}
            leads[var] = found.pop() if len(found) == 1 else None
    return {n for n, begin in program.carried.items() if leads[eqns[begin].outvars[0]] == n}


def _passes_on(rule: OpRule, position: int) -> bool:
    """Whether a result is linear in an operand, and the step makes no sum there.

    What sums over a dim of what was added up before does more than add to it, and a scatter makes
    a sum of its updates apart from what it adds them to.
    """
    return not rule.factors.reductions and any(position in s for s in rule.linear)


def _gathered(
    program: Program, rules: Sequence[OpRule], uses: dict[Var, list[Use]], sums: Set[int]
) -> dict[Var, int]:
    """Values all of whose uses lead into what loops add up or stack, and of how many steps' sums.

    What is added up is reduced once for all steps; of a stack each row is still reduced. Results
    that are to be left as terms are not reduced at all.
    """
    found: dict[Var, int] = {}

    def steps(index: int, position: int) -> int:
        if index < 0:
            hint = program.out_hints[position]
            return _NEVER if hint is not None and hint.unreduced else 0
        eqn = program.equations[index]
        if index in sums and position == 1:
            return eqn.params["control"].trips * found.get(eqn.outvars[0], 1)
        if eqn.primitive is stack_p:
            return found.get(eqn.outvars[0], 1)
        is_linear = any(position in operands for operands in rules[index].linear)
        return found.get(eqn.outvars[0], 0) if is_linear else 0

    for eqn in reversed(program.equations):
        for var in eqn.outvars:
            least = min((steps(*use) for use in uses[var]), default=0)
            if least:
                found[var] = least
    return found


def _shrinking(program: Program, rules: Sequence[OpRule], uses: dict[Var, list[Use]]) -> set[Var]:
    """Values whose one use leads, through linear equations, to a sum of fewer bytes."""
    found: set[Var] = set()
    for eqn in reversed(program.equations):
        for var in eqn.outvars:
            if len(uses[var]) != 1 or uses[var][0][0] < 0:
                continue
            index, position = uses[var][0]
            user, rule = program.equations[index], rules[index]
            passes = any(
                position in group and not any(isinstance(user.invars[i], Literal) for i in group)
                for group in rule.linear
            )
            smaller = bytes_of(*user.outvars) < bytes_of(var)
            if passes and (smaller or not found.isdisjoint(user.outvars)):
                found.add(var)
    return found


def _follow(
    program: Program,
    rules: Sequence[OpRule],
    uses: dict[Var, list[Use]],
    once: Set[Var],
    sums: Iterable[int],
    zeros: Set[Var],
    gathered: Mapping[Var, int],
) -> tuple[list[Carry], set[Var]]:
    """The operands that each equation carries, and what is whole where it is carried."""
    starts = {program.carried[n] for n in sums}
    ends = set(sums)
    made = {v: n for e, n in zip(program.equations, program.trips, strict=True) for v in e.outvars}
    shrinking = _shrinking(program, rules, uses)
    known = _Known(uses, once, made, zeros, gathered, shrinking, set(), set())
    wholes: set[Var] = set()
    carries = []
    for index, (eqn, rule) in enumerate(zip(program.equations, rules, strict=True)):
        carry: Carry = frozenset()
        for operands in ((1,),) if index in ends else rule.linear:
            whole = known.whole(eqn, operands, program.trips[index])
            if known.passes(eqn, operands, whole, program.trips[index]) and (
                known.keeps_picked(eqn, rule, operands)
            ):
                carry = frozenset(operands)
                wholes |= whole
                break
        if index in starts:
            carry = _START
        carries.append(carry)
        is_reduced = Reduction.SUM in rule.factors.reduction_of.values()
        if carry or is_reduced:
            known.unreduced.update(eqn.outvars)
        if (rule.moves and is_reduced) or known.is_picked(eqn, carry):
            known.picked.update(eqn.outvars)
    return carries, wholes


@dataclass(frozen=True)
class _Known:
    """What tells where sums may pass.

    `unreduced` are the values that may be sums so far, `picked` those of which one term counts.
    """

    uses: Mapping[Var, Sequence[Use]]
    once: Set[Var]
    made: Mapping[Var, int]
    zeros: Set[Var]
    gathered: Mapping[Var, int]
    shrinking: Set[Var]
    unreduced: set[Var]
    picked: set[Var]

    def is_picked(self, eqn: JaxprEqn, operands: Collection[int]) -> bool:
        """Whether any of some operands was picked."""
        atoms = [eqn.invars[i] for i in operands]
        return any(a in self.picked for a in atoms if not isinstance(a, Literal))

    def keeps_picked(self, eqn: JaxprEqn, rule: OpRule, operands: Collection[int]) -> bool:
        """Whether what was picked may pass, if any of the operands was."""
        if not self.is_picked(eqn, operands):
            return True
        return keeps_picked(eqn, rule, operands, not self.shrinking.isdisjoint(eqn.outvars))

    def whole(self, eqn: JaxprEqn, operands: Iterable[int], trips: int) -> set[Var]:
        """Operands that one device may add to a sum: as often as they are made."""
        if self.shrinking.isdisjoint(eqn.outvars):
            return set()
        atoms = [eqn.invars[i] for i in operands]
        others = [a for a in atoms if not isinstance(a, Literal) and a not in self.unreduced]
        return {a for a in others if self.made.get(a, 1) == trips}

    def passes(self, eqn: JaxprEqn, operands: Iterable[int], whole: Set[Var], trips: int) -> bool:
        """Whether a sum may pass, to which one device adds what is whole."""
        atoms = [eqn.invars[i] for i in operands]
        terms = [a for a in atoms if isinstance(a, Literal) or a not in whole]
        sums = [self._is_sum(a, atoms.count(a), eqn.outvars, trips) for a in terms]
        if not sums or not all(sums):
            return False
        if eqn.primitive is stack_p:  # each row is as large as what it is made of
            return True
        counted = [a for a in terms if not (isinstance(a, Literal) or a in self.zeros)]
        rows = max((self.gathered.get(v, 1) for v in eqn.outvars), default=1)
        return bool(counted) and bytes_of(*eqn.outvars) <= bytes_of(*counted) * rows

    def _is_sum(self, atom: Any, count: int, results: Sequence[Var], trips: int) -> bool:
        """Whether an operand may be a sum, or zeros around terms of one, and stay one."""
        is_gathered = any(v in self.gathered for v in results)
        if isinstance(atom, Literal):
            return is_gathered and np.ndim(atom.val) == 0 and not atom.val
        if atom in self.zeros:
            return (atom in self.unreduced or is_gathered) and self._is_alone(atom, count)
        is_sum = atom in self.unreduced and self._is_alone(atom, count)
        return is_sum and self.made.get(atom, 1) >= trips

    def _is_alone(self, atom: Var, count: int) -> bool:
        """Whether nothing else that a step reads a value for needs it reduced."""
        only = atom in self.once or len(self.uses[atom]) == count
        return only or atom in self.gathered
