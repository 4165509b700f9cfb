"""Sums of what is cut of an array, and of its ends at the other ends: gradients of what is wrapped.

The gradient of a window over an array that is wrapped is a window over one that is wrapped, and
that of neighbours on a circle is a sum of what is moved round.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import Border, JaxprEqn
from meshwise.ir.operators import is_among
from meshwise.ir.program import shape_of
from meshwise.simplify.borders.equations import Makers, any_maker, one_equation
from meshwise.simplify.borders.joins import zero_pad
from meshwise.simplify.counts import Counts

# Of so many terms, and one more.
MOST_TERMS = 128
_SUMS = frozenset({"add", "add_any"})


def merge_folded(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A sum of rows of a window and of those beyond their ends, added at the other ends.

    So is the gradient of a window over an array that is wrapped: a window over one that is wrapped.
    """
    if all(_Moved.of(atom, makers) is None for atom in eqn.invars):
        return None
    added = _added(eqn, makers)
    terms = [_Moved.of(atom, makers) for atom in added]
    for term in filter(None, terms):
        folded = [other for other in terms if other is not None and other.is_beside(term)]
        made = _folded(eqn, folded, makers)
        if made is None:
            continue
        rest = [atom for atom, other in zip(added, terms, strict=True) if other not in folded]
        for atom in rest:
            own = _jax.var_like(eqn.outvars[0], shape_of(eqn.outvars[0]))
            made = [*made[:-1], made[-1].replace(outvars=[own]), eqn.replace(invars=[own, atom])]
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
    waiting = eqn.invars[::-1]
    while waiting:
        atom = waiting.pop()
        inner = any_maker(atom, makers)
        is_sum = inner is not None and is_among(inner, _SUMS)
        if inner is not None and is_sum and len(found) + len(waiting) < MOST_TERMS:
            waiting += inner.invars[::-1]
        else:
            found.append(atom)
    return found


def _folded(eqn: JaxprEqn, terms: Sequence[_Moved], makers: Makers) -> list[JaxprEqn] | None:
    """A window round the end of a dim, if it is that which is folded there."""
    source, dim, shape = terms[0].source, terms[0].dim, shape_of(eqn.outvars[0])
    size, total = shape[dim], shape_of(source)[dim]
    main = [term.first for term in terms if term.inside == range(size)]
    if len(main) != 1 or not 0 < total - size <= size:
        return None
    before, after = main[0], total - size - main[0]
    ends = [
        (before, range(size)),
        (before + size, range(after)),
        (before - size, range(size - before, size)),
    ]
    wanted = Counter(end for end in ends if end[1])
    if after < 0 or Counter((term.first, term.inside) for term in terms) != wanted:
        return None
    summed = _sum_going_round(eqn, source, dim, before, makers)
    if summed is not None:
        return summed
    maker, place, dropped = any_maker(source, makers), dim, ()
    if maker is not None and _drops_units(maker):
        dropped = _dropped(maker)
        place = [d for d in range(len(shape_of(maker.invars[0]))) if d not in dropped][dim]
        maker = any_maker(maker.invars[0], makers)
    around = tuple(range(size - after, size)), tuple(range(before))
    window = None if maker is None else _going_round(maker, place, around, size)
    if window is None:
        return None
    if not dropped:
        return [window.replace(outvars=eqn.outvars)]
    return [window, *one_equation(eqn, lax.squeeze_p, window.outvars, dimensions=tuple(dropped))]


def _sum_going_round(
    eqn: JaxprEqn, source: Any, dim: int, before: int, makers: Makers
) -> list[JaxprEqn] | None:
    """Arrays that are padded, added up and folded: each is moved round, those alike as one sum."""
    sum_of = any_maker(source, makers)
    atoms = [source] if sum_of is None or not is_among(sum_of, _SUMS) else _added(sum_of, makers)
    size = shape_of(eqn.outvars[0])[dim]
    # By how they are padded along other dims, and how far they are moved along this one.
    alike: dict[Any, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    fill: Any = None  # zero, as all of them have it
    for atom in atoms:
        pad = zero_pad(atom, makers)
        if pad is None or shape_of(pad.invars[0])[dim] != size:
            return None
        config = [tuple(map(int, amounts)) for amounts in pad.params["padding_config"]]
        if min(config[dim]) < 0 or config[dim][2]:
            return None
        others = tuple((0, 0, 0) if d == dim else own for d, own in enumerate(config))
        alike[others][(config[dim][0] - before) % size].append(pad.invars[0])
        fill = pad.invars[1]
    made: list[JaxprEqn] = []

    def emit(primitive: Any, operands: Sequence[Any], shape: Sequence[int], **params: Any) -> Any:
        own = eqn.replace(outvars=[_jax.var_like(eqn.outvars[0], shape)])
        made.extend(one_equation(own, primitive, operands, **params))
        return own.outvars[0]

    def total(values: Sequence[Any]) -> Any:
        return reduce(lambda a, b: emit(eqn.primitive, [a, b], shape_of(a), **eqn.params), values)

    sums: list[Any] = []
    for config, by_shift in alike.items():
        moved = []
        for shift, values in by_shift.items():
            value = total(values)
            what = {"dimension": dim, "shift": shift}
            moved.append(emit(_jax.roll_p, [value], shape_of(value), **what) if shift else value)
        value = total(moved)
        if any(map(any, config)):
            shape = shape_of(eqn.outvars[0])
            value = emit(lax.pad_p, [value, fill], shape, padding_config=config)
        sums.append(value)
    found = total(sums)
    if not made or made[-1].outvars != [found]:
        return [*made, *one_equation(eqn, lax.copy_p, [found])]
    return [*made[:-1], made[-1].replace(outvars=eqn.outvars)]


def _dropped(eqn: JaxprEqn) -> Sequence[int]:
    """The dims that a sum, or a squeeze, leaves out."""
    return eqn.params["axes" if eqn.primitive is lax.reduce_sum_p else "dimensions"]


def _drops_units(eqn: JaxprEqn) -> bool:
    """Whether dims of one element are left out, or summed over."""
    drops = eqn.primitive in (lax.reduce_sum_p, lax.squeeze_p)
    return drops and all(shape_of(eqn.invars[0])[d] == 1 for d in _dropped(eqn))


def _going_round(
    eqn: JaxprEqn, dim: int, around: tuple[tuple[int, ...], tuple[int, ...]], size: int
) -> JaxprEqn | None:
    """The window that goes round, with rows around, where one reads all it may along a dim.

    The dim is one of its result. None of anything else: of a window that is not a sum, or reads the
    same place twice.
    """
    window, params = eqn.params.get("window", eqn.primitive), eqn.params
    if window not in (lax.conv_general_dilated_p, lax.reduce_window_sum_p):
        return None
    at = _padded_of_result(window, params, dim)
    if at < 0:
        return None
    numbers = params.get("dimension_numbers")
    border = Border(dim if numbers is None else numbers.lhs_spec[2 + at], *around)
    if any(other.dim == border.dim for other in params.get("borders", ())):
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
    shape = list(shape_of(eqn.outvars[0]))
    shape[dim] = size
    return _jax.with_borders(eqn, eqn.invars[0], [border], [_jax.var_like(eqn.outvars[0], shape)])


def _padded_of_result(window: Any, params: Any, dim: int) -> int:
    """Which of the amounts that a window pads is that of a dim of its result; -1 for none."""
    if window is not lax.conv_general_dilated_p:
        return dim
    spatial = params["dimension_numbers"].out_spec[2:]
    return spatial.index(dim) if dim in spatial else -1
