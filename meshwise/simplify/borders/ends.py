"""Few rows at a known place that are made of few rows at known places, as walls of a simulation.

`u.at[0].set(u[1])`, `v.at[-1].set(-v[-2])`, `u.at[1:-1, 0].set(2 * u[1:-1, 1] - u[1:-1, 2])`: by
itself each row that is read would go to every device, of which one writes it. As one equation it
goes to that device alone, which mostly has it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import overwrites, shape_of, type_of
from meshwise.simplify.borders.equations import (
    Makers,
    equations_of,
    one_equation,
)
from meshwise.simplify.borders.joins import zero_pad
from meshwise.simplify.borders.recipes import Recipe, is_most
from meshwise.simplify.borders.rows import merge_pad
from meshwise.simplify.borders.shifts import near_runs, one_source
from meshwise.simplify.borders.updates import (
    Place,
    dynamic_place,
    window_of,
    written,
)
from meshwise.simplify.counts import Counts

# The many rows, beside which few others are laid, are more than one in so many of a dim's.
MOST_PART = 2
Join = Callable[[Any, Any], Any]
_JOINS: Mapping[str, Join] = {
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
}


def merge_update(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """An update of few rows at a known place, by what is made of rows at known places."""
    name, place = eqn.primitive.name, _place_of(eqn, makers, counts)
    if place is None:
        return None
    operand, new = eqn.invars[0], eqn.invars[1 if name == "dynamic_update_slice" else 2]
    return _set(eqn, operand, new, place, _JOINS.get(name), makers)


def merge_add(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """The sum of an array and of such rows, padded with zeros, as gradients of walls are.

    Zero is added to the other rows as it was, which makes 0.0 of -0.0 unless XLA leaves it out.
    """
    for operand, other in (eqn.invars, eqn.invars[::-1]):
        pad = None if isinstance(operand, Literal) else zero_pad(other, makers)
        if pad is None:
            continue
        before = _among_zeros(eqn, operand, makers) or []
        x = before[-1].outvars[0] if before else operand
        rest = eqn.replace(outvars=[_jax.new_var(type_of(eqn.outvars[0]))])
        found = _set_padded(eqn, rest.outvars[0], pad, makers, lax.add, x)
        if found is not None:
            return [*before, *one_equation(rest, lax.add_p, [x, pad.invars[1]]), *found]
    return None


def _among_zeros(eqn: JaxprEqn, atom: Any, makers: Makers) -> list[JaxprEqn] | None:
    """Such rows that are padded themselves, written among zeros."""
    pad = zero_pad(atom, makers)
    if pad is None:
        return None
    zeros, rows = (eqn.replace(outvars=[_jax.new_var(type_of(atom))]) for _ in "ab")
    spread = equations_of(zeros, [pad.invars[1]], lambda x: lax.broadcast(x, shape_of(atom)))
    found = _set_padded(rows, zeros.outvars[0], pad, makers)
    return None if found is None or spread is None else [*spread, *found]


def _set_padded(
    eqn: JaxprEqn,
    operand: Any,
    pad: JaxprEqn,
    makers: Makers,
    join: Join | None = None,
    replaced: Any = None,
) -> list[JaxprEqn] | None:
    """What is padded with zeros, written into an array in its place."""
    amounts = [tuple(map(int, own)) for own in pad.params["padding_config"]]
    if any(min(low, high) < 0 or gap for low, high, gap in amounts):
        return None
    begin = [low for low, _, _ in amounts]
    place = Place(begin, shape_of(pad.invars[0]), [1] * len(begin))
    return _set(eqn, operand, pad.invars[0], place, join, makers, replaced)


def merge_concatenate(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """Many rows, and few that are made of rows at known places of others, laid side by side.

    Rows of one value near where they were are a choice between shifts of it (`shifts.py`); of what
    they make longer parts are read, which are that.
    """
    dim, shape = eqn.params["dimension"], shape_of(eqn.outvars[0])
    sizes = [shape_of(part)[dim] for part in eqn.invars]
    begins = [0, *accumulate(sizes)]
    most = sizes.index(max(sizes))
    if sizes[most] * MOST_PART <= shape[dim] or 0 in sizes:
        return None
    source = one_source(eqn, makers)
    is_longer = source is not None and shape_of(source)[dim] != shape[dim]
    if is_longer or near_runs(eqn, makers) is not None:
        return None

    def spread(x: Any) -> Any:
        around = begins[most], shape[dim] - begins[most + 1], 0
        config = [around if d == dim else (0, 0, 0) for d in range(len(shape))]
        return lax.pad(x, np.zeros((), x.dtype), config)

    written = _jax.new_var(type_of(eqn.outvars[0]))
    found = equations_of(eqn.replace(outvars=[written]), [eqn.invars[most]], spread)
    if found is None:
        return None
    found = merge_pad(found[-1], makers, counts) or found
    for k in [k for k in range(len(sizes)) if k != most]:
        begin = [begins[k] if d == dim else 0 for d in range(len(shape))]
        place = Place(begin, shape_of(eqn.invars[k]), [1] * len(shape))
        own = eqn.replace(outvars=[_jax.new_var(type_of(eqn.outvars[0]))])
        more = _set(own, written, eqn.invars[k], place, None, makers)
        if more is None:
            return None
        found, (written,) = [*found, *more], own.outvars
    return [*found[:-1], found[-1].replace(outvars=eqn.outvars)]


def _set(
    eqn: JaxprEqn,
    operand: Any,
    new: Any,
    place: Place,
    join: Join | None,
    makers: Makers,
    replaced: Any = None,
) -> list[JaxprEqn] | None:
    """Rows written, maybe joined with what was there, or in another value, in place of an equation.

    None where they are many, or not made of rows at known places.
    """
    shape = shape_of(operand)
    if jnp.issubdtype(type_of(operand).dtype, jax.dtypes.extended) or not place.is_inside(shape):
        return None
    cut = [d for d, (n, rows) in enumerate(zip(shape, place.window, strict=True)) if n != rows]
    dims = tuple([d for d in cut if place.window[d] == 1 or not is_most(place.window[d], shape[d])])
    if not dims:
        return None
    found = Recipe(eqn, operand, operand if replaced is None else replaced, dims, place, makers)
    made = found.of(new)
    if made is None or not made.is_of_rows:
        return None
    result, before = made.atom, list[JaxprEqn]()
    if join is not None:
        result = found.written_with(join, [found.old, result])
    if len(cut) > len(dims):  # the rest of these rows is written as it was
        mask, before = _mask(eqn, dims, place, shape)
        given = [found.read(mask, None), result, found.old]
        result = found.written_with(lax.select, given)
    operands, starts, function = found.making(result)
    where = {"dims": dims, "at": found.at, "rows": tuple([place.window[d] for d in dims])}
    written = one_equation(
        eqn, _jax.set_rows_p, [operand, *operands], **where, starts=starts, function=function
    )
    return [*before, *found.before, *written]


def _place_of(eqn: JaxprEqn, makers: Makers, counts: Counts) -> Place | None:
    if eqn.primitive.name == "dynamic_update_slice":
        return dynamic_place(eqn, counts)
    numbers = eqn.params["dimension_numbers"]
    is_one = len(shape_of(eqn.invars[1])) == 1 and not numbers.operand_batching_dims
    is_known = overwrites(eqn) or eqn.primitive.name in _JOINS
    return window_of(eqn, makers, counts) if is_one and is_known else None


def _mask(
    eqn: JaxprEqn, dims: Sequence[int], place: Place, shape: Sequence[int]
) -> tuple[Var, list[JaxprEqn]]:
    """Which elements of the rows are written, where they are not written whole."""
    sizes = [place.window[d] if d in dims else n for d, n in enumerate(shape)]

    def inside() -> Any:
        ends = enumerate(zip(place.begin, place.window, sizes, strict=True))
        amounts = [(0, 0, 0) if d in dims else (b, n - b - w, 0) for d, (b, w, n) in ends]
        masks = [mask for d, own in enumerate(amounts) for mask in written(sizes, d, own)]
        found = masks[0]
        for mask in masks[1:]:
            found = lax.bitwise_and(found, mask)
        return found

    closed = _jax.make_jaxpr_over_axes(inside, (), [])
    (aval,) = closed.out_avals
    mask = _jax.new_var(aval)
    return mask, _jax.in_place_of(eqn.replace(outvars=[mask]), closed, [])
