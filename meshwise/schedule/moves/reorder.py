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
from meshwise.ir.mesh import Axes
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Sharding
from meshwise.schedule.moves.fuse import check_convex
from meshwise.schedule.moves.refusal import equation_of, refuse, replaced, traced
from meshwise.schedule.rewrite import Piece
from meshwise.schedule.tidy import tidy
from meshwise.schedule.tiling import (
    Cutter,
    NotTileableError,
    Tiling,
    compute_tile,
    gather,
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
class _Entries:
    """The gathers that are moved, by the whole values; all over the same axes."""

    tiles: Mapping[Var, Tile]
    axes: Axes


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
    gathered: Sequence[Var],
    computations: Sequence[Var] | None = None,
    more_bytes: bool = False,
) -> Reordered:
    """All_gathers over the same axes past computations that read them.

    `computations` are named by their results; by default all that can be done on tiles. Each value
    of them that others read is gathered. Where that gathers more bytes than before, the move is
    refused unless `more_bytes`. Raises `IllegalMove`.
    """
    entry = _entries(view, gathered)
    if computations is None:
        region = _widen(view, entry, _grow(view, entry, range(len(view.eqns)), {}, False))
    else:
        given = {equation_of(view, v, MOVE, lambda _: True, "computations") for v in computations}
        check_convex(view, given, MOVE)
        region = _grow(view, entry, sorted(given), {}, True)
    if not region.tilings:
        raise refuse(
            MOVE,
            [f"nothing that reads {view.text(v)} can be computed on its tiles" for v in gathered],
            "A computation can be moved before the gather if its own rule cuts that dim.",
            "Split the all_reduce along another dim, one that no computation mixes.",
        )
    piece, live_outs = _emit(view, region, entry)
    whole = piece.results[: len(live_outs)]
    renamed = dict(zip(live_outs, whole, strict=True))
    others = [v for i in region.tilings for v in view.eqns[i].outvars if v not in region.tiles]
    renamed.update(zip(others, piece.results[len(live_outs) :], strict=True))
    jaxpr = replaced(view, MOVE, list(region.tilings), [piece], renamed)
    first = gathered[0]
    more = f" and {len(gathered) - 1} more" if len(gathered) > 1 else ""
    reason = Reason(
        f"reorder of all_gather {view.text(first)}{more}", _line(view, view.maker[first])
    )
    moved = tidy(view.with_jaxpr(jaxpr, [reason]))
    _check_bytes(view, moved, gathered, more_bytes)
    return Reordered(moved, tuple([v for v in whole if v in moved.maker]))


def _entries(view: View, gathered: Sequence[Var]) -> _Entries:
    found = {entry.whole: entry for entry in (_entry(view, v) for v in gathered)}
    groups = {entry.axes for entry in found.values()}
    if len(groups) != 1:
        raise refuse(
            MOVE,
            [f"{view.text(v)} over {', '.join(found[v].axes)}" for v in found],
            "Gathers that are moved together go over the same axes (groups).",
            "Reorder those over one group at a time.",
        )
    return _Entries(found, groups.pop())


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
    for made in (v for index in view.readers[gathered] for v in view.eqns[index].outvars):
        cut = view.gathers.get(made)
        if cut and cut.tile is entry.tile and cut.whole is not gathered:
            return cut
    return entry


def _widen(view: View, entry: _Entries, region: _Region) -> _Region:
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
        each = [{atom: tile} for atom, tile in wanted.items()]
        for more_cuts in [wanted, *each] if len(wanted) > 1 else each:
            cuts = {**region.cuts, **more_cuts}
            wider = _grow(view, entry, range(len(view.eqns)), cuts, False)
            more = len(wider.tilings) > len(region.tilings)
            if more and {*_read_outside(view, wider)} <= known:
                region = wider
                break
        else:
            return region


def _grow(
    view: View,
    entry: _Entries,
    candidates: Iterable[int],
    cuts: Mapping[Var, Sharding],
    is_given: bool,
) -> _Region:
    """The candidates that read tiles, in order, with how each is computed on them."""
    tiles: dict[Var, Sharding] = {v: t.sharding for v, t in entry.tiles.items()}
    tiles.update(cuts)
    tilings: dict[int, Tiling] = {}
    made = {view.maker[v] for v in entry.tiles}
    for index in candidates:
        eqn = view.eqns[index]
        operands = [None if isinstance(a, Literal) else tiles.get(a) for a in eqn.invars]
        if not any(operands) or index in made:
            continue
        try:
            tiling = tile_forward(eqn, operands, view.mesh, entry.axes)
            _check_operands(view, index, operands, entry)
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
            tiles.pop(var, None)
            if tile.used_axes:
                tiles[var] = tile
    kept = {v: t for v, t in cuts.items() if view.maker.get(v) not in tilings}
    return _Region(tilings, tiles, kept)


def _check_operands(
    view: View, index: int, operands: Sequence[Sharding | None], entry: _Entries
) -> None:
    """What is not a tile is the same on all devices of the group, whether it is cut or not."""
    for atom, tile in zip(view.eqns[index].invars, operands, strict=True):
        if tile is not None or isinstance(atom, Literal):
            continue
        varying = {*entry.axes} & view.layout(atom).varying
        if varying:
            raise NotTileableError(
                f"{view.text(atom)} is {view.layout(atom)}: a device's own values, read by "
                f"{view.eqns[index].primitive.name} at {_line(view, index)}, cannot be cut"
            )


def _line(view: View, index: int) -> str:
    return _jax.source_summary(view.eqns[index])


def _emit(view: View, region: _Region, entry: _Entries) -> tuple[Piece, list[Var]]:
    """The computations on tiles: results that others read, gathered, then those left whole."""
    inside = region.tilings.keys()
    outside = _read_outside(view, region)
    externals = _externals(view, inside)
    scope = reason_scope(len(view.program.reasons))

    def on_tiles(*arrays: Any) -> list[jax.Array]:
        cutter = Cutter(view.mesh, view.eqns[min(inside)])
        env: dict[Var, Any] = dict(zip(externals, arrays, strict=True))
        tiles: dict[Var, Any] = {v: cutter.cut(env[v], t) for v, t in region.cuts.items()}
        tiles.update((v, env[v]) for v in entry.tiles if v in env)
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
        with _jax.at_source(view.eqns[min(inside)]), jax.named_scope(scope):
            gathered = [gather(tiles[v], shape_of(v), region.tiles[v]) for v in outside]
        return [*gathered, *wholes]

    given = [entry.tiles[v].tile if v in entry.tiles else v for v in externals]
    return traced(MOVE, on_tiles, given, view.mesh, min(inside)), outside


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


def gathered_bytes(view: View) -> float:
    """Wire bytes of all all_gathers of a program."""
    return sum(
        c.wire_bytes for c in view.program.collectives if c.kind is CollectiveKind.ALL_GATHER
    )


def _check_bytes(view: View, moved: View, gathered: Sequence[Var], more_bytes: bool) -> None:
    before, after = gathered_bytes(view), gathered_bytes(moved)
    if after > before and not more_bytes:
        raise refuse(
            MOVE,
            [f"{view.text(gathered[0])}: gathers {after:,} bytes after it, {before:,} before"],
            "Each value that is read after the computations is gathered: together that is more.",
            "Keep state in slices (slice_state), so that it need not be gathered; or ask for it "
            "with more_bytes=True.",
        )
