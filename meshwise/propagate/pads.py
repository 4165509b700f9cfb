"""Pads of what is computed of slices: shifts of what is sliced.

A stencil that leaves the border as it is, `u.at[1:-1].set((u[:-2] + u[2:]) / 2)`, computes rows
that lie one off from where they are written. Where they are sharded, each device would fetch what
it needs for rows of the shorter array, and then send on the ones that are its neighbours'. So the
rows are computed where they are written: slices become shifts of all rows, and what is beyond the
pad's inside is overwritten with its fill. In dims that are not sharded nothing changes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import Program, shape_of, type_of
from meshwise.propagate.completion import Completion
from meshwise.propagate.rewriting import is_of_any_size, rewritten, without_unread
from meshwise.rules.registry import OpRule
from meshwise.simplify.borders.equations import equations_of


def pad_inside(program: Program, rules: Sequence[OpRule], completion: Completion) -> Program:
    """The program with such pads written as shifts; itself where there are none."""
    reads = Counter(a for e in program.equations for a in e.invars if not isinstance(a, Literal))
    reads.update(a for a in program.outputs if not isinstance(a, Literal))
    makers: dict[Var, int] = {}
    instead: dict[int, Sequence[JaxprEqn]] = {}
    before: set[int] = set()
    for index, eqn in enumerate(program.equations):
        if _jax.is_mark(eqn):
            makers = {}  # what is computed in another body stays there
        makers.update((v, index) for v in eqn.outvars)
        pad = _Pad.of(eqn, completion, program)
        if pad is None:
            continue
        inside = _Inside(program, rules, makers, reads, pad)
        found = inside.equations()
        if found is not None:
            instead[index] = found
            before |= inside.read
    return rewritten(program, without_unread(program, instead, before))


@dataclass(frozen=True)
class _Pad:
    """A pad of dims that are sharded, which adds no row to any device's.

    `config` is the pad's in these dims, and adds nothing in the others; `others` the other way
    round.
    """

    eqn: JaxprEqn
    config: tuple[tuple[int, int, int], ...]
    others: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(eqn: JaxprEqn, completion: Completion, program: Program) -> "_Pad | None":
        if eqn.primitive is not lax.pad_p or isinstance(eqn.invars[0], Literal):
            return None
        config, others = [], []
        before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
        for n, m, amounts, axes in zip(
            before,
            after,
            eqn.params["padding_config"],
            completion.dims[eqn.outvars[0]],
            strict=True,
        ):
            shards = program.mesh.size(axes)
            same = -(-n // shards) == -(-m // shards)
            grows = min(amounts) >= 0 and m > n > 0 and not amounts[2]
            moves = shards > 1 and same and grows
            config.append(tuple(amounts) if moves else (0, 0, 0))
            others.append((0, 0, 0) if moves else tuple(amounts))
        return _Pad(eqn, tuple(config), tuple(others)) if any(map(any, config)) else None

    def fill_outside(self, inside: Any, fill: Any) -> Any:
        """The fill in all rows that the pad adds, and the rest of the pad."""
        for dim, (low, high, _) in enumerate(self.config):
            if low or high:
                row = lax.broadcasted_iota(np.int32, inside.shape, dim)
                last = inside.shape[dim] - high - 1
                mask = lax.bitwise_and(
                    lax.ge(row, lax.full_like(row, low)), lax.le(row, lax.full_like(row, last))
                )
                inside = lax.select(mask, inside, lax.broadcast(fill, inside.shape))
        return lax.pad(inside, fill, self.others) if any(map(any, self.others)) else inside


class _Inside:
    """What a pad's rows are computed of, once more where they are written."""

    def __init__(
        self,
        program: Program,
        rules: Sequence[OpRule],
        makers: dict[Var, int],
        reads: Counter[Var],
        pad: _Pad,
    ):
        """Nothing is computed yet."""
        self._program, self._rules, self._makers = program, rules, makers
        self._reads, self._pad = reads, pad
        self._made: list[JaxprEqn] = []
        self._known: dict[Var, Any] = {}
        self.read: set[int] = set()

    def equations(self) -> list[JaxprEqn] | None:
        """The equations in place of the pad; None where something else than slices is read."""
        eqn = self._pad.eqn
        padded, fill = eqn.invars
        if isinstance(padded, Literal) or not shape_of(padded) or not self._find(padded):
            return None
        for index in sorted(self.read):
            found = self._program.equations[index]
            is_slice = found.primitive is lax.slice_p
            made = self._shifted(found) if is_slice else self._computed(found)
            if made is None:
                return None
            self._known[found.outvars[0]] = made
        filled = equations_of(eqn, [self._known[padded], fill], self._pad.fill_outside)
        return None if filled is None else [*self._made, *filled]

    def _find(self, atom: Any) -> bool:
        """Find the equations from slices to a value; whether nothing else is read by them."""
        waiting = [atom]
        while waiting:
            atom = waiting.pop()
            if not shape_of(atom):
                continue
            index = None if isinstance(atom, Literal) else self._makers.get(atom)
            if index is None:
                return False
            eqn = self._program.equations[index]
            if index not in self.read and eqn.primitive is not lax.slice_p:
                if not self._may_grow(index):
                    return False
                waiting += eqn.invars
            self.read.add(index)
        return True

    def _may_grow(self, index: int) -> bool:
        """Whether an equation can be computed with more rows in its place."""
        eqn, rule = self._program.equations[index], self._rules[index]
        if len(eqn.outvars) > 1 or eqn.effects or self._reads[eqn.outvars[0]] > 1:
            return False
        return index not in self._program.hints and is_of_any_size(rule, eqn)

    def _computed(self, eqn: JaxprEqn) -> Var:
        operands = [self._known.get(a, a) if isinstance(a, Var) else a for a in eqn.invars]
        result = self._grown(eqn)
        params = dict(eqn.params)
        if eqn.primitive is lax.broadcast_in_dim_p:
            params["shape"] = shape_of(result)
        self._made.append(eqn.replace(invars=operands, outvars=[result], params=params))
        return result

    def _shifted(self, eqn: JaxprEqn) -> Var | None:
        """A slice of all rows of an array, moved to where it is written."""
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        config = []
        for n, first, limit, (low, high, _) in zip(
            shape_of(eqn.invars[0]), starts, limits, self._pad.config, strict=True
        ):
            config.append((low - first, high - (n - limit), 0))
            if (low or high) and sum(config[-1]):
                return None
        if not _jax.is_plain_slice(eqn):
            return None
        result = self._grown(eqn)
        fill = np.zeros((), type_of(result).dtype)
        made = equations_of(
            eqn.replace(outvars=[result]),
            [eqn.invars[0]],
            lambda x: lax.pad(x, fill, config) if any(map(any, config)) else lax.copy_p.bind(x),
        )
        self._made += made or []
        return result if made else None

    def _grown(self, eqn: JaxprEqn) -> Var:
        """A new variable for a result with the rows that the pad adds."""
        aval: Any = eqn.outvars[0].aval
        grown = [n + sum(amounts) for n, amounts in zip(aval.shape, self._pad.config, strict=True)]
        return _jax.new_var(aval.update(shape=tuple(grown)))
