"""Reductions over windows of what is padded or repeated."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import Makers, equations_of, maker_of
from meshwise.simplify.borders.joins import zero_pad
from meshwise.simplify.counts import Counts


def merge_pad(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """Sums over windows of a pad with zero."""
    inner = zero_pad(eqn.invars[0], makers)
    if inner is None:
        return None
    config, dilations = inner.params["padding_config"], eqn.params["base_dilation"]
    padding = []
    for (low, high, interior), own, dilation in zip(
        config, eqn.params["padding"], dilations, strict=True
    ):
        if low < 0 or high < 0 or ((low or high or interior) and dilation != 1):
            return None
        padding.append((own[0] + low, own[1] + high))
    dilations = tuple(d * (t + 1) for d, (_, _, t) in zip(dilations, config, strict=True))
    params = {**eqn.params, "padding": tuple(padding), "base_dilation": dilations}
    return [eqn.replace(invars=[inner.invars[0]], params=params)]


def narrow(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A reduction over windows of what is repeated along dims without a window: it is repeated."""
    repeated = _Repeated.of(eqn, makers)
    untouched = () if repeated is None else [d for d in repeated.dims if _is_untouched(eqn, d)]
    if repeated is None or not untouched:
        return None

    def function(x: Any) -> Any:
        (found,) = _jax.bind(eqn, [repeated.narrow(x, untouched)])
        return lax.broadcast_in_dim(found, shape_of(eqn.outvars[0]), range(found.ndim))

    return equations_of(eqn, repeated.maker.invars, function)


def count_rows(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """Sums over windows of what is repeated along every dim with a window: no row is read.

    So is how many elements each window of a pool has, for all of a batch and of its channels.
    Each element of a window is said to be inside or not, by its number; dims without a window have
    windows of one.
    """
    repeated, result = _Repeated.of(eqn, makers), shape_of(eqn.outvars[0])
    windowed = [d for d in range(len(result)) if not _is_untouched(eqn, d)]
    if repeated is None or not set(windowed) <= repeated.dims:
        return None
    if any(eqn.params["base_dilation"][d] != 1 for d in windowed):
        return None
    sizes = [eqn.params["window_dimensions"][d] for d in windowed]

    def function(x: Any) -> Any:
        narrow = repeated.narrow(x, repeated.dims)
        shape = [n if d in windowed else narrow.shape[d] for d, n in enumerate(result)]
        elements = lax.broadcast_in_dim(narrow, [*shape, *sizes], range(len(shape)))
        for place, d in enumerate(windowed, len(shape)):
            inside = _inside(eqn, d, place, elements.shape)
            elements = lax.select(inside, elements, lax.full_like(elements, 0))
        found = lax.reduce_sum(elements, tuple(range(len(shape), elements.ndim)))
        return lax.broadcast_in_dim(found, result, range(len(result)))

    return equations_of(eqn, repeated.maker.invars, function)


def _inside(eqn: JaxprEqn, d: int, place: int, shape: Any) -> Any:
    """Which elements of windows over a dim are in it; `place` is the dim that numbers them."""
    stride, dilation = (np.int32(eqn.params[f"window_{k}"][d]) for k in ("strides", "dilation"))
    window, element = (lax.broadcasted_iota(np.int32, shape, dim) for dim in (d, place))
    low, size = int(eqn.params["padding"][d][0]), shape_of(eqn.invars[0])[d]
    row = lax.add(
        lax.mul(window, lax.full_like(window, stride)),
        lax.mul(element, lax.full_like(element, dilation)),
    )
    first, end = lax.full_like(row, low), lax.full_like(row, low + size)
    return lax.bitwise_and(lax.ge(row, first), lax.lt(row, end))


@dataclass(frozen=True)
class _Repeated:
    """What a reduction over windows reads: the equation that repeats it, and along which dims."""

    maker: JaxprEqn
    dims: frozenset[int]

    @staticmethod
    def of(eqn: JaxprEqn, makers: Makers) -> "_Repeated | None":
        maker = maker_of(eqn.invars[0], makers, "broadcast_in_dim")
        if maker is None or len(maker.invars) != 1:
            return None
        shape, before = shape_of(eqn.invars[0]), shape_of(maker.invars[0])
        own = zip(before, maker.params["broadcast_dimensions"], strict=True)
        kept = {d for n, d in own if n == shape[d]}
        return _Repeated(maker, frozenset(d for d, n in enumerate(shape) if n > 1) - kept)

    def narrow(self, x: Any, dims: Collection[int]) -> Any:
        """The value as it is before it is repeated along some of the dims."""
        shape = self.maker.params["shape"]
        sizes = [1 if d in dims else n for d, n in enumerate(shape)]
        return lax.broadcast_in_dim(x, sizes, self.maker.params["broadcast_dimensions"])


def _is_untouched(eqn: JaxprEqn, d: int) -> bool:
    """Whether each window has one element of a dim, and every element is in one."""
    sizes = (eqn.params[k][d] for k in ("window_dimensions", "window_strides", "base_dilation"))
    return all(size == 1 for size in sizes) and tuple(eqn.params["padding"][d]) == (0, 0)
