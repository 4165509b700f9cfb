"""What the library of kernels that XLA on CPU calls knows to make (XLA's `YnnMatcher`)."""

from math import prod
from typing import Any

from jax import numpy as jnp

from meshwise._jax import LIBRARY_HAS_SINES, JaxprEqn

# What the library makes is of so many elements, or made of so many; what only moves, of any.
_LONG_ELEMENTS = 4096
_REDUCED_BY_LIBRARY = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_MADE_BY_LIBRARY = frozenset(
    """
    abs add add_any convert_element_type div erf exp expm1 floor integer_pow log log1p logistic max
    min mul neg pow round rsqrt sign sqrt square sub tanh
    """.split()
) | ({"sin", "cos", "tan"} if LIBRARY_HAS_SINES else set[str]())
_MOVED_BY_LIBRARY = frozenset(
    {"broadcast_in_dim", "expand_dims", "iota", "pad", "reshape", "squeeze"}
)
_OF_LIBRARY = frozenset(
    map(jnp.dtype, (jnp.float64, jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8))
)


def is_reduced_by_library(eqn: JaxprEqn, elements: int) -> bool:
    """Whether it is a sum or an extreme that begins a kernel; the longest has so many elements."""
    is_known = eqn.primitive.name in _REDUCED_BY_LIBRARY and elements >= _LONG_ELEMENTS
    return is_known and _is_of_long_floats(eqn)


def may_be_reduced_by_library(eqn: JaxprEqn, elements: int) -> bool:
    """Whether XLA may make such a sum or extreme of it: of short floats, windows, vectors, too."""
    is_known = eqn.primitive.name.startswith("reduce") or _is_of_vectors(eqn)
    return is_known and elements >= _LONG_ELEMENTS


def _is_of_vectors(eqn: Any) -> bool:
    """Whether it is a product of one row with one column, or many such: XLA makes sums of these."""
    params = eqn.params
    match eqn.primitive.name:
        case "dot_general":
            (_, _), (batch, _) = params["dimension_numbers"]
            pairs = prod(eqn.invars[0].aval.shape[d] for d in batch)
        case "conv_general_dilated":
            pairs = max(params["feature_group_count"], params["batch_group_count"])
        case _:
            return False
    return eqn.outvars[0].aval.size <= pairs


def is_made_by_library(eqn: JaxprEqn, elements: int) -> bool:
    """Whether it is made element by element, or moved, in a kernel that something else begins."""
    name = eqn.primitive.name
    is_known = name in _MADE_BY_LIBRARY and elements >= _LONG_ELEMENTS
    is_moved = name in _MOVED_BY_LIBRARY and not _is_padded_inside(eqn)
    return (is_known or is_moved) and _are_of_library(eqn)


def _is_of_long_floats(eqn: Any) -> bool:
    """What the library reduces: extremes of short floats, too, but XLA makes them longer."""
    return all(v.aval.dtype in (jnp.float32, jnp.float64) for v in (*eqn.invars, *eqn.outvars))


def _is_padded_inside(eqn: Any) -> bool:
    return any(between for _, _, between in eqn.params.get("padding_config", ()))


def _are_of_library(eqn: Any) -> bool:
    return all(atom.aval.dtype in _OF_LIBRARY for atom in (*eqn.invars, *eqn.outvars))
