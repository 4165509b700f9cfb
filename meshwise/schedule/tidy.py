"""After a move: parts of what is gathered are the tiles, and only parts are computed.

Three rewrites until nothing changes. A slice of a gathered value is the tile it was gathered from.
Two slices of one value are one. And where nothing but slices read a value, each device computes its
own part of it: the slice goes up through what makes the value (random numbers, masks, constants).
"""

from collections import defaultdict
from typing import Any

from meshwise import _jax
from meshwise._jax import Literal, Var
from meshwise.ir.sharding import Sharding
from meshwise.schedule.rewrite import Piece, replace, trace_piece
from meshwise.schedule.tiling import (
    NotTileableError,
    Tiling,
    compute_tile,
    cut,
    tile_backward,
)
from meshwise.schedule.view import Tile, View


def tidy(view: View) -> View:
    """The same program with the rewrites of the module's docstring done."""
    while True:
        renamed = _same_slices(view)
        removed, pieces = _parts_only(view, renamed)
        if not renamed and not pieces:
            return view
        view = view.with_jaxpr(replace(view.program.jaxpr, removed, pieces, renamed))


def _same_slices(view: View) -> dict[Var, Any]:
    """Slices that are known values: the tile of a gathered value, an earlier equal slice."""
    renamed: dict[Var, Any] = {}
    first: dict[Any, Var] = {}
    for part, cut_ in view.slices.items():
        key = cut_.whole, cut_.dim, cut_.axes
        gathered = view.gathers.get(cut_.whole)
        if gathered and (gathered.dim, gathered.axes) == (cut_.dim, cut_.axes):
            renamed[part] = gathered.tile
        elif (same := first.setdefault(key, part)) is not part:
            renamed[part] = same
    return renamed


def _parts_only(view: View, renamed: dict[Var, Any]) -> tuple[set[int], list[Piece]]:
    """Equations of which nothing but one kind of part is read, computed on tiles."""
    parts: dict[Var, list[Tile]] = defaultdict(list)
    for part, cut_ in view.slices.items():
        if part not in renamed and not isinstance(cut_.whole, Literal):
            parts[cut_.whole].append(cut_)
    removed: set[int] = set()
    pieces: list[Piece] = []
    for whole, cuts in parts.items():
        index = view.maker.get(whole)
        is_going = index in removed or whole in renamed  # to be looked at in the next round
        if index is None or is_going or not _only_cut(view, whole, cuts):
            continue
        tiling = _tiling_of(view, index, whole, cuts[0].sharding)
        if tiling is None:
            continue
        piece = _piece(view, index, tiling)
        removed.add(index)
        pieces.append(piece)
        made = piece.results[view.eqns[index].outvars.index(whole)]
        renamed.update({c.tile: made for c in cuts})
    return removed, pieces


def _only_cut(view: View, whole: Var, cuts: list[Tile]) -> bool:
    """Whether only equal slices read a value, perhaps through padding."""
    if whole in view.returned or len({(c.dim, c.axes) for c in cuts}) > 1:
        return False
    slicing = {view.maker[c.tile] for c in cuts}
    for index in view.readers[whole]:
        eqn = view.eqns[index]
        through = eqn.primitive.name == "pad" and eqn.outvars[0] not in view.returned
        through = through and {*view.readers[eqn.outvars[0]]} <= slicing
        if index not in slicing and not through:
            return False
    return True


def _tiling_of(view: View, index: int, whole: Var, tile: Sharding) -> Tiling | None:
    """How an equation makes tiles of one of its results, the only one that is read."""
    eqn = view.eqns[index]
    others = [v for v in eqn.outvars if v is not whole]
    if any(view.readers[v] or v in view.returned for v in others):
        return None
    axes = tuple(a for dim in tile.dims for a in dim)
    if any({*axes} & view.layout(a).varying for a in eqn.invars if not isinstance(a, Literal)):
        return None
    try:
        tiling = tile_backward(eqn, eqn.outvars.index(whole), tile, view.mesh, axes)
    except NotTileableError:
        return None
    return None if any(t.unreduced for t in tiling.terms) else tiling


def _piece(view: View, index: int, tiling: Tiling) -> Piece:
    eqn = view.eqns[index]

    def own_part(*arrays: Any) -> list[Any]:
        with _jax.at_source(eqn):
            tiles = [cut(a, t, view.mesh) for a, t in zip(arrays, tiling.operands, strict=True)]
        return compute_tile(eqn, tiling, tiles, view.mesh)

    return trace_piece(own_part, eqn.invars, view.mesh, index)
