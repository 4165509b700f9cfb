"""Few rows at a known place that are made of few rows at known places, as walls of a simulation.

`u.at[0].set(u[1])`, `v.at[-1].set(-v[-2])`, `u.at[1:-1, 0].set(2 * u[1:-1, 1] - u[1:-1, 2])`: by
itself each row that is read would go to every device, of which one writes it. As one equation it
goes to that device alone, which mostly has it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, OfRows, Var
from meshwise.ir.operators import ELEMENTWISE, RESHAPES, SPREADS, is_among
from meshwise.ir.program import overwrites, shape_of, type_of
from meshwise.simplify.borders.equations import (
    Makers,
    any_maker,
    equations_of,
    maker_of,
    one_equation,
)
from meshwise.simplify.borders.joins import zero_pad
from meshwise.simplify.borders.rows import merge_pad
from meshwise.simplify.borders.shifts import rows_of
from meshwise.simplify.borders.updates import (
    MOST_RATIO,
    Place,
    dynamic_place,
    window_of,
    written,
)
from meshwise.simplify.counts import Counts

# What part of a dim the many rows are at least, beside which few others are laid.
MOST_PART = 2
# Equations that are looked at behind one update.
MOST_EQUATIONS = 64
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

    Zero is added to the other rows as it was, which makes 0.0 of -0.0.
    """
    for operand, other in (eqn.invars, eqn.invars[::-1]):
        pad = None if isinstance(operand, Literal) else zero_pad(other, makers)
        if pad is None:
            continue
        before = _among_zeros(eqn, operand, makers) or []
        summed = eqn.replace(outvars=[_jax.new_var(type_of(eqn.outvars[0]))])
        x = before[-1].outvars[0] if before else operand
        found = _set_padded(summed, x, pad, lax.add, makers)
        if found is not None:
            given = [summed.outvars[0], pad.invars[1]]
            return [*before, *found, *one_equation(eqn, lax.add_p, given)]
    return None


def _among_zeros(eqn: JaxprEqn, atom: Any, makers: Makers) -> list[JaxprEqn] | None:
    """Such rows that are padded themselves, written among zeros."""
    pad = zero_pad(atom, makers)
    if pad is None:
        return None
    zeros, rows = (eqn.replace(outvars=[_jax.new_var(type_of(atom))]) for _ in "ab")
    spread = equations_of(zeros, [pad.invars[1]], lambda x: lax.broadcast(x, shape_of(atom)))
    found = _set_padded(rows, zeros.outvars[0], pad, None, makers)
    return None if found is None or spread is None else [*spread, *found]


def _set_padded(
    eqn: JaxprEqn, operand: Any, pad: JaxprEqn, join: Join | None, makers: Makers
) -> list[JaxprEqn] | None:
    """What is padded with zeros, written into an array in its place."""
    amounts = [tuple(map(int, own)) for own in pad.params["padding_config"]]
    if any(min(low, high) < 0 or gap for low, high, gap in amounts):
        return None
    begin = [low for low, _, _ in amounts]
    place = Place(begin, shape_of(pad.invars[0]), [1] * len(begin))
    return _set(eqn, operand, pad.invars[0], place, join, makers)


def merge_concatenate(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """Many rows, and few that are made of rows at known places of others, laid side by side.

    Rows of one value may be a choice between shifts of it, which takes no update (`shifts.py`).
    """
    dim, shape = eqn.params["dimension"], shape_of(eqn.outvars[0])
    sizes = [shape_of(part)[dim] for part in eqn.invars]
    begins = [0, *accumulate(sizes)]
    most = sizes.index(max(sizes))
    if sizes[most] * MOST_PART < shape[dim] or 0 in sizes:
        return None
    if len({rows_of(part, dim, makers)[0] for part in eqn.invars}) == 1:
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
) -> list[JaxprEqn] | None:
    """Rows of one dim written, maybe joined with what was there, in place of an equation.

    None where they are many, or not made of rows at known places.
    """
    shape = shape_of(operand)
    if jnp.issubdtype(type_of(operand).dtype, jax.dtypes.extended) or not place.is_inside(shape):
        return None
    cut = [d for d, (n, rows) in enumerate(zip(shape, place.window, strict=True)) if n != rows]
    narrow = [d for d in cut if place.window[d] == 1 or place.window[d] * MOST_RATIO < shape[d]]
    if len(narrow) != 1:
        return None
    (dim,) = narrow
    found = _Rows(eqn, operand, dim, place, makers)
    made = found.of(new)
    if made is None or not made.is_of_rows:
        return None
    result, before = made.atom, list[JaxprEqn]()
    if join is not None:
        result = found.written_with(join, [found.old, result])
    if len(cut) > 1:  # the rest of these rows is written as it was
        mask, before = _mask(eqn, dim, place, shape)
        given = [found.read(mask, None), result, found.old]
        result = found.written_with(lax.select, given)
    operands, starts, function = found.recipe(result)
    where = {"dimension": dim, "at": place.begin[dim], "rows": place.window[dim]}
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
    eqn: JaxprEqn, dim: int, place: Place, shape: Sequence[int]
) -> tuple[Var, list[JaxprEqn]]:
    """Which elements of the rows are written, where they are not written whole."""
    sizes = [place.window[d] if d == dim else n for d, n in enumerate(shape)]

    def inside() -> Any:
        ends = zip(place.begin, place.window, sizes, strict=True)
        amounts = [(0, 0, 0) if d == dim else (b, n - b - w, 0) for d, (b, w, n) in enumerate(ends)]
        masks = [mask for d, own in enumerate(amounts) for mask in written(sizes, d, own)]
        found = masks[0]
        for mask in masks[1:]:
            found = lax.bitwise_and(found, mask)
        return found

    closed = _jax.make_jaxpr_over_axes(inside, (), [])
    (aval,) = closed.out_avals
    mask = _jax.new_var(aval)
    return mask, _jax.in_place_of(eqn.replace(outvars=[mask]), closed, [])


class _Made(NamedTuple):
    """A value of the recipe, and whether it is of rows that are cut of something."""

    atom: Any
    is_of_rows: bool


@dataclass
class _Rows:
    """The recipe of what is written at a place, as far as it is found.

    `eqn` writes into `operand`. `before` are equations that make what else is read.
    """

    eqn: JaxprEqn
    operand: Any
    dim: int
    place: Place
    makers: Makers
    before: list[JaxprEqn] = field(default_factory=list)
    inputs: dict[tuple[Any, int | None], Var] = field(default_factory=dict)
    eqns: list[JaxprEqn] = field(default_factory=list)
    known: dict[Var, _Made | None] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is written into."""
        return shape_of(self.operand)

    @property
    def _forms(self) -> Sequence[tuple[int, ...]]:
        """The shapes that rows may have: with their dim, and of one row without."""
        window = tuple(self.place.window)
        return [window, window[: self.dim] + window[self.dim + 1 :]][: 1 + (window[self.dim] == 1)]

    def of(self, atom: Any) -> _Made | None:
        """A value as one of the recipe; None if it is neither such rows nor a number."""
        if isinstance(atom, Literal):
            return None if shape_of(atom) else _Made(atom, False)
        if atom not in self.known:
            self.known[atom] = self._of(atom)
        return self.known[atom]

    def _of(self, atom: Var) -> _Made | None:
        eqn, shape = any_maker(atom, self.makers), shape_of(atom)
        if eqn is not None and len(self.known) < MOST_EQUATIONS:
            start = self._start(eqn)
            if start is not None:
                return _Made(self.read(self._latest(eqn.invars[0], start), start), True)
            if self._is_shown(eqn):
                return self.of(eqn.invars[0])
            found = self._computed(eqn)
            if found is not None:
                return found
        if not shape:
            return _Made(self.read(atom, None), False)
        is_whole = all(
            n == rows
            for d, (n, rows) in enumerate(zip(self.shape, self.place.window, strict=True))
            if d != self.dim
        )
        return _Made(self._given(atom), False) if is_whole and shape in self._forms else None

    def _start(self, eqn: JaxprEqn) -> int | None:
        """The first row of those that are cut of something, in the place where they are written."""
        cut = maker_of(eqn.outvars[0], self.makers, "slice")
        if cut is None or any(step != 1 for step in cut.params["strides"] or ()):
            return None
        starts = cut.params["start_indices"]
        if not self._is_like(cut.invars[0]) or shape_of(eqn.outvars[0]) != self._forms[0]:
            return None
        begins = enumerate(self.place.begin)
        is_here = all(begin == starts[d] for d, begin in begins if d != self.dim)
        return starts[self.dim] if is_here else None

    def _is_like(self, source: Any) -> bool:
        """Whether an array may lie as what is written into does: but for the dim it is as large."""
        own, other = list(self.shape), list(shape_of(source))
        if len(own) != len(other):
            return False
        rows, others = own.pop(self.dim), other.pop(self.dim)
        return own == other and max(rows, others) <= MOST_RATIO * min(rows, others)

    def _latest(self, source: Any, start: int) -> Any:
        """What is written into, if that has the same rows as what they are cut of.

        So what other rows were written into needs not be held for those that were not.
        """
        rows, found = self.place.window[self.dim], self.operand
        while found is not source:
            before = maker_of(found, self.makers, _jax.set_rows_p.name)
            if before is None or before.params["dimension"] != self.dim:
                return source
            at = before.params["at"]
            if at < start + rows and start < at + before.params["rows"]:
                return source
            found = before.invars[0]
        return self.operand

    def _is_shown(self, eqn: JaxprEqn) -> bool:
        """Whether something is the same rows in their other form, or a number in place of them."""
        after = shape_of(eqn.outvars[0])
        if after not in self._forms or not is_among(eqn, RESHAPES | SPREADS):
            return False
        before = shape_of(eqn.invars[0])
        if is_among(eqn, SPREADS):
            dims = tuple(d for d in range(len(after)) if d != self.dim or len(before) == len(after))
            return not before or tuple(eqn.params["broadcast_dimensions"]) == dims
        return before in self._forms

    def _computed(self, eqn: JaxprEqn) -> _Made | None:
        """What is computed of rows, element by element, or has them in the other order."""
        shapes = {shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)}
        is_known = self._is_turned(eqn) or is_among(eqn, ELEMENTWISE)
        if not is_known or not shapes <= {(), *self._forms}:
            return None
        given = [made for made in map(self.of, eqn.invars) if made is not None]
        if len(given) < len(eqn.invars) or not any(made.is_of_rows for made in given):
            return None
        made = _jax.new_var(type_of(eqn.outvars[0]))
        self.eqns.append(eqn.replace(invars=[own.atom for own in given], outvars=[made]))
        return _Made(made, True)

    def _is_turned(self, eqn: JaxprEqn) -> bool:
        """Whether rows are mirrored; of another array a single one may be read from its other end.

        Where all of that is reversed, and reversed back, this says no more than a slice.
        """
        if eqn.primitive is not lax.rev_p or eqn.params["dimensions"] != (self.dim,):
            return False
        if self.place.window[self.dim] > 1:
            return True
        cut = maker_of(eqn.invars[0], self.makers, "slice")
        if cut is None or (start := self._start(cut)) is None:
            return False
        return self._latest(cut.invars[0], start) is self.operand

    def written_with(self, function: Callable[..., Any], given: Sequence[Any]) -> Var:
        """What is written, by a function of values of the recipe."""
        shape, made = tuple(self.place.window), _jax.new_var(type_of(self.operand))
        types = [jax.ShapeDtypeStruct(shape, type_of(atom).dtype) for atom in given]
        closed = _jax.make_jaxpr_over_axes(function, (), types)
        self.eqns += _jax.in_place_of(self.eqn.replace(outvars=[made]), closed, given)
        return made

    @property
    def old(self) -> Var:
        """The rows that are written over."""
        return self.read(self.operand, self.place.begin[self.dim])

    def read(self, atom: Any, start: int | None) -> Var:
        """Rows of an operand from one on, or it itself."""
        return self.inputs.setdefault((atom, start), _jax.new_var(atom.aval))

    def _given(self, atom: Var) -> Var:
        """Rows that are an operand."""
        window = tuple(self.place.window)
        if shape_of(atom) == window:
            return self.read(atom, None)
        rows = _jax.new_var(type_of(atom).update(shape=window))
        own = self.eqn.replace(outvars=[rows])
        self.before += equations_of(own, [atom], lambda x: lax.expand_dims(x, [self.dim])) or ()
        return self.read(rows, None)

    def recipe(self, made: Any) -> tuple[list[Any], tuple[int | None, ...], OfRows]:
        """The operands, from which row on each is read, and what is computed of them."""
        wanted = {made}
        eqns = list[JaxprEqn]()
        for eqn in reversed(self.eqns):
            if eqn.outvars[0] in wanted:
                wanted.update(a for a in eqn.invars if not isinstance(a, Literal))
                eqns.append(eqn)
        read = {key: var for key, var in self.inputs.items() if var in wanted}
        function = OfRows(tuple(read.values()), tuple(eqns[::-1]), made)
        return [atom for atom, _ in read], tuple(start for _, start in read), function
