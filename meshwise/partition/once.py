"""Equal collectives of equal values run once.

What two equations want of one value is sent once as it is. But a local rule fetches rows of what it
has cut or joined itself, and two rules may do so alike: two rolls by one place, a border that the
forward and the backward pass both read. Of such collectives the first in a body serves all.
"""

from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var
from meshwise.ir.collectives import is_collective
from meshwise.ir.program import application_key, atom_key


def send_once(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A per-device program whose bodies send equal values the same way once."""
    changed = _once(closed)
    return closed if changed is closed else _jax.without_dead(changed)


def _once(jaxpr: Any) -> Any:
    """A jaxpr with the first of equal collectives in the place of the others, bodies included."""
    body = _jax.opened(jaxpr)
    before = list(body.eqns)
    known: dict[Any, tuple[int, JaxprEqn]] = {}  # of equal equations the number, and the first
    values: dict[Var, tuple[int, int]] = {}  # the number of what makes it, and which result it is
    instead: dict[Var, Var] = {}
    eqns = []
    for original in before:
        eqn = _jax.with_bodies(original, _once)
        operands = tuple([values.get(key, key) for key in map(atom_key, eqn.invars)])
        key = None if _is_apart(eqn) else application_key(eqn, operands)
        number, first = known.setdefault(eqn if key is None else key, (len(known), eqn))
        values.update({v: (number, k) for k, v in enumerate(eqn.outvars)})
        if first is not eqn and is_collective(eqn) and _makes_all(first):
            instead.update(zip(eqn.outvars, first.outvars, strict=True))
        else:
            eqns.append(_jax.reading(eqn, instead))
    if _jax.are_same(eqns, before):
        return jaxpr
    results = [a if isinstance(a, Literal) else instead.get(a, a) for a in body.outvars]
    return _jax.rewritten(jaxpr, eqns=eqns, outvars=results)


def _is_apart(eqn: JaxprEqn) -> bool:
    """Whether an equation equals no other: a barrier stands before what is recomputed."""
    return eqn.primitive is lax.optimization_barrier_p or _jax.has_effects(eqn)


def _makes_all(eqn: JaxprEqn) -> bool:
    return not any(isinstance(v, DropVar) for v in eqn.outvars)
