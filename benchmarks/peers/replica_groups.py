"""Which devices take part in a collective together: three encodings of one thing.

HLO writes the groups as a list `{{0,1},{2,3}}`, as a reshaped and transposed count
`[2,4]<=[4,2]T(1,0)`, or as axes of a mesh `mesh['a'=2,'b'=4] {'b'}`, where an axis may be a part
of one: `'b':(2)2` is the minor half of b, two devices after a major part of two.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

Groups = tuple[tuple[int, ...], ...]

LIST = re.compile(r"\breplica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(
    r"\breplica_groups=@?mesh\w*\[([^\]]*)\](?:,\s*device_ids=\(([^)]*(?:\([\d,]*\))?)\))?\s*"
    r"\{([^}]*)\}"
)
PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\s*\d+\},?\s*)*)\}")


def parse_groups(attributes: str, devices: int) -> Groups:
    """The groups that an instruction's attributes name; all `devices` where they name none."""
    if found := IOTA.search(attributes):
        grid = _counted(found[2], found[3])
        return _rows(grid.reshape(_numbers(found[1])))
    if found := MESH.search(attributes):
        return _of_mesh(found[1], found[2], found[3])
    if (found := LIST.search(attributes)) and found[1]:
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]*)\}", found[1]))
    return (tuple(range(devices)),)


def parse_pairs(attributes: str) -> Groups:
    """(source, target) of each send of a collective-permute."""
    found = PAIRS.search(attributes)
    return tuple(_numbers(pair) for pair in re.findall(r"\{([^}]*)\}", found[1])) if found else ()


def _of_mesh(axes: str, order: str | None, chosen: str) -> Groups:
    """Groups over `chosen` axes ("'a','b':(1)2") of a mesh ("'a'=2,'b'=4") in an order."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen)
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    for name, major, size in parts:
        if size:
            cuts[name] |= {int(major), int(major) * int(size)}
    # Each axis is cut in factors at the edges of the parts asked for: (axis, major size) -> place.
    shape: list[int] = []
    places: dict[tuple[str, int], int] = {}
    for name, edges in cuts.items():
        ordered = sorted(edges)
        for low, high in pairwise(ordered):
            places[name, low] = len(shape)
            shape.append(high // low)
    members: list[int] = []
    for name, major, size in parts:
        low, high = (int(major), int(major) * int(size)) if size else (1, sizes[name])
        members += [
            place for (axis, at), place in places.items() if axis == name and low <= at < high
        ]
    grid = _mesh_order(order, prod(shape)).reshape(shape)
    others = [place for place in range(len(shape)) if place not in members]
    length = prod(shape[place] for place in members)
    return _rows(grid.transpose(others + members).reshape(-1, length))


def _mesh_order(order: str | None, devices: int) -> NDArray[np.int64]:
    """Devices of a mesh in its order: counted unless said, as `[2,4]T(1,0)` or as a list."""
    if not order:
        return np.arange(devices)
    if found := re.match(r"\[([\d,]+)\](?:<=\[\d+\])?(?:T\(([\d,]+)\))?", order):
        return _counted(found[1], found[2])
    return np.array(_numbers(order))


def _counted(dims: str, order: str | None) -> NDArray[np.int64]:
    """0, 1, 2, ... laid out in `dims`, transposed, and flat again."""
    shape = _numbers(dims)
    grid = np.arange(prod(shape)).reshape(shape)
    return (grid.transpose(_numbers(order)) if order else grid).reshape(-1)


def _rows(grid: NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in grid)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
