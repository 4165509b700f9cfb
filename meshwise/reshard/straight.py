"""Moves in rounds: from what a device holds straight to the target, or to just before it.

All shardings that one all_gather makes the target of are tried: an all_gather of whole shards is
one launch, where rounds would take one for each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwise.reshard.moves import Move, Moves, moves_of
from meshwise.reshard.places import Ids
from meshwise.reshard.plan import StepKind
from meshwise.reshard.problem import MOST_DEVICES, Problem
from meshwise.reshard.rounds import Round, plan_rounds
from meshwise.reshard.tiles import Lying, Tiles, elements_received, tiles_of
from meshwise.reshard.transfers import State


@dataclass(frozen=True, slots=True)
class Straight:
    """Rounds that are not found yet, from one state to another, and a cost that they are not below.

    In bytes, as the costs of moves are.
    """

    moves: Moves
    start: State
    end: State
    least: float

    def found(self) -> Move | None:
        """The rounds; None where they would be too many, or nothing is to be sent."""
        p, moves = self.moves.problem, self.moves
        before, after = self.start[:2], self.end[:2]
        rounds = _rounds(p.sizes, p.shape, before, after)
        if rounds is None or before[0] == after[0]:
            return None
        sent = [moves.local_bytes(r.shape) for r in rounds if r.is_sent]
        kept = sum(moves.local_bytes(r.shape) for r in rounds) - sum(sent)
        cost = len(sent) * p.prices.round_launch + sum(sent) * p.prices.round
        cost += kept * p.prices.slice
        peak = max(moves.local_bytes(before[1]), moves.local_bytes(after[1]))
        parts = ((tuple(range(len(p.sizes))), None, None),)
        return Move(StepKind.ROUNDS, parts, self.end, cost, sum(sent), peak)


def straight_moves(moves: Moves, state: State) -> Iterator[Straight]:
    """Rounds from a state to the target, or to what one all_gather makes the target of."""
    dims, blocks, terms, _ = state
    p = moves.problem
    if terms or math.prod(p.sizes) > MOST_DEVICES:
        return
    held = moves.local_bytes(blocks)
    for new_dims, new_blocks in _before_gathers(p):
        received = _received(moves, (dims, blocks), (new_dims, new_blocks))
        # In a round a device receives at most what another holds.
        launches = -(-received // held) * p.prices.round_launch
        least = received * p.prices.round + launches
        yield Straight(moves, state, (new_dims, new_blocks, (), None), least)


def _received(moves: Moves, source: Lying, target: Lying) -> int:
    """The most bytes that any device receives; of regular problems, from the smallest one."""
    p = moves.problem
    if not moves.is_regular:
        return elements_received(p.sizes, p.shape, source, target) * p.itemsize
    shape = moves.smallest_shape
    ends = (
        (dims, tuple(n // moves.size(axes) for n, axes in zip(shape, dims, strict=True)))
        for dims in (source[0], target[0])
    )
    return elements_received(p.sizes, shape, *ends) * moves.scale


@lru_cache(maxsize=1 << 12)
def _rounds(sizes: Ids, shape: Ids, source: Lying, target: Lying) -> tuple[Round, ...] | None:
    return plan_rounds(_tiles(sizes, shape, source), _tiles(sizes, shape, target))


@lru_cache(maxsize=1 << 12)
def _tiles(sizes: Ids, shape: Ids, lying: Lying) -> Tiles:
    dims, blocks = lying
    return tiles_of(shape, blocks, dims, dict(enumerate(sizes)))


@lru_cache(maxsize=1 << 8)
def _before_gathers(problem: Problem) -> list[Lying]:
    """The target, and those that become it by one all_gather of axes that it does not use."""
    p, moves = problem, moves_of(problem)
    found = [(p.target, moves.target_blocks)]
    used = {axis for axes in p.target for axis in axes}
    extra = [axis for axis in range(len(p.sizes)) if axis not in used]
    for dims, blocks in found:
        for axis in extra:
            if any(axis in axes for axes in dims):
                continue
            for dim, axes in enumerate(dims):
                block, left = divmod(blocks[dim], p.sizes[axis])
                if left and (axes or moves.even_dims[dim]):
                    continue
                after = (*dims[:dim], (*axes, axis), *dims[dim + 1 :])
                new = after, (*blocks[:dim], block + bool(left), *blocks[dim + 1 :])
                if new not in found:
                    found.append(new)
    return found
