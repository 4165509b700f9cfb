"""Windows over what has borders of its own rows around it: one equation, without what is joined.

`jnp.pad(u, 1, mode="wrap")` before a convolution, or `"reflect"`, `"symmetric"` and `"edge"`: by
itself what is joined is shared out anew over the devices, a few rows more for each, and then
windows read it.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import Border, JaxprEqn
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import (
    Makers,
    any_maker,
    equations_of,
    maker_of,
    one_equation,
)
from meshwise.simplify.borders.joins import zero_pad
from meshwise.simplify.borders.shifts import rows_of
from meshwise.simplify.counts import Counts

# At most so many rows lie before an array, or behind it.
MOST = 8


def merge_bordered(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A window over such borders, along dims that it pads with nothing itself."""
    window, params = eqn.primitive, eqn.params
    dims = range(len(shape_of(eqn.invars[0])))
    may_have = {d for d in dims if _may_have_border(eqn, d)}
    made, source, borders = _bordered(eqn, eqn.invars[0], may_have, makers)
    if not borders:
        return None
    padding = [*params["padding"]]
    for border in borders:
        amounts = len(border.before), len(border.after)
        padding[_jax.padded_dim(window, params, border.dim)] = amounts
    more = {"padding": tuple(padding), "borders": tuple(borders), "window": window}
    operands = [source, *eqn.invars[1:]]
    primitive = _jax.BORDERED[window]
    return [*made, _jax.new_eqn(primitive, operands, eqn.outvars, {**params, **more}, eqn)]


def _may_have_border(eqn: JaxprEqn, dim: int) -> bool:
    """Whether a window goes along a dim, and pads or dilates nothing there."""
    at = _jax.padded_dim(eqn.primitive, eqn.params, dim)
    if at < 0 or tuple(eqn.params["padding"][at]) != (0, 0):
        return False
    dilations = eqn.params.get("lhs_dilation", eqn.params.get("base_dilation"))
    return dilations is None or dilations[at] == 1


def _bordered(
    eqn: JaxprEqn, atom: Any, dims: Set[int], makers: Makers
) -> tuple[list[JaxprEqn], Any, list[Border]]:
    """What has borders around it along some dims; these, and what is written for it."""
    maker = any_maker(atom, makers)
    if maker is None:
        return [], atom, []
    if maker.primitive is lax.concatenate_p and maker.params["dimension"] in dims:
        dim = maker.params["dimension"]
        source, runs = rows_of(atom, dim, makers)
        border = _around(runs, dim, shape_of(source)[dim])
        if border is None:
            return [], atom, []
        made, source, borders = _bordered(eqn, source, dims - {dim}, makers)
        return made, source, [*borders, border]
    places = _places(maker)
    if places is None:
        return [], atom, []
    inner = {k for k, d in enumerate(places) if d in dims}
    made, source, borders = _bordered(eqn, maker.invars[0], inner, makers)
    if not borders:
        return [], atom, []
    shape = [1] * len(shape_of(atom))
    for n, d in zip(shape_of(source), places, strict=True):
        shape[d] = n
    own = eqn.replace(outvars=[_jax.var_like(atom, shape)])
    made += equations_of(own, [source], lambda x: lax.broadcast_in_dim(x, shape, places)) or ()
    moved = [Border(places[b.dim], b.before, b.after) for b in borders]
    return made, own.outvars[0], moved


def _around(runs: Sequence[tuple[int, int]], dim: int, size: int) -> Border | None:
    """The border of rows of one value, as runs (first, count), of which one is all of it."""
    if runs.count((0, size)) != 1 or len(runs) == 1:
        return None
    at = runs.index((0, size))
    before, after = (
        tuple(first + k for first, count in part for k in range(count))
        for part in (runs[:at], runs[at + 1 :])
    )
    return Border(dim, before, after) if max(len(before), len(after)) <= MOST else None


def _places(eqn: JaxprEqn) -> list[int] | None:
    """Where the dims of an operand are in what has dims of one element more, and no other ones."""
    if len(eqn.invars) != 1:
        return None
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.primitive is lax.broadcast_in_dim_p:
        places = [*eqn.params["broadcast_dimensions"]]
    elif eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is None:
        # Those that have more than one element, as they come; others anywhere between.
        places, at = list[int](), 0
        for n in before:
            at = next((d for d in range(at, len(after)) if after[d] == n), len(after))
            places.append(at)
            at += 1
    else:
        return None
    others = [n for d, n in enumerate(after) if d not in places]
    kept = len(after) not in places and [after[d] for d in places] == [*before]
    return places if kept and all(n == 1 for n in others) else None


def merge_folded(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A sum of rows of a window and of those beyond their ends, added at the other ends.

    So is the gradient of a window over an array that is wrapped: a window over one that is wrapped.
    """
    added = _added(eqn, makers)
    terms = [_Moved.of(atom, makers) for atom in added]
    for term in filter(None, terms):
        folded = [other for other in terms if other is not None and other.is_beside(term)]
        made = _folded(eqn, folded, makers)
        if made is None:
            continue
        rest = [
            atom
            for atom, other in zip(_added(eqn, makers), terms, strict=True)
            if other not in folded
        ]
        for atom in rest:
            own = made[-1].replace(
                outvars=[_jax.var_like(eqn.outvars[0], shape_of(eqn.outvars[0]))]
            )
            made = [*made[:-1], own, eqn.replace(invars=[own.outvars[0], atom])]
        return made
    return None


@dataclass(frozen=True)
class _Moved:
    """Rows of an array from one on as rows of another one: all of these, or those `inside`."""

    source: Any
    dim: int
    first: int
    inside: range

    def is_beside(self, other: "_Moved") -> bool:
        """Whether both are of one array, along one dim."""
        return self.source is other.source and self.dim == other.dim

    @staticmethod
    def of(atom: Any, makers: Makers) -> "_Moved | None":
        """What is cut along one dim, or what is left of it padded with zeros."""
        eqn = any_maker(atom, makers)
        if eqn is not None and _jax.is_plain_slice(eqn):
            config = [
                (-start, end - n, 0)
                for start, end, n in zip(
                    eqn.params["start_indices"],
                    eqn.params["limit_indices"],
                    shape_of(eqn.invars[0]),
                    strict=True,
                )
            ]
        elif (eqn := zero_pad(atom, makers)) is not None:
            config = [tuple(map(int, amounts)) for amounts in eqn.params["padding_config"]]
        else:
            return None
        moved = [d for d, amounts in enumerate(config) if any(amounts)]
        if len(moved) != 1 or config[moved[0]][2]:
            return None
        (dim,), (low, high, _) = moved, config[moved[0]]
        rows = shape_of(atom)[dim]
        return _Moved(eqn.invars[0], dim, -low, range(max(low, 0), rows - max(high, 0)))


def _added(eqn: JaxprEqn, makers: Makers) -> list[Any]:
    """What a sum is of, where some of that are sums as well."""
    found: list[Any] = []
    for atom in eqn.invars:
        inner = maker_of(atom, makers, eqn.primitive.name)
        found += [atom] if inner is None or len(found) > MOST else _added(inner, makers)
    return found


def _folded(eqn: JaxprEqn, terms: Sequence[_Moved], makers: Makers) -> list[JaxprEqn] | None:
    """A window round the end of a dim, if it is that which is folded there."""
    source, dim, shape = terms[0].source, terms[0].dim, shape_of(eqn.outvars[0])
    size, total = shape[dim], shape_of(source)[dim]
    main = [term.first for term in terms if term.inside == range(size)]
    if len(main) != 1 or not 0 < total - size <= size:
        return None
    before, after = main[0], total - size - main[0]
    ends = {
        (before, range(size)),
        (before + size, range(after)),
        (before - size, range(size - before, size)),
    }
    if {(t.first, t.inside) for t in terms} != {end for end in ends if end[1]} or after < 0:
        return None
    maker, place, dropped = any_maker(source, makers), dim, ()
    if maker is not None and _drops_units(maker):
        dropped = maker.params["axes" if maker.primitive is lax.reduce_sum_p else "dimensions"]
        place = [d for d in range(len(shape_of(maker.invars[0]))) if d not in dropped][dim]
        maker = any_maker(maker.invars[0], makers)
    border = Border(place, tuple(range(size - after, size)), tuple(range(before)))
    window = None if maker is None else _going_round(maker, border, size)
    if window is None:
        return None
    if not dropped:
        return [window.replace(outvars=eqn.outvars)]
    return [window, *one_equation(eqn, lax.squeeze_p, window.outvars, dimensions=tuple(dropped))]


def _drops_units(eqn: JaxprEqn) -> bool:
    """Whether dims of one element are left out, or summed over."""
    drops = eqn.primitive in (lax.reduce_sum_p, lax.squeeze_p)
    return drops and prod(shape_of(eqn.invars[0])) == prod(shape_of(eqn.outvars[0]))


def _going_round(eqn: JaxprEqn, border: Border, size: int) -> JaxprEqn | None:
    """The window that goes round in the place of one that reads all places it may along a dim.

    None of anything else: of a window that is not a sum, or reads the same place twice.
    """
    window, params = eqn.params.get("window", eqn.primitive), eqn.params
    if window not in (lax.conv_general_dilated_p, lax.reduce_window_sum_p):
        return None
    at = _jax.padded_dim(window, params, border.dim)
    if at < 0 or any(other.dim == border.dim for other in params.get("borders", ())):
        return None
    if window is lax.conv_general_dilated_p:
        kernel = shape_of(eqn.invars[1])[params["dimension_numbers"].rhs_spec[2 + at]]
        dilation, base = params["rhs_dilation"][at], params["lhs_dilation"][at]
    else:
        kernel = params["window_dimensions"][at]
        dilation, base = params["window_dilation"][at], params["base_dilation"][at]
    reach = (kernel - 1) * dilation
    is_full = tuple(params["padding"][at]) == (reach, reach) and params["window_strides"][at] == 1
    is_around = len(border.before) + len(border.after) == reach < size
    if not (is_full and is_around and base == 1 and shape_of(eqn.invars[0])[border.dim] == size):
        return None
    shape, padding = list(shape_of(eqn.outvars[0])), [*params["padding"]]
    result = border.dim
    if window is lax.conv_general_dilated_p:
        result = params["dimension_numbers"].out_spec[2 + at]
    shape[result] = size
    padding[at] = len(border.before), len(border.after)
    borders = (*params.get("borders", ()), border)
    more = {"padding": tuple(padding), "borders": borders, "window": window}
    outs = [_jax.var_like(eqn.outvars[0], shape)]
    return _jax.new_eqn(_jax.BORDERED[window], eqn.invars, outs, {**params, **more}, eqn)
