"""overlap of products with the reduce_scatter or all_reduce of their sum.

A partial sum of a chunk goes round, and every device adds its term, which it has just computed.
Computations between product and collective that pass the dim through (a cast, a scale, a bias, a
transpose) are done on the chunk as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, named_axes
from meshwise.errors import IllegalMove
from meshwise.ir.collectives import is_collective
from meshwise.ir.mesh import Mesh
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Sharding
from meshwise.schedule.moves.on_chunk import CHUNK, chunk_mesh, compute_chunk, cut_dim
from meshwise.schedule.moves.refusal import equation_of, refuse, replaced
from meshwise.schedule.moves.rings import Ring, collect, filled_from, part_at
from meshwise.schedule.moves.split import split
from meshwise.schedule.rewrite import trace_piece
from meshwise.schedule.tiling import (
    NotTileableError,
    Tiling,
    one_dim,
    pad_dim,
    pads_behind,
    tile_backward,
)
from meshwise.schedule.view import SUMS, View

MOVE = "overlap"


@dataclass(frozen=True)
class ScatterRing:
    """The program after products were overlapped with their sum, this device's part of the sum.

    `whole` is the all_gather after it, where the sum was an all_reduce.
    """

    view: View
    part: Var
    whole: Var | None


@dataclass(frozen=True)
class _Scatter:
    """A reduce_scatter: what it sums, before padding, and what was padded with."""

    eqn: JaxprEqn
    index: int
    summand: Var
    dim: int
    filler: Any
    between: frozenset[int]


@dataclass(frozen=True)
class _Region:
    """Equations from products to the sum, in order, each with how it is done on a chunk."""

    tilings: Mapping[int, Tiling]
    externals: tuple[Var, ...]


def overlap_scatter(view: View, scattered: Var, bidirectional: bool = False) -> ScatterRing:
    """Products and the reduce_scatter of their sum, in one ring.

    The scattered dim is a free dim of the product, or one of the batch. Sums are taken in another
    order than before, in the type that is scattered. Raises `IllegalMove`.
    """
    scatter = _scatter(view, scattered)
    ring = Ring(named_axes(scatter.eqn), view.mesh, reason_scope(len(view.program.reasons)))
    mesh = chunk_mesh(view.mesh, ring.size)
    region = _region(view, scatter, mesh)
    size = shape_of(scatter.summand)[scatter.dim]
    given = [*region.externals, *([scatter.filler] if _is_var(scatter.filler) else [])]

    def round_(*arrays: Any) -> list[jax.Array]:
        filler = arrays[-1] if _is_var(scatter.filler) else scatter.filler
        env = dict(zip(region.externals, arrays, strict=False))
        chunks = _Chunks(view, region, mesh, _padded(view, region, mesh, env))

        def term(number: Any) -> jax.Array:
            found = chunks.of(scatter.summand, number)
            if found.shape[scatter.dim] * ring.size == size:
                return found
            value = _jax.literal_value(filler) if isinstance(filler, Literal) else filler
            return filled_from(found, scatter.dim, number, size, value)

        with _jax.at_source(scatter.eqn):
            return [collect(ring, term, bidirectional)]

    try:
        piece = trace_piece(round_, given, view.mesh, scatter.index)
    except NotTileableError as why:
        raise _refuse_path(view, scatter, [str(why)]) from None
    products = sum(view.eqns[i].primitive.name == "dot_general" for i in region.tilings)
    reason = Reason(
        f"overlap of reduce_scatter {view.text(scattered)} with {products} product(s), ring of "
        f"{ring.size}",
        _jax.source_summary(scatter.eqn),
    )
    gone = [*region.tilings, *scatter.between, scatter.index]
    jaxpr = replaced(view, MOVE, gone, [piece], {scattered: piece.results[0]})
    return ScatterRing(view.with_jaxpr(jaxpr, [reason]), piece.results[0], None)


def overlap_all_reduce(
    view: View, reduced: Var, dim: int | None = None, bidirectional: bool = False
) -> ScatterRing:
    """Products and the all_reduce of their sum: a ring as of a reduce_scatter, and an all_gather.

    Of the dims along which this can be done, by default the first of those that are padded least.
    Raises `IllegalMove`.
    """
    index = equation_of(view, reduced, MOVE, SUMS.__contains__, "an all_reduce that sums (psum)")
    count = view.mesh.size(named_axes(view.eqns[index]))
    shape = shape_of(reduced)

    def padded(d: int) -> float:
        return -(-shape[d] // count) * count / max(shape[d], 1)

    with_elements = [d for d, size in enumerate(shape) if size]
    dims = sorted(with_elements, key=padded) if dim is None else [dim]
    refusal: IllegalMove | None = None
    for d in dims:
        halves = split(view, [reduced], d)
        try:
            found = overlap_scatter(halves.view, halves.firsts[0], bidirectional)
        except IllegalMove as why:
            refusal = refusal or why
            continue
        return ScatterRing(found.view, found.part, halves.seconds[0])
    raise refusal or refuse(
        MOVE,
        [f"{view.text(reduced)} is a scalar, or has no elements"],
        "A ring takes a sum in chunks along a dim.",
        "Merge it with other sums instead.",
    )


def _padded(view: View, region: _Region, mesh: Mesh, arrays: Mapping[Var, Any]) -> dict[Any, Any]:
    """What is read from outside, by the dim that chunks cut, along which it is padded."""
    found: dict[Any, Any] = {(atom, None): array for atom, array in arrays.items()}
    count = mesh.axis_size[CHUNK]
    for index, tiling in region.tilings.items():
        for atom, tile in zip(view.eqns[index].invars, tiling.operands, strict=True):
            dim = cut_dim(tile)
            if isinstance(atom, Literal) or atom not in arrays or dim is None:
                continue
            if (atom, dim) not in found:
                size = -(-shape_of(atom)[dim] // count) * count
                found[atom, dim] = pad_dim(arrays[atom], dim, size)
    return found


@dataclass(frozen=True)
class _Chunks:
    """Chunks of the values of a region, of any number, inside a traced function.

    `arrays` are what is read from outside, each by the dim along which it is cut (None: whole).
    """

    view: View
    region: _Region
    mesh: Mesh
    arrays: Mapping[Any, Any]

    def of(self, wanted: Var, number: Any) -> jax.Array:
        """A value's chunk."""
        made: dict[Any, Any] = {}
        for index, tiling in self.region.tilings.items():
            eqn = self.view.eqns[index]
            operands = [
                self._operand(a, tile, number, made)
                for a, tile in zip(eqn.invars, tiling.operands, strict=True)
            ]
            results = compute_chunk(eqn, tiling, operands, self.mesh, number)
            made.update(zip(eqn.outvars, results, strict=True))
        return made[wanted]

    def _operand(self, atom: Any, tile: Sharding, number: Any, made: Mapping[Any, Any]) -> Any:
        if isinstance(atom, Literal):
            return _jax.literal_value(atom)
        if atom in made:
            return made[atom]
        dim = cut_dim(tile)
        array = self.arrays[atom, dim]
        if dim is None:
            return array
        return part_at(array, dim, number, array.shape[dim] // self.mesh.axis_size[CHUNK])


def _scatter(view: View, scattered: Var) -> _Scatter:
    """A reduce_scatter and what comes to it, padding seen through."""
    what = "a product's reduce_scatter or all_reduce"
    index = equation_of(view, scattered, MOVE, "reduce_scatter".__eq__, what)
    eqn = view.eqns[index]
    if eqn.params.get("axis_index_groups") is not None or not eqn.params["tiled"]:
        raise refuse(
            MOVE,
            [f"{view.text(scattered)} is not tiled, or has axis_index_groups"],
            "A ring is of all devices along axes of the mesh, and gives each its tile.",
            "Use psum_scatter(..., tiled=True), over an axis of the mesh.",
        )
    operand, dim = eqn.invars[0], eqn.params["scatter_dimension"]
    maker = None if isinstance(operand, Literal) else view.maker.get(operand)
    if maker is not None and pads_behind(view.eqns[maker], dim):
        pad = view.eqns[maker]
        before, filler = pad.invars
        size, total = shape_of(before)[dim], shape_of(operand)[dim]
        count = view.mesh.size(named_axes(eqn))
        fits = -(-size // count) * count == total
        is_only = view.readers[pad.outvars[0]] == [index]
        if fits and is_only and isinstance(before, Var):
            return _Scatter(eqn, index, before, dim, filler, frozenset({maker}))
    if not isinstance(operand, Var):
        raise refuse(
            MOVE,
            [view.text(operand)],
            "What is summed in a ring is a product.",
            "Leave the reduce_scatter as it is.",
        )
    return _Scatter(eqn, index, operand, dim, None, frozenset())


def _region(view: View, scatter: _Scatter, mesh: Mesh) -> _Region:
    """The products before a sum and what is between, all of it to be done on chunks."""
    rank = len(shape_of(scatter.summand))
    if shape_of(scatter.summand)[scatter.dim] < 2:
        raise _refuse_path(view, scatter, ["a dim of one element, or none, has no chunks"])
    wanted = {scatter.summand: one_dim(rank, scatter.dim, (CHUNK,))}
    tilings: dict[int, Tiling] = {}
    why: list[str] = []
    last = view.maker.get(scatter.summand, -1)
    for index in range(last, -1, -1):
        eqn = view.eqns[index]
        results = [i for i, v in enumerate(eqn.outvars) if v in wanted]
        if not results or is_collective(eqn):
            why += [f"{view.text(eqn.outvars[i])}: a collective" for i in results]
            continue
        try:
            tiling = _tiling(eqn, results, wanted, mesh)
        except NotTileableError as error:
            why.append(str(error))
            continue
        tilings[index] = tiling
        if eqn.primitive.name == "dot_general":
            continue
        for atom, tile in zip(eqn.invars, tiling.operands, strict=True):
            if cut_dim(tile) is not None and not isinstance(atom, Literal):
                wanted.setdefault(atom, tile)
    kept = _from_products(view, tilings)
    if not kept:
        why = why or [f"{view.text(scatter.summand)}: no product makes it"]
        raise _refuse_path(view, scatter, why)
    _check_read_inside(view, scatter, kept)
    _check_read_alike(view, scatter, kept)
    made = {v for i in kept for v in view.eqns[i].outvars}
    read = [a for i in kept for a in view.eqns[i].invars if not isinstance(a, Literal)]
    return _Region(kept, tuple(dict.fromkeys(a for a in read if a not in made)))


def _tiling(
    eqn: JaxprEqn, results: Sequence[int], wanted: Mapping[Var, Sharding], mesh: Mesh
) -> Tiling:
    first, *others = results
    tile = wanted[eqn.outvars[first]]
    tiling = tile_backward(eqn, first, tile, mesh, (CHUNK,))
    if any(t.unreduced for t in tiling.terms):
        raise NotTileableError(f"{eqn.primitive.name} sums along the dim that chunks cut")
    if any(tiling.terms[i] != wanted[eqn.outvars[i]] for i in others):
        raise NotTileableError(f"{eqn.primitive.name} is read in chunks along two dims")
    return tiling


def _from_products(view: View, tilings: Mapping[int, Tiling]) -> dict[int, Tiling]:
    """Those equations that products lead to, in order."""
    reached: set[Any] = set()
    kept: dict[int, Tiling] = {}
    for index in sorted(tilings):
        eqn, tiling = view.eqns[index], tilings[index]
        chunks = [
            a
            for a, tile in zip(eqn.invars, tiling.operands, strict=True)
            if cut_dim(tile) is not None and not isinstance(a, Literal)
        ]
        if eqn.primitive.name == "dot_general" or any(a in reached for a in chunks):
            kept[index] = tiling
            reached.update(eqn.outvars)
    return kept


def _check_read_inside(view: View, scatter: _Scatter, kept: Mapping[int, Tiling]) -> None:
    """No one else reads what is now made chunk by chunk."""
    inside = {*kept, *scatter.between, scatter.index}
    for index in kept:
        for var in view.eqns[index].outvars:
            others = [i for i in view.readers[var] if i not in inside]
            who = [
                f"{view.eqns[i].primitive.name} at {_jax.source_summary(view.eqns[i])}"
                for i in others
            ] + ["the program's results"] * (var in view.returned)
            if who:
                raise refuse(
                    MOVE,
                    [f"{view.text(var)} is read by {w} too" for w in who],
                    "A ring makes the product chunk by chunk, each added to a sum at once, so that "
                    "it is nowhere as a whole.",
                    "Have them read the sum, or leave the product before its collective.",
                )


def _check_read_alike(view: View, scatter: _Scatter, kept: Mapping[int, Tiling]) -> None:
    """What is made in chunks is read in these chunks: not whole, and not along another dim."""
    made: dict[Any, Sharding] = {}
    for index, tiling in kept.items():
        eqn = view.eqns[index]
        for atom, tile in zip(eqn.invars, tiling.operands, strict=True):
            if not isinstance(atom, Literal) and made.get(atom, tile) != tile:
                dim = cut_dim(tile)
                how = "whole" if dim is None else f"along dim {dim}"
                line = _jax.source_summary(eqn)
                why = (
                    f"{view.text(atom)} is made in chunks along dim {cut_dim(made[atom])}, and "
                    f"read {how} by {eqn.primitive.name} at {line}"
                )
                raise _refuse_path(view, scatter, [why])
        made.update(zip(eqn.outvars, tiling.terms, strict=True))


def _refuse_path(view: View, scatter: _Scatter, why: Sequence[str]) -> IllegalMove:
    return refuse(
        MOVE,
        [*why[:4], f"dim {scatter.dim} of {view.text(scatter.summand)} is scattered"],
        "A sum is overlapped with the products that make its terms, if these and all computations "
        "between can be done in chunks along the scattered dim.",
        "Scatter along a free dim of the product; move computations that mix its elements behind "
        "the sum.",
    )


def _is_var(atom: Any) -> bool:
    return atom is not None and not isinstance(atom, Literal)
