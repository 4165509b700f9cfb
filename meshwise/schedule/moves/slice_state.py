"""slice_state: an argument that a step makes anew is kept in slices (CoCoNeT's asSlice and dead).

A state comes in as an argument and goes out as a result, to be the next step's argument. If it is
replicated, every device holds and computes all of it. Where a step only ever uses this device's
part, the argument and the result can be that part: memory falls to 1/n, and the gather that made
the whole result is gone. It holds for all steps, because result and argument lie alike.
"""

from collections.abc import Sequence
from typing import Any

import jax

from meshwise import _jax
from meshwise._jax import Var
from meshwise.ir.mesh import Axes
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.ir.sharding import Sharding
from meshwise.schedule.moves.refusal import refuse, replaced
from meshwise.schedule.rewrite import trace_piece
from meshwise.schedule.tidy import tidy
from meshwise.schedule.tiling import cut, gather, tile_shape
from meshwise.schedule.view import Tile, View

MOVE = "slice_state"


def slice_state(
    view: View,
    argument: int,
    result: int,
    name: str,
    dim: int | None = None,
    axes: Axes | None = None,
    gathers: bool = False,
) -> View:
    """The program with one state, by its positions among arguments and results, in slices.

    By default the dim and axes are those of the slices that are read of it. `gathers` allows the
    state to be gathered where the step reads it whole. Raises `IllegalMove`.
    """
    _check_is_state(view, argument, result, name)
    tile = _tile_of(view, view.inputs[argument], name, dim, axes)
    _check_replicated(view, argument, result, tile, name)
    _check_even(view, argument, tile, name)
    moved = tidy(_in_slices(view, argument, result, tile, name))
    part = moved.inputs[argument]
    whole = [v for v, t in moved.gathers.items() if t.tile is part]
    if whole and not gathers:
        reader = next(iter(moved.readers[whole[-1]]), None)
        who = "the result" if reader is None else moved.eqns[reader].primitive.name
        line = "" if reader is None else f" at {_jax.source_summary(moved.eqns[reader])}"
        raise refuse(
            MOVE,
            [f"{name} is read whole by {who}{line}"],
            "A state can be kept in slices where the step reads nothing but this device's part.",
            "Reorder the computations that read it first; or allow it to be gathered in every "
            "step, with gathers=True.",
        )
    return moved


def _check_is_state(view: View, argument: int, result: int, name: str) -> None:
    program = view.program
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


def _tile_of(view: View, given: Var, name: str, dim: int | None, axes: Axes | None) -> Tile:
    """How the state is to be cut: as it is read, or as it is said."""
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
    rank = len(shape_of(given))
    if not 0 <= dim < rank:
        raise refuse(
            MOVE,
            [f"{name} has {rank} dims, and no dim {dim}"],
            "A state is cut along one of its dims.",
            f"Choose one of {list(range(rank))}." if rank else "A scalar stays replicated.",
        )
    return Tile(given, None, dim, axes)


def _check_replicated(view: View, argument: int, result: int, tile: Tile, name: str) -> None:
    for what, value in (
        (name, view.inputs[argument]),
        (f"the next {name}", view.outputs[result]),
    ):
        varying = {*tile.axes} & view.layout(value).varying
        if varying:
            raise refuse(
                MOVE,
                [f"{what} is {view.layout(value)}"],
                "Only what all devices of the group hold alike can be held in slices instead.",
                f"Reduce it over {view.mesh.show(tuple(sorted(varying)))} first.",
            )


def _check_even(view: View, argument: int, tile: Tile, name: str) -> None:
    """Parts of a part are parts of the whole, in order, only where they leave no rest."""
    sharding = view.program.in_shardings[argument]
    local = shape_of(view.inputs[argument])[tile.dim]
    if sharding.dims[tile.dim] and local % view.mesh.size(tile.axes):
        raise refuse(
            MOVE,
            [f"dim {tile.dim} of {name}: {local} on each device, over {', '.join(tile.axes)}"],
            "A dim that is sharded already is cut further only where its shards divide.",
            "Choose another dim.",
        )


def _in_slices(view: View, argument: int, result: int, tile: Tile, name: str) -> View:
    """The state as a tile: gathered at once for whoever reads it, and its next value cut."""
    given, following, mesh = view.inputs[argument], view.outputs[result], view.mesh
    sharding = tile.sharding
    aval: Any = given.aval
    part = _jax.new_var(aval.update(shape=tile_shape(aval.shape, sharding, mesh)))
    scope = reason_scope(len(view.program.reasons))

    def joined(x: jax.Array) -> list[jax.Array]:
        with jax.named_scope(scope):
            return [gather(x, shape_of(given), sharding, mesh)]

    whole = trace_piece(joined, [part], mesh, -1)
    if following is given:
        following = whole.results[0]
    parts = trace_piece(lambda x: [cut(x, sharding, mesh)], [following], mesh, len(view.eqns))
    outputs = list(view.outputs)
    outputs[result] = parts.results[0]
    inputs = [part if i == argument else v for i, v in enumerate(view.inputs)]
    jaxpr = replaced(view, MOVE, [], [whole, parts], {given: whole.results[0]}, inputs, outputs)
    return view.with_jaxpr(
        jaxpr,
        [Reason(f"{name}, kept in slices, is read whole", "the argument")],
        _sliced(view.program.in_shardings, argument, tile),
        _sliced(view.program.out_shardings, result, tile),
    )


def _sliced(shardings: Sequence[Sharding], position: int, tile: Tile) -> list[Sharding]:
    found = list(shardings)
    dims = list(found[position].dims)
    dims[tile.dim] = (*dims[tile.dim], *tile.axes)
    found[position] = Sharding(tuple(dims))
    return found
