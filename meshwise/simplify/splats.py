"""What is one number everywhere is that number, spread, however it is cut, joined or padded.

A first guess of zeros is padded and shifted like any other array. Of zeros each device makes just
the part that is wanted, but of a pad or a join it would make all, and cut its part. Reductions of
numbers that are known while tracing are such, where all are equal: `eye(n).sum(0)`. So are integers
times nought.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.operators import COPIES, JOINS, REDUCTIONS, RESHAPES, SPREADS, TURNS, is_among
from meshwise.ir.program import atom_key, shape_of, type_of
from meshwise.simplify.borders.equations import equations_of
from meshwise.simplify.numbers import Numbers

# Operators whose result has no number that the first operand has not.
_LAYING = SPREADS | RESHAPES | TURNS | COPIES | {"slice", "dynamic_slice"}


def propagate_splats(eqns: Sequence[JaxprEqn], constants: Mapping[Var, Any]) -> list[JaxprEqn]:
    """The equations, in which what is one number everywhere is a broadcast of that.

    `constants` are the values of the program's constants.
    """
    numbers: dict[Var, Any] = {}
    made: list[JaxprEqn] = []
    known = Numbers({v: eqn for eqn in eqns for v in eqn.outvars}, constants)
    for eqn in eqns:
        if (spread := _known_reduction(eqn, known)) is not None:
            numbers[eqn.outvars[0]] = spread[-1].invars[0]
            made += spread
            continue
        number = _number_of(eqn, numbers)
        spread = None
        if number is not None:
            (out,) = eqn.outvars
            numbers[out] = number
            if eqn.primitive is not lax.broadcast_in_dim_p:
                spread = equations_of(eqn, [number], _spread_to(shape_of(out)))
        made += [eqn] if spread is None else spread
    return made


def _known_reduction(eqn: JaxprEqn, known: Numbers) -> list[JaxprEqn] | None:
    """A broadcast in place of a reduction, where it is of known numbers, and all of it one."""
    if not is_among(eqn, REDUCTIONS) or not shape_of(eqn.outvars[0]):
        return None
    found = known.of(eqn.outvars[0])
    if found is None or not found.size or np.any(found != found.flat[0]):
        return None
    return equations_of(eqn, eqn.invars[:1], lambda x: lax.full(found.shape, found.flat[0]))


def _number_of(eqn: JaxprEqn, numbers: Mapping[Var, Any]) -> Any:
    """The number that is all of an array, where that is known; else None."""
    if not all(map(shape_of, eqn.outvars)):
        return None
    if is_among(eqn, _LAYING):
        return _one(eqn.invars[0], numbers)
    if is_among(eqn, JOINS):
        found = [_one(atom, numbers) for atom in eqn.invars]
        if all(atom is not None and atom_key(atom) == atom_key(found[0]) for atom in found):
            return found[0]
    if eqn.primitive in (lax.mul_p, lax.and_p):
        found = [_one(atom, numbers) for atom in eqn.invars]
        return next((a for a in found if _is_nothing(a)), None)
    return None


def _is_nothing(number: Any) -> bool:
    """Whether an integral zero, or False: times it all is that. So is no float."""
    if not isinstance(number, Literal):
        return False
    dtype = type_of(number).dtype
    return isinstance(dtype, np.dtype) and dtype.kind in "iub" and not number.val


def _one(atom: Any, numbers: Mapping[Var, Any]) -> Any:
    if not shape_of(atom):
        return atom
    return None if isinstance(atom, Literal) else numbers.get(atom)


def _spread_to(shape: tuple[int, ...]) -> Any:
    return lambda number: lax.broadcast(number, shape)
