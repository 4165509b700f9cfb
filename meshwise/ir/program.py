"""A program to partition: a flat jaxpr, the hints, and where everything came from.

`Program` is what `trace` returns and every later step reads. Its jaxpr has no calls left in it
(jit, custom_jvp and custom_vjp are inlined); values are the jaxpr's variables, and side tables
are keyed by them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwise._jax import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bits_by_position,
    carry_p,
    hint_p,
    next_p,
    number_key,
    source_summary,
)
from meshwise.ir import bodies
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import DimAxes

OpenDims = tuple[Axes | None, ...]  # per dim its axes, or None where the hint leaves it open


@dataclass(frozen=True, slots=True)
class Hint:
    """A sharding the user gave to one value: axes per dim, None for a dim left open.

    A result may be hinted to be left as the terms of a sum over the axes `unreduced`. What a
    tangent or cotangent has of its value's hint is `derived`: nobody gave it, and the value may lie
    otherwise.
    """

    dims: OpenDims
    given_as: str
    source: str
    unreduced: Axes = ()
    derived: bool = False

    @property
    def closed(self) -> DimAxes | None:
        """The dims, where none is left open."""
        return None if None in self.dims else self.dims  # type: ignore[return-value]

    @property
    def shards(self) -> bool:
        """Whether it names an axis."""
        return any(self.dims) or bool(self.unreduced)


@dataclass(frozen=True, eq=False)
class Program:
    """A flat jaxpr with hints.

    `hints` maps the index of an equation that is a hint (a sharding constraint) to what it says;
    `in_hints` and `out_hints` belong to the jaxpr's inputs and outputs in order, None where the
    sharding is left to completion. `paths` names the inputs and outputs for messages.
    """

    jaxpr: ClosedJaxpr
    mesh: Mesh
    in_hints: tuple[Hint | None, ...]
    out_hints: tuple[Hint | None, ...]
    hints: dict[int, Hint]
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    name: str = "fn"

    @cached_property
    def equations(self) -> list[JaxprEqn]:
        """The equations in order."""
        return self.jaxpr.jaxpr.eqns

    @property
    def inputs(self) -> list[Var]:
        """The program's arguments."""
        return self.jaxpr.jaxpr.invars

    @property
    def outputs(self) -> list[Any]:
        """The program's results: variables or literals."""
        return self.jaxpr.jaxpr.outvars

    @cached_property
    def trips(self) -> list[int]:
        """How often each equation runs in one call."""
        return bodies.trips(self.equations)

    @cached_property
    def runs(self) -> list[float]:
        """How often each equation runs in one call where every branch is as probable as others."""
        return bodies.runs(self.equations)

    @property
    def has_loops(self) -> bool:
        """Whether an equation runs more than once in a call, on average."""
        return max(self.runs, default=1) > 1

    @cached_property
    def outermost(self) -> list[bool]:
        """Whether each equation stands in no loop and no branch."""
        return [scope == bodies.OUTERMOST for scope in bodies.scopes(self.equations)]

    @cached_property
    def carried(self) -> dict[int, int]:
        """For each `next` mark the `carry` mark of the same value."""
        begins = {
            eqn.outvars[0]: index
            for index, eqn in enumerate(self.equations)
            if eqn.primitive is carry_p
        }
        return {
            index: begins[eqn.invars[0]]  # type: ignore[index]
            for index, eqn in enumerate(self.equations)
            if eqn.primitive is next_p
        }

    @cached_property
    def most_bytes(self) -> dict[Var, int]:
        """What a device may hold of a value while it is resharded, where a hint says so."""
        found: dict[Var, int] = {}
        for eqn in self.equations:
            limit = eqn.params.get("max_bytes") if eqn.primitive is hint_p else None
            if limit is not None and isinstance(var := eqn.invars[0], Var):
                found[var] = min(limit, found.get(var, limit))
        return found

    def source(self, equation: int) -> str:
        """The user's line that an equation comes from, as `file:line`."""
        return source_summary(self.equations[equation])


def type_of(atom: Any) -> Any:
    """The abstract value of a variable or literal (JAX types it too loosely for a checker)."""
    return atom.aval


def are_alike(atom: Any, other: Any) -> bool:
    """Whether two values have one shape and type, weak or not: one may stand for the other."""
    return shape_of(atom) == shape_of(other) and type_of(atom) == type_of(other)


def shape_of(atom: Any) -> tuple[int, ...]:
    """Global shape of a variable or literal; of what is no array, that of a scalar."""
    return tuple(getattr(atom.aval, "shape", ()))


def itemsize_of(atom: Any) -> int:
    """Bytes of one element of a variable or literal (a typed key counts its data)."""
    return int(getattr(getattr(atom.aval, "dtype", None), "itemsize", 8))


def bytes_of(*atoms: Any) -> int:
    """Bytes of variables or literals, all together."""
    return sum(math.prod(shape_of(atom)) * itemsize_of(atom) for atom in atoms)


def makes_zeros(eqn: JaxprEqn) -> bool:
    """Whether an equation makes an array of zeros."""
    if eqn.primitive.name != "broadcast_in_dim" or not isinstance(eqn.invars[0], Literal):
        return False
    return np.ndim(eqn.invars[0].val) == 0 and not eqn.invars[0].val


def overwrites(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scatter whose updates take the place of what was there.

    `x.at[i].apply(f)` is one of the same name, which writes a function of what was there.
    """
    if eqn.primitive.name != "scatter":
        return False
    body = eqn.params["update_jaxpr"]
    return body is None or body.outvars[0] is body.invars[1]


def application_key(eqn: JaxprEqn, operands: Any) -> Any:
    """Equal for equal primitives, parameters, settings and `operands`.

    None where one of them cannot be hashed.
    """
    params = [(name, number_key(value)) for name, value in sorted(eqn.params.items())]
    key = eqn.primitive, operands, tuple(params), bits_by_position(eqn)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def atom_key(atom: Any) -> Any:
    """A variable itself; a literal by its type and its bits."""
    if not isinstance(atom, Literal):
        return atom
    # Python's numbers by what they are written as: zeros of both signs are equal, a NaN is not.
    bits = atom.val.tobytes() if hasattr(atom.val, "tobytes") else (type(atom.val), repr(atom.val))
    return atom.aval, bits
