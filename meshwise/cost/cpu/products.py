"""How products of XLA on CPU read their operands."""

from collections.abc import Sequence
from math import prod
from typing import Any


def is_product(eqn: Any) -> bool:
    """Whether it sums over elements, and is more than a sum of products element by element."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (len(_shape(a)) - len(batch) - len(contracted) for a in eqn.invars)
    return prod(_shape(eqn.invars[0])[d] for d in contracted) > 1 and left + right > 0


def is_in_order(eqn: Any, operand: int, order: Sequence[int], may_turn: bool = True) -> bool:
    """Whether a product reads an operand where it lies, its dims being those of `order` there."""
    contracted, batch = (tuple(dims[operand]) for dims in eqn.params["dimension_numbers"])
    shape = _shape(eqn.invars[operand])
    free = tuple(d for d in range(len(shape)) if d not in contracted and d not in batch)

    def lying(dims: Sequence[int]) -> list[int]:
        return [order[d] for d in dims if shape[d] > 1]

    leading, outer, inner = lying(batch), lying(free), lying(contracted)
    if operand == 1:
        outer, inner = inner, outer
    ways = [[*leading, *outer, *inner]]
    leads = batch == tuple(range(len(batch)))  # else all dims are put in order, those of one too
    if may_turn and leads and len(outer) <= 1 and len(inner) <= 1:
        ways.append([*leading, *inner, *outer])
    return any(way == sorted(way) for way in ways)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
