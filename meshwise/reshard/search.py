"""The cheapest plan between two shardings: A* over shardings (Rink et al., arXiv 2112.01075).

`plan_reshard` gives the plan, `reshard_cost` only its seconds. Example: on a mesh `x = 2, y = 4`,
64x64 from `[x, -]` to `[-, y]` is a slice of dim 1 over `y` (free), then an all_gather of dim 0
over `x`: 512 of the 4,096 elements are sent, where gathering first would send 2,048.

Memory law: the peak is at most the larger of the source and target shard whenever a plan within
it exists; an uneven dim may hold the padding of its other end, unless `max_bytes` forbids it.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, zip_longest

from meshwise.cost.hardware import Hardware
from meshwise.errors import MemoryLimitError, message
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import Reduction, Sharding, local_bytes, local_shape, unreduced
from meshwise.reshard.canonical import Naming, levels
from meshwise.reshard.moves import Move, Moves, State, moves_of
from meshwise.reshard.plan import Part, ReshardPlan, Step, StepKind
from meshwise.reshard.problem import Problem
from meshwise.reshard.steps import LARGE_BYTES, gathered_in_turn, steps_of
from meshwise.reshard.straight import Straight, straight_moves

# Costs are sums of bytes; two that differ by less than this part of one another are equal.
_ROUNDING = 1e-9

# Rounds cut what they need of what devices hold, so they come first, after what sends nothing or
# must be done before: a slice shares the sending evenly among those who hold the same.
_BEFORE_ROUNDS = (StepKind.SLICE, StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE)


def plan_reshard(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
    max_bytes: int | None = None,
) -> ReshardPlan:
    """The cheapest plan that takes a value from one sharding to another.

    `shape` is global, `itemsize` in bytes, `max_bytes` bounds the largest local array on the way.

    A target that is a sum over axes that the source is none over is made of one device's value,
    and zeros. Raises ValueError where it is another reduction, and MemoryLimitError where no plan
    fits in `max_bytes`.
    """
    return _plan(tuple(shape), itemsize, mesh, source, target, hardware, max_bytes)


def plan_within_shards(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
) -> ReshardPlan:
    """The cheapest plan; one that keeps the memory law to the letter where it sends no more."""
    what = shape, itemsize, mesh, source, target, hardware
    plan = plan_reshard(*what)
    most = max(local_bytes(shape, itemsize, s, mesh) for s in (source, target))
    if plan.peak_bytes <= most:
        return plan
    try:
        within = plan_reshard(*what, most)
    except MemoryLimitError:
        return plan
    return within if within.wire_bytes <= plan.wire_bytes else plan


@lru_cache(maxsize=1 << 17)
def reshard_cost(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
) -> float:
    """Seconds of the plan that `plan_reshard` gives, with the price of bytes that come first."""
    target = _before_term(source, target)
    if source == target:
        return 0.0
    _check(shape, source, target)
    if 0 in shape:
        return 0.0
    if not hardware.byte_factor("slice") and _is_slice(shape, mesh, source, target):
        return 0.0
    path, _ = _best(shape, itemsize, mesh, source, target, hardware, None)
    return path.cost / hardware.link_bytes_per_s


@lru_cache(maxsize=1 << 17)
def reshard_bound(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
) -> float:
    """Seconds that `reshard_cost` is not below, found without a search."""
    target = _before_term(source, target)
    if source == target or 0 in shape:
        return 0.0
    _check(shape, source, target)
    if not hardware.byte_factor("slice") and _is_slice(shape, mesh, source, target):
        return 0.0
    problem, _ = _first_level(shape, itemsize, mesh, source, target, hardware)
    moves = moves_of(problem)
    return moves.bound(moves.start) / hardware.link_bytes_per_s


@lru_cache(maxsize=1 << 14)
def _first_level(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
) -> tuple[Problem, Naming]:
    return next(levels(shape, itemsize, mesh, source, target, hardware))


@dataclass(frozen=True)
class Path:
    """Moves from the source to the target; `cost` in bytes of the plain link."""

    moves: tuple[Move, ...]
    cost: float
    peak_bytes: int


@lru_cache(maxsize=1 << 14)
def _plan(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
    max_bytes: int | None,
) -> ReshardPlan:
    whole = _before_term(source, target)
    if whole != target:
        plan = _plan(shape, itemsize, mesh, source, whole, hardware, max_bytes)
        local = local_shape(shape, target, mesh)
        axes = tuple(a for a in target.unreduced if a not in whole.unreduced)
        term = Step(StepKind.TERM, (Part(axes),), whole, target, local, local, 0, 0)
        return replace(plan, target=target, steps=(*plan.steps, term))
    _check(shape, source, target)
    steps: tuple[Step, ...] = ()
    cost = 0.0
    ends = (local_shape(shape, s, mesh) for s in (source, target))
    peak = max(math.prod(end) for end in ends) * itemsize
    if source != target and 0 not in shape:
        path, naming = _best(shape, itemsize, mesh, source, target, hardware, max_bytes)
        steps = steps_of(path.moves, naming, shape, itemsize, mesh, source, target)
        steps = gathered_in_turn(steps, itemsize, mesh)
        cost, peak = path.cost, path.peak_bytes
    if max_bytes is not None and peak > max_bytes:
        raise MemoryLimitError(too_large(shape, f"{source}", f"{target}", max_bytes, peak))
    sent = sum(step.wire_bytes for step in steps)
    launches = sum(step.launches for step in steps)
    seconds = (cost - sent * hardware.bytes_first) / hardware.link_bytes_per_s
    return ReshardPlan(shape, itemsize, source, target, steps, sent, launches, seconds, peak)


def _best(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    source: Sharding,
    target: Sharding,
    hardware: Hardware,
    max_bytes: int | None,
) -> tuple[Path, Naming]:
    """The best path of all levels; levels after one that meets the bound are not searched."""
    what = shape, itemsize, mesh, source, target, hardware
    problem, naming = _first_level(*what)
    path, meets_bound = solve(problem, max_bytes)
    best = path, naming
    for problem, naming in () if meets_bound else islice(levels(*what), 1, None):
        path, meets_bound = solve(problem, max_bytes)
        if _rank(path, problem, max_bytes) < _rank(best[0], problem, max_bytes):
            best = path, naming
        if meets_bound:
            break
    return best


def _rank(path: Path, problem: Problem, max_bytes: int | None) -> tuple[float, float, int]:
    """Order of preference: within the memory allowed, then cost, then fewer moves."""
    excess = max(path.peak_bytes - _allowed(moves_of(problem), max_bytes), 0)
    return excess, round(path.cost, 3), len(path.moves)


@lru_cache(maxsize=1 << 14)
def solve(problem: Problem, max_bytes: int | None = None) -> tuple[Path, bool]:
    """The cheapest path of a canonical problem, and whether it meets the lower bound.

    Without `max_bytes` the path keeps the memory law, with the padding of a gathered dim; with it,
    it fits in so much. Where there is no such path, it is one of least peak.
    """
    moves = moves_of(problem)
    path = shortest_path(moves, math.inf)
    assert path is not None, f"no path: {problem}"
    allowed = _allowed(moves, max_bytes)
    if path.peak_bytes > allowed:
        caps = (allowed, moves.end_bytes, least_peak(moves))
        fitting = (shortest_path(moves, cap) for cap in caps)
        path = next(filter(None, fitting), path)
    return path, _is_close(path, moves) and path.peak_bytes <= allowed


def _allowed(moves: Moves, max_bytes: int | None) -> int:
    return moves.padded_end_bytes if max_bytes is None else max_bytes


def _is_close(path: Path, moves: Moves) -> bool:
    """Whether nothing better is worth looking for."""
    prices = moves.problem.prices
    return path.cost <= moves.bound(moves.start) * prices.close + prices.slack


# What a queue holds: a state, or rounds from it that are not found yet.
_Waiting = tuple[float, int, int, State, Straight | bool]


def shortest_path(moves: Moves, cap: float) -> Path | None:
    """A* from source to target through arrays of at most `cap` bytes; None where there is none.

    Rounds take long to find. What stands for them waits at a cost that they are not below, first
    for all rounds from a state, then for those to each other state; what comes first is found.
    """
    start = moves.start
    costs: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Move]] = {}
    queue: list[_Waiting] = [(moves.bound(start), 0, 0, start, False)]
    left: dict[State, float] = {}  # at what cost the moves from a state were looked at
    late = _rounds_from(moves)
    count = 0
    while queue:
        rank, length, _, state, rounds = heapq.heappop(queue)
        cost = costs[state]
        if rounds is True:
            for straight in straight_moves(moves, state):
                least = max(rank, cost + straight.least + moves.bound(straight.end))
                count += 1
                heapq.heappush(queue, (least, length, count, state, straight))
            continue
        if rounds:
            found = rounds.found()
            options: Iterable[Move] = () if found is None else (found,)
        elif moves.is_end(state):
            return _trace_back(moves, state, cost, came)
        elif left.get(state) == cost:
            continue
        else:
            left[state] = cost
            options = moves.moves(state)
            if state == start or came[state][1].kind in _BEFORE_ROUNDS:
                count += 1
                least = max(late, cost + moves.bound(state)) * (1 + _ROUNDING)
                heapq.heappush(queue, (least, length, count, state, True))
        for move in options:
            if move.peak_bytes > cap:
                continue
            new_cost = cost + move.cost
            known = costs.get(move.state)
            if known is not None and new_cost >= known * (1 - _ROUNDING):
                continue
            costs[move.state] = new_cost
            came[move.state] = state, move
            count += 1
            rank = new_cost + moves.bound(move.state)
            heapq.heappush(queue, (rank, length + 1, count, move.state, False))
    return None


def _rounds_from(moves: Moves) -> float:
    """The cost up to which collectives alone are as good as rounds."""
    prices, bound = moves.problem.prices, moves.bound(moves.start)
    extra = prices.round_launch - prices.least_launch
    return max(bound * prices.close + prices.slack, bound + extra)


def least_peak(moves: Moves) -> int:
    """The smallest cap for which there is a path: Dijkstra on the largest array on the way.

    Rounds need no more than both ends, and are tried before.
    """
    peaks: dict[State, int] = {moves.start: moves.end_bytes}
    queue = [(moves.end_bytes, 0, moves.start)]
    count = 0
    while queue:
        peak, _, state = heapq.heappop(queue)
        if moves.is_end(state):
            return peak
        for move in moves.moves(state):
            new_peak = max(peak, move.peak_bytes)
            if new_peak < peaks.get(move.state, new_peak + 1):
                peaks[move.state] = new_peak
                count += 1
                heapq.heappush(queue, (new_peak, count, move.state))
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


def _is_slice(shape: tuple[int, ...], mesh: Mesh, source: Sharding, target: Sharding) -> bool:
    """Whether each device holds its target shard already."""
    return source.unreduced == target.unreduced and all(
        mine in ((), wanted) or (mine == wanted[: len(mine)] and n % mesh.size(wanted) == 0)
        for n, mine, wanted in zip(shape, source.dims, target.dims, strict=True)
    )


def _before_term(source: Sharding, target: Sharding) -> Sharding:
    """What a value is before it becomes a term over axes that it is not unreduced over."""
    if target.reduction is not Reduction.SUM:
        return target
    held = source.unreduced if source.reduction is Reduction.SUM else ()
    return unreduced(target.dims, [a for a in target.unreduced if a in held], Reduction.SUM)


def _check(shape: tuple[int, ...], source: Sharding, target: Sharding) -> None:
    """Refuse what no collective does."""
    if not len(shape) == len(source.dims) == len(target.dims):
        raise ValueError(
            f"reshard of shape {list(shape)} from {source} to {target}: the ranks differ.\n"
            "A sharding lists axes for each dim.\nGive two shardings of the value's rank."
        )
    added = sorted(set(target.unreduced) - set(source.unreduced))
    if added or (target.unreduced and source.reduction is not target.reduction):
        raise ValueError(
            f"reshard of shape {list(shape)} from {source} to {target}: the target is unreduced "
            f"over {', '.join(added) or 'another operator'}, the source is not.\n"
            "A value becomes unreduced by the computation that makes it, not by a reshard.\n"
            "Reduce the target, or leave the source unreduced over the same axes."
        )


def too_large(shape: tuple[int, ...], source: str, target: str, max_bytes: int, least: int) -> str:
    """The message of the error for a reshard that does not fit."""
    return message(
        f"reshard of shape {list(shape)} from {source} to {target} in at most {max_bytes:,} "
        "bytes a device",
        [f"the least possible is {least:,}"],
        "The largest array that a device holds on the way, its shards before and after included, "
        "must fit.",
        "Raise max_bytes, or use shardings over more axes.",
    )
