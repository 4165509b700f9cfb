"""Collectives between pretended devices; a value is a list with one array a device."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Axes = tuple[str, ...]
Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Grid:
    """The devices of a mesh, numbered row by row; `noise` disturbs what they add up.

    Of programs that rules emit, not those that a user wrote for each device, `cuts_inside` says
    that every slice must begin where all of it is inside of what a device holds.
    """

    names: Axes
    sizes: tuple[int, ...]
    noise: Callable[[np.ndarray], np.ndarray] | None = None
    cuts_inside: bool = False

    @cached_property
    def count(self) -> int:
        """How many devices."""
        return math.prod(self.sizes)

    @cached_property
    def _numbers(self) -> np.ndarray:
        return np.arange(self.count).reshape(self.sizes)

    def groups(self, axes: Axes) -> list[list[int]]:
        """Devices that differ along some axes only, each group in the order of those axes."""
        order = [self.names.index(a) for a in axes]
        rest = [d for d in range(len(self.names)) if d not in order]
        moved = self._numbers.transpose([*rest, *order])
        size = math.prod(self.sizes[d] for d in order)
        return moved.reshape(-1, size).tolist()

    def index(self, axes: Axes) -> list[int]:
        """Where each device stands in its group."""
        found = [0] * self.count
        for group in self.groups(axes):
            for place, device in enumerate(group):
                found[device] = place
        return found


def _narrow_safe(function: Callable[[list[np.ndarray]], np.ndarray]) -> Any:
    def reduce(arrays: list[np.ndarray]) -> np.ndarray:
        dtype = arrays[0].dtype
        wide = [a.astype(np.float32) for a in arrays] if dtype.kind in "Vf" else arrays
        return np.asarray(function(wide)).astype(dtype)

    return reduce


def _reducer(function: Callable[[list[np.ndarray]], np.ndarray]) -> Any:
    reduce = _narrow_safe(function)

    def collective(arrays: Arrays, params: Mapping[str, Any]) -> Arrays:
        return [reduce(arrays)] * len(arrays)

    return collective


def _sum(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def _fold(function: Any) -> Callable[[list[np.ndarray]], np.ndarray]:
    def fold(arrays: list[np.ndarray]) -> np.ndarray:
        total = arrays[0]
        for array in arrays[1:]:
            total = function(total, array)
        return total

    return fold


def _all_gather(arrays: Arrays, params: Mapping[str, Any]) -> Arrays:
    dim = params["all_gather_dimension"]
    join = np.concatenate if params["tiled"] else np.stack
    return [join(arrays, dim)] * len(arrays)


def _reduce_scatter(arrays: Arrays, params: Mapping[str, Any]) -> Arrays:
    dim, n = params["scatter_dimension"], len(arrays)
    total = _narrow_safe(_sum)(arrays)
    parts = np.split(total, n, dim)
    return parts if params["tiled"] else [np.squeeze(p, dim) for p in parts]


def _all_to_all(arrays: Arrays, params: Mapping[str, Any]) -> Arrays:
    split, concat, n = params["split_axis"], params["concat_axis"], len(arrays)
    assert params["tiled"], "lax writes the untiled form with the tiled one"
    parts = [np.split(a, n, split) for a in arrays]
    return [np.concatenate([p[to] for p in parts], concat) for to in range(n)]


def _permute(arrays: Arrays, params: Mapping[str, Any]) -> Arrays:
    found = [np.zeros_like(arrays[0])] * len(arrays)
    for origin, to in params["perm"]:
        found[to] = arrays[origin]
    return found


COLLECTIVES = {
    "psum": _reducer(_sum),
    "psum_invariant": _reducer(_sum),
    "pmax": _reducer(_fold(np.maximum)),
    "pmin": _reducer(_fold(np.minimum)),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _permute,
}


def axes_of(params: Mapping[str, Any]) -> Axes:
    """The axes that a collective names."""
    named = params.get("axes", params.get("axis_name", ()))
    return tuple(named) if isinstance(named, tuple | list) else (named,)


def apply_collective(
    name: str, params: Mapping[str, Any], values: Sequence[Arrays], grid: Grid
) -> list[Arrays]:
    """The results of one collective on every device."""
    axes = axes_of(params)
    if params.get("axis_index_groups") is not None:
        raise NotImplementedError("axis_index_groups")
    if name == "axis_index":
        numbers = [np.int32(i) for i in range(grid.count)]
        return [[np.asarray(numbers[i]) for i in grid.index(axes)]]
    if name == "ppermute":  # counts devices in the mesh's order, whatever the order of the tuple
        axes = tuple(a for a in grid.names if a in axes)
    found = []
    for arrays in values:
        results: Arrays = [arrays[0]] * grid.count
        for group in grid.groups(axes):
            out = COLLECTIVES[name]([arrays[d] for d in group], params)
            for device, array in zip(group, out, strict=True):
                results[device] = array
        found.append(results)
    return found
