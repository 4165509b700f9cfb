"""Ragged products, which JAX writes for CPUs as one product with a copy of all rows a group.

Group after group the product is the same and no copy is made: of rows in groups every group's
product is kept where its rows are, and of groups that are summed over the rows of others are zero.
A group without rows takes no product: a device that holds some of all rows has most groups empty.
The loop takes 0.1 to 0.9 of the time.
"""

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from meshwise._jax.jaxprs import JaxprEqn, in_place_of


def group_after_group(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A ragged product as a loop over its groups; as it is where every row has sizes of its own."""
    types: list[Any] = [a.aval for a in eqn.invars]
    lhs, rhs, sizes = types[:3]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    if len(eqn.invars) != 3 or len(sizes.shape) != 1 or not sizes.shape[0] or ragged in batch:
        return [eqn]
    way = _summed_by_group if ragged in contract else _rows_by_group
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lhs, rhs, sizes)]
    closed = jax.make_jaxpr(lambda *operands: way(eqn.params, *operands))(*avals)
    return in_place_of(eqn, closed, eqn.invars)


def _rows_by_group(params: dict[str, Any], lhs: Any, rhs: Any, sizes: Any) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (ragged,), (group_dim,) = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    fewer = [[d - (d > group_dim) for d in dims] for dims in (contract_r, batch_r)]
    dims = (contract_l, fewer[0]), (batch_l, fewer[1])
    free = [d for d in range(lhs.ndim) if d not in contract_l and d not in batch_l]
    place = len(batch_l) + free.index(ragged)

    bounds = _bounds(sizes)

    def product(group: Any) -> Any:
        weights = lax.dynamic_index_in_dim(rhs, group, group_dim, keepdims=False)
        return _product(params, lhs, weights, dims)

    def step(found: Any, group: Any) -> tuple[Any, None]:
        first, end = _of_group(bounds, group)

        def kept(found: Any) -> Any:
            return lax.select(_inside(found.shape, place, first, end), product(group), found)

        return lax.cond(lax.lt(first, end), kept, lambda found: found, found), None

    shape = jax.eval_shape(product, 0)
    start = lax.full(shape.shape, 0, shape.dtype)
    return lax.scan(step, start, _groups(sizes))[0]


def _summed_by_group(params: dict[str, Any], lhs: Any, rhs: Any, sizes: Any) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions

    (contract_l, contract_r), _ = numbers.dot_dimension_numbers
    paired = contract_r[contract_l.index(ragged)]

    def mine(x: Any, dim: int, group: tuple[Any, Any]) -> Any:
        return lax.select(_inside(x.shape, dim, *group), x, lax.full_like(x, 0))

    bounds = _bounds(sizes)

    def product(first: Any, end: Any) -> Any:
        both = mine(lhs, ragged, (first, end)), mine(rhs, paired, (first, end))
        return _product(params, *both, numbers.dot_dimension_numbers)

    def step(nothing: None, group: Any) -> tuple[None, Any]:
        first, end = _of_group(bounds, group)
        return nothing, lax.cond(lax.lt(first, end), product, empty, first, end)

    shape = jax.eval_shape(product, *_of_group(bounds, 0))

    def empty(first: Any, end: Any) -> Any:
        return lax.full(shape.shape, 0, shape.dtype)

    return lax.scan(step, None, _groups(sizes))[1]


def _product(params: dict[str, Any], lhs: Any, rhs: Any, dims: Any) -> Any:
    said = {k: params[k] for k in ("precision", "preferred_element_type")}
    return lax.dot_general(lhs, rhs, dims, **said)


def _bounds(sizes: Any) -> tuple[Any, Any]:
    """At which row each group begins, and at which the next."""
    ends = lax.cumsum(sizes)
    return lax.sub(ends, sizes), ends


def _groups(sizes: Any) -> Any:
    return lax.iota(jnp.int32, sizes.shape[0])


def _of_group(bounds: tuple[Any, Any], group: Any) -> Any:
    """At which row a group begins, and at which the next: read in the loop, not handed to it."""
    return tuple(lax.dynamic_index_in_dim(x, group, 0, keepdims=False) for x in bounds)


def _inside(shape: tuple[int, ...], dim: int, first: Any, end: Any) -> Any:
    """Which elements are in the rows of a group."""
    row = lax.broadcasted_iota(first.dtype, shape, dim)
    return lax.bitwise_and(
        lax.ge(row, lax.broadcast(first, shape)), lax.lt(row, lax.broadcast(end, shape))
    )
