"""Slices and pads of rows that follow each other."""

from collections.abc import Sequence, Set
from math import inf
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.program import shape_of
from meshwise.simplify.borders import updates
from meshwise.simplify.borders.equations import (
    Makers,
    known_numbers,
    maker_of,
    one_equation,
)
from meshwise.simplify.borders.joins import merge_concatenate, zero_pad
from meshwise.simplify.borders.slices import (
    along,
    cut_padding,
    is_read_again,
    slice_equation,
    to_merge,
)
from meshwise.simplify.counts import Counts


def merge_slice(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A slice of a slice, a pad, rows side by side, a scatter, or of what is turned round."""
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    if 0 in shape_of(eqn.outvars[0]):
        return None
    inner = maker_of(eqn.invars[0], makers, "slice")
    if inner is not None:
        return _slice_cut(eqn, inner, makers, counts)
    if not _jax.is_plain_slice(eqn):
        return None
    inner = maker_of(eqn.invars[0], makers, "concatenate")
    if inner is not None:
        if _is_selected(eqn, inner, [inner.params["dimension"]], makers):
            return None
        apart = _cut_apart(eqn, inner, makers, counts)
        return _slice_joined(eqn, inner, makers, counts) if apart is None else apart
    inner = maker_of(eqn.invars[0], makers, _jax.roll_p.name)
    if inner is not None:
        return _slice_rolled(eqn, inner, makers, counts)
    scattered = updates.merge_cut(eqn, makers)
    if scattered is not None:
        return scattered
    inner = maker_of(eqn.invars[0], makers, "rev")
    if inner is not None and eqn.invars[0] not in makers.read_whole:
        return _slice_turned(eqn, inner, makers, counts)
    inner = maker_of(eqn.invars[0], makers, "pad")
    if inner is None:
        return None
    padded = [d for d, amounts in enumerate(inner.params["padding_config"]) if any(amounts)]
    if _is_selected(eqn, inner, padded, makers):
        return None
    window = zip(starts, limits, strict=True)
    config = cut_padding(inner.params["padding_config"], shape_of(eqn.invars[0]), window)
    if config is None:
        return None
    return one_equation(eqn, lax.pad_p, inner.invars, padding_config=tuple(config))


def _slice_cut(
    eqn: JaxprEqn, inner: JaxprEqn, makers: Makers, counts: Counts
) -> list[JaxprEqn] | None:
    """One slice of what another one is of."""
    merged = to_merge(inner, _jax.cut_dims(eqn), makers)
    if merged is None:
        return None
    made, inner = merged
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    first, step = inner.params["start_indices"], _jax.strides_of(inner)
    begin = [f + k * s for f, k, s in zip(first, starts, step, strict=True)]
    end = [f + (m - 1) * s + 1 for f, m, s in zip(first, limits, step, strict=True)]
    end = [max(b, e) for b, e in zip(begin, end, strict=True)]
    strides = tuple(a * b for a, b in zip(step, _jax.strides_of(eqn), strict=True))
    (cut,) = slice_equation(eqn, inner.invars[0], begin, end, strides)
    return [*made, *(merge_slice(cut, makers.beside(made), counts) or [cut])]


def _is_selected(eqn: JaxprEqn, inner: JaxprEqn, moved: Sequence[int], makers: Makers) -> bool:
    """Whether a slice only selects, beside the dims that are moved, of what is moved whole anyway.

    Such are fields of a state whose borders are padded, and the taps of a filter of what is joined:
    cut before, they would be sent once more.
    """
    is_along_others = _jax.cut_dims(eqn).isdisjoint(moved)
    is_whole = eqn.invars[0] in makers.read_whole or is_read_again(inner, makers)
    return is_along_others and is_whole


def slice_splits(eqns: list[JaxprEqn]) -> list[JaxprEqn]:
    """The equations with a slice for each part of a split into unlike ones; they if none is.

    A slice sends what its own part needs.
    """
    if not any(_is_unlike_split(e) for e in eqns):
        return eqns
    return [made for e in eqns for made in (_sliced(e) if _is_unlike_split(e) else [e])]


def _is_unlike_split(eqn: JaxprEqn) -> bool:
    return eqn.primitive is lax.split_p and len(set(eqn.params["sizes"])) > 1


def _sliced(split: JaxprEqn) -> list[JaxprEqn]:
    sizes, axis = split.params["sizes"], split.params["axis"]
    found = []
    end = 0
    for part, size in zip(split.outvars, sizes, strict=True):
        starts, limits = [0] * len(shape_of(part)), list(shape_of(split.invars[0]))
        starts[axis], limits[axis] = end, end + size
        end += size
        own = split.replace(outvars=[part])
        found += slice_equation(own, split.invars[0], starts, limits, [1] * len(starts))
    return found


def _slice_joined(
    eqn: JaxprEqn, inner: JaxprEqn, makers: Makers, counts: Counts
) -> list[JaxprEqn] | None:
    """Of each of several arrays in a row what a slice takes of it, laid side by side."""
    dim = inner.params["dimension"]
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    found: list[JaxprEqn] = []
    parts: list[Any] = []
    at = 0
    for atom in inner.invars:
        shape = shape_of(atom)
        begin, end = max(starts[dim] - at, 0), min(limits[dim] - at, shape[dim])
        at += shape[dim]
        if begin >= end:
            continue
        first, last = [*starts], [*limits]
        first[dim], last[dim] = begin, end
        aval: Any = eqn.outvars[0].aval
        sizes = tuple(b - a for a, b in zip(first, last, strict=True))
        part = _jax.new_var(aval.update(shape=sizes))
        is_all = sizes == aval.shape
        own = eqn if is_all else eqn.replace(outvars=[part])
        (cut,) = slice_equation(own, atom, first, last, [1] * len(first))
        if is_all:
            return merge_slice(cut, makers, counts) or [cut]
        if sizes == shape:
            parts.append(atom)
            continue
        found += merge_slice(cut, makers, counts) or [cut]
        parts.append(part)
    (joined,) = one_equation(eqn, lax.concatenate_p, parts, dimension=dim)
    return [*found, *(merge_concatenate(joined, makers.beside(found), counts) or [joined])]


def _cut_apart(
    eqn: JaxprEqn, inner: JaxprEqn, makers: Makers, counts: Counts
) -> list[JaxprEqn] | None:
    """A slice of rows side by side, cut along their dim first, as others may be.

    So of a plane with borders around it the part that is one place off in both dims is what is one
    place off in one, one place off in the other. None where it only cuts along one of the two, or
    what is joined is not read more than once over.
    """
    dim, cut = inner.params["dimension"], _jax.cut_dims(eqn)
    if cut <= {dim} or dim not in cut or not is_read_again(inner, makers):
        return None
    made, part, starts, limits = _cut_once(eqn, eqn.invars[0], {dim}, makers, counts)
    (rest,) = slice_equation(eqn, part, starts, limits, [1] * len(starts))
    return [*made, *(merge_slice(rest, makers.beside(made), counts) or [rest])]


def _cut_once(
    eqn: JaxprEqn, source: Any, dims: Set[int], makers: Makers, counts: Counts
) -> tuple[list[JaxprEqn], Any, list[int], list[int]]:
    """What a slice takes of some dims of an array, for all slices that take as much of these.

    With what makes it, where it is not there yet, and what the slice takes of that.
    """
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    shape = list(shape_of(source))
    own = tuple((starts[d], limits[d]) if d in dims else (0, n) for d, n in enumerate(shape))
    for d in dims:
        shape[d] = limits[d] - starts[d]
        starts[d], limits[d] = 0, shape[d]
    key = source, own
    if key in makers.kept and makers.is_made_here(makers.kept[key]):
        return [], makers.kept[key], starts, limits
    part = makers.kept[key] = _jax.var_like(source, shape)
    makers.times_read[part] = inf
    begins, ends = zip(*own, strict=True)
    (cut,) = slice_equation(eqn.replace(outvars=[part]), source, begins, ends, [1] * len(shape))
    made = merge_slice(cut, makers, counts) or [cut]
    if made[-1].primitive is lax.slice_p and not _jax.cut_dims(made[-1]):
        made, part = made[:-1], made[-1].invars[0]
        makers.kept[key] = part
    return made, part, starts, limits


def _slice_rolled(
    eqn: JaxprEqn, inner: JaxprEqn, makers: Makers, counts: Counts
) -> list[JaxprEqn] | None:
    """What a slice takes along other dims of what is moved round, cut before it is.

    Where that is a slice of what was laid side by side along these.
    """
    cut, (source,) = _jax.cut_dims(eqn), inner.invars
    joined = maker_of(source, makers, "concatenate")
    if joined is None or {joined.params["dimension"]} != cut or inner.params["dimension"] in cut:
        return None
    made, part, _, _ = _cut_once(eqn, source, cut, makers, counts)
    return [*made, *one_equation(eqn, _jax.roll_p, [part], **inner.params)]


def _slice_turned(eqn: JaxprEqn, inner: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn]:
    """What a slice takes of an array that is turned round, cut before it is."""
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    for d in inner.params["dimensions"]:
        n = shape_of(eqn.invars[0])[d]
        starts[d], limits[d] = n - limits[d], n - starts[d]
    part = eqn.replace(outvars=[_jax.new_var(eqn.outvars[0].aval)])
    (cut,) = slice_equation(part, inner.invars[0], starts, limits, [1] * len(starts))
    turned = one_equation(eqn, lax.rev_p, part.outvars, **inner.params)
    return [*(merge_slice(cut, makers, counts) or [cut]), *turned]


def merge_pad(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A pad of a slice, unless it puts fill where the slice left rows out."""
    inner = maker_of(eqn.invars[0], makers, "slice")
    if inner is None or not _jax.is_plain_slice(inner):
        return None
    padding, params = eqn.params["padding_config"], inner.params
    padded = {d for d, amounts in enumerate(padding) if any(amounts)}
    bounds = zip(params["start_indices"], params["limit_indices"], strict=True)
    sizes = shape_of(inner.invars[0])
    config = []
    for d, ((low, high, interior), (first, limit)) in enumerate(zip(padding, bounds, strict=True)):
        before, after = (first, sizes[d] - limit) if d in padded else (0, 0)
        if (before and low > 0) or (after and high > 0) or (interior and (before or after)):
            return None
        config.append((low - before, high - after, interior))
    merged = along(inner, padded, makers)
    if merged is None:
        return None
    made, inner = merged
    operands = [inner.invars[0], eqn.invars[1]]
    return [*made, *one_equation(eqn, lax.pad_p, operands, padding_config=tuple(config))]


def merge_convolution(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A convolution of spatial dims that were padded with zero."""
    inner = zero_pad(eqn.invars[0], makers)
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
        # Padding of a window may be negative, but what it adds to a crop brings rows back.
        if low < 0 or high < 0 or ((low or high or interior) and dilation != 1):
            return None
        # Padded twice a dim grows, and its rows are shared out anew: before, that sends less.
        if (low > 0 or high > 0) and min(own) > 0 and not interior:
            return None
        padding.append((own[0] + low, own[1] + high))
        dilations.append(dilation * (interior + 1))
    params = {**eqn.params, "padding": tuple(padding), "lhs_dilation": tuple(dilations)}
    return [eqn.replace(invars=[inner.invars[0], eqn.invars[1]], params=params)]


def merge_dynamic_slice(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A slice from positions that are known."""
    starts = known_numbers(eqn.invars[1:], counts)
    if starts is None:
        return None
    sizes, shape = eqn.params["slice_sizes"], shape_of(eqn.invars[0])
    begin = [min(max(s, 0), n - w) for s, n, w in zip(starts, shape, sizes, strict=True)]
    end = [s + w for s, w in zip(begin, sizes, strict=True)]
    return slice_equation(eqn, eqn.invars[0], begin, end, (1,) * len(sizes))
