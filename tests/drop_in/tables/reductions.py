"""Reductions, running ones, orders, and sets."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.drop_in.drawing import Call, Dice
from tests.drop_in.tables.numbers import Row, rows


def reduction(
    function: Any,
    kinds: str,
    *,
    initial: bool = False,
    where: bool = False,
    dtypes: bool = False,
    one: bool = False,
    keepdims: bool = True,
    needs_initial: bool = False,
    options: Any = None,
    least: int = 0,
) -> Row:
    """Over all dims, one or some; with the options that the function has."""

    def row(d: Dice) -> Call:
        shape = d.shape(int(one), 4, least=least)
        x = d.array(shape, kinds)
        axis = d.axis(shape) if one and d.flag(0.7) else d.axes(shape) if not one else None
        given: dict[str, Any] = {"axis": axis}
        if keepdims and d.flag(0.3):
            given["keepdims"] = True
        if dtypes and d.flag(0.3):
            given["dtype"] = d.dtype("fi" if x.dtype.kind != "c" else "c")
        if where and d.flag(0.3):
            given["where"] = d.array(d.together(2, shape)[d.integer(0, 1)], "b")
        if initial and (d.flag(0.3) or (needs_initial and "where" in given)):
            given["initial"] = 1
        if options:
            given.update(options(d))
        return d.call(function, x, **given)

    return row


def running(function: Any, kinds: str, **options: Any) -> Row:
    def row(d: Dice) -> Call:
        shape = d.shape(1)
        given = {k: v for k, v in options.items() if d.flag()}
        return d.call(function, d.array(shape, kinds), axis=d.axis(shape), **given)

    return row


def _quantile(function: Any, top: float) -> Row:
    def row(d: Dice) -> Call:
        shape = d.shape(1, 3, 1)
        q = np.asarray(d.rng.uniform(0, top, d.pick((), (3,))), np.float32)
        method = d.pick("linear", "lower", "higher", "midpoint", "nearest")
        return d.call(
            function, d.array(shape, dtype=d.pick("float32", "bfloat16")), q, method=method,
            axis=d.axes(shape), keepdims=d.flag(0.3),
        )  # fmt: skip

    return row


def _ordered(function: Any, **options: Any) -> Row:
    """Along a dim, of numbers many of which are equal."""

    def row(d: Dice) -> Call:
        shape = d.shape(1)
        given = {k: v for k, v in options.items() if d.flag()}
        x = d.array(shape, d.pick("f", "iub", "c"))
        axis = None if d.flag(0.1) else d.axis(shape)
        return d.call(function, x, axis=axis, **given)

    return row


def _partition(function: Any) -> Row:
    def row(d: Dice) -> Call:
        shape = d.shape(1, least=1)
        axis = d.axis(shape)
        kth = d.integer(-shape[axis], shape[axis] - 1)
        return d.call(function, d.array(shape, "fi"), kth, axis)

    return row


def _unique(function: Any, **extra: Any) -> Row:
    def row(d: Dice) -> Call:
        x = d.array(d.shape(1, 2), d.pick("i", "u", "f"))
        return d.call(function, x, size=d.integer(1, 12), fill_value=d.pick(None, 0), **extra)

    return row


def _set(function: Any, sized: bool = True) -> Row:
    def row(d: Dice) -> Call:
        size = {"size": d.integer(1, 10)} if sized else {}
        return d.call(function, d.array(d.shape(1, 2), "i"), d.array(d.shape(1, 1), "i"), **size)

    return row


def _bins(function: Any) -> Row:
    def row(d: Dice) -> Call:
        x = d.ordinary(dtype="float32")
        if d.flag():
            edges = np.sort(d.ordinary((d.integer(2, 8),), dtype="float32"))
            return d.call(function, x, edges)
        return d.call(function, x, bins=d.integer(1, 6), range=d.pick((-2.0, 3.0), None))

    return row


FLAGS = {"keepdims": True}
REDUCTIONS: dict[str, Row] = {
    **rows("jnp", jnp, "sum prod", lambda f: reduction(
        f, "ffiubc", initial=True, where=True, dtypes=True)),
    **rows("jnp", jnp, "max min amax amin", lambda f: reduction(
        f, "ffiub", initial=True, where=True, needs_initial=True)),
    **rows("jnp", jnp, "all any", lambda f: reduction(f, "fib", where=True)),
    **rows("jnp", jnp, "mean", lambda f: reduction(f, "fficb", where=True)),
    **rows("jnp", jnp, "std var", lambda f: reduction(
        f, "fic", where=True, options=lambda d: {"ddof": d.integer(0, 1)})),
    **rows("jnp", jnp, "nansum nanprod", lambda f: reduction(
        f, "ffic", initial=True, where=True, dtypes=True)),
    **rows("jnp", jnp, "nanmax nanmin", lambda f: reduction(f, "ff", least=1)),
    **rows("jnp", jnp, "nanmean nanstd nanvar", lambda f: reduction(f, "ff", where=True)),
    **rows("jnp", jnp, "nanmedian median", lambda f: reduction(f, "ff", least=1)),
    **rows("jnp", jnp, "ptp", lambda f: reduction(f, "fi", least=1)),
    **rows("jnp", jnp, "count_nonzero", lambda f: reduction(f, "fibc")),
    **rows("jnp", jnp, "argmax argmin nanargmax nanargmin", lambda f: reduction(
        f, "ffib", one=True, least=1)),
    "jnp.average": lambda d: (lambda s, a: d.call(
        jnp.average, d.array(s, "fi"), axis=a, weights=d.pick(
            None, d.array(s, "f", low=0.5, high=2),
            d.array((s[a],), "f", low=0.5, high=2)), keepdims=d.flag(0.3)))(
                *(lambda s: (s, d.axis(s)))(d.shape(1, 3, 1))),
    **rows("jnp", jnp, "cumsum cumprod nancumsum nancumprod", lambda f: running(
        f, "ffibc", dtype=jnp.float32)),
    **rows("jnp", jnp, "cumulative_sum cumulative_prod", lambda f: running(
        f, "ffi", include_initial=True)),
    "jnp.cumsum of all": lambda d: d.call(jnp.cumsum, d.array(kinds="fi")),
    **rows("jnp", jnp, "diff", lambda f: lambda d: (lambda s: d.call(
        f, d.array(s, "fib"), n=d.integer(0, 3), axis=d.axis(s)))(d.shape(1))),
    "jnp.diff with ends": lambda d: (lambda s: d.call(
        jnp.diff, d.array(s, "fi"), axis=-1, prepend=d.array((*s[:-1], 2), "f"), append=0))(
            d.shape(1)),
    "jnp.ediff1d": lambda d: d.call(
        jnp.ediff1d, d.array(kinds="fi"), to_end=d.pick(None, np.float32([3, 4]))),
    "jnp.gradient": lambda d: (lambda s: d.call(
        jnp.gradient, d.ordinary(s), d.pick(1.0, 0.5), axis=d.pick(None, 0)))(d.shape(1, 3, 2)),
    "jnp.trapezoid": lambda d: (lambda s: d.call(
        jnp.trapezoid, d.ordinary(s), d.pick(None, d.ordinary(s)), axis=d.axis(s)))(
            d.shape(1, 3, 1)),
    **rows("jnp", jnp, "sort", lambda f: _ordered(f, descending=True, stable=False)),
    **rows("jnp", jnp, "argsort", lambda f: _ordered(f, descending=True, stable=True)),
    **rows("jnp", jnp, "partition argpartition", lambda f: (lambda d: (lambda c: d.call(
        lambda x: jnp.sort(c.function(x), -1) if f is jnp.partition else c.function(x).shape,
        *c.arrays))(_partition(f)(d)))),
    "jnp.lexsort": lambda d: (lambda s: d.call(
        jnp.lexsort, tuple(d.array(s, "ib") for _ in range(d.integer(1, 3)))))(d.shape(1, 2, 1)),
    "jnp.lexsort of rows": lambda d: d.call(jnp.lexsort, d.array(d.shape(2, 3, 1), "fi"), d.pick(
        0, -1)),
    "lax.sort": lambda d: (lambda s: d.call(
        lax.sort, (d.array(s, "i"), d.array(s, "f"), d.array(s, "ib")), dimension=d.axis(s),
        num_keys=d.integer(1, 3)))(d.shape(1)),
    "lax.sort_key_val": lambda d: (lambda s: d.call(
        lax.sort_key_val, d.array(s, "fi"), d.array(s, "f"), d.axis(s)))(d.shape(1)),
    "lax.top_k": lambda d: (lambda s: d.call(
        lax.top_k, d.array(s, "fiu"), d.integer(0, s[-1])))(d.shape(1, 4, 1)),
    **rows("lax", lax, "approx_max_k approx_min_k", lambda f: lambda d: (lambda s: d.call(
        f, d.ordinary(s, dtype="float32"), d.integer(1, s[-1])))(d.shape(1, 3, 1))),
    **rows("jnp", jnp, "quantile nanquantile", lambda f: _quantile(f, 1)),
    **rows("jnp", jnp, "percentile nanpercentile", lambda f: _quantile(f, 100)),
    "jnp.searchsorted": lambda d: d.call(
        jnp.searchsorted, np.sort(d.array(d.shape(1, 1), dtype=d.pick("float32", "int32"))),
        d.array(kinds="fi"), side=d.pick("left", "right"),
        method=d.pick("scan", "scan_unrolled", "sort", "compare_all")),
    "jnp.digitize": lambda d: d.call(
        jnp.digitize, d.ordinary(dtype="float32"),
        np.sort(d.ordinary((d.integer(1, 7),), dtype="float32")), right=d.flag()),
    "jnp.bincount": lambda d: (lambda n: d.call(
        jnp.bincount, d.array((n,), "i", low=0, high=9),
        weights=d.pick(None, d.ordinary((n,), dtype="float32")), length=d.integer(1, 12)))(
            d.size()),
    **rows("jnp", jnp, "histogram histogram_bin_edges", _bins),
    "jnp.histogram2d": lambda d: (lambda n: d.call(
        jnp.histogram2d, d.ordinary((n,), dtype="float32"), d.ordinary((n,), dtype="float32"),
        bins=d.integer(2, 4), range=((-2.0, 2.0), (-3.0, 3.0))))(d.integer(1, 12)),
    "jnp.histogramdd": lambda d: d.call(
        jnp.histogramdd, d.ordinary((d.integer(1, 12), 2), dtype="float32"), bins=3,
        range=((-2.0, 2.0), (-3.0, 3.0))),
    **rows("jnp", jnp, "unique", lambda f: _unique(
        f, return_index=True, return_inverse=True, return_counts=True)),
    "jnp.unique of rows": lambda d: d.call(
        jnp.unique, d.array(d.shape(2, 3, 1), "i", low=0, high=1), axis=d.pick(0, 1),
        size=d.integer(1, 6), return_counts=True, return_index=True),
    **rows("jnp", jnp, "unique_all unique_counts unique_inverse unique_values", lambda f: (
        lambda d: d.call(f, d.array(d.shape(1, 2), "i"), size=d.integer(1, 9)))),
    **rows("jnp", jnp, "intersect1d setdiff1d setxor1d union1d", _set),
    "jnp.isin": lambda d: d.call(
        jnp.isin, d.array(kinds="if"), d.array(d.shape(0, 2), "i"), invert=d.flag()),
    **rows("jnp", jnp, "corrcoef cov", lambda f: lambda d: d.call(
        f, d.ordinary(d.shape(1, 2, 2), dtype=d.pick("float32", "complex64")), rowvar=d.flag())),
    **rows("jnp", jnp, "apply_along_axis", lambda f: lambda d: (lambda s: d.call(
        f, d.pick(jnp.sum, jnp.cumsum), d.axis(s), d.ordinary(s)))(d.shape(1, 3, 1))),
    "jnp.apply_over_axes": lambda d: d.call(
        jnp.apply_over_axes, jnp.sum, d.ordinary(d.shape(2, 3)), [0, -1]),
    **rows("lax", lax, "reduce_sum reduce_prod reduce_max reduce_min", lambda f: lambda d: (
        lambda s: d.call(f, d.array(s, "fi"), tuple(range(d.integer(0, len(s))))))(d.shape())),
    **rows("lax", lax, "reduce_and reduce_or reduce_xor", lambda f: lambda d: (
        lambda s: d.call(f, d.array(s, "iub" if f is not lax.reduce_xor else "iu"), tuple(
            range(d.integer(0, len(s))))))(d.shape())),
    "lax.reduce": lambda d: (lambda s, f: d.call(
        lax.reduce, d.array(s, dtype="float32"), np.float32(1.5),
        f, tuple(range(d.integer(0, len(s))))))(
            d.shape(), d.pick(lax.add, lax.mul, lax.max, lambda x, y: x + y)),
    "lax.reduce of two": lambda d: (lambda s: d.call(
        lambda x, i: lax.reduce((x, i), (np.float32(-np.inf), np.int32(-1)), lambda a, b: (
            jnp.maximum(a[0], b[0]),
            jnp.where(a[0] > b[0], a[1], jnp.where(a[0] < b[0], b[1], jnp.maximum(a[1], b[1])))),
            (0,)), d.ordinary(s, dtype="float32"), d.array(s, dtype="int32")))(d.shape(1, 3)),
    **rows("lax", lax, "argmax argmin", lambda f: lambda d: (lambda s: d.call(
        f, d.array(s, "fi"), d.integer(0, len(s) - 1), d.pick(jnp.int32, jnp.uint8)))(
            d.shape(1, 4, 1))),
    **rows("lax", lax, "cummax cummin cumsum cumprod cumlogsumexp", lambda f: lambda d: (
        lambda s: d.call(f, d.array(s, "f" if f is lax.cumlogsumexp else "fi"), d.integer(
            0, len(s) - 1), reverse=d.flag()))(d.shape(1))),
    "lax.associative_scan": lambda d: (lambda s: d.call(
        lax.associative_scan, d.pick(jnp.add, jnp.maximum, jnp.multiply),
        d.ordinary(s, dtype="float32"), reverse=d.flag(), axis=d.axis(s)))(d.shape(1, 3, 1)),
    "lax.associative_scan of matrices": lambda d: (lambda s: d.call(
        lax.associative_scan, jnp.matmul, d.ordinary((s, 3, 3), dtype="float32")))(
            d.integer(1, 9)),
    **rows("ops", jax.ops, "segment_sum segment_prod segment_max segment_min", lambda f: lambda d: (
        lambda n: d.call(
            f, d.array((n, *d.shape(0, 2)), "fi"), d.array((n,), "i", low=-1, high=6),
            num_segments=d.integer(1, 7), indices_are_sorted=False,
            mode=d.pick(None, "drop", "clip")))(d.size())),
}  # fmt: skip
