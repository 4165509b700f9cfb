"""Gathers and scatters: positions that are data."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fuzz.evaluate.elementwise import Function


def _starts(
    at: np.ndarray, rank: int, dims: Sequence[int], batching: Sequence[int], own: Sequence[int]
) -> list[np.ndarray]:
    """For each dim of the operand, where each window starts: arrays of the batch's shape."""
    batch = at.shape[:-1]
    found = [np.zeros(batch, np.int64)] * rank
    for k, dim in enumerate(dims):
        found[dim] = at[..., k].astype(np.int64)
    for dim, place in zip(batching, own, strict=True):
        sizes = [n if d == place else 1 for d, n in enumerate(batch)]
        found[dim] = np.broadcast_to(np.arange(batch[place]).reshape(sizes), batch)
    return found


def _placed(
    starts: Sequence[np.ndarray],
    sizes: Sequence[int],
    window_dims: Sequence[int],
    moving: Sequence[int],
    rank: int,
) -> list[np.ndarray]:
    """Positions in every dim of the operand, for each element of a result of some rank.

    `window_dims` are the result's dims that run along a window, `moving` the operand's dims they
    run along.
    """
    batch_dims = [d for d in range(rank) if d not in window_dims]
    found = []
    for dim, start in enumerate(starts):
        shape = [1] * rank
        for d, n in zip(batch_dims, start.shape, strict=True):
            shape[d] = n
        index = start.reshape(shape)
        if dim in moving:
            along = [1] * rank
            along[window_dims[moving.index(dim)]] = sizes[dim]
            index = index + np.arange(sizes[dim]).reshape(along)
        found.append(index)
    return found


def _is_clip(mode: Any) -> bool:
    return "CLIP" in str(mode).upper()


def _fill_value(given: Any, dtype: np.dtype) -> Any:
    if given is not None:
        return np.asarray(given).astype(dtype)
    if dtype == np.bool_:
        return True
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.min if dtype.kind == "i" else limits.max
    return np.nan


def gather(params: Any, x: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Windows of the operand at positions that are data."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batching = tuple(numbers.operand_batching_dims)
    starts = _starts(
        at, x.ndim, numbers.start_index_map, batching, numbers.start_indices_batching_dims
    )
    gone = (*numbers.collapsed_slice_dims, *batching)
    moving = [d for d in range(x.ndim) if d not in gone]
    rank = at.ndim - 1 + len(moving)
    inside = np.ones(at.shape[:-1], np.bool_)
    for dim in numbers.start_index_map:
        most = x.shape[dim] - sizes[dim]
        inside = inside & (starts[dim] >= 0) & (starts[dim] <= most)
        starts[dim] = np.clip(starts[dim], 0, max(most, 0))
    index = _placed(starts, sizes, numbers.offset_dims, moving, rank)
    shape = np.broadcast_shapes(*(i.shape for i in index)) if index else at.shape[:-1]
    fill = "FILL" in str(params["mode"]).upper()
    if 0 in shape or not x.size:
        return np.full(shape, _fill_value(params["fill_value"], x.dtype), x.dtype)
    found = x[tuple(index)] if index else np.broadcast_to(x, shape)
    if not fill:
        return found
    batch_dims = [d for d in range(rank) if d not in numbers.offset_dims]
    sizes_of_mask = [1] * rank
    for d, n in zip(batch_dims, inside.shape, strict=True):
        sizes_of_mask[d] = n
    fill_value = np.asarray(_fill_value(params["fill_value"], x.dtype)).astype(x.dtype)
    return np.where(inside.reshape(sizes_of_mask), found, fill_value)


def _scatter(combine: Any) -> Function:
    def scatter(params: Any, x: np.ndarray, at: np.ndarray, updates: np.ndarray) -> np.ndarray:
        body = params["update_jaxpr"]
        if combine is None and body is not None and body.outvars[0] is not body.invars[1]:
            raise NotImplementedError("a function of what is there")
        numbers = params["dimension_numbers"]
        batching = tuple(numbers.operand_batching_dims)
        windows = tuple(numbers.update_window_dims)
        gone = (*numbers.inserted_window_dims, *batching)
        moving = [d for d in range(x.ndim) if d not in gone]
        sizes = [1] * x.ndim
        for dim, own in zip(moving, windows, strict=True):
            sizes[dim] = updates.shape[own]
        starts = _starts(
            at,
            x.ndim,
            numbers.scatter_dims_to_operand_dims,
            batching,
            numbers.scatter_indices_batching_dims,
        )
        if _is_clip(params["mode"]):
            for dim in numbers.scatter_dims_to_operand_dims:
                starts[dim] = np.clip(starts[dim], 0, max(x.shape[dim] - sizes[dim], 0))
        inside = np.ones(at.shape[:-1], np.bool_)
        for dim in numbers.scatter_dims_to_operand_dims:
            inside = inside & (starts[dim] >= 0) & (starts[dim] + sizes[dim] <= x.shape[dim])
        out = np.array(x)
        if not updates.size or not x.size:
            return out
        if not x.ndim:
            index: list[np.ndarray] = []
            mask = np.broadcast_to(inside.reshape(updates.shape), updates.shape)
            for update in updates[mask]:
                out = combine(out, update) if combine else update
            return np.asarray(out)
        index = _placed(starts, sizes, windows, moving, updates.ndim)
        mask_shape = [1] * updates.ndim
        batch_dims = [d for d in range(updates.ndim) if d not in windows]
        for d, n in zip(batch_dims, inside.shape, strict=True):
            mask_shape[d] = n
        order = [*batch_dims, *windows]  # of two updates of a position the later one wins

        def in_order(own: np.ndarray) -> np.ndarray:
            return np.broadcast_to(own, updates.shape).transpose(order)

        mask = in_order(inside.reshape(mask_shape))
        place = tuple(in_order(i)[mask] for i in index)
        if combine is None:
            out[place] = in_order(updates)[mask]
        else:
            combine.at(out, place, in_order(updates)[mask])
        return out

    return scatter


INDEXING: dict[str, Function] = {
    "gather": gather,
    "scatter": _scatter(None),
    "scatter-add": _scatter(np.add),
    "scatter_add": _scatter(np.add),
    "scatter-sub": _scatter(np.subtract),
    "scatter_sub": _scatter(np.subtract),
    "scatter-mul": _scatter(np.multiply),
    "scatter_mul": _scatter(np.multiply),
    "scatter-min": _scatter(np.minimum),
    "scatter_min": _scatter(np.minimum),
    "scatter-max": _scatter(np.maximum),
    "scatter_max": _scatter(np.maximum),
}
