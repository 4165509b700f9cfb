"""What is written in another way once it is known which dims are sharded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.program import Program


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
