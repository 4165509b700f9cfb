"""The cheapest plan between two shardings: A* over shardings (Rink et al., arXiv 2112.01075).

`plan_reshard` gives the plan, `reshard_cost` only its seconds. Example: on a mesh `x = 2, y = 4`,
64x64 from `[x, -]` to `[-, y]` is a slice of dim 1 over `y` (free), then an all_gather of dim 0
over `x`: 512 of the 4,096 elements are sent, where gathering first would send 2,048.

Memory law: the peak is at most the larger of the source and target shard wherever a plan within it
is found; an uneven dim may hold the padding of its other end, unless `max_bytes` forbids it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

from meshwise.errors import MemoryLimitError, message
from meshwise.ir.sharding import Reduction, Sharding, local_shape, unreduced
from meshwise.reshard.bounds import Bounds, bounds_of
from meshwise.reshard.canonical import Level, Naming, levels
from meshwise.reshard.moves import Moves, moves_of
from meshwise.reshard.path import Path, SearchTooLong, least_peak, shortest_path
from meshwise.reshard.plan import Part, Reshard, ReshardPlan, Step, StepKind
from meshwise.reshard.problem import Problem
from meshwise.reshard.steps import gathered_in_turn, steps_of
from meshwise.reshard.turned import straightened, turned_seconds

# Moves that are looked at in each search for a plan: about a second. Thousands of reshards are
# priced for one program, of which it takes a few: fewer moves are looked at for a price, where
# they are not those of a smaller problem, found once for many.
MOST_MOVES = 20_000
MOST_PRICED_MOVES = 2_500

# How many times what is left counts where any path that fits is looked for: better ones, then soon.
_HASTES = 4.0, 64.0

# Half a byte is no difference in bytes.
_NO_BYTES = 0.5


def plan_reshard(asked: Reshard, max_bytes: int | None = None) -> ReshardPlan:
    """The cheapest plan for a reshard; `max_bytes` bounds the largest local array on the way.

    A target that is a sum over axes that the source is none over is made of one device's value,
    and zeros. Raises ValueError where it is another reduction, and MemoryLimitError where no plan
    that fits in `max_bytes` is found.
    """
    return _plan(asked, max_bytes)


@lru_cache(maxsize=1 << 14)
def _plan(asked: Reshard, max_bytes: int | None) -> ReshardPlan:
    shape, itemsize, mesh, source, target, hardware = asked
    whole = _before_term(source, target)
    if whole != target:
        plan = _plan(asked._replace(target=whole), max_bytes)
        local = local_shape(shape, target, mesh)
        axes = tuple(a for a in target.unreduced if a not in whole.unreduced)
        term = Step(StepKind.TERM, (Part(axes),), whole, target, local, local, 0, 0)
        return replace(plan, target=target, steps=(*plan.steps, term))
    _check(asked)
    steps: tuple[Step, ...] = ()
    cost, peak, view = 0.0, asked.end_bytes, shape
    if source.turned:
        way = straightened(asked)
        assert way is not None, f"not in one step: {asked}"
        steps, cost = (way.step,), way.cost
    elif source != target and 0 not in shape:
        best, seen = _best(asked, max_bytes)
        best = _by_finer_groups(best, asked, len(seen), max_bytes)
        best = _taken_apart(best, seen, max_bytes)
        path, naming = best.path, best.naming
        steps = gathered_in_turn(steps_of(path.moves, naming, asked), itemsize, mesh)
        cost, peak, view = path.cost, path.peak_bytes, naming.ends.whole
    if max_bytes is not None and peak > max_bytes:
        ends, is_least = (f"{source}", f"{target}"), peak <= asked.end_bytes
        raise MemoryLimitError(too_large(shape, *ends, max_bytes, peak, is_least))
    sent = sum(step.wire_bytes for step in steps)
    launches = sum(step.launches for step in steps)
    seconds = (cost - sent * hardware.bytes_first) / hardware.link_bytes_per_s
    return ReshardPlan(shape, itemsize, source, target, steps, sent, launches, seconds, peak, view)


def plan_within_shards(asked: Reshard) -> ReshardPlan:
    """The cheapest plan; one that keeps the memory law to the letter where it sends no more."""
    plan = plan_reshard(asked)
    if plan.peak_bytes <= asked.end_bytes:
        return plan
    try:
        within = plan_reshard(asked, asked.end_bytes)
    except MemoryLimitError:
        return plan
    return within if within.wire_bytes <= plan.wire_bytes else plan


@lru_cache(maxsize=1 << 17)
def reshard_cost(asked: Reshard) -> float:
    """Seconds of the best plan found soon that takes no dim apart, bytes that come first priced.

    `plan_reshard` looks at more moves, and gives that plan or one that costs less.
    """
    if asked.source.turned:
        return turned_seconds(asked)
    sending = _sending(asked)
    if sending is None:
        return 0.0
    best, _ = _best(sending, None, is_price=True)
    return best.path.cost / asked.hardware.link_bytes_per_s


@lru_cache(maxsize=1 << 17)
def reshard_bound(asked: Reshard) -> float:
    """Seconds that `reshard_cost` is not below, found without a search."""
    sending = None if asked.source.turned else _sending(asked)
    if sending is None:
        return 0.0
    bounds = _bounds(_first_level(sending).whole[0], None)
    return bounds.cost(bounds.moves.start) / asked.hardware.link_bytes_per_s


def _sending(asked: Reshard) -> Reshard | None:
    """The part of a reshard for which something is sent or copied; None where nothing is."""
    target = _before_term(asked.source, asked.target)
    if asked.source == target:
        return None
    sending = asked._replace(target=target)
    _check(sending)
    is_free = not asked.hardware.byte_factor("slice") and _is_slice(sending)
    return None if 0 in asked.shape or is_free else sending


@lru_cache(maxsize=1 << 14)
def _first_level(asked: Reshard) -> Level:
    return next(levels(asked))


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    problem: Problem
    naming: Naming

    def excess(self, max_bytes: int | None) -> float:
        """Bytes beyond the memory allowed."""
        return max(self.path.peak_bytes - _allowed(moves_of(self.problem), max_bytes), 0)

    def rank(self, max_bytes: int | None) -> tuple[float, float, int]:
        """Order of preference: within the memory allowed, then cost, then fewer moves."""
        return self.excess(max_bytes), round(self.path.cost, 3), len(self.path.moves)


def _best(
    asked: Reshard, max_bytes: int | None, is_price: bool = False
) -> tuple[_Found, list[Level]]:
    """The best path of all levels, and the levels up to the first that meets the bound."""
    seen = [_first_level(asked)]
    path, meets_bound = solve(seen[0].whole[0], max_bytes, is_price)
    best = _Found(path, *seen[0].whole)
    if meets_bound:
        return best, seen
    for level in islice(levels(asked), 1, None):
        seen.append(level)
        if best.excess(max_bytes):
            path, meets_bound = solve(level.whole[0], max_bytes, is_price)
        else:
            below = best.path.cost
            path, meets_bound = _solve_below(level.whole[0], max_bytes, below, is_price)
        if path is not None:
            best = min(best, _Found(path, *level.whole), key=lambda one: one.rank(max_bytes))
        if meets_bound:
            break
    return best, seen


def _by_finer_groups(best: _Found, asked: Reshard, seen: int, max_bytes: int | None) -> _Found:
    """By finer groups of axes than were looked at, where that costs less and sends no more.

    One collective then sends as little as two, or fewer rows of an uneven dim cross borders: cut
    by a part of an axis, shards may be as large as those of the target from the start.
    """
    if best.path.is_one_launch or best.excess(max_bytes):
        return best
    for level in islice(levels(asked), seen, None):
        moves = moves_of(level.whole[0])
        path = _better_path(moves, _allowed(moves, max_bytes), best.path.cost)
        if path is not None and path.sent <= best.path.sent + _NO_BYTES:
            best = _Found(path, *level.whole)
    return best


def _taken_apart(best: _Found, seen: Sequence[Level], max_bytes: int | None) -> _Found:
    """With dims taken apart where that costs less, and sends no more, than the best without."""
    for level in seen:
        if best.path.is_short and _sends_least(best):
            break
        if level.apart is None:
            continue
        moves = moves_of(level.apart[0])
        below = math.inf if best.excess(max_bytes) else best.path.cost
        path = _better_path(moves, _allowed(moves, max_bytes), below)
        if path is not None and path.sent <= best.path.sent + _NO_BYTES:
            best = _Found(path, *level.apart)
    return best


def _better_path(
    moves: Moves,
    cap: int,
    below: float = math.inf,
    with_rounds: bool = False,
    most_moves: int = MOST_MOVES,
    haste: float = 1.0,
) -> Path | None:
    """A path of less cost than one that there is, if it is found soon.

    By default without rounds, which would be those of the array as it is.
    """
    try:
        return shortest_path(moves, cap, below, with_rounds, most_moves, haste)
    except SearchTooLong:
        return None


@lru_cache(maxsize=1 << 14)
def solve(
    problem: Problem, max_bytes: int | None = None, is_price: bool = False
) -> tuple[Path, bool]:
    """A path of a canonical problem, the cheapest that is found soon; and whether none is better.

    Without `max_bytes` it keeps the memory law, with the padding of a gathered dim; with it, it
    fits in so much. Where no such path is found, it is one of little peak.
    """
    moves = moves_of(problem)
    narrow = moves_of(replace(problem, is_narrow=True))
    cap = max(_allowed(moves, max_bytes), moves.end_bytes)  # the ends fit in no less
    most_moves = _most_moves(moves, is_price)
    try:
        path = shortest_path(moves, cap, most_moves=most_moves)
        path = path or _of_little_peak(moves, most_moves)
    except SearchTooLong:
        path = _soon(moves, narrow, cap, most_moves) or _of_little_peak(narrow)
    return path, _meets_bound(path, problem, max_bytes)


def _soon(moves: Moves, narrow: Moves, cap: int, most_moves: int) -> Path | None:
    """A path within the memory allowed, where it would take long to find the cheapest.

    It is the cheapest of those that only come closer to the target, without rounds; or else any.
    """
    path = shortest_path(narrow, cap, with_rounds=False)
    for haste in _HASTES:
        path = path or _better_path(moves, cap, math.inf, True, most_moves, haste)
    return path


def _of_little_peak(moves: Moves, most_moves: float = math.inf) -> Path:
    """The cheapest path through the smallest arrays that do without rounds, if these are told."""
    cap, with_rounds = least_peak(moves, MOST_MOVES), not moves.problem.is_narrow
    path = shortest_path(moves, cap, with_rounds=with_rounds, most_moves=most_moves)
    assert path is not None, f"no path: {moves.problem}"
    return path


@lru_cache(maxsize=1 << 14)
def _solve_below(
    problem: Problem, max_bytes: int | None, below: float, is_price: bool
) -> tuple[Path | None, bool]:
    """As `solve`, where a path that fits and costs `below` is in hand; None where none is found."""
    moves = moves_of(problem)
    most_moves = _most_moves(moves, is_price)
    path = _better_path(moves, _allowed(moves, max_bytes), below, True, most_moves)
    return path, path is not None and _meets_bound(path, problem, max_bytes)


def _meets_bound(path: Path, problem: Problem, max_bytes: int | None) -> bool:
    """Whether nothing better is worth looking for."""
    bounds, prices = _bounds(problem, max_bytes), problem.prices
    close = bounds.cost(bounds.moves.start) * prices.close + prices.slack
    return path.cost <= close and path.peak_bytes <= bounds.cap


def _sends_least(found: _Found) -> bool:
    """Whether no path sends less."""
    bounds = _bounds(found.problem, None)
    return found.path.sent <= bounds.sent(bounds.moves.start) + _NO_BYTES


def _bounds(problem: Problem, max_bytes: int | None) -> Bounds:
    return bounds_of(problem, _allowed(moves_of(problem), max_bytes))


def _most_moves(moves: Moves, is_price: bool) -> int:
    return MOST_PRICED_MOVES if is_price and not moves.is_regular else MOST_MOVES


def _allowed(moves: Moves, max_bytes: int | None) -> int:
    return moves.padded_end_bytes if max_bytes is None else max_bytes


def _is_slice(asked: Reshard) -> bool:
    """Whether each device holds its target shard already."""
    shape, _, mesh, source, target, _ = asked
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


def _check(asked: Reshard) -> None:
    """Refuse what no collective does."""
    shape, _, _, source, target, _ = asked
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


def too_large(
    shape: tuple[int, ...], source: str, target: str, max_bytes: int, peak: int, is_least: bool
) -> str:
    """The message of the error for a reshard that does not fit; what was found takes `peak`."""
    found = "the least possible is" if is_least else "no such plan was found, the least found takes"
    return message(
        f"reshard of shape {list(shape)} from {source} to {target} in at most {max_bytes:,} "
        "bytes a device",
        [f"{found} {peak:,}"],
        "The largest array that a device holds on the way, its shards before and after included, "
        "must fit.",
        "Raise max_bytes, or use shardings over more axes.",
    )
