"""Gathers and scatters of a minor dim, which XLA on CPU puts in order slowly, as of a leading one.

What devices hold of a minor dim does not lie together. XLA gives the collective's operand and
result another layout, and copies from one to the other take several times as long as the
transposition said here: 1.6 times as long in all for an all_gather, twice for a reduce_scatter.
"""

from math import prod
from typing import Any

from jax import lax
from jax import numpy as jnp

from meshwise._jax.jaxprs import JaxprEqn, extended, new_eqn, var_like


def of_leading_dim(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An all_gather or a reduce_scatter of a minor dim; any other equation is left as it is."""
    if eqn.primitive is lax.all_gather_p:
        return _gathered(eqn)
    return _scattered(eqn) if eqn.primitive.name == "reduce_scatter" else [eqn]


def _gathered(eqn: JaxprEqn) -> list[JaxprEqn]:
    x: Any = eqn.invars[0]
    (out,) = eqn.outvars
    shape, dim, group = x.aval.shape, eqn.params["all_gather_dimension"], eqn.params["axis_size"]
    if _lies_together(x, shape[:dim]):
        return [eqn]
    stacked = var_like(x, (group, *shape))
    ordered = var_like(x, (*shape[:dim], group, *shape[dim:]))
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1))
    gather = {**eqn.params, "all_gather_dimension": 0, "tiled": False}
    return [
        eqn.replace(outvars=[stacked], params=gather),
        _transposed(stacked, ordered, order, eqn),
        _reshaped(ordered, out, eqn),
    ]


def _scattered(eqn: JaxprEqn) -> list[JaxprEqn]:
    x: Any = eqn.invars[0]
    (out,) = eqn.outvars
    shape, dim, group = x.aval.shape, eqn.params["scatter_dimension"], eqn.params["axis_size"]
    if _lies_together(x, shape[:dim]):
        return [eqn]
    parts = var_like(x, (*shape[:dim], group, shape[dim] // group, *shape[dim + 1 :]))
    leading = var_like(x, (group, *parts.aval.shape[:dim], *parts.aval.shape[dim + 1 :]))
    part = var_like(x, leading.aval.shape[1:])
    order = (dim, *range(dim), *range(dim + 1, len(shape) + 1))
    scatter = {**eqn.params, "scatter_dimension": 0, "tiled": False}
    return [
        _reshaped(x, parts, eqn),
        _transposed(parts, leading, order, eqn),
        eqn.replace(invars=[leading], outvars=[part], params=scatter),
        _reshaped(part, out, eqn),
    ]


def _lies_together(x: Any, before: tuple[int, ...]) -> bool:
    """Whether nothing comes between the parts of a dim behind others, or nothing is known of it."""
    return prod(before) <= 1 or 0 in x.aval.shape or jnp.issubdtype(x.aval.dtype, extended)


def _transposed(x: Any, out: Any, order: tuple[int, ...], like: JaxprEqn) -> JaxprEqn:
    return new_eqn(lax.transpose_p, [x], [out], {"permutation": order}, like)


def _reshaped(x: Any, out: Any, like: JaxprEqn) -> JaxprEqn:
    params = {"dimensions": None, "new_sizes": out.aval.shape, "sharding": None}
    return new_eqn(lax.reshape_p, [x], [out], params, like)
