"""The roll primitive: rows of one dim moved round by some places.

`jnp.roll` is two slices and a concatenation. Tracing writes that as one equation, as only both
together say that most rows stay where they are. It stands in no program that is run.
"""

from typing import Any

from jax import lax

from meshwise._jax.jaxprs import Primitive

roll_p = Primitive("roll")
roll_p.def_abstract_eval(lambda x, **params: x)


def roll(x: Any, *, dimension: int, shift: int) -> Any:
    """Row `i` becomes row `i + shift`, and the last ones the first; `0 < shift < size`."""
    at = x.shape[dimension] - shift
    last = lax.slice_in_dim(x, at, None, axis=dimension)
    return lax.concatenate([last, lax.slice_in_dim(x, 0, at, axis=dimension)], dimension)


roll_p.def_impl(roll)
