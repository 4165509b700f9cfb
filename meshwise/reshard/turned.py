"""What lies turned, in one step to where its shards belong.

A dim that is reversed shard by shard lies turned: its shards have to change places, the first with
the last. Where the value is wanted in other shards anyway, each goes straight there: what device
`k` holds is then counted as what the device as far from the end should hold.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import local_shape
from meshwise.reshard.canonical import prices_of
from meshwise.reshard.plan import Part, Reshard, Step, StepKind
from meshwise.reshard.rounds import plan_rounds
from meshwise.reshard.straight import MOST_DEVICES
from meshwise.reshard.tiles import tiles_over


@dataclass(frozen=True, slots=True)
class Turned:
    """The step, and what it costs in bytes of the plain link."""

    step: Step
    cost: float


@lru_cache(maxsize=1 << 14)
def straightened(asked: Reshard) -> Turned | None:
    """From where a value lies turned to a target, in one step; None where none leads there.

    To the same sharding, not turned, one always does.
    """
    assert asked.source.unreduced == asked.target.unreduced, asked
    ways = [way for way in (_permuted(asked), _in_rounds(asked)) if way is not None]
    return min(ways, key=lambda way: way.cost, default=None)


def _permuted(asked: Reshard) -> Turned | None:
    """Shards that change places whole: where both ends cut each dim in as many."""
    shape, itemsize, mesh, source, target, hardware = asked
    ends = zip(source.dims, target.dims, strict=True)
    if any(mesh.size(mine) != mesh.size(wanted) for mine, wanted in ends):
        return None
    block = local_shape(shape, source, mesh)
    sent = math.prod(block) * itemsize
    parts = (Part(_axes_that_move(asked)),)
    step = Step(StepKind.PERMUTE, parts, source, target, block, block, sent, 1)
    prices = prices_of(hardware)
    return Turned(step, prices.launch_of(StepKind.PERMUTE) + sent * prices.permute)


def _in_rounds(asked: Reshard) -> Turned | None:
    """Pieces that go straight to who lacks them; an all_gather is what makes larger shards."""
    shape, itemsize, mesh, source, target, hardware = asked
    axes = _axes_that_move(asked)
    blocks = local_shape(shape, source, mesh), local_shape(shape, target, mesh)
    gathers = mesh.size(target.used_axes) < mesh.size(source.used_axes)
    if gathers or mesh.size(axes) > MOST_DEVICES:
        return None
    ends = zip((source, target), blocks, strict=True)
    rounds = plan_rounds(*(tiles_over(axes, shape, block, s, mesh) for s, block in ends))
    if rounds is None:
        return None
    sent = [math.prod(r.shape) * itemsize for r in rounds if r.is_sent]
    kept = sum(math.prod(r.shape) * itemsize for r in rounds) - sum(sent)
    parts = (Part(axes),)
    what = StepKind.ROUNDS, parts, source, target, *blocks, sum(sent), len(sent)
    prices = prices_of(hardware)
    cost = len(sent) * prices.round_launch + sum(sent) * prices.round + kept * prices.slice
    return Turned(Step(*what, rounds), cost)


def _axes_that_move(asked: Reshard) -> Axes:
    """Axes of the dims whose shards are others at the target, or elsewhere."""
    found: set[str] = set()
    for mine, wanted in zip(asked.source.dims, asked.target.dims, strict=True):
        if mine != wanted or not set(mine).isdisjoint(asked.source.turned):
            found.update(mine, wanted)
    return asked.mesh.permute_order(found)


def turned_seconds(asked: Reshard) -> float:
    """Seconds of that step, the price of bytes that come first included; infinite without one."""
    way = straightened(asked)
    return math.inf if way is None else way.cost / asked.hardware.link_bytes_per_s
