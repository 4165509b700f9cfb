"""The states of the search and the moves between them, with what each move costs.

A *state* is `(dims, blocks, terms, chain)`:

- `dims`: for each dim its axes, major to minor, as small integers into `Problem.sizes`;
- `blocks`: for each dim the local size. Shard `r` of a dim with block `c` holds rows `r * c` to
  `(r + 1) * c`. In an even dim of size `n` over `k` shards the block is `n / k`. In an uneven dim
  several blocks are of use: of 17 rows over 2 x 4 shards, gathering the minor 4 gives blocks
  of 12, while the canonical block of 17 over 2 is 9;
- `terms`: axes over which the value is still unreduced;
- `chain`: the kind of the last collective where one more of it joins the same launch.

The moves are those of Rink et al. (arXiv 2112.01075, section 3: allgather, dynslice, alltoall,
allpermute) on suffixes of any length, an all_to_all between several pairs of dims at once (which
sends less than one after the other), the two reductions of unreduced values, and the
realignment of an uneven dim. Costs are in bytes: a launch counts as the bytes that take as long.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any

from meshwise.reshard.places import DimIds, IdPart, Ids, arrangements, exchanges, moved_axes
from meshwise.reshard.plan import StepKind
from meshwise.reshard.problem import MAX_FREE_SEARCH, Problem
from meshwise.rules.halo import realignment

State = tuple[DimIds, Ids, Ids, StepKind | None]


@dataclass(frozen=True, slots=True)
class Move:
    """A move to a state, with its cost and the largest local array on the way.

    `joins` says that it belongs to the launch of the move before it.
    """

    kind: StepKind
    parts: tuple[IdPart, ...]
    state: State
    cost: float
    peak_bytes: int
    joins: bool = False


@dataclass(frozen=True)
class Moves:
    """The graph that a problem is a path in."""

    problem: Problem

    @cached_property
    def start(self) -> State:
        """Where the search starts."""
        p = self.problem
        return p.source, self._canonical_blocks(p.source), p.terms, None

    @cached_property
    def target_blocks(self) -> Ids:
        """Local sizes in the target."""
        return self._canonical_blocks(self.problem.target)

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
            [-(-n // self._size(axes)) for axes, n in zip(dims, padded, strict=True)]
            for dims in (p.source, p.target)
        ]
        return max(map(self.local_bytes, local))

    def is_end(self, state: State) -> bool:
        """Whether a state is the target."""
        dims, blocks, terms, _ = state
        return dims == self.problem.target and not terms and blocks == self.target_blocks

    def bound(self, state: State) -> float:
        """A cost that no path from a state to the target is below.

        A device must receive whatever of its target shard it does not hold. Where two even dims
        disagree beyond a common prefix, some device holds none of it. Of a value that is
        unreduced over `n` devices it holds nothing finished: with `m` bytes the smallest array
        that can be reduced, a reduce_scatter sends `m (n - 1) / n` and leaves `m / n` of it.
        """
        p = self.problem
        dims, blocks, terms, chain = state
        missing = self._missing(dims, blocks)
        if terms:
            group = self._size(terms)
            least = self._total_bytes * group / (math.prod(p.sizes) * p.idle)
            missing = self._wanted_bytes + least * (1 - 2 / group)
        if missing <= 0:
            return 0.0
        # Only an all_gather makes arrays larger, one byte for each that it sends.
        gathered = 0.0 if terms else max(self._wanted_bytes - self.local_bytes(blocks), 0)
        gather_price = min(p.prices.all_gather, p.prices.minor_all_gather, p.prices.round)
        dearer = gathered * (gather_price - self._least_price)
        launch = 0.0 if chain else min(p.prices.launch, p.prices.round_launch)
        return missing * self._least_price + dearer + launch

    def moves(self, state: State) -> Iterator[Move]:
        """Every move from a state."""
        free = self._free(state)
        yield from self._slices(state, free)
        yield from self._gathers(state)
        yield from self._exchanges(state)
        yield from self._permutes(state, free)
        if not self._is_even:
            yield from self._realigns(state)
        if state[2]:
            yield from self._reduce_scatters(state)
            yield from self._all_reduces(state)

    def _slices(self, state: State, free: Ids) -> Iterator[Move]:
        dims, blocks, terms, chain = state
        kind = StepKind.SLICE
        local = self.local_bytes(blocks)
        for axis in free:
            for dim in self._gaining_dims(dims, axis):
                for block in self._splits(state, dim, self.problem.sizes[axis]):
                    new = _append(dims, dim, axis), _put(blocks, dim, block), terms, kind
                    part = (axis,), None, dim
                    cost = self.local_bytes(new[1]) * self.problem.prices.slice
                    yield Move(kind, (part,), new, cost, local, chain is kind)

    def _gathers(self, state: State) -> Iterator[Move]:
        dims, blocks, terms, chain = state
        kind = StepKind.ALL_GATHER
        joins = chain is kind
        launch = 0.0 if joins else self.problem.prices.launch
        for dim, axes in enumerate(dims):
            for kept in range(len(axes)):
                lost = axes[kept:]
                block = blocks[dim] * self._size(lost)
                out = self.local_bytes(_put(blocks, dim, block))
                sent = out - self.local_bytes(blocks)
                whole = block if kept else self.problem.shape[dim]
                # After a cut of padding a joined gather would send the padding too.
                next_chain = kind if whole == block else None
                new = _put(dims, dim, axes[:kept]), _put(blocks, dim, whole), terms, next_chain
                cost = launch + sent * self._gather_price(blocks, dim)
                yield Move(kind, ((lost, dim, None),), new, cost, out, joins)

    def _gather_price(self, blocks: Ids, dim: int) -> float:
        """Of a byte: more where rows of other dims come between what the devices hold."""
        p = self.problem
        is_leading = math.prod(blocks[:dim]) * math.prod(p.before[: dim + 1]) == 1
        return p.prices.all_gather if is_leading else p.prices.minor_all_gather

    def _exchanges(self, state: State) -> Iterator[Move]:
        dims, blocks, terms, _ = state
        p = self.problem
        target = p.target if self._is_narrow else None
        for new_dims, parts, lost, gained in exchanges(dims, p.sizes, target):
            options = [self._splits(state, dim, size) for dim, size in gained]
            for chosen in product(*options):
                after = list(blocks)
                padded = list(blocks)
                group = 1
                for (dim, size), block in zip(gained, chosen, strict=True):
                    after[dim], padded[dim] = block, block * size
                    group *= size
                for dim, size in lost:
                    after[dim] *= size
                    if not new_dims[dim]:
                        after[dim] = p.shape[dim]
                operand = self.local_bytes(padded)
                cost = p.prices.launch + operand * (1 - 1 / group) * p.prices.all_to_all
                new = new_dims, tuple(after), terms, None
                yield Move(StepKind.ALL_TO_ALL, parts, new, cost, operand)

    def _permutes(self, state: State, free: Ids) -> Iterator[Move]:
        dims, blocks, terms, _ = state
        p = self.problem
        local = self.local_bytes(blocks)
        cost = p.prices.launch + local * p.prices.permute
        options = arrangements(dims, free, p.sizes, p.target if self._is_narrow else None)
        for new_dims in options:
            moved = moved_axes(dims, new_dims, p.sizes)
            new = new_dims, blocks, terms, None
            yield Move(StepKind.PERMUTE, ((moved, None, None),), new, cost, local)

    def _realigns(self, state: State) -> Iterator[Move]:
        dims, blocks, terms, _ = state
        p = self.problem
        for dim, axes in enumerate(dims):
            if not axes:
                continue
            rest = self.local_bytes(_put(blocks, dim, 1))
            shards = self._size(axes)
            for block in () if self.even_dims[dim] else self._blocks(dim, shards):
                if block == blocks[dim]:
                    continue
                sent = realignment(p.shape[dim], shards, blocks[dim], block).exchange(rest)
                cost = sent.launches * p.prices.launch + sent.wire_bytes * p.prices.permute
                new = dims, _put(blocks, dim, block), terms, None
                peak = max(block, blocks[dim]) * rest
                yield Move(StepKind.REALIGN, ((axes, dim, None),), new, cost, peak)

    def _reduce_scatters(self, state: State) -> Iterator[Move]:
        dims, blocks, terms, chain = state
        p = self.problem
        kind = StepKind.REDUCE_SCATTER
        for axis in terms:
            left = tuple(t for t in terms if t != axis)
            group = p.sizes[axis]
            for dim in self._gaining_dims(dims, axis):
                for block in self._splits(state, dim, group):
                    operand = self.local_bytes(_put(blocks, dim, block * group))
                    # To pad in a joined one would pad what the first sends.
                    joins = chain is kind and block * group == blocks[dim]
                    launch = 0.0 if joins else p.prices.launch
                    new = _append(dims, dim, axis), _put(blocks, dim, block), left, kind
                    cost = launch + operand * (1 - 1 / group) * p.prices.reduce_scatter
                    yield Move(kind, (((axis,), None, dim),), new, cost, operand, joins)

    def _all_reduces(self, state: State) -> Iterator[Move]:
        dims, blocks, terms, _ = state
        p = self.problem
        local = self.local_bytes(blocks)
        least = max(1, len(terms) - 1) if self._is_narrow else 1
        for count in range(least, len(terms) + 1):
            for axes in combinations(terms, count):
                group = self._size(axes)
                left = tuple(t for t in terms if t not in axes)
                sent = 2 * (1 - 1 / group) * local
                peak, price = local, p.prices.all_reduce
                if p.gathers_terms:
                    sent, peak, price = (group - 1) * local, group * local, p.prices.all_gather
                cost = p.prices.launch + sent * price
                new = dims, blocks, left, None
                yield Move(StepKind.ALL_REDUCE, ((axes, None, None),), new, cost, peak)

    def _gaining_dims(self, dims: DimIds, axis: int) -> Iterator[int]:
        """Dims that an axis may be added to: in a narrow search only where the target has it."""
        for dim, axes in enumerate(dims):
            if not self._is_narrow or self.problem.target[dim][: len(axes) + 1] == (*axes, axis):
                yield dim

    @cached_property
    def _is_narrow(self) -> bool:
        return len(self.problem.sizes) > MAX_FREE_SEARCH

    def _splits(self, state: State, dim: int, shards: int) -> Sequence[int]:
        """Blocks that a dim may have after it is split further; none where rows do not line up."""
        dims, blocks, _, _ = state
        if not dims[dim]:
            return self._blocks(dim, shards)
        return () if blocks[dim] % shards else (blocks[dim] // shards,)

    def _blocks(self, dim: int, shards: int) -> Sequence[int]:
        """Blocks of use for a dim over so many shards: one where it is even.

        Those are the canonical one, and those that lead to the canonical one at either end, or
        over all axes, by splitting alone.
        """
        size = self.problem.shape[dim]
        if self.even_dims[dim]:
            return () if size % shards else (size // shards,)
        found = {-(-size // shards)}
        for whole, block in self._landmarks[dim]:
            if whole % shards == 0:
                found.add(block * (whole // shards))
        return tuple(sorted(found))

    @cached_property
    def _landmarks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each dim the (shards, block) at both ends, and over all axes together."""
        p = self.problem
        most = math.prod(p.sizes)
        ends = ((p.source, self.start[1]), (p.target, self.target_blocks))
        return tuple(
            (*((self._size(dims[d]), blocks[d]) for dims, blocks in ends), (most, -(-n // most)))
            for d, n in enumerate(p.shape)
        )

    def _free(self, state: State) -> Ids:
        """Unused axes, one of each set that is alike to the target."""
        dims, _, terms, _ = state
        used = {a for axes in dims for a in axes}.union(terms)
        found, seen = [], set()
        for axis, size in enumerate(self.problem.sizes):
            if axis in used:
                continue
            if axis not in self._target_axes:
                if size in seen:
                    continue
                seen.add(size)
            found.append(axis)
        return tuple(found)

    def _missing(self, dims: DimIds, blocks: Ids) -> float:
        """Bytes of its target shard that some device does not hold."""
        held = 1.0
        if not self._is_even:
            for mine, wanted in zip(blocks, self.target_blocks, strict=True):
                held *= min(mine, wanted) / wanted if wanted else 1.0
            return self._wanted_bytes * (1 - held)
        for mine, wanted in zip(dims, self.problem.target, strict=True):
            if mine == wanted:
                continue
            shared = 0
            for a, b in zip(mine, wanted, strict=False):
                if a != b:
                    return self._wanted_bytes
                shared += 1
            held /= self._size(mine[shared:])
        return self._wanted_bytes * (1 - held)

    @cached_property
    def even_dims(self) -> tuple[bool, ...]:
        """Whether each dim divides evenly at both ends; it is then split evenly in between too."""
        p = self.problem
        ends = zip(p.shape, p.source, p.target, strict=True)
        return tuple(n % self._size(s) == 0 == n % self._size(t) for n, s, t in ends)

    @cached_property
    def _is_even(self) -> bool:
        return all(self.even_dims)

    @cached_property
    def _target_axes(self) -> frozenset[int]:
        return frozenset(a for axes in self.problem.target for a in axes)

    @cached_property
    def _total_bytes(self) -> int:
        return self.local_bytes(self.problem.shape)

    @cached_property
    def _wanted_bytes(self) -> int:
        """Rows of the first device's target shard; no padding."""
        pairs = zip(self.target_blocks, self.problem.shape, strict=True)
        return self.local_bytes([min(block, n) for block, n in pairs])

    @cached_property
    def _least_price(self) -> float:
        return self.problem.prices.least

    def _canonical_blocks(self, dims: DimIds) -> Ids:
        pairs = zip(self.problem.shape, dims, strict=True)
        return tuple(-(-n // self._size(axes)) for n, axes in pairs)

    def _size(self, axes: Ids) -> int:
        sizes = self.problem.sizes
        total = 1
        for axis in axes:
            total *= sizes[axis]
        return total

    def local_bytes(self, blocks: Sequence[int]) -> int:
        """Bytes of a local array."""
        return math.prod(blocks) * self.problem.itemsize


def _append(dims: DimIds, dim: int, axis: int) -> DimIds:
    return _put(dims, dim, (*dims[dim], axis))


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
