"""What slices take of an array, and what they leave out."""

from typing import Any

from jax import lax

from meshwise._jax.jaxprs import JaxprEqn, shape_of


def strides_of(eqn: Any) -> tuple[int, ...]:
    """The strides of a slice, or of what has its parameters: one for each dim."""
    return eqn.params["strides"] or (1,) * len(eqn.params["start_indices"])


def is_plain_slice(eqn: JaxprEqn) -> bool:
    """Whether an equation is a slice of rows that follow each other, in each dim."""
    return eqn.primitive is lax.slice_p and all(stride == 1 for stride in strides_of(eqn))


def cut_dims(eqn: JaxprEqn) -> set[int]:
    """The dims of which a slice leaves something out."""
    whole, found = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return {d for d, (n, m) in enumerate(zip(whole, found, strict=True)) if n != m}


def rows_cut(eqn: JaxprEqn | None, dim: int) -> tuple[Any, int, int] | None:
    """Of which value an equation takes rows of one dim, and all of the others; from where to where.

    None of anything else.
    """
    if eqn is None or not is_plain_slice(eqn) or not cut_dims(eqn) <= {dim}:
        return None
    return eqn.invars[0], eqn.params["start_indices"][dim], eqn.params["limit_indices"][dim]
