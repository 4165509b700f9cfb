"""Positions of writes in a type that holds every place of the array.

XLA's older maker of kernels on CPU clamps the position of a `dynamic_update_slice`, or of a scatter
of windows, in its own type, in which the last place may be another number: at 100 of 304 rows, as 8
bits, it writes row 47, and at 100 of 200 outside of the array, under `jax.jit` too.
"""

from typing import Any

from jax import lax
from jax import numpy as jnp

from meshwise._jax.jaxprs import JaxprEqn, Var, new_eqn, with_bodies, with_each

SCATTERS = (
    lax.scatter_p,
    lax.scatter_add_p,
    lax.scatter_sub_p,
    lax.scatter_mul_p,
    lax.scatter_min_p,
    lax.scatter_max_p,
)


def at_wide_positions(jaxpr: Any) -> Any:
    """A jaxpr of local arrays whose writes are at positions in such types, bodies included."""
    return with_each(jaxpr, lambda eqn: _widened(with_bodies(eqn, at_wide_positions)))


def _widened(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation behind conversions of its positions, if their type holds too few places."""
    first, last = _positions(eqn)
    positions = eqn.invars[first:last]
    types: list[Any] = [p.aval for p in positions]
    written: Any = eqn.outvars[0].aval if positions else None
    if all(jnp.iinfo(t.dtype).max >= max(written.shape, default=0) for t in types):
        return [eqn]
    wide = [Var(t.update(dtype=jnp.dtype(jnp.int32), weak_type=False)) for t in types]
    params = {"new_dtype": jnp.dtype(jnp.int32), "weak_type": False, "sharding": None}
    conversions = [
        new_eqn(lax.convert_element_type_p, [position], [var], params, eqn)
        for position, var in zip(positions, wide, strict=True)
    ]
    invars = [*eqn.invars[:first], *wide, *eqn.invars[last:]]
    return [*conversions, eqn.replace(invars=invars)]


def _positions(eqn: JaxprEqn) -> tuple[int, int]:
    """Which of the operands are positions, from the first to before the last."""
    if eqn.primitive is lax.dynamic_update_slice_p:
        return 2, len(eqn.invars)
    return (1, 2) if eqn.primitive in SCATTERS else (0, 0)
