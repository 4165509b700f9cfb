"""reorder: an all_gather after the computations that read it, which then run on tiles.

CoCoNeT section 3.2 (AGReorder). Each computation is done by every device on its own part; what
others read of the results is gathered then. A sum over the dim that is cut (a norm) becomes a sum
of this device's part and an all_reduce of that.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import Literal, Var
from meshwise.ir.collectives import CollectiveKind
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Sharding
from meshwise.schedule.moves.fuse import check_convex
from meshwise.schedule.moves.refusal import equation_of, refuse, replaced
from meshwise.schedule.rewrite import Piece, trace_piece
from meshwise.schedule.tidy import tidy
from meshwise.schedule.tiling import (
    Cutter,
    NotTileableError,
    Tiling,
    compute_tile,
    gather,
    is_literal,
    tile_forward,
)
from meshwise.schedule.view import GATHERS, Tile, View

MOVE = "reorder"


@dataclass(frozen=True)
class Reordered:
    """The program after a reorder, and the gathers after the computations, by their results."""

    view: View
    gathers: tuple[Var, ...]


@dataclass(frozen=True)
class _Region:
    """Equations to be computed on tiles, each with how, and the tiles that their values are.

    `cuts` are replicated values that are cut once, at the beginning.
    """

    tilings: Mapping[int, Tiling]
    tiles: Mapping[Var, Sharding]
    cuts: Mapping[Var, Sharding]


def reorder(
    view: View,
    gathered: Var,
    computations: Sequence[Var] | None = None,
    more_bytes: bool = False,
) -> Reordered:
    """An all_gather past computations that read it.

    `computations` are named by their results; by default all that can be done on tiles. Each value
    of them that others read is gathered. Where that gathers more bytes than before, the move is
    refused unless `more_bytes`. Raises `IllegalMove`.
    """
    entry = _entry(view, gathered)
    if computations is None:
        region = _widen(view, entry, _grow(view, entry, range(len(view.eqns)), {}, False))
    else:
        given = {equation_of(view, v, MOVE, lambda _: True, "computations") for v in computations}
        check_convex(view, given, MOVE)
        region = _grow(view, entry, sorted(given), {}, True)
    if not region.tilings:
        raise refuse(
            MOVE,
            [f"nothing that reads {view.text(gathered)} can be computed on its tiles"],
            "A computation can be moved before the gather if its own rule cuts that dim.",
            "Split the all_reduce along another dim, one that no computation mixes.",
        )
    piece, live_outs = _emit(view, region, entry)
    whole = piece.results[: len(live_outs)]
    renamed = dict(zip(live_outs, whole, strict=True))
    others = [v for i in region.tilings for v in view.eqns[i].outvars if v not in region.tiles]
    renamed.update(zip(others, piece.results[len(live_outs) :], strict=True))
    jaxpr = replaced(view, MOVE, list(region.tilings), [piece], renamed)
    reason = Reason(
        f"reorder of all_gather {view.text(gathered)}", _line(view, view.maker[gathered])
    )
    moved = tidy(view.with_jaxpr(jaxpr, [reason]))
    _check_bytes(view, moved, gathered, more_bytes)
    return Reordered(moved, tuple([v for v in whole if v in moved.maker]))


def _entry(view: View, gathered: Var) -> Tile:
    """The gather that is moved; of one that was padded the value without padding."""
    equation_of(view, gathered, MOVE, {*GATHERS, "slice"}.__contains__, "an all_gather")
    entry = view.gathers.get(gathered)
    if entry is None:
        raise refuse(
            MOVE,
            [view.text(gathered)],
            "A gather that can be moved joins tiles along one dim, over whole axes of the mesh.",
            "Gather with tiled=True and without axis_index_groups.",
        )
    for index in view.readers[gathered]:
        cut = view.gathers.get(view.eqns[index].outvars[0])
        if cut and cut.tile is entry.tile and cut.whole is not gathered:
            return cut
    return entry


def _widen(view: View, entry: Tile, region: _Region) -> _Region:
    """What else can be computed on the tiles that replicated values are cut in, for nothing.

    The norm of the weights, beside their update: it is a sum, and nothing more is to be gathered.
    """
    while True:
        wanted = {
            atom: tile
            for index, tiling in region.tilings.items()
            for atom, tile in zip(view.eqns[index].invars, tiling.operands, strict=True)
            if not isinstance(atom, Literal) and atom not in region.tiles and tile.used_axes
        }
        known = {*_read_outside(view, region)}
        for atom, tile in wanted.items():
            cuts = {**region.cuts, atom: tile}
            wider = _grow(view, entry, range(len(view.eqns)), cuts, False)
            more = len(wider.tilings) > len(region.tilings)
            if more and {*_read_outside(view, wider)} <= known:
                region = wider
                break
        else:
            return region


def _grow(
    view: View,
    entry: Tile,
    candidates: Iterable[int],
    cuts: Mapping[Var, Sharding],
    is_given: bool,
) -> _Region:
    """The candidates that read tiles, in order, with how each is computed on them."""
    tiles: dict[Var, Sharding] = {entry.whole: entry.sharding, **cuts}
    tilings: dict[int, Tiling] = {}
    for index in candidates:
        eqn = view.eqns[index]
        operands = [None if isinstance(a, Literal) else tiles.get(a) for a in eqn.invars]
        if not any(operands) or index == view.maker.get(entry.whole):
            continue
        try:
            tiling = tile_forward(eqn, operands, view.mesh, entry.axes)
            _check_operands(view, index, operands, tiling, entry)
        except NotTileableError as why:
            if not is_given:
                continue
            raise refuse(
                MOVE,
                [str(why)],
                "Every computation that is moved must be one that each device can do on its part.",
                "Leave it after the gather, or split the all_reduce along another dim.",
            ) from None
        tilings[index] = tiling
        for var, tile in zip(eqn.outvars, tiling.results, strict=True):
            if tile.used_axes:
                tiles[var] = tile
    return _Region(tilings, tiles, cuts)


def _check_operands(
    view: View, index: int, operands: Sequence[Sharding | None], tiling: Tiling, entry: Tile
) -> None:
    """What is not a tile is the same on all devices of the group, whether it is cut or not."""
    for atom, tile in zip(view.eqns[index].invars, operands, strict=True):
        if tile is not None or is_literal(atom):
            continue
        varying = {*entry.axes} & view.layout(atom).varying
        if varying:
            raise NotTileableError(
                f"{view.text(atom)} is {view.layout(atom)}: a device's own values, read by "
                f"{view.eqns[index].primitive.name} at {_line(view, index)}, cannot be cut"
            )


def _line(view: View, index: int) -> str:
    return _jax.source_summary(view.eqns[index])


def _emit(view: View, region: _Region, entry: Tile) -> tuple[Piece, list[Var]]:
    """The computations on tiles: results that others read, gathered, then those left whole."""
    inside = region.tilings.keys()
    outside = _read_outside(view, region)
    externals = _externals(view, inside)
    scope = reason_scope(len(view.program.reasons))

    def on_tiles(*arrays: Any) -> list[jax.Array]:
        cutter = Cutter(view.mesh, view.eqns[view.maker[entry.whole]])
        env: dict[Var, Any] = dict(zip(externals, arrays, strict=True))
        tiles: dict[Var, Any] = {v: cutter.cut(env[v], t) for v, t in region.cuts.items()}
        if entry.whole in env:
            tiles[entry.whole] = env[entry.whole]
        wholes: list[Any] = []
        for index, tiling in region.tilings.items():
            eqn = view.eqns[index]
            operands = []
            for atom, tile in zip(eqn.invars, tiling.operands, strict=True):
                if isinstance(atom, Literal):
                    operands.append(_jax.literal_value(atom))
                elif atom in tiles:
                    operands.append(tiles[atom])
                else:
                    operands.append(cutter.cut(env[atom], tile) if tile.used_axes else env[atom])
            with jax.named_scope(scope):
                results = compute_tile(eqn, tiling, operands, view.mesh)
            for var, array in zip(eqn.outvars, results, strict=True):
                (tiles if var in region.tiles else env)[var] = array
                if var not in region.tiles:
                    wholes.append(array)
        with jax.named_scope(scope):
            gathered = [gather(tiles[v], shape_of(v), region.tiles[v], view.mesh) for v in outside]
        return [*gathered, *wholes]

    given = [entry.tile if v is entry.whole else v for v in externals]
    return trace_piece(on_tiles, given, view.mesh, min(inside)), outside


def _read_outside(view: View, region: _Region) -> list[Var]:
    """Values of the region, cut in tiles, that are results or read by what is not moved."""
    return [
        var
        for index in region.tilings
        for var in view.eqns[index].outvars
        if var in region.tiles
        and (var in view.returned or not {*view.readers[var]} <= region.tilings.keys())
    ]


def _externals(view: View, inside: Collection[int]) -> list[Var]:
    """What equations read that they do not make, in order."""
    made = {v for i in inside for v in view.eqns[i].outvars}
    read = [a for i in inside for a in view.eqns[i].invars if not isinstance(a, Literal)]
    return list(dict.fromkeys(v for v in read if v not in made))


def gathered_bytes(view: View) -> int:
    """Wire bytes of all all_gathers of a program."""
    return sum(
        c.wire_bytes for c in view.program.collectives if c.kind is CollectiveKind.ALL_GATHER
    )


def _check_bytes(view: View, moved: View, gathered: Var, more_bytes: bool) -> None:
    before, after = gathered_bytes(view), gathered_bytes(moved)
    if after > before and not more_bytes:
        raise refuse(
            MOVE,
            [f"{view.text(gathered)}: gathers {after:,} bytes after the move, {before:,} before"],
            "Each value that is read after the computations is gathered: together that is more.",
            "Keep state in slices (slice_state), so that it need not be gathered; or ask for it "
            "with more_bytes=True.",
        )
