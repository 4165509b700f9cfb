"""Of which rows at known places others are made, and how: what is behind an update, as a recipe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, OfRows, Var
from meshwise.ir.operators import ELEMENTWISE, RESHAPES, SPREADS, is_among
from meshwise.ir.program import shape_of, type_of
from meshwise.simplify.borders.equations import Makers, any_maker, equations_of, maker_of
from meshwise.simplify.borders.updates import MOST_RATIO, Place

# Equations that are looked at behind one update.
MOST_EQUATIONS = 64


class Made(NamedTuple):
    """A value of the recipe, and whether it is of rows that are cut of something."""

    atom: Any
    is_of_rows: bool


Starts = tuple[int, ...]  # the first row in each dim of which there are few


@dataclass
class Recipe:
    """The recipe of what is written at a place, as far as it is found.

    `eqn` writes into `operand` few rows of some `dims`, for those that `replaced` has there. What
    else is read `before` makes. Behind what a loop reads of around it nothing is looked at: that is
    made once.
    """

    eqn: JaxprEqn
    operand: Any
    replaced: Any
    dims: tuple[int, ...]
    place: Place
    makers: Makers
    before: list[JaxprEqn] = field(default_factory=list)
    inputs: dict[tuple[Any, Starts | None], Var] = field(default_factory=dict)
    eqns: list[JaxprEqn] = field(default_factory=list)
    known: dict[Var, Made | None] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is written into."""
        return shape_of(self.operand)

    @property
    def _window(self) -> tuple[int, ...]:
        return tuple(self.place.window)

    @property
    def at(self) -> Starts:
        """The first row that is written, in each of the dims."""
        return self._in_dims(self.place.begin)

    def _in_dims(self, starts: Sequence[int]) -> Starts:
        return tuple([starts[d] for d in self.dims])

    def _has_rows(self, shape: Sequence[int]) -> bool:
        """Whether a shape is that of the rows, but for dims of one element."""
        return [n for n in shape if n != 1] == [n for n in self.place.window if n != 1]

    def of(self, atom: Any) -> Made | None:
        """A value as one of the recipe; None if it is neither such rows nor a number."""
        if isinstance(atom, Literal):
            return None if shape_of(atom) else Made(atom, False)
        if atom not in self.known:
            self.known[atom] = self._of(atom)
        return self.known[atom]

    def _of(self, atom: Var) -> Made | None:
        shape = shape_of(atom)
        eqn = any_maker(atom, self.makers) if self.makers.is_made_here(atom) else None
        if eqn is not None and len(self.known) < MOST_EQUATIONS:
            starts = self._starts(eqn)
            if starts is not None:
                return Made(self.read(self._latest(eqn.invars[0], starts), starts), True)
            if self._is_shown(eqn):
                return self.of(eqn.invars[0])
            found = self._computed(eqn)
            if found is not None:
                return found
        if not shape:
            return Made(self.read(atom, None), False)
        sizes = enumerate(zip(self.shape, self.place.window, strict=True))
        is_whole = all(n == rows for d, (n, rows) in sizes if d not in self.dims)
        return Made(self._given(atom), False) if is_whole and self._has_rows(shape) else None

    def _starts(self, eqn: JaxprEqn) -> Starts | None:
        """The first of the rows that are cut of something; in other dims where they are written."""
        if not _jax.is_plain_slice(eqn) or shape_of(eqn.outvars[0]) != self._window:
            return None
        starts = eqn.params["start_indices"]
        if not self._is_like(eqn.invars[0]):
            return None
        begins = enumerate(self.place.begin)
        is_here = all(begin == starts[d] for d, begin in begins if d not in self.dims)
        return self._in_dims(starts) if is_here else None

    def _is_like(self, source: Any) -> bool:
        """Whether an array may lie as what is written into does: in other dims it is as large."""
        if len(shape_of(source)) != len(self.shape):
            return False
        sizes = enumerate(zip(self.shape, shape_of(source), strict=True))
        return all(
            is_most(min(n, m), max(n, m)) if d in self.dims else n == m for d, (n, m) in sizes
        )

    def _latest(self, source: Any, starts: Starts) -> Any:
        """What is written into, if that has the same rows as what they are cut of.

        So what other rows were written into needs not be held for those that were not.
        """
        own = dict(zip(self.dims, starts, strict=True))
        found = self.operand
        while found is not source:
            before = maker_of(found, self.makers, _jax.set_rows_p.name)
            if before is None:
                return source
            params = before.params
            if not any(
                d in own and not _meet(own[d], self.place.window[d], at, rows)
                for d, at, rows in zip(params["dims"], params["at"], params["rows"], strict=True)
            ):
                return source
            found = before.invars[0]
        return self.operand

    def _is_shown(self, eqn: JaxprEqn) -> bool:
        """Whether something is the same rows in another form, or a number in place of them."""
        if not is_among(eqn, RESHAPES | SPREADS) or len(eqn.invars) != 1:
            return False
        before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
        is_spread = not before and is_among(eqn, SPREADS)
        return self._has_rows(after) and (is_spread or self._has_rows(before))

    def _computed(self, eqn: JaxprEqn) -> Made | None:
        """What is computed of rows, element by element, or has them in the other order."""
        shapes = {shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)} - {()}
        is_known = self._is_turned(eqn) or is_among(eqn, ELEMENTWISE)
        if not is_known or not all(map(self._has_rows, shapes)):
            return None
        given = [made for made in map(self.of, eqn.invars) if made is not None]
        if len(given) < len(eqn.invars) or not any(made.is_of_rows for made in given):
            return None
        made = _jax.new_var(type_of(eqn.outvars[0]))
        self.eqns.append(eqn.replace(invars=[own.atom for own in given], outvars=[made]))
        return Made(made, True)

    def _is_turned(self, eqn: JaxprEqn) -> bool:
        """Whether rows are mirrored; of another array a single one may be read from its other end.

        Where all of that is reversed, and reversed back, this says no more than a slice.
        """
        if eqn.primitive is not lax.rev_p or shape_of(eqn.invars[0]) != self._window:
            return False
        turned = eqn.params["dimensions"]
        if not {*turned} <= {*self.dims}:
            return False
        if max(self.place.window[d] for d in turned) > 1:
            return True
        cut = maker_of(eqn.invars[0], self.makers, "slice")
        if cut is None or (starts := self._starts(cut)) is None:
            return False
        return self._latest(cut.invars[0], starts) is self.operand

    def written_with(self, function: Callable[..., Any], given: Sequence[Any]) -> Var:
        """What is written, by a function of values of the recipe."""
        made = _jax.new_var(type_of(self.operand))
        types = [jax.ShapeDtypeStruct(self._window, type_of(atom).dtype) for atom in given]
        closed = _jax.make_jaxpr_over_axes(function, (), types)
        self.eqns += _jax.in_place_of(self.eqn.replace(outvars=[made]), closed, given)
        return made

    @property
    def old(self) -> Var:
        """The rows that are written over."""
        return self.read(self.replaced, self.at)

    def read(self, atom: Any, starts: Starts | None) -> Var:
        """Rows of an operand from some on, or it itself."""
        return self.inputs.setdefault((atom, starts), _jax.new_var(atom.aval))

    def _given(self, atom: Var) -> Var:
        """Rows that are an operand."""
        window = self._window
        if shape_of(atom) == window:
            return self.read(atom, None)
        rows = _jax.new_var(type_of(atom).update(shape=window))
        own = self.eqn.replace(outvars=[rows])
        self.before += equations_of(own, [atom], lambda x: lax.reshape(x, window)) or ()
        return self.read(rows, None)

    def making(self, made: Any) -> tuple[list[Any], tuple[Starts | None, ...], OfRows]:
        """The operands, from which row on each is read, and what is computed of them."""
        wanted = {made}
        eqns = list[JaxprEqn]()
        for eqn in reversed(self.eqns):
            if eqn.outvars[0] in wanted:
                wanted.update(a for a in eqn.invars if not isinstance(a, Literal))
                eqns.append(eqn)
        read = {key: var for key, var in self.inputs.items() if var in wanted}
        function = OfRows(tuple(read.values()), tuple(eqns[::-1]), made)
        return [atom for atom, _ in read], tuple([starts for _, starts in read]), function


def is_most(rows: int, size: int) -> bool:
    """Whether so many rows are most of a dim, as far as it matters here."""
    return rows * MOST_RATIO >= size


def _meet(start: int, rows: int, at: int, others: int) -> bool:
    """Whether two runs of rows have some in common."""
    return at < start + rows and start < at + others
