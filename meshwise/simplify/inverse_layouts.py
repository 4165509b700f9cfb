"""Arrays laid otherwise and back again are the arrays: windows cut, and put together as they were.

In between a dim may be joined of several, of which one in the midst is sharded. No shard is a row
of such a dim: all of the array would be moved, twice, for nothing that is computed there.

Where they are as they were but for dims of one, only these are laid: the gradient of `jnp.tile`
lays its copies end to end, and tells them apart again with such dims between.

What changes nothing is left out with them: a dim of one element turned round, an array joined with
nothing (as `jnp.pad` does along dims that it does not pad). Passes behind look past neither.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.operators import RESHAPES, SPREADS, is_among
from meshwise.ir.program import are_alike, shape_of, type_of
from meshwise.simplify.borders.equations import equations_of

# Operators that leave elements in their order, where none is repeated.
_RESHAPING = RESHAPES | SPREADS


def cancel_inverse_layouts(
    eqns: Sequence[JaxprEqn], outputs: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and outputs of a flat program, which read arrays, not what is laid as they are.

    What lies in between stays for whoever else reads it, and is dead if nobody does. A row without
    its dim of one is left: it is spread from there, which can be done wherever it is wanted.
    """
    same: dict[Var, Any] = {}
    makers: dict[Var, JaxprEqn] = {}
    kept = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else same.get(atom, atom)

    for original in eqns:
        eqn = original.replace(invars=[read(a) for a in original.invars])
        array = _laid_so_before(eqn, makers)
        if array is not None:
            same[eqn.outvars[0]] = array
            continue
        eqn = _without_detour(eqn, makers)
        kept.append(eqn)
        if _is_reshape(eqn) or eqn.primitive is lax.transpose_p:
            makers[eqn.outvars[0]] = eqn
    return kept, [read(a) for a in outputs]


def _laid_so_before(eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn]) -> Any:
    """The array that an equation lays as it lay before, if it is one."""
    if eqn.primitive is lax.transpose_p:
        return _turned_back(eqn, makers)
    if eqn.primitive is lax.rev_p:
        (array,), dims = eqn.invars, eqn.params["dimensions"]
        return array if all(shape_of(array)[d] == 1 for d in dims) else None
    if eqn.primitive is lax.concatenate_p:
        parts = [a for a in eqn.invars if math.prod(shape_of(a))]
        return parts[0] if len(parts) == 1 and are_alike(parts[0], eqn.outvars[0]) else None
    is_other = False
    for array in _reshaped_from(eqn, makers):
        if are_alike(array, eqn.outvars[0]):
            return array if is_other else None
        is_other = is_other or _has_other_dims(array, eqn.outvars[0])
    return None


def _without_detour(eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn]) -> JaxprEqn:
    """A reshape of what had its dims, but for those of one, before they were joined or split."""
    array, is_detour = None, False
    for before in _reshaped_from(eqn, makers):
        if _sizes(before) != _sizes(eqn.outvars[0]):
            is_detour = True
        elif is_detour and type_of(before).dtype == type_of(eqn.outvars[0]).dtype:
            array = before
    if array is None:
        return eqn
    shape = shape_of(eqn.outvars[0])
    short = equations_of(eqn, [array], lambda x: lax.reshape(x, shape))
    return short[0] if short is not None and len(short) == 1 else eqn


def _reshaped_from(eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn]) -> Iterator[Any]:
    """The arrays that a reshape, if it is one, is made of by reshapes alone, nearest first."""
    made: JaxprEqn | None = eqn
    while made is not None and _is_reshape(made):
        array: Any = made.invars[0]
        yield array
        made = makers.get(array)


def _sizes(array: Any) -> list[int]:
    """The dims of an array that are not of one."""
    return [n for n in shape_of(array) if n != 1]


def _has_other_dims(array: Any, than: Any) -> bool:
    """Whether an array has more dims than another one, or they are not only missing dims of one."""
    return _sizes(array) != _sizes(than) or len(shape_of(array)) > len(shape_of(than))


def _turned_back(eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn]) -> Any:
    made: JaxprEqn | None = eqn
    order = tuple(range(len(shape_of(eqn.outvars[0]))))
    while made is not None and made.primitive is lax.transpose_p:
        (array,) = made.invars
        order = tuple(made.params["permutation"][d] for d in order)
        if isinstance(array, Literal):
            return None
        if order == tuple(range(len(order))) and are_alike(array, eqn.outvars[0]):
            return array
        made = makers.get(array)
    return None


def _is_reshape(eqn: JaxprEqn) -> bool:
    """Whether an equation says only where dims begin and end."""
    if not is_among(eqn, _RESHAPING) or len(eqn.invars) != 1:
        return False
    (array,), (result,), params = eqn.invars, eqn.outvars, eqn.params
    if isinstance(array, Literal) or params.get("sharding") is not None:
        return False
    return math.prod(shape_of(array)) == math.prod(shape_of(result))
