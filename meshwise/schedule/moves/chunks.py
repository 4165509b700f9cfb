"""overlap of a chain of equations, cut in chunks that follow each other through it.

While one chunk is in a collective, the one before it is in the computation or collective after: a
reduce_scatter within a stage, the send to the next stage and the all_gather there go over different
links at once (CoCoNeT, sections 3.2 and 4.5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var
from meshwise.errors import IllegalMove
from meshwise.ir.collectives import CollectiveKind, is_collective, kind_of_primitive
from meshwise.ir.mesh import Mesh
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Sharding
from meshwise.rules.registry import REGISTRY
from meshwise.schedule.moves.fuse import between
from meshwise.schedule.moves.on_chunk import CHUNK, chunk_mesh, compute_chunk, cut_dim
from meshwise.schedule.moves.refusal import equation_of, refuse, replaced
from meshwise.schedule.rewrite import trace_piece
from meshwise.schedule.tiling import (
    NotTileableError,
    Tiling,
    one_dim,
    tile_backward,
    tile_forward,
)
from meshwise.schedule.view import View

MOVE = "overlap"


@dataclass(frozen=True)
class Chunked:
    """The program after a chain was cut in chunks; `values` are what stands for its live results.

    These are the values, of those that the chain makes, that others read, in order.
    """

    view: View
    values: tuple[Var, ...]


@dataclass(frozen=True)
class _Chain:
    """Equations in order, each with how it is done on a chunk; the dim that chunks cut, by value.

    `stages` are the equations again: each collective by itself, and what is computed between.
    """

    tilings: Mapping[int, Tiling]
    dims: Mapping[Var, int | None]
    stages: tuple[tuple[int, ...], ...]
    externals: tuple[Var, ...]
    live_outs: tuple[Var, ...]


def overlap_chunks(
    view: View, values: Sequence[Var], chunks: int, dim: int | None = None
) -> Chunked:
    """The equations that make some values, as `chunks` chains, one a chunk of a dim.

    What lies between the values given is taken with them. `dim` is of the value that is made last;
    by default its first that divides and that all of the chain passes through. No equation of a
    chunk waits for one of another chunk. Values are the same bit for bit, as far as a machine's
    product of some rows is. Wire bytes stay, launches are `chunks` times as many. Raises
    `IllegalMove`.
    """
    given = {equation_of(view, v, MOVE, lambda _: True, "equations of a chain") for v in values}
    given |= between(view, given)
    last = view.eqns[max(given)].outvars[0]
    chain = _chain(view, sorted(given), last, chunks, dim)
    scope = reason_scope(len(view.program.reasons))
    mesh = chunk_mesh(view.mesh, chunks)

    def pipelined(*arrays: Any) -> list[jax.Array]:
        env = dict(zip(chain.externals, arrays, strict=True))
        flows = [_Chunk(view, chain, mesh, number, env) for number in range(chunks)]
        with jax.named_scope(scope):
            for wave in range(chunks + len(chain.stages) - 1):
                for stage, indices in reversed([*enumerate(chain.stages)]):
                    if 0 <= wave - stage < chunks:
                        flows[wave - stage].run(indices)
            return [_joined(chain.dims[v], [f.made[v] for f in flows]) for v in chain.live_outs]

    try:
        piece = trace_piece(pipelined, chain.externals, view.mesh, _position(view, chain))
    except NotTileableError as why:
        raise _refuse_dim(view, last, [str(why)]) from None
    renamed = dict(zip(chain.live_outs, piece.results, strict=True))
    jaxpr = replaced(view, MOVE, sorted(given), [piece], renamed)
    lines = [
        _jax.source_summary(view.eqns[i]) for i in sorted(given) if is_collective(view.eqns[i])
    ]
    reason = Reason(
        f"overlap in {chunks} chunks along dim {chain.dims[last]} of {view.text(last)}",
        next(iter(lines), _jax.source_summary(view.eqns[min(given)])),
    )
    return Chunked(view.with_jaxpr(jaxpr, [reason]), piece.results)


def _position(view: View, chain: _Chain) -> int:
    """Where the chain stands: after what it reads, so that chunks stay in the order of waves."""
    return max(min(chain.tilings), *(view.maker.get(v, -1) for v in chain.externals), 0)


@dataclass
class _Chunk:
    """One chunk on its way through a chain, inside a traced function."""

    view: View
    chain: _Chain
    mesh: Mesh
    number: int
    env: Mapping[Var, Any]
    made: dict[Any, Any] = field(default_factory=dict)
    cuts: dict[Any, Any] = field(default_factory=dict)

    def run(self, indices: Sequence[int]) -> None:
        """Compute some equations, whose operands are there."""
        for index in indices:
            eqn, tiling = self.view.eqns[index], self.chain.tilings[index]
            operands = [
                self._operand(a, tile) for a, tile in zip(eqn.invars, tiling.operands, strict=True)
            ]
            results = compute_chunk(eqn, tiling, operands, self.mesh, np.int32(self.number))
            self.made.update(zip(eqn.outvars, results, strict=True))

    def _operand(self, atom: Any, tile: Sharding) -> Any:
        if isinstance(atom, Literal):
            return _jax.literal_value(atom)
        if atom in self.made:
            return self.made[atom]
        dim = cut_dim(tile)
        if dim is None:
            return self.env[atom]
        if (atom, dim) not in self.cuts:
            size = shape_of(atom)[dim] // self.mesh.axis_size[CHUNK]
            start = self.number * size
            cut = lax.slice_in_dim(self.env[atom], start, start + size, axis=dim)
            self.cuts[atom, dim] = cut
        return self.cuts[atom, dim]


def _joined(dim: int | None, parts: Sequence[jax.Array]) -> jax.Array:
    """A value from its chunks; one that chunks do not cut is the same in all."""
    return parts[0] if dim is None else lax.concatenate(parts, dim)


def _chain(view: View, indices: Sequence[int], last: Var, chunks: int, dim: int | None) -> _Chain:
    """The equations of a chain, cut along a dim of its last value."""
    if chunks < 2:
        raise refuse(
            MOVE,
            [f"chunks={chunks}"],
            "What overlaps are the chunks of a value: two or more.",
            "Choose how many, of those that divide the dim.",
        )
    shape = shape_of(last)
    if dim is not None and not 0 <= dim < len(shape):
        raise _refuse_dim(view, last, [f"there is no dim {dim}"])
    why: list[str] = []
    for d in range(len(shape)) if dim is None else [dim]:
        if shape[d] % chunks or not shape[d]:
            why.append(f"dim {d}: {shape[d]} elements on each device are not {chunks} equal chunks")
            continue
        try:
            return _cut_along(view, indices, last, d, chunks)
        except NotTileableError as error:
            why.append(f"dim {d}: {error}")
    raise _refuse_dim(view, last, why)


def _refuse_dim(view: View, last: Var, why: Sequence[str]) -> IllegalMove:
    return refuse(
        MOVE,
        [f"{view.text(last)}, {w}" for w in why] or [f"{view.text(last)} is a scalar"],
        "All of a chain is cut along one dim, that every equation of it passes through: no "
        "reduction may cross it, no collective cut or join it.",
        "Choose another dim, a number of chunks that divides it, or a shorter chain.",
    )


def _cut_along(view: View, indices: Sequence[int], last: Var, dim: int, chunks: int) -> _Chain:
    """A chain cut along one dim of its last value. Raises `NotTileableError`."""
    mesh = chunk_mesh(view.mesh, chunks)
    made = {v for i in indices for v in view.eqns[i].outvars}
    cuts = _Cuts(view, made, chunks, {last: one_dim(len(shape_of(last)), dim, (CHUNK,))})
    tilings: dict[int, Tiling] = {}
    for index in reversed(indices):
        eqn = view.eqns[index]
        known = [i for i, v in enumerate(eqn.outvars) if v in cuts.tiles]
        if known:
            tile = cuts.tiles[eqn.outvars[known[0]]]
            tilings[index] = tile_backward(eqn, known[0], tile, mesh, (CHUNK,))
            cuts.note(index, tilings[index])
    for index in indices:  # what the last value does not come from, but what it comes from leads to
        if index not in tilings:
            eqn = view.eqns[index]
            operands = [None if isinstance(a, Literal) else cuts.tiles.get(a) for a in eqn.invars]
            if not any(operands):
                raise NotTileableError(f"{eqn.primitive.name} reads nothing of the chain")
            tilings[index] = tile_forward(eqn, operands, mesh, (CHUNK,))
            cuts.note(index, tilings[index])
    read = [a for i in indices for a in view.eqns[i].invars if not isinstance(a, Literal)]
    outside = [v for i in range(len(view.eqns)) if i not in tilings for v in view.eqns[i].invars]
    others = {v for v in outside if not isinstance(v, Literal)} | view.returned
    return _Chain(
        {i: tilings[i] for i in indices},
        {v: cut_dim(cuts.tiles.get(v)) for v in made},
        _stages(view, indices),
        tuple(dict.fromkeys(a for a in read if a not in made)),
        tuple([v for i in indices for v in view.eqns[i].outvars if v in others]),
    )


@dataclass
class _Cuts:
    """How the values that a chain makes are cut, and the equation that asked for it first."""

    view: View
    made: set[Var]
    chunks: int
    tiles: dict[Var, Sharding]
    asked: dict[Var, int] = field(default_factory=dict)

    def note(self, index: int, tiling: Tiling) -> None:
        """Take note of an equation's operands and results. Raises `NotTileableError`."""
        eqn = self.view.eqns[index]
        if any(t.unreduced for t in tiling.terms):
            raise NotTileableError(f"{self._name(index)} sums over the dim that is cut")
        if is_collective(eqn) and not any(tiling.strategy.axes):
            raise NotTileableError(f"{self._name(index)} is of a value that is not cut")
        pairs = [*zip(eqn.invars, tiling.operands, strict=True)]
        pairs += zip(eqn.outvars, tiling.terms, strict=True)
        for atom, tile in pairs:
            if isinstance(atom, Literal):
                continue
            self._check_chunks_are_equal(index, atom, tile)
            if atom not in self.made:
                continue
            self.asked.setdefault(atom, index)
            if self.tiles.setdefault(atom, tile) != tile:
                both = self._how(index, tile), self._how(self.asked[atom], self.tiles[atom])
                raise NotTileableError(f"{self.view.text(atom)} is read {' and '.join(both)}")

    def _check_chunks_are_equal(self, index: int, var: Var, tile: Sharding) -> None:
        """A pad has fewer rows than its result: that those divide does not say that its own do."""
        dim = cut_dim(tile)
        if dim is not None and shape_of(var)[dim] % self.chunks:
            raise NotTileableError(
                f"{self._name(index)} has {shape_of(var)[dim]} elements along dim {dim} of "
                f"{self.view.text(var)}, which are not {self.chunks} equal chunks"
            )

    def _how(self, index: int, tile: Sharding) -> str:
        dim = cut_dim(tile)
        if dim is None:
            return f"whole by {self._name(self._mixer(index))}"
        return f"in chunks along dim {dim} by {self._name(index)}"

    def _mixer(self, index: int) -> int:
        """The reduction that an equation's result goes into whole, if there is one."""
        at: int | None = index
        while at is not None:
            eqn = self.view.eqns[at]
            if _mixes(eqn):
                return at
            at = next((self.asked[v] for v in eqn.outvars if self.asked.get(v, at) != at), None)
        return index

    def _name(self, index: int) -> str:
        eqn = self.view.eqns[index]
        return f"{eqn.primitive.name} at {_jax.source_summary(eqn)}"


def _mixes(eqn: JaxprEqn) -> bool:
    """Whether an equation adds elements up, or takes the largest, so that it reads them whole."""
    if is_collective(eqn):
        return kind_of_primitive(eqn.primitive.name) is CollectiveKind.REDUCE_SCATTER
    return bool(REGISTRY.describe(eqn).factors.reductions)


def _stages(view: View, indices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Each collective by itself, and the computations between collectives."""
    stages: list[list[int]] = []
    ends = True
    for index in indices:
        alone = is_collective(view.eqns[index])
        if alone or ends:
            stages.append([])
        stages[-1].append(index)
        ends = alone
    return tuple([tuple(s) for s in stages])
