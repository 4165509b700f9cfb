"""slice_state: an argument that a step makes anew is kept in slices (CoCoNeT's asSlice and dead).

A state comes in as an argument and goes out as a result, to be the next step's argument. If it is
replicated, every device holds and computes all of it. Where a step only ever uses this device's
part, the argument and the result can be that part: memory falls to 1/n, and the gather that made
the whole result is gone. It holds for all steps, because result and argument lie alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import Var
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.schedule.moves.refusal import refuse, replaced, traced
from meshwise.schedule.rewrite import Piece, trace_piece
from meshwise.schedule.tidy import tidy
from meshwise.schedule.tiling import cut, gather
from meshwise.schedule.view import Tile, View

MOVE = "slice_state"


@dataclass(frozen=True)
class State:
    """An argument and the result that is its next value, by position, and what errors call it."""

    argument: int
    result: int
    name: str


def slice_state(
    view: View,
    states: Sequence[State],
    dim: int | None = None,
    axes: Axes | None = None,
    gathers: bool = False,
) -> View:
    """The program with states in slices.

    By default the dim and axes are those of the slices that are read of each. `gathers` allows a
    state to be gathered where the step reads it whole. Raises `IllegalMove`.
    """
    _check_apart(states)
    tiles = {}
    for state in states:
        _check_is_state(view, state)
        tile = tiles[state] = _tile_of(view, state, dim, axes)
        _check_replicated(view, state, tile)
        _check_even(view, state, tile)
    moved = tidy(_in_slices(view, tiles))
    if not gathers:
        for state in states:
            _check_not_whole(moved, state)
    return moved


def _check_not_whole(moved: View, state: State) -> None:
    part = moved.inputs[state.argument]
    whole = [v for v, t in moved.gathers.items() if t.tile is part]
    if not whole:
        return
    reader = next(iter(moved.readers[whole[-1]]), None)
    who = "the result" if reader is None else moved.eqns[reader].primitive.name
    line = "" if reader is None else f" at {_jax.source_summary(moved.eqns[reader])}"
    raise refuse(
        MOVE,
        [f"{state.name} is read whole by {who}{line}"],
        "A state can be kept in slices where the step reads nothing but this device's part.",
        "Reorder the computations that read it first; or allow it to be gathered in every "
        "step, with gathers=True.",
    )


def _check_apart(states: Sequence[State]) -> None:
    for ends in ({s.argument for s in states}, {s.result for s in states}):
        if len(ends) < len(states):
            raise refuse(
                MOVE,
                [f"{state.name}: result {state.result}" for state in states],
                "Each state has a next value of its own, and is named once.",
                "Name each with its own result, in calls of their own if need be.",
            )


def _check_is_state(view: View, state: State) -> None:
    program, name = view.program, state.name
    argument, result = state.argument, state.result
    before, after = program.in_types[argument], program.out_types[result]
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        raise refuse(
            MOVE,
            [f"{name} is {before.str_short()}, what is to be its next value {after.str_short()}"],
            "A state's next value is the next step's argument: both are of one type.",
            "Name the result that is its next value.",
        )
    ins, outs = program.in_shardings[argument], program.out_shardings[result]
    if ins != outs:
        raise refuse(
            MOVE,
            [f"{name} lies as {ins}, its next value as {outs}"],
            "A state must come out as it goes in, or the next step would read something else.",
            "Give argument and result one sharding.",
        )


def _tile_of(view: View, state: State, dim: int | None, axes: Axes | None) -> Tile:
    """How the state is to be cut: as it is read, or as it is said."""
    given, name = view.inputs[state.argument], state.name
    if dim is None or axes is None:
        found = {(t.dim, t.axes) for t in view.slices.values() if t.whole is given}
        found = {(d, a) for d, a in found if axes in (None, a) and dim in (None, d)}
        if len(found) != 1:
            ways = ", ".join(f"along dim {d} over {', '.join(a)}" for d, a in sorted(found))
            raise refuse(
                MOVE,
                [f"{name} is read {ways or 'whole, in no slices'}"],
                "A state is kept as the one slice that the step reads of it.",
                "Reorder the computations that read it first, or say dim and axes.",
            )
        ((dim, axes),) = found
    if not {*axes} <= {*view.mesh.names}:
        raise refuse(
            MOVE,
            [f"{', '.join(axes)} has one device"],
            "A state is cut over axes of several devices.",
            f"Choose among {', '.join(view.mesh.names)}.",
        )
    rank = len(shape_of(given))
    if not 0 <= dim < rank:
        raise refuse(
            MOVE,
            [f"{name} has {rank} dims, and no dim {dim}"],
            "A state is cut along one of its dims.",
            f"Choose one of {list(range(rank))}." if rank else "A scalar stays replicated.",
        )
    if not shape_of(given)[dim]:
        raise refuse(
            MOVE,
            [f"dim {dim} of {name} has no elements"],
            "A state is cut along one of its dims.",
            "Choose one that has elements.",
        )
    return Tile(given, None, dim, axes)


def _check_replicated(view: View, state: State, tile: Tile) -> None:
    for what, value in (
        (state.name, view.inputs[state.argument]),
        (f"the next {state.name}", view.outputs[state.result]),
    ):
        varying = {*tile.axes} & view.layout(value).varying
        if varying:
            raise refuse(
                MOVE,
                [f"{what} is {view.layout(value)}"],
                "Only what all devices of the group hold alike can be held in slices instead.",
                f"Reduce it over {view.mesh.show(tuple(sorted(varying)))} first.",
            )


def _check_even(view: View, state: State, tile: Tile) -> None:
    """Parts of a part are parts of the whole, in order, only where they leave no rest."""
    sharding = view.program.in_shardings[state.argument]
    local = shape_of(view.inputs[state.argument])[tile.dim]
    if sharding.dims[tile.dim] and local % view.mesh.size(tile.axes):
        raise refuse(
            MOVE,
            [f"dim {tile.dim} of {state.name}: {local} a device, over {', '.join(tile.axes)}"],
            "A dim that is sharded already is cut further only where its shards divide.",
            "Choose another dim.",
        )


def _in_slices(view: View, tiles: Mapping[State, Tile]) -> View:
    """States as tiles: gathered at once for whoever reads them, and their next values cut."""
    program, mesh = view.program, view.mesh
    inputs, outputs = list(view.inputs), list(view.outputs)
    ins, outs = list(program.in_shardings), list(program.out_shardings)
    pieces, reasons = [], []
    renamed: dict[Var, Any] = {}
    for state, tile in tiles.items():
        given: Any = view.inputs[state.argument]
        part = _jax.new_var(
            given.aval.update(shape=local_shape(shape_of(given), tile.sharding, mesh))
        )
        scope = reason_scope(len(program.reasons) + len(reasons))
        reasons.append(Reason(f"{state.name}, kept in slices, is read whole", "the argument"))
        pieces.append(_gathered(part, shape_of(given), tile.sharding, mesh, scope))
        inputs[state.argument] = part
        renamed[given] = pieces[-1].results[0]
        ins[state.argument] = _sliced(ins[state.argument], tile)
    for state, tile in tiles.items():
        following = outputs[state.result]
        following = renamed.get(following, following)
        parts = traced(
            MOVE, lambda x, t=tile.sharding: [cut(x, t, mesh)], [following], mesh, len(view.eqns)
        )
        pieces.append(parts)
        outputs[state.result] = parts.results[0]
        outs[state.result] = _sliced(outs[state.result], tile)
    jaxpr = replaced(view, MOVE, [], pieces, renamed, inputs, outputs)
    return view.with_jaxpr(jaxpr, reasons, ins, outs)


def _gathered(part: Var, shape: Sequence[int], sharding: Sharding, mesh: Mesh, scope: str) -> Piece:
    def joined(x: jax.Array) -> list[jax.Array]:
        with jax.named_scope(scope):
            return [gather(x, shape, sharding)]

    return trace_piece(joined, [part], mesh, -1)


def _sliced(sharding: Sharding, tile: Tile) -> Sharding:
    dims = list(sharding.dims)
    dims[tile.dim] = (*dims[tile.dim], *tile.axes)
    return replace(sharding, dims=tuple(dims))
