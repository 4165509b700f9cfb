"""Give out factors while a rule is written, and make the rule from them."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from meshwise.ir.factors import Dims, FactorRule
from meshwise.ir.sharding import Reduction

Dim = tuple[int, ...]  # the factors of one dim, major to minor; empty where nothing can be sharded
Kind = Reduction | Literal["whole", "permute"] | None  # None: pass-through


class Factoring:
    """The factors of one rule in the making.

    `new` gives the dim of a fresh factor: write it in every operand and result that has it.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kinds: list[Kind] = []
        self.permuted: set[int] = set()

    def new(self, size: int, kind: Kind = None, permuted: bool = False) -> Dim:
        """A dim of one fresh factor; size one has nothing to shard and gets none.

        A reduction factor is `permuted` as well where its operands exchange rows first.
        """
        if size == 1:
            return ()
        self.sizes.append(size)
        self.kinds.append(kind)
        if permuted or kind == "permute":
            self.permuted.add(len(self.sizes) - 1)
        return (len(self.sizes) - 1,)

    def dims(self, shape: Sequence[int], kind: Kind = None) -> list[Dim]:
        """A fresh factor for each dim of a shape."""
        return [self.new(size, kind) for size in shape]

    def rule(
        self, operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]]
    ) -> FactorRule:
        """The rule; factors are numbered in order of appearance, unused ones left out."""
        number: dict[int, int] = {}
        for tensor in (*operands, *results):
            for dim in tensor:
                for factor in dim:
                    number.setdefault(factor, len(number))
        kinds = {number[f]: self.kinds[f] for f in number}
        return FactorRule(
            operands=tuple(_renumber(t, number) for t in operands),
            results=tuple(_renumber(t, number) for t in results),
            sizes=tuple(self.sizes[f] for f in number),
            reductions=tuple((f, r) for r in Reduction for f in kinds if kinds[f] is r),
            whole=frozenset(f for f in kinds if kinds[f] == "whole"),
            permuted=frozenset(number[f] for f in number if f in self.permuted),
        )


def _renumber(tensor: Sequence[Dim], number: dict[int, int]) -> Dims:
    return tuple(tuple(number[f] for f in dim) for dim in tensor)


@lru_cache(maxsize=4096)
def stretched(
    operands: tuple[tuple[int, ...], ...], shape: tuple[int, ...], results: int
) -> FactorRule:
    """The rule of an element-wise operator.

    An operand is a scalar, or has the rank of the result and may have dims of size one where the
    result's are larger.
    """
    factoring = Factoring()
    dims = factoring.dims(shape)
    return factoring.rule(
        [
            [d if n != 1 else () for n, d in zip(op, dims, strict=True)] if op else ()
            for op in operands
        ],
        [dims] * results,
    )


def shapes(avals: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of some abstract values."""
    return tuple(tuple(aval.shape) for aval in avals)


def total_size(avals: Sequence[Any]) -> float:
    """How many elements some abstract values have together."""
    return float(sum(math.prod(aval.shape) for aval in avals))
