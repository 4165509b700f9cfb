"""Floats as integers in the same order, NaN beyond all of them.

On one device a NaN wins, in the collectives of a backend it may lose (XLA's on CPU compare with
`<`). Floats go as integers of their own size, so that as many bytes are sent; a compiler whose
backend reduces no short ones makes them longer itself. Those of less than a byte go as 32 bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax.numpy import finfo, issubdtype

from meshwise.ir.sharding import Reduction


def extreme_as_integers(
    reduction: Reduction, reduce: Callable[..., Any], *floats: Any
) -> Any:  # fmt: skip
    """The largest or smallest of floats as `reduce` finds it among integers in their order."""
    dtype = floats[0].dtype
    wide = np.dtype(dtype if are_ordered_alike(dtype) else np.float32)
    ints = np.dtype(f"int{8 * wide.itemsize}")
    limits = np.iinfo(ints)
    beyond = limits.min if reduction is Reduction.MIN else limits.max

    def fold(bits: Any) -> Any:
        """Floats are signs and magnitudes; turn the order of the negative ones round, or back."""
        sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, limits.bits - 1))
        return lax.bitwise_xor(bits, lax.bitwise_and(sign, lax.full_like(bits, limits.max)))

    def ordered(x: Any) -> Any:
        x = lax.convert_element_type(x, wide)
        found = fold(lax.bitcast_convert_type(x, ints))
        return lax.select(lax.ne(x, x), lax.full_like(found, beyond), found)

    found = fold(reduce(*map(ordered, floats)))
    return lax.convert_element_type(lax.bitcast_convert_type(found, wide), dtype)


def are_ordered_alike(dtype: Any) -> bool:
    """Whether floats of a type have integers of their own size in `extreme_as_integers`.

    They have a NaN beyond the largest number, of either sign. Floats of a byte without zeros of
    both signs have their one NaN there.
    """
    dtype = np.dtype(dtype)
    if not issubdtype(dtype, np.floating) or finfo(dtype).bits != 8 * dtype.itemsize:
        return False
    beyond = np.full(dtype.itemsize, 0xFF, np.uint8)
    both = np.stack([beyond, beyond])
    both[0, -1] = 0x7F  # the sign is in the last byte
    return bool(np.isnan(both.view(dtype)).all())
