"""Transfers: the moves from a state of a reshard, before they are priced.

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
realignment of an uneven dim.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any, NamedTuple

from meshwise.reshard.places import DimIds, IdPart, Ids, arrangements, exchanges, moved_axes
from meshwise.reshard.plan import StepKind
from meshwise.reshard.problem import MAX_FREE_SEARCH, Problem
from meshwise.rules.halo import realignment

State = tuple[DimIds, Ids, Ids, StepKind | None]


class Transfer(NamedTuple):
    """A move before it is priced: its launches, and the bytes that a device sends (or copies)."""

    kind: StepKind
    parts: tuple[IdPart, ...]
    state: State
    launches: int
    sent: float
    peak_bytes: int
    joins: bool = False


@dataclass(frozen=True)
class Transfers:
    """What can be sent from the states of a problem."""

    problem: Problem

    @cached_property
    def start(self) -> State:
        """Where the search starts."""
        p = self.problem
        return p.source, self.canonical_blocks(p.source), p.terms, None

    @cached_property
    def target_blocks(self) -> Ids:
        """Local sizes in the target."""
        return self.canonical_blocks(self.problem.target)

    def transfers(self, state: State, free: Ids | None = None) -> Iterator[Transfer]:
        """Every move from a state, found anew; `free` are the unused axes that may be used."""
        free = self.free_axes(state) if free is None else free
        yield from self._slices(state, free)
        yield from self._gathers(state)
        yield from self._exchanges(state)
        yield from self._permutes(state, free)
        if not self.is_even:
            yield from self._realigns(state)
        if state[2]:
            yield from self._reduce_scatters(state)
            yield from self._all_reduces(state)

    def _slices(self, state: State, free: Ids) -> Iterator[Transfer]:
        dims, blocks, terms, chain = state
        kind = StepKind.SLICE
        local = self.local_bytes(blocks)
        for axis in free:
            for dim in self._gaining_dims(dims, axis):
                for block in self._splits(state, dim, self.problem.sizes[axis]):
                    new = _append(dims, dim, axis), _put(blocks, dim, block), terms, kind
                    part = (axis,), None, dim
                    copied = self.local_bytes(new[1])
                    yield Transfer(kind, (part,), new, 0, copied, local, chain is kind)

    def _gathers(self, state: State) -> Iterator[Transfer]:
        dims, blocks, terms, chain = state
        kind = StepKind.ALL_GATHER
        joins = chain is kind
        for dim, axes in enumerate(dims):
            for kept in range(len(axes)):
                lost = axes[kept:]
                block = blocks[dim] * self.size(lost)
                out = self.local_bytes(_put(blocks, dim, block))
                sent = out - self.local_bytes(blocks)
                whole = block if kept else self.problem.shape[dim]
                # After a cut of padding a joined gather would send the padding too.
                next_chain = kind if whole == block else None
                new = _put(dims, dim, axes[:kept]), _put(blocks, dim, whole), terms, next_chain
                yield Transfer(kind, ((lost, dim, None),), new, not joins, sent, out, joins)

    def _exchanges(self, state: State) -> Iterator[Transfer]:
        dims, blocks, terms, _ = state
        p = self.problem
        target = p.target if self.is_narrow else None
        splits: dict[tuple[int, int], Sequence[int]] = {}
        for new_dims, parts, lost, gained in exchanges(dims, p.sizes, target):
            for way in gained:
                if way not in splits:
                    splits[way] = self._splits(state, *way)
            options = [splits[way] for way in gained]
            if not all(options):
                continue
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
                new = new_dims, tuple(after), terms, None
                sent = operand * (1 - 1 / group)
                yield Transfer(StepKind.ALL_TO_ALL, parts, new, 1, sent, operand)

    def _permutes(self, state: State, free: Ids) -> Iterator[Transfer]:
        dims, blocks, terms, _ = state
        p = self.problem
        local = self.local_bytes(blocks)
        options = arrangements(dims, free, p.sizes, p.target if self.is_narrow else None)
        for new_dims in options:
            moved = moved_axes(dims, new_dims, p.sizes)
            new = new_dims, blocks, terms, None
            yield Transfer(StepKind.PERMUTE, ((moved, None, None),), new, 1, local, local)

    def _realigns(self, state: State) -> Iterator[Transfer]:
        dims, blocks, terms, _ = state
        p = self.problem
        for dim, axes in enumerate(dims):
            if not axes:
                continue
            rest = self.local_bytes(_put(blocks, dim, 1))
            shards = self.size(axes)
            for block in () if self.even_dims[dim] else self._blocks(dim, shards):
                if block == blocks[dim]:
                    continue
                sent = realignment(p.shape[dim], shards, blocks[dim], block).exchange(rest)
                new = dims, _put(blocks, dim, block), terms, None
                peak = max(block, blocks[dim]) * rest
                what = sent.launches, sent.wire_bytes, peak
                yield Transfer(StepKind.REALIGN, ((axes, dim, None),), new, *what)

    def _reduce_scatters(self, state: State) -> Iterator[Transfer]:
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
                    new = _append(dims, dim, axis), _put(blocks, dim, block), left, kind
                    what = not joins, operand * (1 - 1 / group), operand, joins
                    yield Transfer(kind, (((axis,), None, dim),), new, *what)

    def _all_reduces(self, state: State) -> Iterator[Transfer]:
        dims, blocks, terms, _ = state
        p = self.problem
        local = self.local_bytes(blocks)
        least = max(1, len(terms) - 1) if self.is_narrow else 1
        for count in range(least, len(terms) + 1):
            for axes in combinations(terms, count):
                group = self.size(axes)
                left = tuple(t for t in terms if t not in axes)
                sent = 2 * (1 - 1 / group) * local
                peak = local
                if p.gathers_terms:
                    sent, peak = (group - 1) * local, group * local
                new = dims, blocks, left, None
                yield Transfer(StepKind.ALL_REDUCE, ((axes, None, None),), new, 1, sent, peak)

    def _gaining_dims(self, dims: DimIds, axis: int) -> Iterator[int]:
        """Dims that an axis may be added to: in a narrow search only where the target has it."""
        for dim, axes in enumerate(dims):
            if not self.is_narrow or self.problem.target[dim][: len(axes) + 1] == (*axes, axis):
                yield dim

    @cached_property
    def is_narrow(self) -> bool:
        """Whether only moves towards the target are looked at, as where there are many axes."""
        return self.problem.is_narrow or len(self.problem.sizes) > MAX_FREE_SEARCH

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
            (*((self.size(dims[d]), blocks[d]) for dims, blocks in ends), (most, -(-n // most)))
            for d, n in enumerate(p.shape)
        )

    def free_axes(self, state: State) -> Ids:
        """Unused axes, one of each set that is alike to the target."""
        dims, _, terms, _ = state
        used = {a for axes in dims for a in axes}.union(terms)
        found, seen = [], set()
        for axis, size in enumerate(self.problem.sizes):
            if axis in used:
                continue
            if axis not in self.target_axes:
                if size in seen:
                    continue
                seen.add(size)
            found.append(axis)
        return tuple(found)

    @cached_property
    def even_dims(self) -> tuple[bool, ...]:
        """Whether each dim divides evenly at both ends; it is then split evenly in between too."""
        p = self.problem
        ends = zip(p.shape, p.source, p.target, strict=True)
        return tuple(n % self.size(s) == 0 == n % self.size(t) for n, s, t in ends)

    @cached_property
    def is_even(self) -> bool:
        """Whether all dims are even."""
        return all(self.even_dims)

    @cached_property
    def target_axes(self) -> frozenset[int]:
        """The axes that the target's dims are sharded over."""
        return frozenset(a for axes in self.problem.target for a in axes)

    def canonical_blocks(self, dims: DimIds) -> Ids:
        """Local sizes of dims as `ceil(n / k)`."""
        pairs = zip(self.problem.shape, dims, strict=True)
        return tuple(-(-n // self.size(axes)) for n, axes in pairs)

    def size(self, axes: Ids) -> int:
        """Product of the sizes of some axes."""
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
