"""Products of flattened arrays are those of the arrays: `vdot(x, y)` sums over all of their dims.

A flattened array has one dim, which cannot lie as blocks of rows and columns do: all of it would be
moved to have one number computed of it, as conjugate gradients do in each step.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import shape_of

_INNER = (((0,), (0,)), ((), ()))  # the dimension numbers of an inner product


def unflatten_products(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations of a flat program, inner products of arrays in place of flattened ones."""
    arrays: dict[Var, Any] = {e.outvars[0]: e.invars[0] for e in eqns if _flattens(e)}
    return [_of_arrays(e, [arrays.get(a) for a in e.invars if isinstance(a, Var)]) for e in eqns]


def _of_arrays(eqn: JaxprEqn, arrays: Sequence[Any]) -> JaxprEqn:
    """An equation with these in place of its operands, if it is an inner product of all of them."""
    if eqn.primitive is not lax.dot_general_p or eqn.params["dimension_numbers"] != _INNER:
        return eqn
    found = [a for a in arrays if a is not None]
    shapes = {shape_of(a) for a in found}
    if len(found) < 2 or len(shapes) > 1:
        return eqn
    dims = tuple(range(len(shapes.pop())))
    params = eqn.params | {"dimension_numbers": ((dims, dims), ((), ()))}
    return eqn.replace(invars=found, params=params)


def _flattens(eqn: JaxprEqn) -> bool:
    """Whether an equation lays the elements of an array in a row."""
    if eqn.primitive is not lax.reshape_p or isinstance(eqn.invars[0], Literal):
        return False
    return len(shape_of(eqn.outvars[0])) == 1
