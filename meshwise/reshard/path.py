"""The cheapest path in the graph of a reshard: A* over shardings."""

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from meshwise.reshard.bounds import Bounds, bounds_of
from meshwise.reshard.moves import Move, Moves
from meshwise.reshard.plan import StepKind
from meshwise.reshard.steps import LARGE_BYTES
from meshwise.reshard.straight import Straight, straight_moves
from meshwise.reshard.transfers import State

# Costs are sums of bytes; two that differ by less than this part of one another are equal.
_ROUNDING = 1e-9

# Rounds cut what they need of what devices hold, so they come first, after what sends nothing or
# must be done before: a slice shares the sending evenly among those who hold the same.
_BEFORE_ROUNDS = (StepKind.SLICE, StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE)


@dataclass(frozen=True)
class Path:
    """Moves from the source to the target; `cost` in bytes of the plain link."""

    moves: tuple[Move, ...]
    cost: float
    peak_bytes: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends."""
        return sum(move.sent for move in self.moves if move.kind is not StepKind.SLICE)

    @property
    def launches(self) -> int:
        """How many collectives it is, rounds as one."""
        return sum(move.kind is not StepKind.SLICE and not move.joins for move in self.moves)

    @property
    def is_short(self) -> bool:
        """Whether it is at most two collectives, and no rounds."""
        return self.launches <= 2 and not self.has_rounds

    @property
    def is_one_launch(self) -> bool:
        """Whether it is at most one collective, and no rounds."""
        return self.launches <= 1 and not self.has_rounds

    @property
    def has_rounds(self) -> bool:
        """Whether pieces travel in rounds."""
        return any(move.kind is StepKind.ROUNDS for move in self.moves)


# Rounds that are found take as long as so many other moves.
_ROUNDS_TAKE = 300


class SearchTooLong(Exception):
    """So many moves as were allowed led to no path."""


# What a queue holds: a state, or rounds from it that are not found yet.
_Waiting = tuple[float, int, int, State, Straight | bool]


def shortest_path(
    moves: Moves,
    cap: float,
    below: float = math.inf,
    with_rounds: bool = True,
    most_moves: float = math.inf,
    haste: float = 1.0,
) -> Path | None:
    """A* from source to target through arrays of at most `cap` bytes, at a cost `below` another.

    None where there is none. Raises SearchTooLong where so many moves do not tell. With `haste` the
    path is not the cheapest, but at most so many times dearer: what is left counts so many times.

    Rounds take long to find. What stands for them waits at a cost that they are not below, first
    for all rounds from a state, then for those to each other state; what comes first is found.
    """
    start, bounds = moves.start, bounds_of(moves.problem, cap)
    costs: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Move]] = {}
    queue: list[_Waiting] = [(haste * bounds.cost(start), 0, 0, start, False)]
    left: dict[State, float] = {}  # at what cost the moves from a state were looked at
    late, number, tried = _rounds_from(bounds), itertools.count(1), 0
    while queue:
        rank, length, _, state, rounds = heapq.heappop(queue)
        if rank >= below:
            return None
        if tried > most_moves:
            raise SearchTooLong
        cost = costs[state]
        if rounds is True:
            for straight in straight_moves(moves, state):
                least = max(rank, cost + straight.least + haste * bounds.cost(straight.end))
                heapq.heappush(queue, (least, length, next(number), state, straight))
            continue
        if rounds:
            options: Iterable[Move] = filter(None, (rounds.found(),))
            tried += _ROUNDS_TAKE
        elif moves.is_end(state):
            return _trace_back(moves, state, cost, came)
        elif left.get(state) == cost:
            continue
        else:
            left[state] = cost
            options = moves.moves(state)
            tried += len(options)
            if with_rounds and (state == start or came[state][1].kind in _BEFORE_ROUNDS):
                least = max(late, cost + haste * bounds.cost(state)) * (1 + _ROUNDING)
                heapq.heappush(queue, (least, length, next(number), state, True))
        for move in options:
            new_cost = cost + move.cost
            known = costs.get(move.state, below) * (1 - _ROUNDING)
            if move.peak_bytes > cap or new_cost >= known:
                continue
            least = new_cost + haste * bounds.cost(move.state)
            if least >= below:
                continue
            costs[move.state] = new_cost
            came[move.state] = state, move
            heapq.heappush(queue, (least, length + 1, next(number), move.state, False))
    return None


def _rounds_from(bounds: Bounds) -> float:
    """The cost up to which collectives alone are as good as rounds."""
    start, prices = bounds.moves.start, bounds.moves.problem.prices
    return max(bounds.cost(start) * prices.close + prices.slack, bounds.with_rounds(start))


def least_peak(moves: Moves, most_moves: float = math.inf) -> float:
    """The smallest cap for which there is a path without rounds: Dijkstra on the largest array.

    No limit (infinity) where so many moves do not tell.
    """
    peaks: dict[State, int] = {moves.start: moves.end_bytes}
    queue = [(moves.end_bytes, 0, moves.start)]
    count = itertools.count(1)
    tried = 0
    while queue:
        peak, _, state = heapq.heappop(queue)
        if moves.is_end(state):
            return peak
        if tried > most_moves:
            return math.inf
        options = moves.moves(state)
        tried += len(options)
        for move in options:
            new_peak = max(peak, move.peak_bytes)
            if new_peak < peaks.get(move.state, new_peak + 1):
                peaks[move.state] = new_peak
                heapq.heappush(queue, (new_peak, next(count), move.state))
    raise AssertionError(f"no path: {moves.problem}")


def _trace_back(
    moves: Moves, end: State, cost: float, came: dict[State, tuple[State, Move]]
) -> Path:
    path: list[Move] = []
    state = end
    while state in came:
        state, move = came[state]
        path.append(move)
    peak = max([moves.end_bytes, *(move.peak_bytes for move in path)])
    path.reverse()
    launch = moves.problem.prices.launch_of(StepKind.ALL_GATHER)
    return Path(tuple(path), cost + _launches_apart(moves, path) * launch, peak)


def _launches_apart(moves: Moves, path: Sequence[Move]) -> int:
    """How many launches more it takes that large gathers of several dims go one by one."""
    count = 0
    dims: set[int | None] = set()
    for move, after in zip_longest(path, path[1:]):
        if move.kind is not StepKind.ALL_GATHER:
            continue
        dims = {*(dims if move.joins else ()), *(dim for _, dim, _ in move.parts)}
        is_last = after is None or not after.joins
        if is_last and moves.local_bytes(move.state[1]) >= LARGE_BYTES:
            count += len(dims) - 1
    return count
