"""What is written in another way once it is known what equations mean, or what is sharded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal
from meshwise.ir.program import Program, shape_of
from meshwise.rules.registry import OpRule


def rewritten(program: Program, instead: Mapping[int, Sequence[JaxprEqn]]) -> Program:
    """A program with other equations in place of some, by index; itself where there are none."""
    if not instead:
        return program
    eqns: list[JaxprEqn] = []
    hints = {}
    for index, eqn in enumerate(program.equations):
        if index in program.hints:
            hints[len(eqns)] = program.hints[index]
        eqns += instead.get(index, (eqn,))
    flat = program.jaxpr.jaxpr
    closed = _jax.close_jaxpr(flat.constvars, flat.invars, flat.outvars, eqns, program.jaxpr.consts)
    return replace(program, jaxpr=closed, hints=hints)


def without_unread(
    program: Program, instead: dict[int, Sequence[JaxprEqn]], before: set[int]
) -> dict[int, Sequence[JaxprEqn]]:
    """Equations that only those replaced have read (`before`) are left out."""
    reads = Counter(a for a in program.outputs if not isinstance(a, Literal))
    for index, eqn in enumerate(program.equations):
        for e in instead.get(index, (eqn,)):
            reads.update(a for a in e.invars if not isinstance(a, Literal))
    found = dict(instead)
    for index in sorted({*before, *instead}, reverse=True):
        kept: list[JaxprEqn] = []
        for eqn in reversed(found.get(index, (program.equations[index],))):
            if any(reads[v] for v in eqn.outvars):
                kept.insert(0, eqn)
            else:
                reads.subtract(a for a in eqn.invars if not isinstance(a, Literal))
        found[index] = kept
    return found


def is_of_any_size(rule: OpRule, eqn: JaxprEqn) -> bool:
    """Whether an equation treats every element alone, the same in arrays of another size."""
    if eqn.primitive is lax.broadcast_in_dim_p:
        return not shape_of(eqn.invars[0])
    factors = rule.factors
    special = factors.reductions or factors.whole or factors.permuted or factors.compound
    if special or rule.opaque or rule.local is not None or not any(factors.operands):
        return False
    return all(dims in ((), factors.results[0]) for dims in factors.operands)
