"""Updates of most of a dim at places that are known: a pad, and a choice between old and new."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.program import overwrites, shape_of, type_of
from meshwise.simplify.batch_positions import index_columns
from meshwise.simplify.borders.equations import (
    Makers,
    any_maker,
    equations_of,
    known_numbers,
    maker_of,
)
from meshwise.simplify.counts import Count, Counts

# An update of less than a quarter of a dim stays an update: a pad would be mostly fill.
MOST_RATIO = 4


def merge_dynamic_update_slice(
    eqn: JaxprEqn, makers: Makers, counts: Counts
) -> list[JaxprEqn] | None:
    """An update from positions that are known."""
    place, shape = dynamic_place(eqn, counts), shape_of(eqn.invars[0])
    if place is None or not place.is_wide(shape):
        return None
    return equations_of(eqn, eqn.invars[:2], _update(None, place))


def dynamic_place(eqn: JaxprEqn, counts: Counts) -> "Place | None":
    """Where a dynamic update writes, if that is known."""
    starts = known_numbers(eqn.invars[2:], counts)
    if starts is None:
        return None
    shape, window = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    begin = [min(max(s, 0), n - w) for s, n, w in zip(starts, shape, window, strict=True)]
    return Place(begin, window, [1] * len(shape))


def merge_scatter(eqn: JaxprEqn, makers: Makers, counts: Counts) -> list[JaxprEqn] | None:
    """An update of one window at a known place, or of rows that are counted."""
    numbers, (operand, indices, updates) = eqn.params["dimension_numbers"], eqn.invars
    if numbers.operand_batching_dims or not (overwrites(eqn) or eqn.primitive.name in _JOINS):
        return None
    one = len(shape_of(indices)) == 1
    place = window_of(eqn, makers, counts) if one else _rows_of(eqn, counts)
    shape = shape_of(operand)
    if place is None or not place.is_inside(shape) or not place.is_wide(shape):
        return None
    is_complex = jnp.issubdtype(type_of(operand).dtype, jnp.complexfloating)
    if is_complex and eqn.primitive.name == "scatter-mul":
        return None  # infinity times one is not a number
    return equations_of(eqn, [operand, updates], _update(eqn.primitive.name, place))


def merge_cut(eqn: JaxprEqn, makers: Makers) -> list[JaxprEqn] | None:
    """The first rows of what a scatter writes single rows of: it drops what is for the others.

    So is one row more than there are places for what finds none, and is cut off again.
    """
    inner = any_maker(eqn.invars[0], makers)
    is_scatter = inner is not None and inner.primitive.name.startswith("scatter")
    if inner is None or not is_scatter or inner.outvars[0] in makers.read_whole:
        return None
    numbers, mode = inner.params["dimension_numbers"], inner.params["mode"]
    shape, limits = shape_of(inner.outvars[0]), eqn.params["limit_indices"]
    single = set(numbers.inserted_window_dims) & set(numbers.scatter_dims_to_operand_dims)
    is_most = math.prod(limits) * 2 >= math.prod(shape)
    if any(eqn.params["start_indices"]) or not _jax.cut_dims(eqn) <= single or not is_most:
        return None
    if lax.GatherScatterMode.from_any(mode) == lax.GatherScatterMode.CLIP:
        return None  # what is before the first row is for that
    # What was promised to be inside is not, now; what is dropped leaves the rest sorted and unique.
    params = {**inner.params, "mode": lax.GatherScatterMode.FILL_OR_DROP}
    spread = maker_of(inner.invars[0], makers, "broadcast_in_dim")
    number = None if spread is None or shape_of(spread.invars[0]) else spread.invars[0]

    def scattered(x: Any, *given: Any) -> Any:
        is_number = number is not None
        x = lax.broadcast(x, limits) if is_number else lax.slice(x, [0] * len(limits), limits)
        (found,) = _jax.bind(inner, [x, *given], params)
        return found

    operand = inner.invars[0] if number is None else number
    return equations_of(eqn, [operand, *inner.invars[1:]], scattered)


@dataclass(frozen=True)
class Place:
    """Rows of each dim that are written: from `begin` on, `window` of them, `steps` apart.

    `order` is how the dims of what is written there are to be transposed.
    """

    begin: Sequence[int]
    window: Sequence[int]
    steps: Sequence[int]
    order: Sequence[int] | None = None

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether all of them are rows of the operand."""
        dims = zip(self.begin, self.window, self.steps, shape, strict=True)
        return all(0 <= s and s + (w - 1) * step < n for s, w, step, n in dims)

    def is_wide(self, shape: Sequence[int]) -> bool:
        """Whether they are most of each dim that they are not all of, and there is one."""
        dims = zip(self.window, self.steps, shape, strict=True)
        part = [(w, step, n) for w, step, n in dims if n != w]
        return bool(part) and all(w > 1 and w * step * MOST_RATIO >= n for w, step, n in part)


def window_of(eqn: JaxprEqn, makers: Makers, counts: Counts) -> Place | None:
    """Where a scatter of one window writes, if that is known."""
    numbers, (operand, indices, updates) = eqn.params["dimension_numbers"], eqn.invars
    starts = _components(indices, makers, counts)
    if starts is None:
        return None
    rank, sizes = len(shape_of(operand)), iter(shape_of(updates))
    window = [1 if d in numbers.inserted_window_dims else next(sizes) for d in range(rank)]
    begin = [0] * rank
    for d, start in zip(numbers.scatter_dims_to_operand_dims, starts, strict=True):
        begin[d] = start
    return Place(begin, window, [1] * rank)


def _rows_of(eqn: JaxprEqn, counts: Counts) -> Place | None:
    """Single rows of some dims, a fixed step apart in each: `x.at[1::2]`, `x.at[::2, 1::2]`."""
    numbers, (operand, indices, updates) = eqn.params["dimension_numbers"], eqn.invars
    shape, dims = shape_of(operand), numbers.scatter_dims_to_operand_dims
    columns = [indices] if len(dims) == 1 else index_columns(indices, counts)
    if columns is None or sorted(numbers.inserted_window_dims) != sorted(dims):
        return None
    windows = iter(numbers.update_window_dims)
    given = [d for d in range(len(shape_of(updates))) if d not in numbers.update_window_dims]
    begin, steps, order = [0] * len(shape), [1] * len(shape), list[int | None]()
    for d in range(len(shape)):
        if d not in dims:
            order.append(next(windows))
            continue
        column = columns[dims.index(d)]
        found = _counted(counts.of(column), shape_of(column))
        if found is None:
            return None
        begin[d], steps[d], along = found
        order.append(None if along is None else given[along])
    own = [d for d in order if d is not None]
    if sorted(own) != list(range(len(shape_of(updates)))):
        return None
    window = [1 if d is None else shape_of(updates)[d] for d in order]
    return Place(begin, window, steps, own)


def _counted(count: Count | None, shape: Sequence[int]) -> tuple[int, int, int | None] | None:
    """The first of some numbers, their step, and along which dim they grow, if they do."""
    if count is None:
        return None
    moving = [
        (s, d) for d, (s, n) in enumerate(zip(count.strides, shape, strict=True)) if s and n > 1
    ]
    if not moving:
        return count.offset, 1, None
    (step, along), *more = moving
    return None if more or step < 1 else (count.offset, step, along)


def _components(indices: Any, makers: Makers, counts: Counts) -> list[int] | None:
    """The numbers of one index vector."""
    count = counts.of(indices)
    if count is not None:
        return [count.offset + count.strides[0] * c for c in range(shape_of(indices)[0])]
    joined = maker_of(indices, makers, "concatenate")
    return None if joined is None else known_numbers(joined.invars, counts)


def _minus_zero(dtype: Any) -> Any:
    """What changes no number when it is added, the sign of a zero included."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.asarray(complex(-0.0, -0.0), dtype)
    return np.asarray(-0.0 if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)


_JOINS: Mapping[str | None, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "scatter-add": (lax.add, _minus_zero),
    "scatter-sub": (lax.sub, lambda dtype: np.zeros((), dtype)),
    "scatter-mul": (lax.mul, lambda dtype: np.ones((), dtype)),
}


def _update(name: str | None, place: Place) -> Callable[[Any, Any], Any]:
    """What an update of known rows computes, by its primitive; others than joins set."""

    def update(x: Any, new: Any) -> Any:
        dims = zip(place.begin, place.window, place.steps, x.shape, strict=True)
        config = [(s, n - s - (w - 1) * step - 1, step - 1) for s, w, step, n in dims]
        if place.order is not None:
            new = lax.transpose(new, place.order)
        new = lax.reshape(new, place.window)
        if name in _JOINS:
            join, nothing = _JOINS[name]
            return join(x, lax.pad(new, nothing(x.dtype), config))
        masks = [m for d, amounts in enumerate(config) for m in written(x.shape, d, amounts)]
        inside = masks[0]
        for mask in masks[1:]:
            inside = lax.bitwise_and(inside, mask)
        return lax.select(inside, lax.pad(new, np.zeros((), x.dtype), config), x)

    return update


def written(shape: Sequence[int], dim: int, amounts: tuple[int, int, int]) -> list[Any]:
    """Masks that together are true where a pad of a dim has no fill."""
    low, high, between = amounts
    row = lax.broadcasted_iota(np.int32, shape, dim)
    masks = []
    if low or high:
        masks.append(lax.ge(row, lax.full_like(row, low)))
        masks.append(lax.lt(row, lax.full_like(row, shape[dim] - high)))
    if between:
        past = lax.rem(lax.sub(row, lax.full_like(row, low)), lax.full_like(row, between + 1))
        masks.append(lax.eq(past, lax.full_like(row, 0)))
    return masks
