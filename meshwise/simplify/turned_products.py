"""Products read matrices that are turned as they lay before: `A.T @ u` is `A` summed over its rows.

One matrix read by rows and by columns, as in `A.T @ (A @ v)`, is then one value of which both
products take shards: where it lies is decided once, for both. What is turned first would be another
value, which nobody hinted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import shape_of


def read_unturned(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations of a flat program, whose products turn their operands themselves."""
    turned: dict[Var, JaxprEqn] = {}
    found = []
    for eqn in eqns:
        if eqn.primitive is lax.transpose_p and not isinstance(eqn.invars[0], Literal):
            turned[eqn.outvars[0]] = eqn
        found.append(_unturned(eqn, turned) if eqn.primitive is lax.dot_general_p else eqn)
    return found


def _unturned(eqn: JaxprEqn, turned: Mapping[Var, JaxprEqn]) -> JaxprEqn:
    """A product of what its operands are turned from, where its result is the same.

    Those of a batch are as they are: an exchange brings a batch to the front where it is turned.
    """
    numbers, batch = eqn.params["dimension_numbers"]
    if any(batch):
        return eqn
    read, summed = list[Any](), list[Any]()
    for atom, over in zip(eqn.invars, numbers, strict=True):
        array, dims = _before(atom, turned)
        free = [own for d, own in enumerate(dims) if d not in over]
        if free != sorted(free):
            array, dims = atom, tuple(range(len(dims)))
        read.append(array)
        summed.append(tuple(dims[d] for d in over))
    if read == list(eqn.invars):
        return eqn
    params = eqn.params | {"dimension_numbers": (tuple(summed), batch)}
    return eqn.replace(invars=read, params=params)


def _before(atom: Any, turned: Mapping[Var, JaxprEqn]) -> tuple[Any, tuple[int, ...]]:
    """What an operand is turned from, and which of its dims each dim of the operand is."""
    dims = tuple(range(len(shape_of(atom))))
    while not isinstance(atom, Literal) and (maker := turned.get(atom)) is not None:
        dims = tuple(maker.params["permutation"][d] for d in dims)
        atom = maker.invars[0]
    return atom, dims
