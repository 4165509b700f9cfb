"""Equations found and replaced, for all that merges moves."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.bodies import OUTERMOST, Scope
from meshwise.ir.program import shape_of, type_of
from meshwise.simplify.counts import Counts


@dataclass(frozen=True)
class Makers:
    """The equations that make values, and the values that something reads which is no slice.

    Values of other bodies than the outermost are made in `scopes`; it is looked at from `here`.
    Each value is read so many times over (`times_read`); slices are `kept` for several readers, by
    what they are of and its dims' ranges (`slices.py`).
    """

    of: Mapping[Var, JaxprEqn]
    read_whole: Set[Var]
    scopes: Mapping[Var, Scope] = field(default_factory=dict)
    here: Scope = OUTERMOST
    times_read: dict[Var, float] = field(default_factory=dict)
    kept: dict[Any, Var] = field(default_factory=dict)

    def get(self, var: Var) -> JaxprEqn | None:
        """The equation that makes a value; None of an input."""
        return self.of.get(var)

    def beside(self, eqns: Iterable[JaxprEqn]) -> "Makers":
        """The same with those of some more equations."""
        known = cast(dict[Var, JaxprEqn], self.of)
        return replace(self, of=ChainMap({v: e for e in eqns for v in e.outvars}, known))

    def is_made_here(self, var: Var) -> bool:
        """Whether a value is made in the same body, as often as what is looked at."""
        return self.scopes.get(var, OUTERMOST) == self.here


def any_maker(atom: Any, makers: Makers) -> JaxprEqn | None:
    """The equation that makes a value; None of a literal and of an input."""
    return None if isinstance(atom, Literal) else makers.get(atom)


def maker_of(atom: Any, makers: Makers, name: str) -> JaxprEqn | None:
    """The equation that makes a value, where it is one of a primitive."""
    eqn = any_maker(atom, makers)
    return eqn if eqn is not None and eqn.primitive.name == name else None


def known_numbers(atoms: Sequence[Any], counts: Counts) -> list[int] | None:
    """Integers that are known while tracing."""
    found = [counts.of(atom) for atom in atoms]
    known = [c.offset for c in found if c is not None]
    return known if len(known) == len(atoms) else None


def one_equation(
    eqn: JaxprEqn, primitive: Any, operands: Sequence[Any], **params: Any
) -> list[JaxprEqn]:
    """One equation of a primitive in place of another."""
    return [_jax.new_eqn(primitive, operands, eqn.outvars, params, eqn)]


def equations_of(
    eqn: JaxprEqn, operands: Sequence[Any], function: Callable[..., Any] | None
) -> list[JaxprEqn] | None:
    """The equations of a function of some operands, in place of one equation."""
    if function is None or jnp.issubdtype(type_of(operands[0]).dtype, jax.dtypes.extended):
        return None
    types = [jax.ShapeDtypeStruct(shape_of(a), type_of(a).dtype) for a in operands]
    closed = _jax.make_jaxpr_over_axes(function, (), types)
    return _jax.in_place_of(eqn, closed, operands)
