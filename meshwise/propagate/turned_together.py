"""What is turned together where the dims of a value are reversed: all around it, and what reads it.

A view of a program says what makes and reads each value, and how dims go through equations that
treat every element alone.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.ir.program import Program, shape_of
from meshwise.propagate.directed import DIRECTED
from meshwise.propagate.rewriting import is_of_any_size
from meshwise.rules.registry import OpRule

Dims = frozenset[int]
Turn = tuple[Any, Dims]  # a value, and the dims in which it is turned


def reversed_dims(eqn: JaxprEqn | None) -> Dims:
    """The dims that an equation reverses."""
    if eqn is None or eqn.primitive is not lax.rev_p:
        return frozenset()
    return frozenset(eqn.params["dimensions"])


@dataclass(frozen=True, eq=False)
class Around:
    """Values that are turned together, found from a seed.

    With the equations that make them, and which of their dims are those of the seed; `led` has for
    each of them from which others it was come to.
    """

    seed: Turn
    values: Mapping[Var, int]
    dims: Mapping[Var, Dims]
    led: Mapping[Turn, Sequence[Turn]]

    def seeds(self) -> set[Turn]:
        """From what the same is found: all that leads to the seed, which leads to all of it."""
        found = {self.seed} if self.values else set[Turn]()
        waiting = list(found)
        while waiting:
            new = set(self.led.get(waiting.pop(), ())) - found
            found |= new
            waiting += new
        return found


class View:
    """What makes and reads each value of a program, told for the body in which it stands."""

    def __init__(self, program: Program, rules: Sequence[OpRule]):
        """The equations, gone through once."""
        self.program, self._rules = program, rules
        self.eqns = program.equations
        self._makers: dict[Var, int] = {}
        self.readers: defaultdict[Var, list[int]] = defaultdict(list)
        self._bodies: list[int] = []
        marks = 0
        for index, eqn in enumerate(self.eqns):
            marks += _jax.is_mark(eqn)
            self._bodies.append(marks)
            self._makers.update((v, index) for v in eqn.outvars)
            for atom in {a for a in eqn.invars if not isinstance(a, Literal)}:
                self.readers[atom].append(index)
        self.results = {a for a in program.outputs if not isinstance(a, Literal)}

    def maker(self, atom: Any) -> int | None:
        """Which equation makes a value."""
        return None if isinstance(atom, Literal) else self._makers.get(atom)

    def reversal(self, atom: Any) -> JaxprEqn | None:
        """The reversal that makes a value."""
        index = self.maker(atom)
        if index is None or self.eqns[index].primitive is not lax.rev_p:
            return None
        return self.eqns[index]

    def is_plain(self, index: int | None, transposed: bool) -> bool:
        """Whether an equation treats every element alone, in the same place or `transposed`.

        Or goes along dims in either direction.
        """
        if index is None or index in self.program.hints:
            return False
        eqn = self.eqns[index]
        if eqn.effects or len(eqn.outvars) > 1 or _jax.is_mark(eqn):
            return False
        if eqn.primitive.name in DIRECTED:
            return True
        if eqn.primitive is not lax.broadcast_in_dim_p and is_of_any_size(self._rules[index], eqn):
            return True
        return transposed and (_adds_dims(eqn) or _keeps_elements(self._rules[index]))

    def result_dims(self, index: int, operand: int, dims: Dims) -> Dims:
        """The dims of a plain equation's result that are those of an operand.

        There are none where not all of them can be reversed, as along a dim in steps.
        """
        eqn = self.eqns[index]
        if directed := DIRECTED.get(eqn.primitive.name):
            passing = directed.passing(eqn).items()
            found = frozenset(d for d, own in passing if own[operand] in dims)
            return found if len(found) == len(dims) else frozenset()
        rule = self._rules[index].factors
        factors = {f for d in dims for f in rule.operands[operand][d]}
        return frozenset(d for d, own in enumerate(rule.results[0]) if factors.intersection(own))

    def operand_dims(self, index: int, operand: int, dims: Dims) -> Dims:
        """The dims of a plain equation's operand that are those of its result."""
        eqn = self.eqns[index]
        if directed := DIRECTED.get(eqn.primitive.name):
            passing = directed.passing(eqn)
            return frozenset(own for d in dims if (own := passing[d][operand]) is not None)
        rule = self._rules[index].factors
        factors = {f for d in dims for f in rule.results[0][d]}
        own = enumerate(rule.operands[operand])
        return frozenset(d for d, each in own if factors.intersection(each))

    def may_turn(self, index: int, dims: Dims) -> bool:
        """Whether a plain equation can make its result with these dims reversed."""
        eqn = self.eqns[index]
        directed = DIRECTED.get(eqn.primitive.name)
        return directed is None or dims <= directed.passing(eqn).keys()

    def is_beside(self, one: int, other: int) -> bool:
        """Whether two equations stand in the same body."""
        return self._bodies[one] == self._bodies[other]

    def around(self, seed: Any, dims: Dims, transposed: bool) -> Around:
        """What element-wise equations compute of each other around a value, and reversals there.

        There is nothing where one value is read as two: `x + x.T`.
        """
        found: dict[Var, int] = {}
        known: dict[Var, Dims] = {}
        led: defaultdict[Turn, list[Turn]] = defaultdict(list)
        left: list[tuple[Any, Dims, Turn | None]] = [(seed, dims, None)]
        while left:
            value, own, source = left.pop()
            index = self.maker(value)
            if index is None or not own:
                continue
            if known.get(value, own) != own:
                return Around((seed, dims), {}, {}, {})
            if source is not None:
                led[value, own].append(source)
            others = iter(found.values())
            if value in found or (found and not self.is_beside(index, next(others))):
                continue
            if self.reversal(value) is None:
                if not self.is_plain(index, transposed) or not self.may_turn(index, own):
                    continue
                read = enumerate(self.eqns[index].invars)
                operands = [(a, self.operand_dims(index, k, own)) for k, a in read if shape_of(a)]
                left += [(*operand, (value, own)) for operand in operands]
            found[value], known[value] = index, own
            for reader in self.readers[value]:
                left += [(*other, (value, own)) for other in self.summed_with(reader, value, own)]
                if self.is_beside(reader, index) and self.is_plain(reader, transposed):
                    operand = self.eqns[reader].invars.index(value)
                    result = self.eqns[reader].outvars[0]
                    turned = self.result_dims(reader, operand, own)
                    left.append((result, turned, (value, own)))
        return Around((seed, dims), found, known, led)

    def summed_with(self, index: int, value: Any, dims: Dims) -> list[tuple[Any, Dims]]:
        """What a product sums with some dims of a value, and over which of its dims.

        There is nothing where it does not sum over all of them, or has the value twice.
        """
        eqn = self.eqns[index]
        if eqn.primitive is not lax.dot_general_p or eqn.invars[0] is eqn.invars[1]:
            return []
        summed, _ = eqn.params["dimension_numbers"]
        operand = eqn.invars.index(value)
        pairs = dict(zip(summed[operand], summed[1 - operand], strict=True))
        if not dims <= pairs.keys():
            return []
        return [(eqn.invars[1 - operand], frozenset(pairs[d] for d in dims))]


def _adds_dims(eqn: JaxprEqn) -> bool:
    """Whether a result has dims of one element more, and nothing else."""
    if eqn.primitive is not lax.broadcast_in_dim_p or len(eqn.invars) > 1:
        return False
    return math.prod(shape_of(eqn.invars[0])) == math.prod(shape_of(eqn.outvars[0]))


def _keeps_elements(rule: OpRule) -> bool:
    """Whether a result has the elements of each operand that has dims, perhaps in other dims."""
    factors = rule.factors
    special = factors.reductions or factors.whole or factors.permuted or factors.compound
    if special or rule.opaque or rule.local is not None:
        return False
    made = sorted(factors.results[0])
    return any(map(any, factors.operands)) and all(
        sorted(filter(None, dims)) == list(filter(None, made))
        for dims in factors.operands
        if any(dims)
    )
