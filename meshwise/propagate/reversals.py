"""Reversals that meet through element-wise work cancel: `flip(f(flip(x)))` is `f(x)`.

The gradient of what reverses a dim reverses it back, and between the two every element is mostly
treated alone. Reversing a sharded dim sends all of it, so what is computed between two reversals
is computed of what lies as it lay, and two that reverse different dims are one that reverses both.
A reduction over reversed dims reads them in any order, a product with both operands reversed in
what it sums over too, and a transpose between two reversals turns them into others: the gradient of
a quarter turn reverses nothing. What goes along a dim goes the other way (`directed.py`): sums from
the last element on, a convolution with the kernel reversed. Along other dims than it sums over it
is what is summed that is reversed, which is smaller: `flip(x, 0).sum(1)` is `flip(x.sum(1))`. The
first of the largest along a reversed dim is the last of them as they lay.
Nothing is computed twice: equations that read each other are turned together, where that leaves
less to reverse around them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.operators import REDUCTIONS, is_among
from meshwise.ir.program import Program, itemsize_of, shape_of
from meshwise.propagate.directed import DIRECTED, OTHER_END, from_other_end
from meshwise.propagate.rewriting import rewritten, without_unread
from meshwise.propagate.turned_together import Dims, Turn, View, reversed_dims
from meshwise.rules.registry import OpRule, describe_all


def cancel_reversals(
    program: Program, rules: tuple[OpRule, ...]
) -> tuple[Program, tuple[OpRule, ...]]:
    """The program without reversals that undo each other, and what its equations mean."""
    while any(e.primitive is lax.rev_p for e in program.equations):
        fewer = _with_fewer(program, rules)
        if fewer is program:
            break
        program, rules = fewer, describe_all(fewer.equations)
    return program, rules


def _with_fewer(program: Program, rules: Sequence[OpRule]) -> Program:
    """The program with some equations turned; itself where that leaves as much to reverse."""
    view = View(program, rules)
    tried: set[tuple[Turn, bool]] = set()  # what no turn pays around
    for eqn in program.equations:
        dims = reversed_dims(eqn)
        seeds = (eqn.outvars[0], eqn.invars[0]) if dims else ()
        parts = dict.fromkeys((dims, *(frozenset({d}) for d in sorted(dims))))
        for seed, part, transposed in product(seeds, parts, (False, True)):
            if isinstance(seed, Literal) or ((seed, part), transposed) in tried:
                continue
            around = view.around(seed, part, transposed)
            turned = _Turned(view, around.values, around.dims)
            if turned.is_sound and turned.more < 0:
                return rewritten(program, without_unread(program, turned.equations(), set()))
            tried.update((turn, transposed) for turn in around.seeds())
    return program


@dataclass(frozen=True, eq=False)
class _Turned:
    """Values as they are with some dims in the other order, and what has to be reversed then.

    `values` are those, with the equations that make them, and `dims` which of their dims.
    """

    view: View
    values: Mapping[Var, int]
    dims: Mapping[Var, Dims]

    @property
    def is_sound(self) -> bool:
        """Whether there are such values, and none is another one reversed."""
        reversals = [e for v in self.values if (e := self.view.reversal(v)) is not None]
        return bool(self.values) and not any(e.invars[0] in self.values for e in reversals)

    @cached_property
    def _inside(self) -> set[int]:
        """The equations that are turned."""
        return {i for v, i in self.values.items() if self.view.reversal(v) is None}

    @cached_property
    def _entering(self) -> list[tuple[Any, Dims]]:
        """What they read that has to be reversed for them, and in which dims."""
        read = [
            (a, dims)
            for i in sorted(self._inside)
            for a, dims in self._operands(i)
            if dims and a not in self.values and not self._is_symmetric(a, dims)
        ]
        return list(dict.fromkeys(read))

    def _operands(self, index: int) -> list[tuple[Any, Dims]]:
        """What an equation that is turned reads, and the dims that are turned of it."""
        eqn = self.view.eqns[index]
        dims = self.dims[eqn.outvars[0]]
        return [(a, self.view.operand_dims(index, k, dims)) for k, a in enumerate(eqn.invars)]

    def _is_symmetric(self, atom: Any, dims: Dims) -> bool:
        """Whether a value is the same in either order."""
        if all(shape_of(atom)[d] == 1 for d in dims):
            return True
        index = self.view.maker(atom)
        eqn = None if index is None else self.view.eqns[index]
        if eqn is None or eqn.primitive is not lax.broadcast_in_dim_p:
            return False
        before, placed = shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"]
        return all(before[own] == 1 for own, d in enumerate(placed) if d in dims)

    def _leaving(self, value: Var) -> list[int]:
        """The equations that read a value and take it in the other order as well."""
        return [r for r in self._outside(value) if self._takes(r, value)]

    def _outside(self, value: Var) -> list[int]:
        return [r for r in self.view.readers[value] if r not in self._inside]

    def _takes(self, index: int, value: Var) -> bool:
        eqn, dims = self.view.eqns[index], self.dims[value]
        in_any_order = is_among(eqn, REDUCTIONS) or eqn.primitive in OTHER_END
        axes = eqn.params["axes"] if in_any_order else ()
        both = self.view.summed_with(index, value, dims)
        return (
            eqn.primitive is lax.rev_p
            or dims <= set(axes)
            or any(self.dims.get(other) == own for other, own in both)
        )

    def _is_read_as_it_was(self, value: Var) -> bool:
        others = len(self._outside(value)) > len(self._leaving(value))
        inside = (i for i in self.view.readers[value] if i in self._inside)
        both = any(a is value and not dims for i in inside for a, dims in self._operands(i))
        return others or both or value in self.view.results

    @cached_property
    def more(self) -> int:
        """How much more is reversed than before: bytes times dims, and one for each reversal."""
        found = sum(_cost(a, dims) for a, dims in self._entering)
        for value in self.values:
            dims = self.dims[value]
            around = [
                self.view.reversal(value),
                *map(self.view.eqns.__getitem__, self._leaving(value)),
            ]
            found += _cost(value, dims) if self._is_read_as_it_was(value) else 0
            for own in filter(None, map(reversed_dims, around)):
                found += _cost(value, own ^ dims) - _cost(value, own)
        return found

    def equations(self) -> dict[int, Sequence[JaxprEqn]]:
        """The equations in place of others, by index."""
        view, found = self.view, defaultdict[int, list[JaxprEqn]](list)
        same: dict[Any, Any] = {}
        for value, index in self.values.items():
            reversal = view.reversal(value)
            same[value] = self._name(value)
            if reversal is not None:
                found[index] = [reversal]
                dims = self.dims[value] ^ reversed_dims(reversal)
                if dims:
                    found[index] += [_reverse(reversal, reversal.invars[0], same[value], dims)]
        for index in sorted(self._inside):
            eqn = view.eqns[index]
            operands: list[Any] = []
            for atom, dims in self._operands(index):
                if not dims or (atom not in self.values and self._is_symmetric(atom, dims)):
                    operands.append(atom)
                    continue
                key = atom if atom in self.values else (atom, dims)
                if key not in same:
                    same[key] = _jax.new_var(atom.aval)
                    found[index].append(_reverse(eqn, atom, same[key], dims))
                operands.append(same[key])
            (value,) = eqn.outvars
            params = eqn.params
            if directed := DIRECTED.get(eqn.primitive.name):
                params = params | directed.turned(eqn, self.dims[value])
                operands = directed.operands(eqn, self.dims[value], operands)
            new = eqn.replace(invars=operands, outvars=[same[value]], params=params)
            found[index].append(new)
            if self._is_read_as_it_was(value):
                found[index].append(_reverse(eqn, same[value], value, self.dims[value]))
        for value in self.values:
            for index in self._leaving(value):
                found[index] = self._read(view.eqns[index], same, self.dims[value])
        return dict(found)

    def _name(self, value: Var) -> Any:
        """What a value is called in the other order: as what it was or will be reversed to."""
        reversal = self.view.reversal(value)
        if reversal is not None:
            is_undone = reversed_dims(reversal) == self.dims[value]
            return reversal.invars[0] if is_undone else _jax.new_var(value.aval)
        for index in self._leaving(value):
            eqn = self.view.eqns[index]
            if reversed_dims(eqn) == self.dims[value] and self.view.is_beside(
                index, self.values[value]
            ):
                return eqn.outvars[0]
        return _jax.new_var(value.aval)

    def _read(self, eqn: JaxprEqn, same: Mapping[Any, Any], turned: Dims) -> list[JaxprEqn]:
        """An equation that takes its operands in either order."""
        operands = [same[a] for a in eqn.invars]
        if eqn.primitive in OTHER_END:
            return from_other_end(eqn, operands)
        if eqn.primitive is not lax.rev_p:
            return [eqn.replace(invars=operands)]
        (operand,) = operands
        dims = turned ^ reversed_dims(eqn)
        if dims:
            return [_reverse(eqn, operand, eqn.outvars[0], dims)]
        if eqn.outvars[0] is operand:
            return []
        return [_jax.new_eqn(lax.copy_p, [operand], eqn.outvars, {}, eqn)]


def _cost(atom: Any, dims: Dims) -> int:
    """What it costs to reverse some dims."""
    return math.prod(shape_of(atom)) * itemsize_of(atom) * len(dims) + bool(dims)


def _reverse(source: JaxprEqn, operand: Any, result: Var, dims: Dims) -> JaxprEqn:
    params = {"dimensions": tuple(sorted(dims))}
    return _jax.new_eqn(lax.rev_p, [operand], [result], params, source)
