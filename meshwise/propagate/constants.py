"""Constants are split: each user of a constant gets its own copy.

A value made of literals alone (zeros, an iota, a mask of iotas) belongs to nobody: were two users
to share it, completion would carry the sharding of the one to the other through it, and one zero
would tie unrelated arrays together. XLA's partitioner splits constants for the same reason. The
copies cost nothing: each device makes just the part that is wanted, and equal ones are merged
again by the compiler.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, hint_p
from meshwise.ir.program import Program, shape_of
from meshwise.rules.registry import OpRule


def split_constants(
    program: Program, rules: Sequence[OpRule]
) -> tuple[Program, tuple[OpRule, ...]]:
    """The program with a copy of each constant for each of its users, and its rules."""
    makers: dict[Var, int] = {}
    for index, (eqn, rule) in enumerate(zip(program.equations, rules, strict=True)):
        if _is_cheap(eqn, rule) and all(isinstance(a, Literal) or a in makers for a in eqn.invars):
            makers.update(dict.fromkeys(eqn.outvars, index))
    if not makers:
        return program, tuple(rules)
    eqns: list[JaxprEqn] = []
    new_rules: list[OpRule] = []
    hints = {}

    def copy(atom: Any, made: dict[Var, Var]) -> Any:
        """The atom, or its own copy where it is a constant; `made` are the user's copies."""
        if isinstance(atom, Literal) or atom not in makers:
            return atom
        if atom not in made:
            eqn = program.equations[makers[atom]]
            operands = [copy(a, made) for a in eqn.invars]
            outvars = [_jax.new_var(v.aval) for v in eqn.outvars]
            made.update(zip(eqn.outvars, outvars, strict=True))
            eqns.append(_jax.rename(eqn, operands, outvars))
            new_rules.append(rules[makers[atom]])
        return made[atom]

    for index, (eqn, rule) in enumerate(zip(program.equations, rules, strict=True)):
        if eqn.outvars and eqn.outvars[0] in makers:
            continue
        made: dict[Var, Var] = {}
        operands = [copy(a, made) for a in eqn.invars]
        if index in program.hints:
            hints[len(eqns)] = program.hints[index]
        eqns.append(_jax.rename(eqn, operands, eqn.outvars))
        new_rules.append(rule)
    outputs = [copy(a, {}) for a in program.outputs]
    flat = program.jaxpr.jaxpr
    closed = _jax.close_jaxpr(flat.constvars, flat.invars, outputs, eqns, program.jaxpr.consts)
    return replace(program, jaxpr=closed, hints=hints), tuple(new_rules)


def _is_cheap(eqn: JaxprEqn, rule: OpRule) -> bool:
    """Element-wise work or less, any part of which can be made by itself."""
    factors = rule.factors
    special = factors.whole or factors.permuted or factors.compound or factors.reductions
    size = sum(math.prod(shape_of(v)) for v in eqn.outvars)
    plain = not (rule.opaque or special or eqn.effects) and eqn.primitive is not hint_p
    return bool(eqn.outvars) and plain and rule.flops <= size
