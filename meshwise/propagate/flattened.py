"""Products of flattened arrays are those of the arrays: `vdot(x, y)` sums over all of their dims.

A flattened array has one dim, which cannot lie as blocks of rows and columns do: all of it would be
moved to have one number computed of it, as conjugate gradients do in each step.
"""

from collections.abc import Sequence

from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import Program, shape_of
from meshwise.propagate.rewriting import rewritten, without_unread

_INNER = (((0,), (0,)), ((), ()))  # the dimension numbers of an inner product


def unflatten_products(program: Program) -> Program:
    """The program with inner products of arrays in the place of those of flattened ones."""
    makers = {v: i for i, eqn in enumerate(program.equations) for v in eqn.outvars}
    instead: dict[int, Sequence[JaxprEqn]] = {}
    before: set[int] = set()
    for index, eqn in enumerate(program.equations):
        if eqn.primitive is not lax.dot_general_p or eqn.params["dimension_numbers"] != _INNER:
            continue
        made = [makers.get(a) for a in eqn.invars if isinstance(a, Var)]
        flattened = [k for k in made if k is not None and _flattens(program.equations[k])]
        if len(flattened) < 2:
            continue
        operands = [program.equations[k].invars[0] for k in flattened]
        if shape_of(operands[0]) != shape_of(operands[1]):
            continue
        dims = tuple(range(len(shape_of(operands[0]))))
        params = eqn.params | {"dimension_numbers": ((dims, dims), ((), ()))}
        instead[index] = [eqn.replace(invars=operands, params=params)]
        before.update(flattened)
    if not instead:
        return program
    return rewritten(program, without_unread(program, instead, before))


def _flattens(eqn: JaxprEqn) -> bool:
    """Whether an equation lays the elements of an array in a row."""
    if eqn.primitive is not lax.reshape_p or isinstance(eqn.invars[0], Literal):
        return False
    return len(shape_of(eqn.outvars[0])) == 1
