"""What joins nothing: the identity of each reduction, and padding overwritten with a value."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise.ir.sharding import Reduction
from meshwise.rules.registry import LocalContext

# By what the largest and smallest of booleans are joined.
OF_BOOLS: Mapping[Reduction | None, Reduction] = {
    Reduction.MAX: Reduction.OR,
    Reduction.MIN: Reduction.AND,
}


def reduction_identity(reduction: Reduction, dtype: Any) -> Any:
    """The value that a reduction ignores, as a numpy scalar of a dtype.

    `max` of floats has minus infinity, or the lowest number where the dtype has no infinity.
    `and` of integers works on bits, so its identity has them all set.
    """
    dtype = np.dtype(dtype)
    if reduction is Reduction.SUM or reduction is Reduction.OR:
        return np.zeros((), dtype)[()]
    if reduction is Reduction.PROD:
        return np.ones((), dtype)[()]
    if reduction is Reduction.AND:
        return np.invert(np.zeros((), dtype))[()]
    return _lowest(dtype) if reduction is Reduction.MAX else _highest(dtype)


def nothing_like(array: Any) -> Any:
    """Terms that leave every number as it is when they are added, the sign of a zero included."""
    if issubdtype(array.dtype, np.complexfloating):
        return lax.full_like(array, complex(-0.0, -0.0))
    return lax.full_like(array, -0.0 if issubdtype(array.dtype, np.floating) else 0)


def mask_padding(
    context: LocalContext, array: Any, dim: int, factor: int, value: Any, each: int = 1
) -> Any:
    """Overwrite the padding along one sharded dim of a local array.

    `factor` is the dim's only factor, or its first, of which `each` one is so many rows. Nothing is
    done where there is no padding.
    """
    size = context.rule.sizes[factor]
    local = context.local_size(factor)
    if local * context.shards(factor) == size:
        return array
    position = lax.broadcasted_iota(np.int32, array.shape, dim)
    rows = context.real_rows(factor)
    rows = rows if each == 1 else lax.mul(rows, np.int32(each))
    inside = lax.lt(position, lax.full_like(position, rows))
    return lax.select(inside, array, lax.full_like(array, value))


def _lowest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return np.False_
    if issubdtype(dtype, np.integer):
        return np.array(jnp.iinfo(dtype).min, dtype)[()]
    lowest = np.array(-np.inf, dtype)[()]
    return lowest if np.isinf(lowest) else np.array(jnp.finfo(dtype).min, dtype)[()]


def _highest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return np.True_
    if issubdtype(dtype, np.integer):
        return np.array(jnp.iinfo(dtype).max, dtype)[()]
    highest = np.array(np.inf, dtype)[()]
    return highest if np.isinf(highest) else np.array(jnp.finfo(dtype).max, dtype)[()]
