"""Slices and pads of rows that follow each other."""

from collections.abc import Iterator, Sequence, Set
from math import inf
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.program import shape_of
from meshwise.simplify.borders import updates
from meshwise.simplify.borders.equations import (
    Makers,
    any_maker,
    known_numbers,
    maker_of,
    one_equation,
)
from meshwise.simplify.borders.joins import merge_concatenate, zero_pad
from meshwise.simplify.borders.recipes import is_most
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
        bordered = _slice_bordered(eqn, inner, makers, counts)
        if bordered is not None:
            return bordered
        if _is_selected(eqn, inner, [inner.params["dimension"]], makers):
            return None
        return _slice_joined(eqn, inner, makers, counts)
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


def _flat(joined: JaxprEqn, makers: Makers) -> list[Any]:
    """What is laid side by side, where some of that may be as well, along the same dim."""
    found: list[Any] = []
    for atom in joined.invars:
        inner = maker_of(atom, makers, "concatenate")
        is_more = inner is not None and inner.params["dimension"] == joined.params["dimension"]
        found += _flat(inner, makers) if inner is not None and is_more else [atom]
    return found


def _taken(
    arrays: Sequence[Any], dim: int, start: int, limit: int
) -> Iterator[tuple[Any, int, int]]:
    """Of several arrays in a row those of which a slice takes rows; from where to where in each."""
    at = 0
    for atom in arrays:
        size = shape_of(atom)[dim]
        begin, end = max(start - at, 0), min(limit - at, size)
        at += size
        if begin < end:
            yield atom, begin, end


def _rows_between(eqn: JaxprEqn, atom: Any, dim: int, begin: int, end: int) -> JaxprEqn:
    """A slice of some rows of a dim, in place of another equation."""
    starts, ends = [0] * len(shape_of(atom)), list(shape_of(atom))
    starts[dim], ends[dim] = begin, end
    sizes = [m - n for n, m in zip(starts, ends, strict=True)]
    own = eqn.replace(outvars=[_jax.var_like(atom, sizes)])
    (cut,) = slice_equation(own, atom, starts, ends, [1] * len(ends))
    return cut


def _slice_joined(
    eqn: JaxprEqn, inner: JaxprEqn, makers: Makers, counts: Counts
) -> list[JaxprEqn] | None:
    """Of each of several arrays in a row what a slice takes of it, laid side by side."""
    dim = inner.params["dimension"]
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    found: list[JaxprEqn] = []
    parts: list[Any] = []
    for atom, begin, end in _taken(inner.invars, dim, starts[dim], limits[dim]):
        shape = shape_of(atom)
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


def _slice_bordered(
    eqn: JaxprEqn, inner: JaxprEqn, makers: Makers, counts: Counts
) -> list[JaxprEqn] | None:
    """What a slice takes of borders laid along one dim around what has some along another.

    That is cut first, along its own dim, so that of a plane with borders around it what is one
    place off in both dims is what is one place off in one, one place off in the other. None where
    there are no such borders, or the slice takes few rows.
    """
    dim = inner.params["dimension"]
    others = _jax.cut_dims(eqn) - {dim}
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    sizes = zip(shape_of(eqn.outvars[0]), shape_of(eqn.invars[0]), strict=True)
    if not others or not all(is_most(rows, size) for rows, size in sizes):
        return None
    taken = [*_taken(_flat(inner, makers), dim, starts[dim], limits[dim])]
    behind = [_joined_behind(atom, others, makers) for atom, *_ in taken]
    if None in behind:  # before anything is kept for others
        return None
    found: list[JaxprEqn] = []
    parts: list[Any] = []
    for (atom, begin, end), (source, between) in zip(taken, filter(None, behind), strict=True):
        made, part = _cut_once(eqn, source, others, makers.beside(found), counts)
        found += made
        is_cut = end - begin < shape_of(atom)[dim]
        for move in [*between, *([_rows_between(eqn, atom, dim, begin, end)] if is_cut else [])]:
            own = _of_part(move, part, others)
            is_slice = own.primitive is lax.slice_p
            merged = merge_slice(own, makers.beside(found), counts) if is_slice else None
            found += merged or [own]
            (part,) = own.outvars
        parts.append(part)
    if len(parts) == 1:
        return [*found, *one_equation(eqn, lax.copy_p, parts)]
    (joined,) = one_equation(eqn, lax.concatenate_p, parts, dimension=dim)
    return [*found, *(merge_concatenate(joined, makers.beside(found), counts) or [joined])]


def _joined_behind(
    atom: Any, dims: Set[int], makers: Makers
) -> tuple[Any, Sequence[JaxprEqn]] | None:
    """What is laid side by side along a dim, which are all of some, and what comes between.

    That are slices, reversals and repeated rows, along other dims.
    """
    moves: list[JaxprEqn] = []
    eqn = any_maker(atom, makers)
    while eqn is not None and dims.isdisjoint(_moved_dims(eqn)):
        moves.insert(0, eqn)
        atom = eqn.invars[0]
        eqn = any_maker(atom, makers)
    if eqn is None or eqn.primitive is not lax.concatenate_p:
        return None
    return (atom, moves) if {eqn.params["dimension"]} == dims else None


def _moved_dims(eqn: JaxprEqn) -> Set[int]:
    """Along which dims an equation cuts, reverses or repeats a row; of any other, all."""
    if eqn.primitive is lax.rev_p:
        return {*eqn.params["dimensions"]}
    dims = range(len(shape_of(eqn.outvars[0])))
    is_repeat = eqn.primitive is lax.broadcast_in_dim_p and len(eqn.invars) == 1
    if _jax.is_plain_slice(eqn) or (is_repeat and [*eqn.params["broadcast_dimensions"]] == [*dims]):
        return _jax.cut_dims(eqn)
    return {*dims}


def _of_part(move: JaxprEqn, part: Any, dims: Set[int]) -> JaxprEqn:
    """The same along other dims of a part along some."""
    sizes, params = shape_of(part), dict(move.params)
    shape = [sizes[d] if d in dims else n for d, n in enumerate(shape_of(move.outvars[0]))]
    if move.primitive is lax.broadcast_in_dim_p:
        params["shape"] = tuple(shape)
    if move.primitive is lax.slice_p:
        limits = enumerate(params["limit_indices"])
        params["limit_indices"] = tuple([sizes[d] if d in dims else end for d, end in limits])
    return move.replace(invars=[part], outvars=[_jax.var_like(part, shape)], params=params)


def _cut_once(
    eqn: JaxprEqn, source: Any, dims: Set[int], makers: Makers, counts: Counts
) -> tuple[list[JaxprEqn], Any]:
    """What a slice takes of some dims of an array, for all slices that take as much of these.

    With what makes it, where it is not there yet.
    """
    ranges = [*zip(eqn.params["start_indices"], eqn.params["limit_indices"], strict=True)]
    own = tuple(ranges[d] if d in dims else (0, n) for d, n in enumerate(shape_of(source)))
    key = source, own
    if key in makers.kept and makers.is_made_here(makers.kept[key]):
        return [], makers.kept[key]
    part: Any = _jax.var_like(source, [end - start for start, end in own])
    makers.kept[key] = part
    makers.times_read[part] = inf
    begins, ends = zip(*own, strict=True)
    (cut,) = slice_equation(eqn.replace(outvars=[part]), source, begins, ends, [1] * len(own))
    made = merge_slice(cut, makers, counts) or [cut]
    if made[-1].primitive is lax.slice_p and not _jax.cut_dims(made[-1]):
        made, part = made[:-1], made[-1].invars[0]
        makers.kept[key] = part
    return made, part


def _slice_rolled(
    eqn: JaxprEqn, inner: JaxprEqn, makers: Makers, counts: Counts
) -> list[JaxprEqn] | None:
    """What a slice takes along other dims of what is moved round, cut before it is.

    Where that is a slice of what was laid side by side along these.
    """
    cut, (source,) = _jax.cut_dims(eqn), inner.invars
    if inner.params["dimension"] in cut or _joined_behind(source, cut, makers) is None:
        return None
    made, part = _cut_once(eqn, source, cut, makers, counts)
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
