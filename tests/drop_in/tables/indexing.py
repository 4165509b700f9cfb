"""Reads and writes at places."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.drop_in.drawing import Call, Dice
from tests.drop_in.tables.numbers import Row, rows

ALL = "fiubc"
MODES = (None, "clip", "fill", "drop", "wrap", "promise_in_bounds")


def basic_index(d: Dice, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Numbers, slices with steps of either sign, new dims, an ellipsis."""
    found: list[Any] = []
    used = d.integer(0, len(shape))
    for n in shape[:used]:
        kind = d.integer(0, 5)
        if kind == 0 and n:
            found.append(d.integer(-n, n - 1))
        elif kind <= 3:
            low, high = (d.pick(None, d.integer(-n - 2, n + 2)) for _ in range(2))
            found.append(slice(low, high, d.pick(None, None, 1, 2, 3, -1, -2)))
        else:
            found.append(slice(None))
        if d.flag(0.1):
            found.append(None)
    if d.flag(0.2):
        found.insert(d.integer(0, len(found)), Ellipsis)
    return tuple(found)


def places(d: Dice, shape: Any, size: int, outside: bool) -> np.ndarray:
    reach = size + 3 if outside else size
    found = d.rng.integers(-reach, max(reach, 1), shape) if size or outside else np.zeros(shape)
    return np.asarray(found, d.pick(np.int32, np.int32, np.int8))


def advanced_index(d: Dice, shape: tuple[int, ...], outside: bool) -> tuple[Any, ...]:
    """Arrays of places that broadcast, mixed with slices and numbers."""
    dims = d.integer(1, min(3, len(shape)))
    common = d.shape(0, 2)
    found: list[Any] = []
    for n in shape[:dims]:
        if d.flag(0.65):
            found.append(places(d, d.together(2, common)[0], n, outside))
        else:
            found.append(d.pick(slice(None), slice(1, None), slice(None, None, -1), slice(0, 3)))
    if d.flag(0.15):
        found.insert(d.integer(0, len(found)), None)
    return tuple(found)


def _read(d: Dice) -> Call:
    shape = d.shape(1)
    index = basic_index(d, shape)
    return Call(lambda x: x[index], [d.array(shape, ALL)])


def _read_places(d: Dice) -> Call:
    shape = d.shape(1, 4, 1)
    index = advanced_index(d, shape, outside=True)
    mode = d.pick(*MODES[:-1])
    given = {} if mode is None or d.flag(0.3) else {"mode": mode}
    return d.call(lambda x, i: x.at[i].get(**given), d.array(shape, ALL), index)


def _read_mask(d: Dice) -> Call:
    shape = d.shape(1)
    return d.call(lambda x, m: jnp.where(m, x, 0)[m.argmax()], d.array(shape, "f"),
        d.array(shape, "b")) if shape[0] else d.call(lambda x: x, d.array(shape))  # fmt: skip


def write(name: str) -> Row:
    def row(d: Dice) -> Call:
        shape = d.shape(1, 4, 1)
        dtype = d.dtype("ffiu")
        x = d.array(shape, dtype=dtype)
        if d.flag(0.4):
            index = basic_index(d, shape)
            view = x[index]
            values = d.array(d.together(2, view.shape)[0], dtype=dtype)
            if np.broadcast_shapes(values.shape, view.shape) != view.shape:
                values = d.array((), dtype=dtype)
            return d.call(lambda x, v: getattr(x.at[index], name)(v), x, values)
        index = advanced_index(d, shape, outside=name != "set")
        if name == "set":  # of equal places JAX may take either, so none are equal
            index = (d.rng.permutation(shape[0])[: d.integer(0, shape[0])].astype(np.int32),)
        mode = d.pick(None, "clip", "drop", "fill", "wrap") if name != "set" else None
        given = {} if mode is None else {"mode": mode}
        got = jax.eval_shape(lambda x: x[index], x).shape
        values = d.array(d.pick(got, ()), dtype=dtype)
        return d.call(lambda x, i, v: getattr(x.at[i], name)(v, **given), x, index, values)

    return row


def _dynamic(d: Dice) -> tuple[Any, tuple[int, ...], list[np.ndarray]]:
    shape = d.shape(1, 4, 1)
    sizes = tuple(d.integer(0 if d.flag(0.1) else 1, n) for n in shape)
    starts = [np.asarray(d.integer(-n - 2, n + 2), np.int32) for n in shape]
    return shape, sizes, starts


def _dynamic_slice(d: Dice) -> Call:
    shape, sizes, starts = _dynamic(d)
    return d.call(lambda x, s: lax.dynamic_slice(x, s, sizes), d.array(shape, ALL), starts)


def _dynamic_update(d: Dice) -> Call:
    shape, sizes, starts = _dynamic(d)
    dtype = d.dtype(ALL)
    return d.call(
        lax.dynamic_update_slice, d.array(shape, dtype=dtype), d.array(sizes, dtype=dtype), starts
    )


def _take_along(d: Dice) -> Call:
    shape = d.shape(1, 4, 1)
    axis = d.axis(shape)
    places_shape = list(shape)
    places_shape[axis] = d.size()
    index = places(d, places_shape, shape[axis], outside=False).astype(np.int32)
    return d.call(
        jnp.take_along_axis, d.array(shape, ALL), index, axis=axis,
        mode=d.pick(None, "clip", "fill"),
    )  # fmt: skip


def _put_along(d: Dice) -> Call:
    shape = d.shape(1, 3, 1)
    axis = d.axis(shape)
    order = np.argsort(d.rng.random(shape), axis).astype(np.int32)
    some = order.take(range(d.integer(1, shape[axis])), axis)
    return d.call(
        jnp.put_along_axis, d.array(shape, dtype="float32"), some,
        d.array(some.shape, dtype="float32"), axis=axis, inplace=False,
    )  # fmt: skip


def _take(d: Dice) -> Call:
    shape = d.shape(1, 4, 1)
    axis = d.pick(None, d.axis(shape))
    size = int(np.prod(shape)) if axis is None else shape[axis]
    return d.call(
        jnp.take, d.array(shape, ALL), places(d, d.shape(0, 2), size, True), axis=axis,
        mode=d.pick(None, "clip", "fill", "wrap"), unique_indices=False,
    )  # fmt: skip


def _scatter_apply(d: Dice) -> Call:
    shape = d.shape(1, 2, 1)
    index = d.rng.permutation(shape[0])[: d.integer(0, shape[0])].astype(np.int32)
    return d.call(lambda x, i: x.at[i].apply(jnp.sin), d.array(shape, dtype="float32"), index)


def _batched(function: Any) -> Row:
    """Mapped with vmap, so that dims of places and arrays count along together."""

    def row(d: Dice) -> Call:
        n, shape = d.integer(1, 8), d.shape(1, 3, 1)
        x = d.array((n, *shape), dtype=d.dtype("fi"))
        i = places(d, (n, *d.shape(0, 1)), shape[0], True)
        return d.call(jax.vmap(function), x, i)

    return row


INDEXING: dict[str, Row] = {
    "x[slices]": _read,
    "x[places]": _read_places,
    "x[mask]": _read_mask,
    **{f"x.at.{n}": write(n) for n in ("set", "add", "multiply", "mul", "min", "max", "subtract")},
    "x.at.power": lambda d: d.call(
        lambda x, i: x.at[i].power(2), d.array((7, 5), dtype="float32"),
        d.rng.permutation(7)[:3].astype(np.int32)),
    "x.at.divide": lambda d: d.call(
        lambda x, i: x.at[i].divide(3), d.array((7, 5), dtype="float32"),
        d.rng.permutation(7)[:3].astype(np.int32)),
    "x.at.apply": _scatter_apply,
    "x[i] mapped": _batched(lambda x, i: x[i]),
    "x.at[i].add mapped": _batched(lambda x, i: x.at[i].add(2)),
    "x.at[i].set mapped": _batched(lambda x, i: x.at[i].set(3)),
    "x[i, j] mapped": _batched(lambda x, i: x[..., i]),
    "dynamic_slice mapped": lambda d: d.call(
        jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 1), (3, 2))),
        d.array((6, 7, 4), ALL), d.array((6,), "i")),
    "dynamic_update mapped": lambda d: d.call(
        jax.vmap(lambda x, i: lax.dynamic_update_slice(x, x[:3, 1:3] + 1, (i, 1))),
        d.array((6, 7, 4), "fi"), d.array((6,), "i")),
    "lax.dynamic_slice": _dynamic_slice,
    "lax.dynamic_update_slice": _dynamic_update,
    "lax.dynamic_slice_in_dim": lambda d: d.call(
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 3, 1), d.array((5, 8), ALL), d.array((), "i")),
    "lax.dynamic_update_slice_in_dim": lambda d: d.call(
        lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 0),
        d.array((9, 4), dtype="float32"), d.array((3, 4), dtype="float32"), d.array((), "i")),
    "lax.dynamic_index_in_dim": lambda d: d.call(
        lambda x, i: lax.dynamic_index_in_dim(x, i, 1, keepdims=False),
        d.array((5, 8, 3), ALL), d.array((), "i")),
    "lax.dynamic_update_index_in_dim": lambda d: d.call(
        lambda x, y, i: lax.dynamic_update_index_in_dim(x, y, i, 1),
        d.array((5, 8), dtype="float32"), d.array((5,), dtype="float32"), d.array((), "i")),
    "lax.index_in_dim": lambda d: d.call(lax.index_in_dim, d.array((6, 5), ALL), d.pick(0, -2), 1),
    "lax.index_take": lambda d: d.call(
        lambda x, i, j: lax.index_take(x, (i, j), (0, 1)), d.array((6, 5, 3), "fi"),
        d.array((4,), dtype="int32", low=0, high=5), d.array((4,), dtype="int32", low=0, high=4)),
    "jnp.take": _take,
    "jnp.take_along_axis": _take_along,
    "jnp.put_along_axis": _put_along,
    "jnp.put": lambda d: d.call(
        jnp.put, d.array((5, 6), dtype="float32"),
        d.rng.permutation(30)[:5].astype(np.int32), d.array((5,), dtype="float32"),
        mode=d.pick(None, "clip", "wrap"), inplace=False),
    "jnp.place": lambda d: d.call(
        jnp.place, d.array((5, 6), dtype="float32"), d.array((5, 6), "b"),
        d.array((4,), dtype="float32"), inplace=False),
    "jnp.insert": lambda d: d.call(
        jnp.insert, d.array((5, 6), "f"), d.pick(2, -1, np.int32([1, 3])), 7, axis=d.pick(0, 1)),
    "jnp.delete": lambda d: d.call(
        jnp.delete, d.array((5, 6), "f"), d.pick(2, -1, slice(1, 4)), axis=d.pick(0, 1, None)),
    "jnp.delete by data": lambda d: d.call(
        lambda x, i: jnp.delete(x, i, axis=0, assume_unique_indices=True), d.array((5, 6), "f"),
        np.int32([1, 3])),
    **rows("jnp", jnp, "nonzero argwhere flatnonzero", lambda f: lambda d: d.call(
        f, d.array(d.shape(1, 3), "ib"), size=d.integer(0, 9), fill_value=d.pick(None, -1))),
    "jnp.where of one": lambda d: d.call(
        lambda m: jnp.where(m, size=5, fill_value=-1), d.array(d.shape(1, 3), "b")),
    "jnp.extract": lambda d: (lambda s: d.call(
        lambda m, x: jnp.extract(m, x, size=6, fill_value=0), d.array(s, "b"), d.array(s, "f")))(
            d.shape(1, 3)),
    "jnp.compress": lambda d: d.call(
        jnp.compress, d.array((5,), "b"), d.array((5, 4), "f"), axis=0, size=3),
    "jnp.unravel_index": lambda d: d.call(
        jnp.unravel_index, d.array(d.shape(0, 2), dtype="int32", low=0, high=59), (3, 4, 5)),
    "jnp.ravel_multi_index": lambda d: (lambda s: d.call(
        jnp.ravel_multi_index, (d.array(s, dtype="int32", low=-1, high=4),
        d.array(s, dtype="int32", low=0, high=5)), (4, 5), mode=d.pick("wrap", "clip")))(
            d.shape(0, 2)),
    "lax.gather": lambda d: (
            lambda mode: d.call(
                lambda x, i: lax.gather(
                    x, i, lax.GatherDimensionNumbers((1, 2), (1,), (0, 1)), (2, 1, 3), mode=mode),
                d.array((6, 5, 4), ALL), d.array((7, 2), dtype="int32", low=-2, high=6)))(
                    d.pick(None, "clip", "fill")),
    **rows("lax", lax, "scatter_add scatter_mul scatter_min scatter_max scatter_sub",
        lambda f: lambda d: (lambda t, mode: d.call(
            lambda x, i, u: f(x, i, u, lax.ScatterDimensionNumbers((1,), (0,), (0,)), mode=mode),
            d.array((6, 5), dtype=t), d.array((7, 1), dtype="int32", low=-2, high=7),
            d.array((7, 5), dtype=t)))(d.dtype("fi"), d.pick(None, "clip", "drop"))),
    "lax.scatter": lambda d: d.call(
        lambda x, i, u: lax.scatter(x, i, u, lax.ScatterDimensionNumbers((1,), (0,), (0,))),
        d.array((8, 5), dtype="float32"), d.rng.permutation(8)[:4, None].astype(np.int32),
        d.array((4, 5), dtype="float32")),
    "lax.scatter_apply": lambda d: d.call(
        lambda x, i: lax.scatter_apply(
            x, i, jnp.sin, lax.ScatterDimensionNumbers((1,), (0,), (0,)), update_shape=(4, 5)),
        d.array((8, 5), dtype="float32"), d.rng.permutation(8)[:4, None].astype(np.int32)),
}  # fmt: skip
