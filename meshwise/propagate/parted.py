"""Rows in parts, written: what lies side by side is cut, joined and spread, in place of others."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.bodies import OUTERMOST, Scope
from meshwise.ir.operators import SPREADS, is_among
from meshwise.ir.program import Program, shape_of
from meshwise.simplify.borders.merge import Merging
from meshwise.simplify.counts import Counts


class Writing:
    """The equations `made` in place of one, in a body, each merged with what it is of."""

    def __init__(self, given: Program):
        """Nothing is written yet."""
        flat, equations = given.jaxpr.jaxpr, given.equations
        constants = dict(zip(flat.constvars, given.jaxpr.consts, strict=True))
        self.merging = Merging(equations, Counts(equations, constants), shares=False)
        self._here: Scope = OUTERMOST
        self.made: list[JaxprEqn] = []

    def begin(self, scope: Scope) -> None:
        """Go on with what stands in place of another equation."""
        self._here, self.made = scope, []

    def keep(self, eqn: JaxprEqn) -> None:
        """Leave an equation as it is."""
        self.merging.add([eqn], self._here)

    def parted(
        self,
        eqn: JaxprEqn,
        parts: Sequence[Any],
        dim: int,
        count: int,
        first: int,
        main: Any = None,
    ) -> tuple[Any, ...]:
        """What lies side by side as so many main rows from one on, and single ones around them.

        The main ones may be known otherwise.
        """
        total = sum(size_of(part, dim) for part in parts)
        ends = [*range(first + 1), *range(first + count, total + 1)]
        return tuple(
            [
                self.join(eqn, self.cut(eqn, parts, dim, start, end), dim)
                if main is None or start != first
                else main
                for start, end in pairwise(ends)
            ]
        )

    def cut(
        self, eqn: JaxprEqn, parts: Sequence[Any], dim: int, start: int, limit: int
    ) -> list[Any]:
        """Of what lies side by side the rows between two."""
        found, at = [], 0
        for part in parts:
            size = size_of(part, dim)
            begin, end = max(start - at, 0), min(limit - at, size)
            if end - begin == size:
                found.append(part)
            elif end > begin:
                starts, limits = [0] * len(shape_of(part)), list(shape_of(part))
                starts[dim], limits[dim] = begin, end
                found.append(self.slice(eqn, part, starts, limits))
            at += size
        return found

    def slice(self, eqn: JaxprEqn, atom: Any, starts: Sequence[int], limits: Sequence[int]) -> Any:
        """A part of an array; of a number that is repeated so many of it."""
        shape = [end - start for start, end in zip(starts, limits, strict=True)]
        maker = self.merging.maker(atom)
        if maker is not None and is_among(maker, SPREADS) and not shape_of(maker.invars[0]):
            return self.spread(eqn, maker.invars[0], shape, atom)
        params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
        return self.emit(eqn, lax.slice_p, [atom], params, _jax.var_like(atom, shape))

    def join(self, eqn: JaxprEqn, parts: Sequence[Any], dim: int, result: Any = None) -> Any:
        """Rows side by side, of one array maybe."""
        if len(parts) == 1:
            return parts[0] if result is None else self.emit(eqn, lax.copy_p, parts, {}, result)
        shape = list(shape_of(parts[0]))
        shape[dim] = sum(size_of(part, dim) for part in parts)
        made = _jax.var_like(eqn.outvars[0], shape) if result is None else result
        return self.emit(eqn, lax.concatenate_p, parts, {"dimension": dim}, made)

    def roll(self, eqn: JaxprEqn, atom: Any, dim: int, shift: int) -> Any:
        """Rows moved on by so many, round the end."""
        shift %= size_of(atom, dim)
        params = {"dimension": dim, "shift": shift}
        made = _jax.var_like(atom, shape_of(atom))
        return self.emit(eqn, _jax.roll_p, [atom], params, made) if shift else atom

    def row_of(self, eqn: JaxprEqn, number: Any, like: Any, dim: int) -> Any:
        """A row of a number, as those of an array are."""
        shape = list(shape_of(like))
        shape[dim] = 1
        return self.spread(eqn, number, shape, like)

    def spread(self, eqn: JaxprEqn, number: Any, shape: Sequence[int], like: Any) -> Any:
        """An array of a number."""
        params = {"shape": tuple(shape), "broadcast_dimensions": (), "sharding": None}
        return self.emit(eqn, lax.broadcast_in_dim_p, [number], params, _jax.var_like(like, shape))

    def emit(
        self, eqn: JaxprEqn, primitive: Any, operands: Sequence[Any], params: Any, result: Any
    ) -> Any:
        """One more equation in place of another, merged with what it is of."""
        made = _jax.new_eqn(primitive, list(operands), [result], params, eqn)
        found = self.merging.merged(made, self._here)
        if primitive is lax.concatenate_p and found == [made]:
            found = self.merging.shifted(made)
        self.merging.add(found, self._here)
        self.made += found
        return result


def size_of(atom: Any, dim: int) -> int:
    """How many rows of a dim an array has."""
    return shape_of(atom)[dim]
