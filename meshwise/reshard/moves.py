"""The graph that a reshard is a path in: moves between states, with what each costs.

Costs are in bytes: a launch counts as the bytes that take as long. Where every dim is even, the
moves from a state are those of the smallest array like it, with more bytes: dims that all axes
together divide are as large as that needs. They are found once for all shapes and targets
(`_smallest`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from meshwise.reshard.places import DimIds, IdPart, Ids
from meshwise.reshard.plan import StepKind
from meshwise.reshard.problem import Prices, Problem
from meshwise.reshard.transfers import State, Transfer, Transfers


class Move(NamedTuple):
    """A move to a state: its cost, the bytes sent (or copied), the largest local array on the way.

    `joins` says that it belongs to the launch of the move before it.
    """

    kind: StepKind
    parts: tuple[IdPart, ...]
    state: State
    cost: float
    sent: float
    peak_bytes: int
    joins: bool = False


@dataclass(frozen=True)
class Moves(Transfers):
    """The graph that a problem is a path in; what is found of it is remembered."""

    @cached_property
    def end_bytes(self) -> int:
        """Local bytes of the larger of source and target: what the memory law allows."""
        sizes = (math.prod(self.start[1]), math.prod(self.target_blocks))
        return max(sizes) * self.problem.itemsize

    @cached_property
    def padded_end_bytes(self) -> int:
        """As `end_bytes`, with each uneven dim padded to what all axes divide."""
        p = self.problem
        most = math.prod(p.sizes)
        padded = [
            n if even else -(-n // most) * most
            for n, even in zip(p.shape, self.even_dims, strict=True)
        ]
        local = [
            [-(-n // self.size(axes)) for axes, n in zip(dims, padded, strict=True)]
            for dims in (p.source, p.target)
        ]
        return max(map(self.local_bytes, local))

    def is_end(self, state: State) -> bool:
        """Whether a state is the target."""
        dims, blocks, terms, _ = state
        return dims == self.problem.target and not terms and blocks == self.target_blocks

    def moves(self, state: State) -> Sequence[Move]:
        """Every move from a state (remembered)."""
        found = self.known.get(state)
        if found is None:
            priced = self._scaled(state) if self.is_regular else self._priced(state)
            found = self.known[state] = list(priced)
        return found

    @cached_property
    def known(self) -> dict[State, Sequence[Move]]:
        """The moves of the states that were looked at."""
        return {}

    def _priced(self, state: State) -> Iterator[Move]:
        for kind, parts, new, launches, sent, peak, joins in self.transfers(state):
            cost = launches * self.launch_of[kind] + sent * self._price(kind, parts, state[1])
            yield Move(kind, parts, new, cost, sent, peak, joins)

    def _price(self, kind: StepKind, parts: tuple[IdPart, ...], blocks: Ids) -> float:
        """Of a byte."""
        if kind is not StepKind.ALL_GATHER:
            return self._price_of[kind]
        dim = parts[0][1]
        assert dim is not None, "a dim is gathered"
        return self._gather_price(blocks, dim)

    @cached_property
    def launch_of(self) -> dict[StepKind, float]:
        """What a launch of each kind costs."""
        p = self.problem
        as_what = {StepKind.REALIGN: StepKind.PERMUTE}
        if p.gathers_terms:
            as_what[StepKind.ALL_REDUCE] = StepKind.ALL_GATHER
        return {kind: p.prices.launch_of(as_what.get(kind, kind)) for kind in StepKind}

    @cached_property
    def _price_of(self) -> dict[StepKind, float]:
        prices = self.problem.prices
        return {
            StepKind.SLICE: prices.slice,
            StepKind.ALL_TO_ALL: prices.all_to_all,
            StepKind.PERMUTE: prices.permute,
            StepKind.REALIGN: prices.permute,
            StepKind.REDUCE_SCATTER: prices.reduce_scatter,
            StepKind.ALL_REDUCE: (
                prices.all_gather if self.problem.gathers_terms else prices.all_reduce
            ),
        }

    @cached_property
    def is_regular(self) -> bool:
        """Whether it has the moves of a smaller problem."""
        return not self.is_narrow and self.is_even and all(self.problem.shape)

    @cached_property
    def smallest_shape(self) -> Ids:
        """Of a regular problem: the smallest shape with the same moves."""
        most = math.prod(self.problem.sizes)
        return tuple(n if n % most else most for n in self.problem.shape)

    @cached_property
    def scale(self) -> int:
        """Of a regular problem: how many times the bytes of the smallest one like it."""
        return self.total_bytes // math.prod(self.smallest_shape)

    def _scaled(self, state: State) -> Iterator[Move]:
        """Every move from a state of a regular problem, from those of the smallest one like it."""
        p = self.problem
        dims, before, terms, chain = state
        what = p.sizes, self.smallest_shape, p.gathers_terms
        shared = _smallest(*what, dims, terms, chain, self.free_axes(state))
        scale, launch_of, blocks_of = self.scale, self.launch_of, self._blocks_of
        for kind, parts, (new_dims, _, left, new_chain), launches, sent, peak, joins in shared:
            blocks = blocks_of.get(new_dims)
            if blocks is None:
                blocks = blocks_of[new_dims] = self.canonical_blocks(new_dims)
            cost = launches * launch_of[kind] + sent * scale * self._price(kind, parts, before)
            new = new_dims, blocks, left, new_chain
            yield Move(kind, parts, new, cost, sent * scale, peak * scale, joins)

    @cached_property
    def _blocks_of(self) -> dict[DimIds, Ids]:
        return {}

    def _gather_price(self, blocks: Ids, dim: int) -> float:
        """Of a byte: more where rows of other dims come between what the devices hold."""
        prices, is_leading = self.problem.prices, self.rows_before(dim, blocks) == 1
        return prices.all_gather if is_leading else prices.minor_all_gather

    def rows_before(self, dim: int, blocks: Ids) -> int:
        """How many rows stand before a dim, of those left out of the search, too."""
        return math.prod(blocks[:dim]) * math.prod(self.problem.before[: dim + 1])

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the whole array."""
        return self.local_bytes(self.problem.shape)


@lru_cache(maxsize=1 << 8)
def moves_of(problem: Problem) -> Moves:
    """The graph of a problem, with what is known of it so far."""
    return Moves(problem)


_NO_PRICES = Prices(0.0, 0.0)


@lru_cache(maxsize=1 << 15)
def _smallest(
    sizes: Ids,
    shape: Ids,
    gathers_terms: bool,
    dims: DimIds,
    terms: Ids,
    chain: StepKind | None,
    free: Ids,
) -> tuple[Transfer, ...]:
    """Moves of an array of a smallest shape, of elements of a byte."""
    rank = len(dims)
    nowhere = ((),) * rank
    problem = Problem(
        sizes, shape, 1, nowhere, nowhere, (), gathers_terms, 1, _NO_PRICES, (1,) * rank
    )
    moves = Transfers(problem)
    blocks = moves.canonical_blocks(dims)
    return tuple(moves.transfers((dims, blocks, terms, chain), free))
