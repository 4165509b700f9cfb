"""Sums of what was scattered into zeros: sums of what was scattered.

The gradient of a loss that reads one logit of each row is such a sum. Written so, it needs no row:
where a row is sharded, nothing is sent for it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from meshwise._jax import JaxprEqn
from meshwise.ir.program import makes_zeros, shape_of
from meshwise.simplify.borders.equations import Makers, any_maker, equations_of, maker_of
from meshwise.simplify.counts import Counts

# Through these a sum passes: the sum of what they make is what they make of the sum. Of zeros it is
# zero, where `neg` would make one of the other sign.
_OUTSIDE: Mapping[str, Callable[[Any], Any]] = {
    "neg": lambda x: lax.sub(lax.full_like(x, 0), x),
    "copy": lambda x: x,
}


def merge_reduce_sum(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """A sum over every dim in which a scatter into zeros has its places."""
    atom, after = eqn.invars[0], []
    while (maker := any_maker(atom, makers)) is not None and maker.primitive.name in _OUTSIDE:
        after.append(_OUTSIDE[maker.primitive.name])
        atom = maker.invars[0]
    scattered = maker_of(atom, makers, "scatter-add")
    start = None if scattered is None else any_maker(scattered.invars[0], makers)
    if scattered is None or start is None or not makes_zeros(start):
        return None
    update = _Updates.of(scattered, eqn.params["axes"])
    if update is None:
        return None

    def summed(indices: Any, updates: Any) -> Any:
        for step in after:
            updates = step(updates)
        return update.summed(indices, updates)

    return equations_of(eqn, scattered.invars[1:], summed)


@dataclass(frozen=True)
class _Updates:
    """What a scatter adds: which dims of it are summed over, and which of its places count.

    `kept` are the updates' dims that are left, in the order of the result; `vectors` those that
    index vectors have, and `sizes` the sizes of the dims that these point into: where one points
    beyond, nothing is added. No sizes: every place is one of the operand.
    """

    kept: Sequence[int]
    vectors: Sequence[int]
    sizes: Sequence[int]

    @staticmethod
    def of(eqn: JaxprEqn, axes: Sequence[int]) -> "_Updates | None":
        """Of a scatter of single positions in dims that are summed over; None of any other."""
        numbers = eqn.params["dimension_numbers"]
        operand, _, updates = (shape_of(a) for a in eqn.invars)
        places = numbers.scatter_dims_to_operand_dims
        if not set(places) <= set(numbers.inserted_window_dims).intersection(axes):
            return None
        if math.prod(updates) > math.prod(operand):
            return None
        vectors = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
        inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        windows = [d for d in range(len(operand)) if d not in inserted]
        dim_of = dict(zip(windows, numbers.update_window_dims, strict=True))
        for d, b in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        ):
            dim_of[d] = vectors[b]
        left = [d for d in range(len(operand)) if d not in axes]
        if any(d not in dim_of or operand[d] != updates[dim_of[d]] for d in left):
            return None
        drops = eqn.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
        sizes = [operand[d] for d in places] if drops else []
        if not sizes and len(left) == len(updates):
            return None
        return _Updates([dim_of[d] for d in left], vectors, sizes)

    def summed(self, indices: Any, updates: Any) -> Any:
        """The sum of the updates that count."""
        for column, size in enumerate(self.sizes):
            index = lax.index_in_dim(indices, column, indices.ndim - 1, keepdims=False)
            last = min(size - 1, np.iinfo(index.dtype).max)
            above = lax.ge(index, lax.full_like(index, 0))
            inside = lax.bitwise_and(above, lax.le(index, lax.full_like(index, last)))
            mask = lax.broadcast_in_dim(inside, updates.shape, self.vectors)
            updates = lax.select(mask, updates, lax.full_like(updates, 0))
        over = tuple(d for d in range(updates.ndim) if d not in self.kept)
        order = sorted(self.kept)
        total = lax.reduce_sum(updates, over) if over else updates
        return lax.transpose(total, [order.index(d) for d in self.kept])
