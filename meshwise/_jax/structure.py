"""When two jaxprs are the same program: a key that tells them apart.

JAX's transformations make new jaxprs each time they are applied without an enclosing `jax.jit`.
Names of variables, source lines and debugging names are no part of the key. Nor is what a
`custom_vjp` or `custom_jvp` says of derivatives: it is of programs that are run as they are.
"""

from typing import Any

import numpy as np
from jax._src.util import weakref_lru_cache as _weakref_lru_cache

from meshwise._jax.bodies import call_body
from meshwise._jax.explicit import is_typed
from meshwise._jax.jaxprs import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    bits_by_position,
    is_jaxpr,
    opened,
)


class StructureKey:
    """Hashable; equal for jaxprs of the same structure and the same constants.

    It keeps alive what it compares by identity.
    """

    __slots__ = ("_hash", "_kept", "_parts")

    def __init__(self, parts: Any, kept: Any):
        """Hash once."""
        self._parts = parts
        self._kept = kept
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructureKey) and self._parts == other._parts


@_weakref_lru_cache
def structure_key(closed: ClosedJaxpr) -> StructureKey:
    """The key of a jaxpr."""
    kept: list[Any] = []
    return StructureKey(_jaxpr_parts(closed, kept), kept)


def _jaxpr_parts(jaxpr: Any, kept: list[Any]) -> Any:
    consts: tuple[Any, ...] = ()
    if isinstance(jaxpr, ClosedJaxpr):
        consts, jaxpr = tuple(jaxpr.consts), opened(jaxpr)
    numbers: dict[Any, int] = {}
    kept += consts

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return numbers[atom]
        value = np.asarray(atom.val) if not hasattr(atom.val, "dtype") else atom.val
        if isinstance(value, np.ndarray | np.generic):
            return "literal", _type_parts(atom.aval), value.tobytes()
        return "literal", _type_parts(atom.aval), _param_parts(value, kept)

    def bind(var: Any) -> Any:
        numbers[var] = len(numbers)
        return _type_parts(var.aval)

    inputs = tuple([bind(v) for v in (*jaxpr.constvars, *jaxpr.invars)])
    eqns = []
    for eqn in jaxpr.eqns:
        operands = tuple([read(a) for a in eqn.invars])
        results = tuple([bind(v) for v in eqn.outvars])
        own = bits_by_position(eqn), _eqn_parts(eqn, kept)
        eqns.append((eqn.primitive, operands, results, own))
    outputs = tuple([read(a) for a in jaxpr.outvars])
    return tuple(map(id, consts)), inputs, tuple(eqns), outputs


def _type_parts(aval: Any) -> Any:
    if not hasattr(aval, "dtype"):
        return aval
    typed = aval.sharding if is_typed([aval]) else None
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False), typed


def _eqn_parts(eqn: JaxprEqn, kept: list[Any]) -> Any:
    body = call_body(eqn)
    if body is None:
        return tuple([(k, _param_parts(v, kept)) for k, v in sorted(eqn.params.items())])
    specs = tuple(body.in_specs), tuple(body.out_specs)
    kept += body.consts
    parts = _jaxpr_parts(body.jaxpr, kept)
    return tuple(map(id, body.consts)), parts, body.recomputed, specs


def number_key(value: Any) -> Any:
    """A value; a number that may be no integer by what it is written as.

    Zeros of both signs are equal, and a NaN does not equal itself.
    """
    return (type(value), repr(value)) if isinstance(value, float | complex | np.generic) else value


def _param_parts(value: Any, kept: list[Any]) -> Any:
    """A parameter as something hashable; by identity where it cannot be compared."""
    if is_jaxpr(value):
        return _jaxpr_parts(value, kept)
    if isinstance(value, tuple | list):
        return tuple([_param_parts(v, kept) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _param_parts(v, kept)) for k, v in value.items()])
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes()
    try:
        hash(value)
    except TypeError:
        kept.append(value)
        return id(value)
    return number_key(value)
