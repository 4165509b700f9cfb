"""The primitives of the largest of each row and where it is, and of the smallest.

JAX has one equation for what it is and another for where. As one, both are found in one exchange
where rows are sharded. They stand in no program that `mw.jit` runs.
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


def _types(x: Any, *, axes: tuple[int, ...], index_dtype: Any) -> list[Any]:
    shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    return [ShapedArray(shape, x.dtype), ShapedArray(shape, index_dtype)]


def _primitive(find: Callable[..., Any]) -> Primitive:
    primitive = Primitive(find.__name__)
    primitive.multiple_results = True
    primitive.def_impl(find)
    primitive.def_abstract_eval(_types)
    _mlir.register_lowering(primitive, _mlir.lower_fun(find, multiple_results=True))
    return primitive


max_and_argmax_p = _primitive(max_and_argmax)
min_and_argmin_p = _primitive(min_and_argmin)
