"""The primitives of the largest of each row and where it is, and of the smallest.

JAX has one equation for what it is and another for where. As one, both are found in one exchange
where rows are sharded. And JAX finds the first of equals, not the last. None of these stands in a
program that `mw.jit` runs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax._src.interpreters import mlir as _mlir
from jax._src.lax.lax import _ArgMinMaxReducer, _get_max_identity, _get_min_identity

from meshwise._jax.jaxprs import Primitive, ShapedArray


def max_and_argmax(x: Any, *, axes: tuple[int, ...], index_dtype: Any) -> list[Any]:
    """Along the only one of `axes` the largest, and where it is first."""
    return [lax.reduce_max(x, axes), lax.argmax(x, axes[0], index_dtype)]


def min_and_argmin(x: Any, *, axes: tuple[int, ...], index_dtype: Any) -> list[Any]:
    """Along the only one of `axes` the smallest, and where it is first."""
    return [lax.reduce_min(x, axes), lax.argmin(x, axes[0], index_dtype)]


def last_argmax(x: Any, *, axes: tuple[int, ...], index_dtype: Any) -> Any:
    """Along the only one of `axes` where the largest is last."""
    return x.shape[axes[0]] - 1 - lax.argmax(lax.rev(x, axes), axes[0], index_dtype)


def last_argmin(x: Any, *, axes: tuple[int, ...], index_dtype: Any) -> Any:
    """Along the only one of `axes` where the smallest is last."""
    return x.shape[axes[0]] - 1 - lax.argmin(lax.rev(x, axes), axes[0], index_dtype)


def extreme_and_place(
    x: Any, *, axes: tuple[int, ...], index_dtype: Any, is_largest: bool, is_last: bool = False
) -> list[Any]:
    """The largest (else smallest) along the only one of `axes`, and where it is first, or last.

    Both in one reduction, the one that JAX makes of `lax.argmax`: an element that is looked up at
    its place needs all of `x` in memory. A NaN is an extreme. Zeros of both signs are equal.
    """
    (axis,) = axes
    compare, identity = (lax.gt, _get_max_identity) if is_largest else (lax.lt, _get_min_identity)
    worst = identity(x.dtype), np.array(0, index_dtype)
    places = lax.broadcasted_iota(index_dtype, x.shape, axis)
    operands = lax.rev(x, axes) if is_last else x, places
    value, place = lax.reduce(operands, worst, _ArgMinMaxReducer(compare), axes)
    return [value, x.shape[axis] - 1 - place if is_last else place]


def is_extreme_and_place(eqn: Any) -> bool:
    """Whether a reduction by a function is the one that JAX makes of `lax.argmax` or `argmin`."""
    return isinstance(eqn.params.get("computation"), _ArgMinMaxReducer)


def _types(x: Any, *, axes: tuple[int, ...], index_dtype: Any) -> list[Any]:
    shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    return [ShapedArray(shape, x.dtype), ShapedArray(shape, index_dtype)]


def _place(x: Any, *, axes: tuple[int, ...], index_dtype: Any) -> Any:
    return _types(x, axes=axes, index_dtype=index_dtype)[1]


def _primitive(find: Callable[..., Any], types: Callable[..., Any]) -> Primitive:
    primitive = Primitive(find.__name__)
    primitive.multiple_results = several = types is _types
    primitive.def_impl(find)
    primitive.def_abstract_eval(types)
    _mlir.register_lowering(primitive, _mlir.lower_fun(find, multiple_results=several))
    return primitive


max_and_argmax_p = _primitive(max_and_argmax, _types)
min_and_argmin_p = _primitive(min_and_argmin, _types)
last_argmax_p = _primitive(last_argmax, _place)
last_argmin_p = _primitive(last_argmin, _place)
