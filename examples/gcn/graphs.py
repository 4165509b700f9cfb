"""Graphs as the model takes them: read, normalised, and cut into parts."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.gcn.model import Edges, Nodes, Parts

Ints = NDArray[np.int64]
NO_METIS = """graphs are cut by METIS through pymetis, which is not installed
  rule: it is not needed for anything else, so nothing brings it along
  way out: pip install pymetis, or leave --metis out and have breadth-first blocks"""


def karate() -> tuple[Ints, Ints]:
    """Zachary's karate club: pairs of members [78, 2], and who went with whom, 0 or 1 [34]."""
    lines = (Path(__file__).parent / "karate.txt").read_text(encoding="utf-8").splitlines()
    pairs = np.array([line.split() for line in lines if line[0].isdigit()], np.int64) - 1
    sides = np.ones(34, np.int64)
    sides[np.array(lines[-1].split()[1:], np.int64) - 1] = 0
    return pairs, sides


def normalised(pairs: Ints, count: int) -> Edges:
    """Both directions of each pair, and each node with itself, scaled by its ends' degrees."""
    nodes = np.arange(count)
    senders = np.concatenate([pairs[:, 0], pairs[:, 1], nodes])
    receivers = np.concatenate([pairs[:, 1], pairs[:, 0], nodes])
    degrees = np.bincount(receivers, minlength=count)
    scales = (degrees[senders] * degrees[receivers]) ** -0.5
    return Edges(senders.astype(np.int32), receivers.astype(np.int32), scales.astype(np.float32))


def blocks(pairs: Ints, count: int, parts: int) -> Ints:
    """The part of each node: equal blocks in the order of a breadth-first search."""
    near: list[list[int]] = [[] for _ in range(count)]
    for a, b in pairs:
        near[a].append(b)
        near[b].append(a)
    met: dict[int, None] = {}
    for first in range(count):
        queue = deque([first])
        while queue:
            node = queue.popleft()
            if node not in met:
                met[node] = None
                queue.extend(near[node])
    found = np.empty(count, np.int64)
    found[list(met)] = np.arange(count) * parts // count
    return found


def metis(pairs: Ints, count: int, parts: int) -> Ints:
    """The part of each node, so that few edges are cut; by METIS."""
    try:
        import pymetis  # type: ignore[import-not-found]
    except ImportError:
        raise SystemExit(NO_METIS) from None
    near = [
        np.concatenate([pairs[pairs[:, 0] == i, 1], pairs[pairs[:, 1] == i, 0]])
        for i in range(count)
    ]
    return np.array(pymetis.part_graph(parts, adjacency=near)[1], np.int64)


def in_parts(edges: Edges, part: Ints) -> tuple[Parts, Ints]:
    """A graph in parts, and the place of each node when parts of one size follow each other."""
    parts = int(part.max()) + 1
    size = int(np.bincount(part).max())
    local = np.empty(len(part), np.int64)
    for number in range(parts):
        inside = part == number
        local[inside] = np.arange(inside.sum())
    owner, reader = part[edges.senders], part[edges.receivers]
    wanted = {
        (p, q): np.unique(edges.senders[(owner == p) & (reader == q)])
        for p in range(parts)
        for q in range(parts)
        if p != q
    }
    most = max(1, *(len(nodes) for nodes in wanted.values()))
    reads = np.zeros((parts, parts, most), np.int32)
    for (p, q), nodes in wanted.items():
        reads[p, q, : len(nodes)] = local[nodes]
    long = int(np.bincount(reader).max())
    senders, receivers = np.zeros((2, parts, long), np.int32)
    scales = np.zeros((parts, long), np.float32)
    for q in range(parts):
        mine = np.flatnonzero(reader == q)
        for place, edge in enumerate(mine):
            node, p = edges.senders[edge], owner[edge]
            far = size + p * most
            senders[q, place] = local[node] if p == q else far + np.searchsorted(wanted[p, q], node)
        receivers[q, : len(mine)] = local[edges.receivers[mine]]
        scales[q, : len(mine)] = edges.scales[mine]
    return Parts(reads, senders, receivers, scales), part * size + local


def placed(nodes: Nodes, places: Ints, parts: int) -> Nodes:
    """The nodes' values in parts; places of no node count for nothing."""
    size = -(-(int(places.max()) + 1) // parts)

    def put(values: Any) -> Any:
        found = np.zeros((parts * size, *values.shape[1:]), values.dtype)
        found[places] = values
        return found.reshape(parts, size, *values.shape[1:])

    return Nodes(*map(put, nodes))
