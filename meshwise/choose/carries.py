"""Where an unreduced sum may travel on, before it is reduced.

A sum travels through linear equations while each value on the way has one use, and is joined with
other sums at an addition: then one reduction after it serves them all. A value with several uses
is where it is reduced, and so is one that the next equation would make larger.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from meshwise._jax import Literal, Var
from meshwise.ir.program import Program, itemsize_of, shape_of
from meshwise.ir.sharding import Reduction
from meshwise.rules.registry import OpRule

Carry = frozenset[int]


def find_carries(program: Program, rules: Sequence[OpRule]) -> list[Carry]:
    """For each equation the operands through which a sum passes together (empty: none)."""
    uses: dict[Var, int] = defaultdict(int)
    for atom in [a for e in program.equations for a in e.invars] + list(program.outputs):
        if not isinstance(atom, Literal):
            uses[atom] += 1
    may_be_unreduced: set[Var] = set()
    carries = []
    for eqn, rule in zip(program.equations, rules, strict=True):
        carry: Carry = frozenset()
        for operands in rule.linear:
            atoms = [eqn.invars[i] for i in operands]
            travels = all(
                not isinstance(a, Literal) and a in may_be_unreduced and uses[a] == atoms.count(a)
                for a in atoms
            )
            if travels and _bytes(eqn.outvars) <= _bytes(atoms):
                carry = frozenset(operands)
                break
        carries.append(carry)
        if carry or Reduction.SUM in rule.factors.reduction_of.values():
            may_be_unreduced.update(eqn.outvars)
    return carries


def _bytes(atoms: Sequence[Any]) -> int:
    return sum(math.prod(shape_of(a)) * itemsize_of(a) for a in atoms)
