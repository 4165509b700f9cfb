"""Reductions over windows of what is padded or repeated, and over windows that cover a dim."""

from collections.abc import Callable, Collection, Mapping, Sequence
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
    merged = eqn.replace(invars=[inner.invars[0]], params=params)
    return merge_covered(merged, makers, counts) or [merged]


def merge_covered(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A plain reduction of dims that one window covers; what is one row in every window is spread.

    The one is pooling of a whole image, the other its gradient.
    """
    before, result = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    windowed = [d for d in range(len(result)) if not _is_untouched(eqn, d)]
    spread = [d for d in windowed if before[d] == 1 and _is_in_every_window(eqn, d)]
    covered = [d for d in windowed if d not in spread and _is_covered(eqn, d)]
    if not (spread or covered) or 0 in (*before, *result):
        return None
    left = _untouched_in(eqn, {*spread, *covered})

    def function(x: Any) -> Any:
        if covered:
            found = _PLAIN[eqn.primitive.name](x, covered)
            x = lax.expand_dims(found, covered)
        if len(spread) + len(covered) < len(windowed):
            (x,) = _jax.bind(left, [x])
        return lax.broadcast_in_dim(x, result, range(x.ndim)) if x.shape != result else x

    return equations_of(eqn, eqn.invars, function)


def _untouched_in(eqn: JaxprEqn, dims: Collection[int]) -> JaxprEqn:
    """The same without windows over some dims."""
    sizes = ("window_dimensions", "window_strides", "window_dilation", "base_dilation")
    params = {
        k: tuple([nothing if d in dims else own for d, own in enumerate(eqn.params[k])])
        for k, nothing in (*dict.fromkeys(sizes, 1).items(), ("padding", (0, 0)))
    }
    return eqn.replace(params={**eqn.params, **params})


_PLAIN: Mapping[str, Callable[[Any, Sequence[int]], Any]] = {
    "reduce_window_sum": lax.reduce_sum,
    "reduce_window_max": lax.reduce_max,
    "reduce_window_min": lax.reduce_min,
}


def _is_covered(eqn: JaxprEqn, d: int) -> bool:
    """Whether one window is all of a dim, and no more."""
    params, rows = eqn.params, shape_of(eqn.invars[0])[d]
    is_plain = params["window_dilation"][d] == params["base_dilation"][d] == 1
    whole = (rows, (0, 0)) == (params["window_dimensions"][d], tuple(params["padding"][d]))
    return is_plain and whole and shape_of(eqn.outvars[0])[d] == 1


def _is_in_every_window(eqn: JaxprEqn, d: int) -> bool:
    """Whether the one row of a dim is in each window over it."""
    params, windows = eqn.params, shape_of(eqn.outvars[0])[d]
    if params["window_dilation"][d] != 1:
        return False
    low, last = params["padding"][d][0], (windows - 1) * params["window_strides"][d]
    return last <= low < params["window_dimensions"][d]


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
