"""What no path of a reshard costs less than: the bound that the search goes by.

Bytes: a device must receive whatever of its target shard it does not hold. Launches: one collective
moves every piece only in a few ways, and each is looked at for what it would send; what none of
them does takes two.
"""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile

from meshwise.reshard.moves import Moves, moves_of
from meshwise.reshard.places import DimIds, Ids
from meshwise.reshard.plan import StepKind
from meshwise.reshard.problem import MOST_DEVICES, Prices, Problem
from meshwise.reshard.tiles import elements_received
from meshwise.reshard.transfers import State

# Where a launch costs no more than this part of the bytes, it does not matter how many there are.
LITTLE = 1 / 16

# Rows are counted, and divided: what is less than this of one is none.
_NOTHING = 1e-9


@dataclass(frozen=True)
class Bounds:
    """Bounds of the paths from each state to the target through arrays of at most `cap` bytes."""

    moves: Moves
    cap: float

    def cost(self, state: State) -> float:
        """A cost that no path from a state is below (remembered)."""
        found = self._costs.get(state)
        if found is None:
            found = self._costs[state] = self._cost(state)
        return found

    def with_rounds(self, state: State) -> float:
        """A cost that no path with rounds is below, from a state that nothing joins."""
        missing, prices = self.sent(state), self._prices
        among = prices.round_launch + prices.least_launch + self._bytes(state, missing)
        return among if state[2] else min(among, self._rounds(state, missing))

    def sent(self, state: State) -> float:
        """Bytes that no path from a state sends less than.

        Of a value that is unreduced over `n` devices one holds nothing finished: with `m` bytes the
        smallest array that can be reduced, a reduce_scatter sends `m (n - 1) / n` and leaves
        `m / n` of it.
        """
        p = self._problem
        dims, blocks, terms, _ = state
        if not terms:
            return self._missing(dims, blocks)
        group = self.moves.size(terms)
        least = self.moves.total_bytes * group / (math.prod(p.sizes) * p.idle)
        return self._wanted_bytes + least * (1 - 2 / group)

    def _cost(self, state: State) -> float:
        missing = self.sent(state)
        if missing <= 0:
            return 0.0
        _, _, terms, chain = state
        begun = chain is StepKind.ALL_GATHER or (terms and chain is StepKind.REDUCE_SCATTER)
        launch, price = self._prices.least_launch, self._bytes(state, missing)
        one, two = (0.0 if begun else launch) + price, (launch if begun else 2 * launch) + price
        if launch <= LITTLE * price:
            return one
        ways = self._reductions(state, one) if terms else self._at_once(state, missing)
        return min([two, *ways])

    def _bytes(self, state: State, missing: float) -> float:
        """What the bytes cost that a device lacks. Only what gathers makes an array larger."""
        _, blocks, terms, _ = state
        prices = self._prices
        if terms:
            return missing * prices.least
        gathered = max(self._wanted_bytes - self.moves.local_bytes(blocks), 0)
        gather = min(prices.all_gather, prices.minor_all_gather, prices.round)
        return missing * prices.least_moved + gathered * (gather - prices.least_moved)

    def _reductions(self, state: State, least: float) -> Iterator[float]:
        """One launch, which costs `least`: sums are made where they are wanted, or too large."""
        if not self.moves.is_even or self._is_front(state[0]):
            yield least

    def _at_once(self, state: State, missing: float) -> Iterator[float]:
        """One launch that makes the target, with slices before and after it; for each kind."""
        dims, blocks, _, chain = state
        launch, prices = self.moves.launch_of, self._prices
        gathered, before = self._gathered(dims) if self.moves.is_even else (missing, 0)
        if gathered <= self.cap:
            begins = 0.0 if chain is StepKind.ALL_GATHER else launch[StepKind.ALL_GATHER]
            yield begins + (gathered - before) * self._gather_price(dims, blocks)
        if _axes(dims) <= self.moves.target_axes:
            yield launch[StepKind.ALL_TO_ALL] + missing * prices.all_to_all
        if not self.moves.is_even:  # shards change places, or rows cross their borders
            yield launch[StepKind.PERMUTE] + missing * prices.permute
        elif all(map(operator.ge, blocks, self.moves.target_blocks)):
            yield launch[StepKind.PERMUTE] + self._wanted_bytes * prices.permute
        if math.prod(self._problem.sizes) <= MOST_DEVICES:
            yield self._rounds(state, missing)

    def _is_front(self, dims: DimIds) -> bool:
        """Whether the axes of each dim are the first of those that it is to have."""
        pairs = zip(dims, self._problem.target, strict=True)
        return all(wanted[: len(mine)] == mine for mine, wanted in pairs)

    def _rounds(self, state: State, missing: float) -> float:
        """Of rounds: in each a device receives at most what another holds."""
        count = math.ceil(missing / self.moves.local_bytes(state[1]) - _NOTHING)
        return count * self._prices.round_launch + missing * self._prices.round

    def _gathered(self, dims: DimIds) -> tuple[float, float]:
        """Bytes of the smallest array of which the target is a part, by gathers alone; and before.

        What is sliced first is not gathered: dims that the target cuts further, by free axes.
        """
        used = _axes(dims)
        after = before = float(self.moves.total_bytes)
        for mine, wanted in zip(dims, self._problem.target, strict=True):
            shared = _shared(mine, wanted)
            kept = mine[:shared]
            if kept == mine:
                kept += tuple(takewhile(lambda axis: axis not in used, wanted[shared:]))
            after /= self.moves.size(kept)
            before /= self.moves.size(max(mine, kept, key=len))
        return after, before

    def _gather_price(self, dims: DimIds, blocks: Ids) -> float:
        """The least of a byte that is gathered.

        A dim is leading where slices of free axes may leave one row of what stands before it. Where
        none that must be gathered is, these may be sliced, for as many times fewer bytes, and be
        gathered afterwards, as leading dims.
        """
        p, prices = self._problem, self._prices
        free = math.prod(p.sizes) // self.moves.size(tuple(_axes(dims)))
        least = min(prices.all_gather, prices.minor_all_gather)
        for dim, (mine, wanted) in enumerate(zip(dims, p.target, strict=True)):
            is_gathered = wanted[: len(mine)] != mine
            if is_gathered and self.moves.rows_before(dim, blocks) <= free:
                return least
        return least + (prices.minor_all_gather - least) / free

    def _missing(self, dims: DimIds, blocks: Ids) -> float:
        """Bytes of its target shard that the device which lacks most does not hold.

        Where two even dims disagree beyond a common prefix, some device holds none of it.
        """
        if not self.moves.is_even:
            p, target = self._problem, (self._problem.target, self.moves.target_blocks)
            return elements_received(p.sizes, p.shape, (dims, blocks), target) * p.itemsize
        part = 1.0
        for mine, wanted in zip(dims, self._problem.target, strict=True):
            if mine != wanted:
                shared = _shared(mine, wanted)
                if shared < min(len(mine), len(wanted)):
                    return self._wanted_bytes
                part /= self.moves.size(mine[shared:])
        return self._wanted_bytes * (1 - part)

    @cached_property
    def _wanted_bytes(self) -> int:
        """Rows of the first device's target shard; no padding."""
        pairs = zip(self.moves.target_blocks, self._problem.shape, strict=True)
        return self.moves.local_bytes([min(block, n) for block, n in pairs])

    @cached_property
    def _costs(self) -> dict[State, float]:
        return {}

    @property
    def _problem(self) -> Problem:
        return self.moves.problem

    @property
    def _prices(self) -> Prices:
        return self.moves.problem.prices


@lru_cache(maxsize=1 << 8)
def bounds_of(problem: Problem, cap: float) -> Bounds:
    """The bounds of a problem, with what is known of them so far."""
    return Bounds(moves_of(problem), cap)


def _axes(dims: DimIds) -> set[int]:
    return {axis for axes in dims for axis in axes}


def _shared(mine: Ids, wanted: Ids) -> int:
    """How many axes of a dim stand where they are wanted."""
    return next(
        (i for i, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b),
        min(len(mine), len(wanted)),
    )
