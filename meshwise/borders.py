"""Moves of rows that are several equations, written as the one that says what moves.

Each of these would be right as it stands, and send more than it must: of a slice of a pad the pad
is shared out anew over the devices, and then the slice again. So, in a traced program,

- a slice of a slice, a slice of a pad and a pad of a slice become one slice or pad;
- a pad with what a window over it would pad with (the gradient of average pooling, `jnp.pad` before
  a convolution) becomes the window's own padding and dilation;
- two slices laid side by side the other way round (`jnp.roll`) become one roll;
- a slice, or an update of most of a dim, at positions that are known while tracing becomes a
  plain slice, or a pad and a choice between old and new (`u.at[1:-1].set(...)` of a stencil).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import shape_of, type_of
from meshwise.pairing import Counts

# An update of less than a quarter of a dim stays an update: a pad would be mostly fill.
MOST_RATIO = 4


def merge_moves(eqns: Sequence[JaxprEqn], constants: Mapping[Var, Any]) -> list[JaxprEqn]:
    """The equations, each move of rows as one; what is no longer used is still there."""
    counts = Counts(eqns, constants)
    makers: dict[Var, JaxprEqn] = {}
    found: list[JaxprEqn] = []
    for eqn in eqns:
        merge = _MERGES.get(eqn.primitive.name)
        merged = merge(eqn, makers, counts) if merge else None
        made = [eqn] if merged is None else merged
        makers.update((v, e) for e in made for v in e.outvars)
        found += made
    return found


def _maker(atom: Any, makers: Mapping[Var, JaxprEqn], name: str) -> JaxprEqn | None:
    """The equation that makes a value, where it is one of a primitive."""
    eqn = None if isinstance(atom, Literal) else makers.get(atom)
    return eqn if eqn is not None and eqn.primitive.name == name else None


def _one(eqn: JaxprEqn, primitive: Any, operands: Sequence[Any], **params: Any) -> list[JaxprEqn]:
    return [_jax.new_eqn(primitive, operands, eqn.outvars, params, eqn)]


def _strides(eqn: JaxprEqn) -> tuple[int, ...]:
    return eqn.params["strides"] or (1,) * len(eqn.params["start_indices"])


def _merge_slice(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], counts: Counts
) -> list[JaxprEqn] | None:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    inner = _maker(eqn.invars[0], makers, "slice")
    if inner is not None:
        first, step = inner.params["start_indices"], _strides(inner)
        begin = [f + k * s for f, k, s in zip(first, starts, step, strict=True)]
        end = [f + (m - 1) * s + 1 for f, m, s in zip(first, limits, step, strict=True)]
        end = [max(b, e) for b, e in zip(begin, end, strict=True)]
        strides = tuple(a * b for a, b in zip(step, _strides(eqn), strict=True))
        return _slice(eqn, inner.invars[0], begin, end, strides)
    inner = _maker(eqn.invars[0], makers, "pad")
    if inner is None or any(s != 1 for s in _strides(eqn)):
        return None
    config = []
    shape = shape_of(eqn.invars[0])
    for amounts, n, first, limit in zip(
        inner.params["padding_config"], shape, starts, limits, strict=True
    ):
        low, high, interior = amounts
        if interior and (first, limit) != (0, n):
            return None
        config.append((low - first, high - (n - limit), interior))
    return _one(eqn, lax.pad_p, inner.invars, padding_config=tuple(config))


def _slice(
    eqn: JaxprEqn, x: Any, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]
) -> list[JaxprEqn]:
    return _one(
        eqn,
        lax.slice_p,
        [x],
        start_indices=tuple(starts),
        limit_indices=tuple(limits),
        strides=None if all(s == 1 for s in strides) else tuple(strides),
    )


def _merge_pad(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], counts: Counts
) -> list[JaxprEqn] | None:
    """A pad of a slice, unless it puts fill where the slice left rows out."""
    inner = _maker(eqn.invars[0], makers, "slice")
    if inner is None or any(s != 1 for s in _strides(inner)):
        return None
    config = []
    shape, params = shape_of(inner.invars[0]), inner.params
    for (low, high, interior), n, first, limit in zip(
        eqn.params["padding_config"],
        shape,
        params["start_indices"],
        params["limit_indices"],
        strict=True,
    ):
        before, after = first, n - limit
        if (before and low > 0) or (after and high > 0) or (interior and (before or after)):
            return None
        config.append((low - before, high - after, interior))
    operands = [inner.invars[0], eqn.invars[1]]
    return _one(eqn, lax.pad_p, operands, padding_config=tuple(config))


def _merge_reduce_window_sum(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], counts: Counts
) -> list[JaxprEqn] | None:
    inner = _zero_pad(eqn.invars[0], makers)
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


def _merge_convolution(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], counts: Counts
) -> list[JaxprEqn] | None:
    inner = _zero_pad(eqn.invars[0], makers)
    if inner is None:
        return None
    batch, feature, *spatial = eqn.params["dimension_numbers"][0]
    config = inner.params["padding_config"]
    if any(tuple(config[d]) != (0, 0, 0) for d in (batch, feature)):
        return None
    padding, dilations = [], []
    for d, own, dilation in zip(
        spatial, eqn.params["padding"], eqn.params["lhs_dilation"], strict=True
    ):
        low, high, interior = config[d]
        if (low or high or interior) and dilation != 1:
            return None
        padding.append((own[0] + low, own[1] + high))
        dilations.append(dilation * (interior + 1))
    params = {**eqn.params, "padding": tuple(padding), "lhs_dilation": tuple(dilations)}
    return [eqn.replace(invars=[inner.invars[0], eqn.invars[1]], params=params)]


def _zero_pad(atom: Any, makers: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """The pad with zero that makes a value."""
    inner = _maker(atom, makers, "pad")
    if inner is None or not isinstance(inner.invars[1], Literal) or inner.invars[1].val:
        return None
    return inner


def _merge_concatenate(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], counts: Counts
) -> list[JaxprEqn] | None:
    """The end of a dim and then its beginning."""
    dim = eqn.params["dimension"]
    parts = [_maker(x, makers, "slice") for x in eqn.invars]
    if len(parts) != 2 or parts[0] is None or parts[1] is None:
        return None
    end, begin = parts
    x = end.invars[0]
    shape = shape_of(x)
    at = end.params["start_indices"][dim]
    wanted = ((at, shape[dim]), (0, at))
    for part, (first, limit) in zip((end, begin), wanted, strict=True):
        starts, limits = ([0] * len(shape), list(shape))
        starts[dim], limits[dim] = first, limit
        taken = part.params["start_indices"], part.params["limit_indices"]
        if part.invars[0] is not x or taken != (tuple(starts), tuple(limits)):
            return None
        if any(s != 1 for s in _strides(part)):
            return None
    if not 0 < at < shape[dim]:
        return None
    return _one(eqn, _jax.roll_p, [x], dimension=dim, shift=shape[dim] - at)


def _known(atoms: Sequence[Any], counts: Counts) -> list[int] | None:
    """Integers that are known while tracing."""
    found = [counts.of(atom) for atom in atoms]
    known = [c.offset for c in found if c is not None]
    return known if len(known) == len(atoms) else None


def _merge_dynamic_slice(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], counts: Counts
) -> list[JaxprEqn] | None:
    starts = _known(eqn.invars[1:], counts)
    if starts is None:
        return None
    sizes, shape = eqn.params["slice_sizes"], shape_of(eqn.invars[0])
    begin = [min(max(s, 0), n - w) for s, n, w in zip(starts, shape, sizes, strict=True)]
    end = [s + w for s, w in zip(begin, sizes, strict=True)]
    return _slice(eqn, eqn.invars[0], begin, end, (1,) * len(sizes))


def _merge_dynamic_update_slice(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], counts: Counts
) -> list[JaxprEqn] | None:
    starts = _known(eqn.invars[2:], counts)
    if starts is None:
        return None
    shape, window = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    begin = [min(max(s, 0), n - w) for s, n, w in zip(starts, shape, window, strict=True)]
    if not _is_wide(shape, begin, window):
        return None
    return _replaced(eqn, eqn.invars[:2], _update(None, begin, window))


def _merge_scatter(
    eqn: JaxprEqn, makers: Mapping[Var, JaxprEqn], counts: Counts
) -> list[JaxprEqn] | None:
    """An update of one window at a known place."""
    numbers, (operand, indices, updates) = eqn.params["dimension_numbers"], eqn.invars
    if len(shape_of(indices)) != 1 or numbers.operand_batching_dims:
        return None
    starts = _components(indices, makers, counts)
    if starts is None:
        return None
    shape, sizes = shape_of(operand), iter(shape_of(updates))
    window = [1 if d in numbers.inserted_window_dims else next(sizes) for d in range(len(shape))]
    begin = [0] * len(shape)
    for d, start in zip(numbers.scatter_dims_to_operand_dims, starts, strict=True):
        begin[d] = start
    inside = all(0 <= s <= n - w for s, n, w in zip(begin, shape, window, strict=True))
    if not inside or not _is_wide(shape, begin, window):
        return None
    update = _update(eqn.primitive.name, begin, window)
    return None if update is None else _replaced(eqn, [operand, updates], update)


def _components(indices: Any, makers: Mapping[Var, JaxprEqn], counts: Counts) -> list[int] | None:
    """The numbers of one index vector."""
    count = counts.of(indices)
    if count is not None:
        return [count.offset + count.strides[0] * c for c in range(shape_of(indices)[0])]
    joined = _maker(indices, makers, "concatenate")
    return None if joined is None else _known(joined.invars, counts)


def _is_wide(shape: Sequence[int], begin: Sequence[int], window: Sequence[int]) -> bool:
    """Whether a window has most of each dim that it does not have all of, and there is one."""
    part = [(n, w) for n, w in zip(shape, window, strict=True) if n != w]
    return bool(part) and all(w > 1 and w * MOST_RATIO >= n for n, w in part)


def _minus_zero(dtype: Any) -> Any:
    """What changes no number when it is added, the sign of a zero included."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.asarray(complex(-0.0, -0.0), dtype)
    return np.asarray(-0.0 if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)


_JOINS: Mapping[str | None, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "scatter-add": (lax.add, _minus_zero),
    "scatter-sub": (lax.sub, lambda dtype: np.zeros((), dtype)),
    "scatter-mul": (lax.mul, lambda dtype: np.ones((), dtype)),
}


def _update(
    name: str | None, begin: Sequence[int], window: Sequence[int]
) -> Callable[[Any, Any], Any] | None:
    """What an update of one window computes, by its primitive; None sets."""
    if name not in (None, "scatter", *_JOINS):
        return None

    def update(x: Any, new: Any) -> Any:
        config = [(s, n - s - w, 0) for s, n, w in zip(begin, x.shape, window, strict=True)]
        new = lax.reshape(new, window) if new.shape != tuple(window) else new
        if name in _JOINS:
            join, nothing = _JOINS[name]
            return join(x, lax.pad(new, nothing(x.dtype), config))
        new = lax.pad(new, np.zeros((), x.dtype), config)
        masks = []
        for d, (low, high, _) in enumerate(config):
            if low or high:
                row = lax.broadcasted_iota(np.int32, x.shape, d)
                masks.append(lax.ge(row, lax.full_like(row, low)))
                masks.append(lax.lt(row, lax.full_like(row, low + window[d])))
        inside = masks[0]
        for mask in masks[1:]:
            inside = lax.bitwise_and(inside, mask)
        return lax.select(inside, new, x)

    return update


def _replaced(
    eqn: JaxprEqn, operands: Sequence[Any], function: Callable[..., Any] | None
) -> list[JaxprEqn] | None:
    """The equations of a function of some operands, in place of one equation."""
    if function is None or jnp.issubdtype(type_of(operands[0]).dtype, jax.dtypes.extended):
        return None
    types = [jax.ShapeDtypeStruct(shape_of(a), type_of(a).dtype) for a in operands]
    closed = _jax.make_jaxpr_over_axes(function, (), types)
    names: dict[Var, Any] = dict(zip(closed.jaxpr.invars, operands, strict=True))
    for inner in closed.jaxpr.eqns:
        names.update((v, _jax.new_var(v.aval)) for v in inner.outvars)
    names[closed.jaxpr.outvars[0]] = eqn.outvars[0]
    return [
        _jax.new_eqn(
            inner.primitive,
            [a if isinstance(a, Literal) else names[a] for a in inner.invars],
            [names[v] for v in inner.outvars],
            inner.params,
            eqn,
        )
        for inner in closed.jaxpr.eqns
    ]


_MERGES: Mapping[str, Callable[..., list[JaxprEqn] | None]] = {
    "slice": _merge_slice,
    "pad": _merge_pad,
    "reduce_window_sum": _merge_reduce_window_sum,
    "conv_general_dilated": _merge_convolution,
    "concatenate": _merge_concatenate,
    "dynamic_slice": _merge_dynamic_slice,
    "dynamic_update_slice": _merge_dynamic_update_slice,
    "scatter": _merge_scatter,
    "scatter-add": _merge_scatter,
    "scatter-sub": _merge_scatter,
    "scatter-mul": _merge_scatter,
}
