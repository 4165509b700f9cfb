"""Random tiles, what devices hold of a value under them, and what rounds between them must do."""

import itertools
import random
from collections.abc import Sequence

import numpy as np

from meshwise.reshard.rounds import Round
from meshwise.reshard.tiles import Tiles


def random_tiles(
    draw: random.Random, shape: Sequence[int], devices: int, *, is_whole: bool, idle: float = 0.2
) -> Tiles:
    """Tiles of random size on random devices, some held often, some wholly beyond the end.

    Where `is_whole`, every tile is on some device. A share `idle` of the other devices holds none.
    """
    while True:
        block = [draw.randint(1, n) if n else 0 for n in shape]
        counts = [
            -(-n // b) + (draw.random() < 0.2) if n else 1
            for n, b in zip(shape, block, strict=True)
        ]
        cells = list(itertools.product(*map(range, counts)))
        if len(cells) <= devices:
            break
    found: list[tuple[int, ...] | None] = [
        tuple(i * b for i, b in zip(cell, block, strict=True)) for cell in cells
    ]
    starts = list(found) if is_whole else []
    while len(starts) < devices:
        starts.append(None if draw.random() < idle else draw.choice(found))
    draw.shuffle(starts)
    return Tiles(tuple(shape), tuple(block), tuple(starts))


def inside(tiles: Tiles, device: int) -> tuple[slice, ...]:
    """The rows of the array in a device's tile, padding left out."""
    lows = np.minimum(tiles.lows[device], tiles.shape)
    highs = np.maximum(tiles.highs[device], lows)
    return tuple(slice(a, b) for a, b in zip(lows.tolist(), highs.tolist(), strict=True))


def held(value: np.ndarray, tiles: Tiles, garbage: float) -> np.ndarray:
    """What every device holds: [devices, *block, *element], garbage where there is no value."""
    element = value.shape[len(tiles.shape) :]
    out = np.full((len(tiles.starts), *tiles.block, *element), garbage, value.dtype)
    for device, start in enumerate(tiles.starts):
        if start is not None:
            part = value[inside(tiles, device)]
            out[(device, *map(slice, part.shape[: len(tiles.shape)]))] = part
    return out


def check_rounds(source: Tiles, target: Tiles, rounds: Sequence[Round]) -> None:
    """All that is promised of rounds, device by device."""
    devices = len(source.starts)
    kept = rounds[:1] if rounds and not rounds[0].is_sent else ()
    assert all(p.sender == p.receiver for each in kept for p in each.pieces)
    received = [np.zeros(target.block, int) for _ in range(devices)]
    missing = [0] * devices
    loads = np.zeros((2, devices), int)
    for each in rounds:
        senders, receivers = ([getattr(p, e) for p in each.pieces] for e in ("sender", "receiver"))
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers), each
        assert each.pieces
        assert each.shape == tuple(map(max, zip(*[p.size for p in each.pieces], strict=True)))
        for p in each.pieces:
            start, end = np.array(p.start, int), np.array(p.start, int) + np.array(p.size, int)
            for tiles, device in ((source, p.sender), (target, p.receiver)):
                assert tiles.starts[device] is not None, (each, device)
                assert (tiles.lows[device] <= start).all(), (each, p)
                assert (end <= tiles.highs[device]).all(), (each, p)
            at = start - target.lows[p.receiver]
            where = tuple(slice(a, a + n) for a, n in zip(at, p.size, strict=True))
            received[p.receiver][where] += 1
            missing[p.receiver] += (p.sender != p.receiver) * int(np.prod(p.size))
            if each not in kept:
                loads[0, p.sender] += 1
                loads[1, p.receiver] += 1
    assert len(rounds) - len(kept) == loads.max(initial=0)
    for device in range(devices):
        wanted = np.zeros(target.block, int)
        own = 0
        if target.starts[device] is not None:
            part = inside(target, device)
            wanted[tuple(slice(s.stop - s.start) for s in part)] = 1
            mine = inside(source, device) if source.starts[device] is not None else None
            own = _shared(part, mine)
        np.testing.assert_array_equal(received[device], wanted)
        assert missing[device] == wanted.sum() - own, device


def _shared(part: Sequence[slice], other: Sequence[slice] | None) -> int:
    """Elements in both boxes."""
    if other is None:
        return 0
    total = 1
    for a, b in zip(part, other, strict=True):
        total *= max(0, min(a.stop, b.stop) - max(a.start, b.start))
    return total
