"""The kernel: sums scattered round a ring, a computation on this device's chunks, results gathered.

Built from a computation's `Passes`, whatever it computes.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshwise._jax import pallas as pl
from meshwise._jax import pallas_tpu as pltpu
from meshwise.ir.program import shape_of, type_of
from meshwise.schedule.kernels import blocks as on_blocks
from meshwise.schedule.kernels import exchange as exchanges
from meshwise.schedule.kernels import gather as gathers
from meshwise.schedule.kernels import scatter as scatters
from meshwise.schedule.kernels.blocks import Value
from meshwise.schedule.kernels.passes import Env, Passes
from meshwise.schedule.kernels.pipelines import pipeline
from meshwise.schedule.kernels.products import MatmulBlocks
from meshwise.schedule.kernels.ring import Piece, Ring, bytes_of
from meshwise.schedule.kernels.tiles import Tile


@dataclass(frozen=True)
class Product:
    """A summand that is a matrix product: `left` (all chunks of rows) times `right`."""

    left: Tile
    right: Tile
    sums: Any
    blocks: MatmulBlocks
    precision: Any

    @property
    def flops(self) -> int:
        """Of all chunks, on one device."""
        rows, inner = self.left.logical
        return 2 * rows * inner * self.right.shape[1]


@dataclass(frozen=True)
class Fused:
    """All that is known of the kernel before it runs.

    `summands` are arrays of all chunks, or products; the first tiles of `passes` are their sums.
    """

    ring: Ring
    passes: Passes
    pieces: tuple[Piece, ...]
    block_rows: int
    summands: tuple[Tile | Product, ...]
    tiles: tuple[Tile, ...]
    wholes: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[Tile | jax.ShapeDtypeStruct, ...]
    gathered: tuple[Tile | None, ...]
    exchanges: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]

    @property
    def slots(self) -> Sequence[Tile]:
        """The two slots in which each sum arrives."""
        sums = self.tiles[: len(self.summands)]
        return [replace(tile, chunks=2, dim=0) for tile in sums]

    def out_shape(self) -> tuple[list[Any], list[Any]]:
        """The results as they are stored, and the slots of the ring."""
        results = [
            (gathered or result).stored if isinstance(result, Tile) else result
            for result, gathered in zip(self.results, self.gathered, strict=True)
        ]
        return results, [slots.stored for slots in self.slots]

    def in_specs(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Where summands, tiles and whole values lie."""
        large = pl.BlockSpec(memory_space=pl.ANY)
        small = pl.BlockSpec(memory_space=pltpu.VMEM)
        summands: list[Any] = [
            [large, large] if isinstance(s, Product) else [large] for s in self.summands
        ]
        return (
            summands,
            [large] * (len(self.tiles) - len(self.summands)),
            [small] * len(self.wholes),
        )

    def out_specs(self) -> tuple[list[Any], list[Any]]:
        """Where results and slots lie."""
        large = pl.BlockSpec(memory_space=pl.ANY)
        small = pl.BlockSpec(memory_space=pltpu.VMEM)
        results = [large if isinstance(r, Tile) else small for r in self.results]
        return results, [large] * len(self.summands)

    def scratch_shapes(self) -> list[Any]:
        """Semaphores, the terms of exchanges, and what passes and products add up in."""
        products = [
            [pltpu.VMEM((s.blocks.rows, s.blocks.columns), s.sums)]
            if isinstance(s, Product)
            else []
            for s in self.summands
        ]
        return [
            scatters.scratch_of(len(self.summands), self.pieces, self.ring),
            gathers.scratch_of(sum(g is not None for g in self.gathered), self.pieces, self.ring),
            [exchanges.scratch_of(e, self.ring) for e in self.exchanges],
            products,
            [pltpu.VMEM(shape, dtype) for shape, dtype in self._totals().values()],
        ]

    def _totals(self) -> Mapping[Any, tuple[tuple[int, ...], Any]]:
        """The reductions over rows, with the shape in which each is added up."""
        found = {}
        for number in range(1, self.passes.last + 1):
            for eqn in self.passes.reductions(number):
                aval = type_of(eqn.outvars[0])
                shape = (1,) * (2 - len(aval.shape)) + tuple(aval.shape)
                found[eqn.outvars[0]] = (shape, aval.dtype)
        return found

    def cost(self) -> "pl.CostEstimate":
        """What the compiler is told of the kernel: products, and each byte moved once.

        Elementwise flops are left out: memory, not arithmetic, is what such passes wait for.
        """
        (results, slots), steps = self.out_shape(), self.ring.size - 1
        products = [s for s in self.summands if isinstance(s, Product)]
        sums = sum(_bytes(s) // 2 for s in slots)
        tiles = [t.stored for t in self.tiles[len(self.summands) :]] * self.passes.last
        gathered = [g.stored for g in self.gathered if g is not None]
        return pl.CostEstimate(
            flops=sum(s.flops for s in products),
            transcendentals=0,
            # A step of the ring reads a sum and a term and writes a sum.
            bytes_accessed=3 * steps * sums + sum(map(_bytes, [*tiles, *results])),
            remote_bytes_transferred=steps * (sums + sum(map(_bytes, gathered)) // self.ring.size),
        )

    def kernel(self, *refs: Any) -> None:
        """The kernel, given references: in, out, scratch, each as the methods above list them."""
        summands, tiles, wholes, results, slots, *scratch = refs
        scatter_scratch, gather_scratch, exchange_scratch, product_scratch, totals = scratch
        run = _Run(
            fused=self,
            tiles=tiles,
            results=results,
            totals=dict(zip(self._totals(), totals, strict=True)),
            exchange_scratch=exchange_scratch,
            scatter=scatters.Scatter(
                self.ring,
                self.pieces,
                self.block_rows,
                [self._term(i, refs, product_scratch[i]) for i, refs in enumerate(summands)],
                self.slots,
                slots,
                *scatter_scratch,
            ),
            gather=gathers.Gather(
                self.ring,
                self.pieces,
                [g for g in self.gathered if g is not None],
                [r for r, g in zip(results, self.gathered, strict=True) if g is not None],
                *gather_scratch,
            ),
        )
        run.all({v: _given(v, ref) for v, ref in zip(self.passes.kept(), wholes, strict=True)})

    def _term(self, number: int, refs: Sequence[Any], scratch: Sequence[Any]) -> scatters.Term:
        summand = self.summands[number]
        if isinstance(summand, Tile):
            return scatters.ArrayTerm(refs[0], summand)
        left, right = refs
        return scatters.ProductTerm(
            left, summand.left, right, scratch[0], summand.blocks, summand.precision
        )


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return bytes_of(array.shape, array.dtype)


def _given(var: Any, ref: Any) -> Any:
    """A whole value; truth values are given as numbers."""
    return ref[...] != 0 if type_of(var).dtype == jnp.bool_ else ref[...]


@dataclass(frozen=True)
class _Run:
    """The kernel while it runs: its references."""

    fused: Fused
    tiles: Sequence[Any]
    results: Sequence[Any]
    totals: Mapping[Any, Any]
    exchange_scratch: Sequence[Any]
    scatter: scatters.Scatter
    gather: gathers.Gather

    def all(self, kept: Mapping[Any, Any]) -> None:
        """Everything, in order; `kept` holds the whole values that the kernel is given."""
        passes, pieces = self.fused.passes, self.fused.pieces
        env = {v: Value(a, shape_of(v), False) for v, a in kept.items()}
        exchange = self._exchange()
        self.fused.ring.meet_neighbours()
        self.scatter.run()
        arrived_early = passes.has_exchange(1)
        for piece in pieces if arrived_early else ():
            # Then all devices have entered, and any may be written to.
            self.scatter.wait(piece)
        for number in range(1, passes.last + 1):
            passes.between(number, env, exchange)
            self._clear(number)
            for piece in pieces:
                if number == 1 and not arrived_early:
                    self.scatter.wait(piece)
                self._pass(number, piece, env)
                if number == passes.last:
                    self.gather.start(piece)
            self._collect(number, env)
        passes.between(passes.last + 1, env, exchange)
        self._write_wholes(env)
        self.gather.finish()

    def _exchange(self) -> Any:
        waiting = list(self.exchange_scratch)

        def exchange(terms: Sequence[Any], joins: Sequence[Any]) -> Sequence[Any]:
            buffers = exchanges.Buffers(*waiting.pop(0))
            return exchanges.exchange_terms(self.fused.ring, buffers, terms, joins)

        return exchange

    def _clear(self, number: int) -> None:
        for eqn in self.fused.passes.reductions(number):
            total = self.totals[eqn.outvars[0]]
            total[...] = jnp.full(total.shape, on_blocks.neutral(eqn), total.dtype)

    def _collect(self, number: int, env: Env) -> None:
        for eqn in self.fused.passes.reductions(number):
            var = eqn.outvars[0]
            env[var] = Value(self.totals[var][...], shape_of(var), False)

    def _pass(self, number: int, piece: Piece, env: Env) -> None:
        """One piece of a pass, block by block, from large memory and back."""
        fused, passes = self.fused, self.fused.passes
        sources = {i: self._sources(i, piece) for i in passes.tiles_read(number)}
        written = self._written(number, piece)
        rows = fused.block_rows

        def body(*blocks: Any) -> None:
            unread = list(blocks)
            tiles = {i: self._block(i, [unread.pop(0) for _ in s]) for i, s in sources.items()}
            partials, results = passes.in_block(number, env, tiles)
            for eqn, array in zip(passes.reductions(number), partials, strict=True):
                total = self.totals[eqn.outvars[0]]
                total[...] = on_blocks.join(eqn)(total[...], array)
            for (i, _), block in zip(written, unread, strict=True):
                tile = fused.results[i]
                assert isinstance(tile, Tile)
                block[...] = tile.written(results[i].array, rows)

        pipeline(
            body,
            (piece.rows // rows,),
            [fused.tiles[i].spec(rows) for i, s in sources.items() for _ in s],
            [t.spec(rows) for i, _ in written if isinstance(t := fused.results[i], Tile)],
            [*(ref for s in sources.values() for ref in s), *(ref for _, ref in written)],
        )

    def _sources(self, number: int, piece: Piece) -> list[Any]:
        """The references of which a tile's piece is the sum."""
        count = len(self.fused.summands)
        if number < count:
            return self.scatter.result(number, piece)
        return [self.fused.tiles[number].part(self.tiles[number - count], piece)]

    def _block(self, number: int, blocks: Sequence[Any]) -> Any:
        arrays = [self.fused.tiles[number].read(b[...]) for b in blocks]
        return functools.reduce(scatters.add, arrays)

    def _written(self, number: int, piece: Piece) -> list[tuple[int, Any]]:
        """Which results a pass writes, and where."""
        if number < self.fused.passes.last:
            return []
        found, gathered = [], 0
        for i, (result, whole) in enumerate(
            zip(self.fused.results, self.fused.gathered, strict=True)
        ):
            if whole is not None:
                found.append((i, self.gather.own(gathered, piece)))
                gathered += 1
            elif isinstance(result, Tile):
                found.append((i, result.part(self.results[i], piece)))
        return found

    def _write_wholes(self, env: Env) -> None:
        for i, atom in enumerate(self.fused.passes.results):
            if not isinstance(self.fused.results[i], Tile):
                ref = self.results[i]
                ref[...] = on_blocks.at_hand(env[atom], ref.shape).astype(ref.dtype)
