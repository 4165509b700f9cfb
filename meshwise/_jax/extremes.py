"""The primitives of the largest of each row and where it is, and of the smallest.

JAX has one equation for what it is and another for where. As one, both are found in one exchange
where rows are sharded. And JAX finds the first of equals, not the last. None of these stands in a
program that `mw.jit` runs.
"""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax._src.interpreters import mlir as _mlir

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
