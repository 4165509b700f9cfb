"""Random moves of a schedule, legal or not, and what must hold of each."""

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import meshwise as mw
from meshwise.schedule.handles import Handle, depths

REFUSALS = (mw.IllegalMove, mw.ArgumentError)


def move_at_random(
    schedule: mw.Schedule, rng: random.Random, states: dict[str, int], count: int = 5
) -> int:
    """Try some moves; how many were legal. One that is refused must have changed nothing."""
    made = 0
    for _ in range(count):
        kind = rng.choice(MOVES)
        view, program = schedule.view, schedule.view.program
        try:
            made += kind(schedule, rng, states)
        except REFUSALS as refusal:
            if kind is not on_slices:
                assert schedule.view is view and view.program is program, "a refused move changed"
            text = str(refusal)
            assert len(text.splitlines()) >= 3, text
    return made


def some(handles: Sequence[Handle], rng: random.Random) -> list[Handle]:
    """One, some or all, in order or not."""
    if not handles:
        return []
    count = rng.choice([1, len(handles), rng.randint(1, len(handles))])
    chosen = rng.sample(list(handles), count)
    return chosen if rng.random() < 0.2 else [h for h in handles if h in chosen]


def split(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """All_reduces in two halves; mostly those that are summed."""
    del states
    sums = [h for h in s.find("all_reduce") if h.value.aval.shape or rng.random() < 0.1]
    chosen = some(sums, rng)
    if not chosen:
        return False
    dim = rng.choice([None, None, 0, 1, 2])
    s.split(chosen if rng.random() < 0.7 else chosen[0], dim, pad=rng.random() < 0.8)
    return True


def on_slices(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """What belongs together: sums over a group in halves, computation between, state in slices."""
    sums = [h for h in s.find("all_reduce") if h.value.aval.shape]
    if not sums:
        return False
    first = rng.choice(sums)
    dim = rng.choice([None, 0, 0, 1])
    alike = [h for h in sums if h.text.split(" over ")[1] == first.text.split(" over ")[1]]
    _, gathered = s.split(alike if rng.random() < 0.5 else [first], dim)
    s.reorder(gathered, more_bytes=True)
    for name, result in states.items():
        with contextlib.suppress(*REFUSALS):
            s.slice_state(name, result, gathers=rng.random() < 0.3)
    return True


def split_to_root(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """A reduce and a broadcast."""
    del states
    chosen = some(s.find("all_reduce"), rng)[:1]
    for handle in chosen:
        s.split_to_root(handle, rng.randint(0, 2))
    return bool(chosen)


def reorder(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """Gathers past all that can be, or past some equations of the program."""
    del states
    gathers = s.find("all_gather")
    if rng.random() < 0.2:
        gathers += s.find("slice")
    chosen = some(gathers, rng)
    if not chosen:
        return False
    computations = None
    if rng.random() < 0.4:
        found = s.find()
        start = rng.randrange(len(found))
        computations = found[start : start + rng.randint(1, 6)]
        if rng.random() < 0.5:
            computations = rng.sample(found, min(3, len(found)))
    s.reorder(chosen, computations, more_bytes=rng.random() < 0.9)
    return True


def slice_state(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """States as the slices that are read of them, or as is said."""
    if not states:
        return False
    name = rng.choice(list(states))
    dim, axes = None, None
    if rng.random() < 0.4:
        names = s.view.mesh.names
        dim, axes = rng.choice([0, 0, 1]), tuple(rng.sample(names, rng.randint(1, len(names))))
    s.slice_state(name, states[name], dim, axes, gathers=rng.random() < 0.5)
    return True


def bucket(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """Collectives of a kind together."""
    del states
    chosen = some(
        s.find(rng.choice(["all_reduce", "all_reduce", "reduce_scatter", "all_gather"])), rng
    )
    if not chosen:
        return False
    depth = depths(s.view, [h.value for h in chosen])
    level = chosen
    if rng.random() < 0.7:
        level = [h for h in chosen if depth[h.value] == depth[chosen[0].value]]
    s.bucket(level, rng.choice([None, None, 64, 1024]))
    return True


def fuse(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """Some neighbours, or a whole all_reduce, as one."""
    del states
    found = s.find()
    start = rng.randrange(len(found))
    chosen = found[start : start + rng.randint(2, 5)]
    scattered, gathered = s.find("reduce_scatter"), s.find("all_gather")
    if scattered and gathered and rng.random() < 0.5:
        chosen = [rng.choice(scattered), *some(gathered, rng)]
    s.fuse(chosen)
    return True


def overlap(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """Rings of products and collectives, or chains of equations in chunks."""
    del states
    products = s.find("dot_general") + s.find("all_gather")
    if products and rng.random() < 0.7:
        s.overlap(rng.choice(products), bidirectional=rng.random() < 0.5)
        return True
    found = s.find()
    start = rng.randrange(len(found))
    s.overlap(found[start : start + rng.randint(1, 4)], chunks=2, dim=rng.choice([None, 0, 1]))
    return True


def merge(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """Two collectives as one."""
    del states
    kind = rng.choice(["all_reduce", "all_gather", "reduce_scatter", "add", "dynamic_slice"])
    found = s.find(kind)
    if found:
        s.merge(rng.choice(found))
    return bool(found)


def hoist(s: mw.Schedule, rng: random.Random, states: dict[str, int]) -> bool:
    """What can leave a loop."""
    del states
    found = s.find("scan")
    if found:
        s.hoist(rng.choice(found), more_bytes=rng.random() < 0.5)
    return bool(found)


Move = Callable[[mw.Schedule, random.Random, dict[str, int]], Any]
MOVES: list[Move] = [on_slices] * 10 + [split] * 5 + [reorder] * 6 + [slice_state] * 3
MOVES += [bucket, bucket, fuse, split_to_root, overlap, merge, hoist]
