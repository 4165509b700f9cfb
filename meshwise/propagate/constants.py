"""Constants are split: each user of a constant gets its own copy.

A value made of literals alone (zeros, an iota, a mask of iotas) belongs to nobody: were two users
to share it, completion would carry the sharding of the one to the other through it, and one zero
would tie unrelated arrays together. XLA's partitioner splits constants for the same reason. The
copies cost nothing: each device makes just the part that is wanted, and equal ones are merged
again by the compiler. So only what is made within a kernel is copied, and of few equations. A
scatter, as of the gradient of a diagonal, would be written whole for a user of its own; shared, it
lies as others need it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, hint_p
from meshwise.cost.fusion import is_elementwise, is_view
from meshwise.ir.bodies import places_to_read
from meshwise.ir.program import Program, shape_of
from meshwise.rules.registry import OpRule

# So many equations at most are copied for each user.
_MOST = 64


def split_constants(
    program: Program, rules: Sequence[OpRule]
) -> tuple[Program, tuple[OpRule, ...]]:
    """The program with a copy of each constant for each of its users, and its rules."""
    makers: dict[Var, int] = {}
    made_of: dict[Var, frozenset[int]] = {}
    for index, (eqn, rule) in enumerate(zip(program.equations, rules, strict=True)):
        read = [a for a in eqn.invars if not isinstance(a, Literal)]
        if _is_cheap(eqn, rule) and made_of.keys() >= set(read):
            equations = frozenset({index}).union(*(made_of[a] for a in read))
            if len(equations) <= _MOST:
                makers.update(dict.fromkeys(eqn.outvars, index))
                made_of.update(dict.fromkeys(eqn.outvars, equations))
    if not makers:
        return program, tuple(rules)
    copies = _Copies(program, rules, makers)
    users = copies.of_users()
    outputs = [copies.copy(a, len(program.equations), {}) for a in program.outputs]
    eqns: list[JaxprEqn] = []
    new_rules: list[OpRule] = []
    hints = {}
    for index in range(len(program.equations) + 1):
        for eqn, rule in copies.before[index]:
            eqns.append(eqn)
            new_rules.append(rule)
        if index in program.hints:
            hints[len(eqns)] = program.hints[index]
        if index in users:
            eqns.append(users[index])
            new_rules.append(rules[index])
    flat = program.jaxpr.jaxpr
    closed = _jax.close_jaxpr(flat.constvars, flat.invars, outputs, eqns, program.jaxpr.consts)
    return replace(program, jaxpr=closed, hints=hints), tuple(new_rules)


@dataclass
class _Copies:
    """Copies of constants, by the equation before which they are to be made."""

    program: Program
    rules: Sequence[OpRule]
    makers: dict[Var, int]
    before: dict[int, list[tuple[JaxprEqn, OpRule]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def copy(self, atom: Any, place: int, made: dict[Var, Var]) -> Any:
        """The atom, or its own copy where it is a constant; `made` are the user's copies."""
        if isinstance(atom, Literal) or atom not in self.makers:
            return atom
        if atom not in made:
            maker = self.makers[atom]
            eqn = self.program.equations[maker]
            operands = [self.copy(a, place, made) for a in eqn.invars]
            outvars = [_jax.new_var(v.aval) for v in eqn.outvars]
            made.update(zip(eqn.outvars, outvars, strict=True))
            self.before[place].append((_jax.rename(eqn, operands, outvars), self.rules[maker]))
        return made[atom]

    def of_users(self) -> dict[int, JaxprEqn]:
        """Every equation that makes no constant, reading copies of its own."""
        places = places_to_read(self.program.equations)
        users = {}
        for index, eqn in enumerate(self.program.equations):
            if not (eqn.outvars and eqn.outvars[0] in self.makers):
                made: dict[int, dict[Var, Var]] = defaultdict(dict)
                at = [places.get((index, k), index) for k in range(len(eqn.invars))]
                operands = [self.copy(a, p, made[p]) for a, p in zip(eqn.invars, at, strict=True)]
                users[index] = _jax.rename(eqn, operands, eqn.outvars)
        return users


def _is_cheap(eqn: JaxprEqn, rule: OpRule) -> bool:
    """Element-wise work or less, any part of which can be made by itself, where it is read.

    So are sums and maxima along dims, as those by which weights are normalised.
    """
    factors = rule.factors
    reduces = len(eqn.invars) == 1 and bool(factors.reductions)
    if eqn.invars and not (reduces or is_view(eqn) or is_elementwise(eqn, rule)):
        return False
    special = factors.whole or factors.permuted or factors.compound
    made = eqn.invars if reduces else eqn.outvars
    size = sum(math.prod(shape_of(v)) for v in made)
    plain = not (rule.opaque or special or rule.exchanges or eqn.effects)
    plain = plain and eqn.primitive is not hint_p
    return bool(eqn.outvars) and plain and rule.flops <= size
