"""Shapes, joins, cuts, and arrays made of nothing."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.drop_in.drawing import Call, Dice, Scalar
from tests.drop_in.tables.numbers import Row, rows, unary

ALL = "fiubc"


def _joined(function: Any, low: int = 1, high: int = 3, equal: bool = False) -> Row:
    """Arrays alike but along one dim."""

    def row(d: Dice) -> Call:
        shape = d.shape(low, high)
        axis = d.integer(0, len(shape) - 1)
        arrays = []
        for _ in range(d.integer(1, 3)):
            size = shape[axis] if equal else d.size()
            arrays.append(d.array((*shape[:axis], size, *shape[axis + 1 :]), ALL))
        return d.call(function, arrays, axis=d.pick(axis, axis - len(shape)))

    return row


def _cut(function: Any, least: int, axis: Any = None) -> Row:
    """In equal parts, or at places."""

    def row(d: Dice) -> Call:
        shape = d.shape(max(1, least), 4, 1)
        at = d.axis(shape) if axis is None else axis(shape)
        n = shape[at]
        parts = [k for k in range(1, n + 1) if n % k == 0]
        where = d.pick(int(d.rng.choice(parts)), sorted(d.rng.integers(0, n + 1, 2).tolist()))
        given = {"axis": at} if axis is None else {}
        return d.call(function, d.array(shape, ALL), where, **given)

    return row


def _reshape(d: Dice) -> Call:
    """To any shape of as many elements: dims joined and cut."""
    x = d.array(d.shape(0, 4), ALL)
    left, dims = x.size, []
    while left > 1 and len(dims) < 3:
        part = int(d.rng.choice([k for k in range(1, left + 1) if left % k == 0]))
        dims.append(part)
        left //= part
    dims = [*dims, left]
    if x.size and d.flag(0.3):
        dims[d.integer(0, len(dims) - 1)] = -1
    return d.call(jnp.reshape, x, tuple(dims), order=d.pick("C", "C", "C", "F"))


def _pad(d: Dice) -> Call:
    shape = d.shape(1, 3, 1)
    mode = d.pick(
        "constant", "edge", "reflect", "symmetric", "wrap", "linear_ramp", "maximum", "mean",
        "median", "minimum", "empty",
    )  # fmt: skip
    widths = [(d.integer(0, 4), d.integer(0, 4)) for _ in shape]
    given = {}
    if mode == "constant":
        given = {"constant_values": d.pick(0, 2, (1, 3))}
    if mode in ("reflect", "symmetric"):
        given = {"reflect_type": d.pick("even", "odd")}
    if mode in ("maximum", "mean", "median", "minimum"):
        given = {"stat_length": d.pick(None, 2)}
    if mode == "empty":
        return d.call(lambda x: jnp.pad(x, widths, mode=mode).shape, d.ordinary(shape))
    return d.call(jnp.pad, d.ordinary(shape, "fi"), widths, mode=mode, **given)


def _lax_pad(d: Dice) -> Call:
    shape = d.shape(1, 3)
    config = [(d.integer(-2, 3), d.integer(-2, 3), d.integer(0, 2)) for _ in shape]
    dtype = d.dtype("fi")
    return d.call(lax.pad, d.array(shape, dtype=dtype), d.array((), dtype=dtype), config)


def _made(function: Any, *args: Any, **kwargs: Any) -> Row:
    """A constant beside an argument that is placed."""
    return lambda d: d.call(
        lambda x: (function(*args, **kwargs), x + 1), d.array(d.shape(1, 2), "f")
    )


def _slice(d: Dice) -> Call:
    shape = d.shape(1)
    low = [d.integer(0, n) for n in shape]
    high = [d.integer(at, n) for at, n in zip(low, shape, strict=True)]
    steps = d.pick(None, [d.integer(1, 3) for _ in shape])
    return d.call(lax.slice, d.array(shape, ALL), low, high, steps)


def _squeeze(d: Dice) -> Call:
    shape = [1 if d.flag(0.4) else d.size() for _ in range(d.integer(1, 4))]
    ones = [i for i, n in enumerate(shape) if n == 1]
    axis = d.pick(None, tuple(ones), ones[0] if ones else None)
    return d.call(jnp.squeeze, d.array(shape[:4], ALL), axis=axis)


SHAPES: dict[str, Row] = {
    **rows("jnp", jnp, (
        "array asarray atleast_1d atleast_2d atleast_3d copy ravel transpose matrix_transpose"
        " flip argwhere_none empty_like_none ones_like zeros_like diag_indices_none"
    ), lambda f: lambda d: d.call(
        f, d.array(d.shape(2 if f is jnp.matrix_transpose else 0), ALL))),
    "jnp.reshape": _reshape,
    "jnp.ravel": lambda d: d.call(jnp.ravel, d.array(kinds=ALL), order=d.pick("C", "F")),
    "jnp.method flatten": lambda d: d.call(lambda x: (x.flatten(), x.T, x.mT if x.ndim > 1 else x),
        d.array(kinds=ALL)),
    **rows("jnp", jnp, "transpose permute_dims", lambda f: lambda d: (lambda s: d.call(
        f, d.array(s, ALL), tuple(int(i) for i in d.rng.permutation(len(s)))))(d.shape())),
    "jnp.moveaxis": lambda d: (lambda s: d.call(
        jnp.moveaxis, d.array(s, ALL), d.axis(s), d.axis(s)))(d.shape(1)),
    "jnp.swapaxes": lambda d: (lambda s: d.call(
        jnp.swapaxes, d.array(s, ALL), d.axis(s), d.axis(s)))(d.shape(1)),
    "jnp.rollaxis": lambda d: (lambda s: d.call(
        jnp.rollaxis, d.array(s, ALL), d.axis(s), d.integer(0, len(s))))(d.shape(1)),
    "jnp.expand_dims": lambda d: d.call(
        jnp.expand_dims, d.array(kinds=ALL), d.pick(0, -1, (0, 1), (0, -1))),
    "jnp.squeeze": _squeeze,
    "jnp.broadcast_to": lambda d: (lambda s: d.call(
        jnp.broadcast_to, d.array(s[0], ALL), np.broadcast_shapes(*s)))(d.together(2)),
    "jnp.broadcast_arrays": lambda d: d.call(
        jnp.broadcast_arrays, *[d.array(s, ALL) for s in d.together(3)]),
    "jnp.flip": lambda d: (lambda s: d.call(jnp.flip, d.array(s, ALL), d.axes(s)))(d.shape(1)),
    "jnp.fliplr": lambda d: d.call(jnp.fliplr, d.array(d.shape(2), ALL)),
    "jnp.flipud": lambda d: d.call(jnp.flipud, d.array(d.shape(1), ALL)),
    "jnp.rot90": lambda d: d.call(
        jnp.rot90, d.array(d.shape(2, 3), ALL), d.integer(-1, 4), d.pick((0, 1), (1, 0))),
    "jnp.roll": lambda d: (lambda s: d.call(
        jnp.roll, d.array(s, ALL), d.pick(d.integer(-15, 15), np.int32(d.integer(-5, 5))),
        d.pick(None, d.axis(s))))(d.shape(1)),
    "jnp.roll of several": lambda d: d.call(
        jnp.roll, d.array(d.shape(2), ALL), (d.integer(-4, 4), d.integer(-4, 4)), (0, 1)),
    "jnp.roll by data": lambda d: (lambda s: d.call(
        jnp.roll, d.array(s, ALL), d.array((), "i"), d.axis(s)))(d.shape(1)),
    **rows("jnp", jnp, "concatenate concat", _joined),
    "jnp.stack": _joined(jnp.stack, equal=True),
    **rows("jnp", jnp, "hstack vstack dstack column_stack", lambda f: lambda d: (
        lambda s: d.call(f, [d.array(s, ALL) for _ in range(d.integer(1, 3))]))(d.shape(0, 3))),
    "jnp.append": lambda d: d.call(
        jnp.append, d.array(kinds="fi"), d.array(kinds="fi"), axis=None),
    "jnp.block": lambda d: d.call(
        jnp.block, [[d.array((2, 3)), d.array((2, 5))], [d.array((4, 3)), d.array((4, 5), "i")]]),
    **rows("jnp", jnp, "split array_split", lambda f: _cut(f, 1)),
    "jnp.array_split uneven": lambda d: d.call(
        jnp.array_split, d.array(d.shape(1), ALL), d.integer(1, 5)),
    "jnp.hsplit": _cut(jnp.hsplit, 2, lambda s: 1),
    "jnp.vsplit": _cut(jnp.vsplit, 2, lambda s: 0),
    "jnp.dsplit": _cut(jnp.dsplit, 3, lambda s: 2),
    "jnp.unstack": lambda d: (lambda s: d.call(
        jnp.unstack, d.array(s, ALL), axis=d.axis(s)))(d.shape(1, 3, 1)),
    "jnp.tile": lambda d: d.call(
        jnp.tile, d.array(d.shape(0, 3), ALL), d.pick(2, (2, 3), (1, 2, 1), (3, 1, 1, 2), ())),
    "jnp.repeat": lambda d: (lambda s: d.call(
        jnp.repeat, d.array(s, ALL), d.integer(0, 3), axis=d.pick(None, d.axis(s))))(d.shape(1)),
    "jnp.repeat by counts": lambda d: (lambda s: d.call(
        jnp.repeat, d.array(s, ALL), d.array((s[0],), "i", low=0, high=3), axis=0,
        total_repeat_length=d.integer(1, 12)))(d.shape(1, 3, 1)),
    "jnp.resize": lambda d: d.call(jnp.resize, d.array(kinds=ALL), d.shape(1, 3)),
    "jnp.pad": _pad,
    "jnp.tri": _made(jnp.tri, 5, 7, 1),
    **rows("jnp", jnp, "tril triu", lambda f: lambda d: d.call(
        f, d.array(d.shape(2), ALL), d.integer(-3, 3))),
    "jnp.diag": lambda d: d.call(jnp.diag, d.array(d.shape(1, 2), ALL), d.integer(-3, 3)),
    "jnp.diagflat": lambda d: d.call(jnp.diagflat, d.array(d.shape(1, 2), ALL), d.integer(-2, 2)),
    "jnp.diagonal": lambda d: d.call(
        jnp.diagonal, d.array(d.shape(2), ALL), d.integer(-2, 2), d.pick(0, -1), 1)
        if d.flag() else d.call(jnp.diagonal, d.array(d.shape(2, 3), ALL), d.integer(-2, 2)),
    "jnp.trace": lambda d: d.call(jnp.trace, d.array(d.shape(2), "fib"), d.integer(-2, 2)),
    "jnp.fill_diagonal": lambda d: d.call(
        jnp.fill_diagonal, d.array(d.pick((5, 5), (4, 6), (7, 3)), "fi"),
        d.pick(np.float32(2), Scalar(3.0)), inplace=False),
    "jnp.vander": lambda d: d.call(
        jnp.vander, d.ordinary(d.shape(1, 1), dtype="float32", low=-2, high=2),
        d.pick(None, 3), d.flag()),
    "jnp.meshgrid": lambda d: d.call(
        jnp.meshgrid, *[d.array(d.shape(1, 1), "fi") for _ in range(d.integer(1, 3))],
        indexing=d.pick("xy", "ij"), sparse=d.flag(0.3)),
    "jnp.ix_": lambda d: d.call(
        jnp.ix_, *[d.array((d.size(),), "i") for _ in range(d.integer(1, 3))]),
    "jnp.arange": _made(jnp.arange, 2, 19, 3),
    "jnp.linspace": lambda d: (lambda s: d.call(
        jnp.linspace, d.ordinary(s[0]), d.ordinary(s[1]), d.integer(0, 9), endpoint=d.flag(),
        axis=d.pick(0, -1), retstep=d.flag(0.3)))(d.together(2, d.shape(0, 2))),
    **rows("jnp", jnp, "logspace", lambda f: lambda d: (lambda s: d.call(
        f, d.array(s[0], dtype="float32", low=0, high=1),
        d.array(s[1], dtype="float32", low=1, high=2), d.integer(1, 9)))(
            d.together(2, d.shape(0, 2)))),
    "jnp.geomspace": lambda d: (lambda s: d.call(
        jnp.geomspace, d.array(s[0], dtype="float32", low=1, high=2),
        d.array(s[1], dtype="float32", low=3, high=9), d.integer(1, 9)))(
            d.together(2, d.shape(0, 2))),
    "jnp.eye": _made(jnp.eye, 6, 5, k=1),
    "jnp.identity": _made(jnp.identity, 5),
    "jnp.zeros": _made(jnp.zeros, (3, 5)),
    "jnp.ones": _made(jnp.ones, (3, 5), jnp.int32),
    "jnp.full": lambda d: d.call(
        lambda x: jnp.full((4, 5), x), d.pick(np.float32(2), Scalar(3.0), np.int8(1))),
    **rows("jnp", jnp, "full_like", lambda f: lambda d: d.call(
        f, d.array(kinds=ALL), d.pick(2, Scalar(1.5)))),
    **rows("jnp", jnp, "zeros_like ones_like", lambda f: lambda d: d.call(
        f, d.array(kinds=ALL), dtype=d.pick(None, jnp.float32, jnp.int8), shape=d.pick(
            None, (3, 4)))),
    **rows("jnp", jnp, "bartlett blackman hamming hanning", lambda f: _made(f, 9)),
    "jnp.kaiser": _made(jnp.kaiser, 9, 3.0),
    "jnp.indices": _made(jnp.indices, (3, 4)),
    **rows("jnp", jnp, "tril_indices triu_indices", lambda f: _made(f, 5, 1, 4)),
    **rows("jnp", jnp, "tril_indices_from triu_indices_from", lambda f: lambda d: d.call(
        f, d.array(d.shape(2, 2)))),
    "jnp.diag_indices": _made(jnp.diag_indices, 5),
    "jnp.diag_indices_from": lambda d: d.call(jnp.diag_indices_from, d.array((5, 5))),
    "jnp.mask_indices": _made(jnp.mask_indices, 4, jnp.triu, size=10),
    "jnp.fromfunction": _made(jnp.fromfunction, lambda i, j: i * 2 - j, (4, 5)),
    **rows("jnp.fft", jnp.fft, "fftfreq rfftfreq", lambda f: _made(f, 9, 0.5)),
    **rows("jnp.fft", jnp.fft, "fftshift ifftshift", lambda f: lambda d: (lambda s: d.call(
        f, d.array(s, "fi"), axes=d.axes(s)))(d.shape(1))),
    **rows("lax", lax, "expand_dims", lambda f: lambda d: d.call(f, d.array(kinds=ALL), (0,))),
    "lax.squeeze": lambda d: d.call(lax.squeeze, d.array((1, 4, 1, 3), ALL), d.pick((0,), (0, 2))),
    "lax.reshape": lambda d: d.call(
        lax.reshape, d.array((4, 6, 3), ALL), d.pick((24, 3), (4, 18), (72,), (2, 2, 18)),
        dimensions=d.pick(None, (1, 0, 2), (2, 1, 0))),
    "lax.collapse": lambda d: d.call(lax.collapse, d.array(d.shape(3), ALL), 1, d.pick(2, 3)),
    "lax.transpose": lambda d: d.call(lax.transpose, d.array(d.shape(3, 3), ALL), (2, 0, 1)),
    "lax.rev": lambda d: (lambda s: d.call(
        lax.rev, d.array(s, ALL), tuple(range(d.integer(0, len(s))))))(d.shape()),
    "lax.broadcast": lambda d: d.call(lax.broadcast, d.array(d.shape(0, 2), ALL), (3, 2)),
    "lax.broadcast_in_dim": lambda d: d.call(
        lax.broadcast_in_dim, d.array((4, 1, 5), ALL), (3, 4, 6, 5), (1, 2, 3)),
    "lax.broadcast_to_rank": lambda d: d.call(
        lax.broadcast_to_rank, d.array(d.shape(0, 2), ALL), rank=3),
    "lax.broadcasted_iota": _made(lax.broadcasted_iota, jnp.int32, (3, 8), 1),
    "lax.iota": _made(lax.iota, jnp.float32, 9),
    "lax.concatenate": lambda d: (lambda t: d.call(
        lax.concatenate, [d.array((d.size(), 5), dtype=t) for _ in range(3)], 0))(d.dtype(ALL)),
    "lax.pad": _lax_pad,
    "lax.slice": _slice,
    "lax.slice_in_dim": lambda d: d.call(
        lax.slice_in_dim, d.array((9, 7), ALL), d.pick(-7, 1, None), d.pick(-1, 8, None),
        d.integer(1, 3), axis=d.pick(0, -1)),
    "lax.split": lambda d: d.call(lax.split, d.array((9, 4), ALL), d.pick((2, 7), (3, 3, 3)), 0),
    **rows("lax", lax, "tile", lambda f: lambda d: d.call(f, d.array((3, 5), ALL), (2, 3))),
    **rows("lax", lax, "full_like", lambda f: lambda d: d.call(f, d.array(kinds=ALL), 2)),
    **rows("lax", lax, "stack unstack", lambda f: lambda d: (
        d.call(f, [d.array((3, 4))] * 2) if f.__name__ == "stack" else d.call(f, d.array((3, 4))))),
    "jnp.packbits": lambda d: (lambda s: d.call(
        jnp.packbits, d.array(s, "b"), axis=d.pick(None, d.axis(s)), bitorder=d.pick(
            "big", "little")))(d.shape(1)),
    "jnp.unpackbits": lambda d: (lambda s: d.call(
        jnp.unpackbits, d.array(s, dtype="uint8", low=0, high=255), axis=d.pick(
            None, d.axis(s)), bitorder=d.pick("big", "little")))(d.shape(1)),
    "jnp.trim_zeros": lambda d: d.call(jnp.trim_zeros, d.array(d.shape(1, 1), "i")),
    "jnp.view": lambda d: d.call(
        lambda x: x.view(jnp.uint16), d.array((3, 4), dtype=d.pick("float32", "float16", "int8"))),
    "jnp.array of a list": lambda d: d.call(
        lambda x, y: jnp.array([x, y, 3]), d.array((), "f"), d.array((), "i")),
    "jnp.iterate": lambda d: d.call(list, d.array(d.shape(1, 2, 1), ALL)),
    "jnp.methods": lambda d: d.call(lambda x: (
        x.sum(), x.real, x.astype(jnp.float32), x.size, x.clip(0), x.mean(0), x.argmax(0),
        x.sort(0), x.cumsum(0), x.repeat(2), x.ptp() if hasattr(x, "ptp") else 0,
        x.swapaxes(0, -1), x.squeeze(), x.take(0), x.prod(), x.max(), x.any(), x.dot(x.T)),
        d.ordinary(d.shape(2, 2, 1), dtype="float32")),
    "jnp.copy of a scalar": unary(jnp.copy, ALL),
}  # fmt: skip
