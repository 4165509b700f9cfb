"""Dynamic updates: a window written at a position that is data, of which each device has a part.

A scatter of a single window is written so, too (`scattering.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.dtypes import extended
from jax.numpy import issubdtype

from meshwise.rules.factoring import Dim, Factoring, shapes
from meshwise.rules.positions import all_of, from_offset, in_bounds, inside_starts, local_start
from meshwise.rules.registry import Application, LocalContext, OpRule, register

Join = Callable[[Any, Any], Any]


@register("dynamic_update_slice")
def _dynamic_update_slice_rule(application: Application) -> OpRule:
    """Every dim of the operand may be sharded: each device writes the part that it owns."""
    operand, update = shapes(application.operands[:2])
    starts: list[list[Dim]] = [[]] * (len(application.operands) - 2)
    factoring = Factoring()
    dims: list[Dim] = []
    written: list[Dim] = []
    for n, size in zip(operand, update, strict=True):
        dims.append(factoring.new(n))
        written.append(dims[-1] if size == n else factoring.new(size, "whole"))
    factors = factoring.rule([dims, written, *starts], [dims])
    return OpRule(factors, linear=((0, 1),), local=_dynamic_update_slice_local, moves=True)


def _dynamic_update_slice_local(
    context: LocalContext, operand: Any, update: Any, *starts: Any
) -> list[Any]:
    before, after = context.rule.operands[:2]
    split = {d: dim[0] for d, dim in enumerate(before) if context.is_split(dim) and dim != after[d]}
    if not split:
        return context.bind(operand, update, *starts)
    windows = context.global_shape(1)
    inside = inside_starts(context, starts, windows)
    return write_window(context, operand, update, inside, windows, split)


def write_window(
    context: LocalContext,
    operand: Any,
    update: Any,
    starts: list[Any],
    windows: Sequence[int],
    split: dict[int, int],
    join: Join | None = None,
    kept: Any = None,
) -> list[Any]:
    """Write this device's part of a window that starts, globally, at `starts`, all of it inside.

    The update may be joined with what was there, and nothing is written where `kept` is false.
    """
    write = write_in_one if all(windows[d] == 1 for d in split) else _write_part
    return write(context, operand, update, starts, split, join, kept)


def write_in_one(
    context: LocalContext,
    operand: Any,
    update: Any,
    starts: list[Any],
    split: dict[int, int],
    join: Join | None = None,
    kept: Any = None,
) -> list[Any]:
    """Write a window that one device has all of, or what was there already where it is not ours."""
    owned = [] if kept is None else [kept]
    for d, factor in split.items():
        starts[d], here = local_start(context, factor, starts[d], update.shape[d])
        owned.append(here)
    old = lax.dynamic_slice(operand, starts, update.shape, allow_negative_indices=False)
    update = update if join is None else join(old, update)
    new = lax.select(lax.broadcast(all_of(owned), update.shape), update, old)
    return [_write(operand, new, starts)]


def _write_part(
    context: LocalContext,
    operand: Any,
    update: Any,
    starts: list[Any],
    split: dict[int, int],
    join: Join | None,
    kept: Any,
) -> list[Any]:
    """Write all local positions of the split dims: the update's where it reaches, else the old.

    The update is surrounded by as many elements as a device holds, so that a slice of the local
    size can be taken at any distance from it.
    """
    around = [(0, 0, 0)] * operand.ndim
    sizes, begins = list(update.shape), [np.int32(0)] * operand.ndim
    reached = []
    for d, factor in split.items():
        local, window = operand.shape[d], update.shape[d]
        start = from_offset(context, factor, starts[d])
        begin = lax.sub(start.dtype.type(local), start)
        begin = lax.clamp(start.dtype.type(0), begin, start.dtype.type(window + local))
        begins[d] = lax.convert_element_type(begin, np.int32)
        around[d], sizes[d], starts[d] = (local, local, 0), local, starts[d].dtype.type(0)
        reached.append((d, start, window))
    masks = [] if kept is None else [lax.broadcast(kept, sizes)]
    for d, start, window in reached:
        position = lax.broadcasted_iota(start.dtype, sizes, d)
        masks.append(in_bounds(lax.sub(position, start), window - 1))
    part = lax.dynamic_slice(
        _surrounded(update, around), begins, sizes, allow_negative_indices=False
    )
    old = lax.dynamic_slice(operand, starts, sizes, allow_negative_indices=False)
    part = part if join is None else join(old, part)
    return [_write(operand, lax.select(all_of(masks), part, old), starts)]


def _surrounded(update: Any, around: Sequence[tuple[int, int, int]]) -> Any:
    """An array with zeros around it; keys, which cannot be padded, with what is made of zeros."""
    if not issubdtype(update.dtype, extended):
        return lax.pad(update, lax.full((), 0, update.dtype), around)
    data = jax.random.key_data(update)
    within = [*around, *[(0, 0, 0)] * (data.ndim - update.ndim)]
    padded = lax.pad(data, lax.full((), 0, data.dtype), within)
    return jax.random.wrap_key_data(padded, impl=jax.random.key_impl(update))


def _write(operand: Any, update: Any, starts: list[Any]) -> Any:
    if update.shape == operand.shape:
        return update
    return lax.dynamic_update_slice(operand, update, starts, allow_negative_indices=False)
