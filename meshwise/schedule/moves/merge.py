"""merge: two collectives that are one.

Five forms, told by the value that is named: collectives of one kind in a row over two groups (one,
over both); an all_reduce of which each device keeps its own part (reduce_scatter); a
reduce_scatter whose result is gathered again (all_reduce, the inverse of split); and a sum of two
collectives' results (one, of the sum). No form sends more than before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, named_axes
from meshwise.ir.mesh import Axes
from meshwise.ir.operators import ADDITIONS
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.schedule.moves.refusal import refuse, replaced
from meshwise.schedule.moves.split import reduce_scatter
from meshwise.schedule.rewrite import trace_piece
from meshwise.schedule.tiling import pads_behind
from meshwise.schedule.view import GATHERS, SUMS, Tile, View

MOVE = "merge"
_SCATTER = "reduce_scatter"
_REDUCTIONS: Mapping[str, Callable[[Any, Axes], jax.Array]] = {
    **dict.fromkeys(SUMS, lax.psum),
    "pmax": lax.pmax,
    "pmin": lax.pmin,
}
_ADDITIVE = SUMS | GATHERS | {_SCATTER, "ppermute", "all_to_all"}


@dataclass(frozen=True)
class Merged:
    """The program after a merge, and what stands for the value that was named."""

    view: View
    value: Var


def merge(view: View, value: Var) -> Merged:
    """Two collectives as one, by the result of the later (or of the sum, or slice, of them).

    - psum (pmax, pmin), reduce_scatter or all_gather of another one of its kind, over other axes;
    - a slice that keeps this device's part of a psum, or the psum, if only such slices read it;
    - an all_gather of a reduce_scatter over the same axes and dim, padding seen through;
    - the sum or difference of two results of one kind of collective, that nothing else reads.

    Sums are taken in another order than before. Raises `IllegalMove`.
    """
    if value in view.slices:
        return _slice_of_sum(view, view.slices[value].whole)
    name = view.eqns[view.maker[value]].primitive.name if value in view.maker else ""
    if name in ADDITIONS:
        return _sum_of_two(view, value)
    if value in view.gathers:
        before = _maker(view, view.gathers[value].tile)
        if before is not None and before.primitive.name == _SCATTER:
            return _scatter_and_gather(view, value)
    if name in _REDUCTIONS or name in GATHERS or name == _SCATTER:
        before = _maker(view, view.eqns[view.maker[value]].invars[0])
        if before is not None and _is_kind(before, name):
            return _in_a_row(view, value, before)
    if name in SUMS:
        return _slice_of_sum(view, value)
    raise refuse(
        MOVE,
        [view.text(value)],
        "Merged are two collectives in a row of one kind; a reduce_scatter and the all_gather of "
        "it; an all_reduce and the slices of it; the sum of two collectives' results.",
        "Name the value that the later of the two makes.",
    )


def _in_a_row(view: View, value: Var, first: JaxprEqn) -> Merged:
    """Collectives of one kind over two groups as one over both."""
    second = view.eqns[view.maker[value]]
    name, between = second.primitive.name, first.outvars[0]
    inner, outer = named_axes(first), named_axes(second)
    _check_plain(view, [first, second])
    _check_unread(view, [(between, {view.maker[value]})])
    if {*inner} & {*outer}:
        raise refuse(
            MOVE,
            [
                f"{view.text(between)} goes over {', '.join(inner)}, {view.text(value)} over "
                f"{', '.join(outer)}"
            ],
            "One collective goes over an axis once.",
            "Leave out the one that does nothing, or only scales.",
        )
    dims = {eqn.params.get(_DIMS.get(name, "")) for eqn in (first, second)}
    if len(dims) > 1:
        raise refuse(
            MOVE,
            [view.text(between), view.text(value), f"along dims {sorted(map(str, dims))}"],
            "One collective joins or cuts one dim.",
            "Leave them as they are.",
        )
    dim: Any = dims.pop()

    def both(x: jax.Array) -> jax.Array:
        if name in _REDUCTIONS:
            return _REDUCTIONS[name](x, view.mesh.permute_order((*outer, *inner)))
        if name == _SCATTER:
            axes = (*inner, *outer)
            return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return lax.all_gather(x, (*outer, *inner), axis=dim, tiled=True)

    return _done(view, value, both, [first.invars[0]], f"merge of two {name} in a row")


_DIMS = {
    _SCATTER: "scatter_dimension",
    **dict.fromkeys(GATHERS, "all_gather_dimension"),
}


def _scatter_and_gather(view: View, value: Var) -> Merged:
    """A reduce_scatter and the all_gather of its result as one all_reduce."""
    tile = view.gathers[value]
    scatter = _maker(view, tile.tile)
    gather = _raw(view, value)
    assert scatter is not None
    _check_plain(view, [scatter, gather])
    same = named_axes(scatter) == tile.axes and scatter.params["scatter_dimension"] == tile.dim
    if not same:
        raise refuse(
            MOVE,
            [
                f"{view.text(tile.tile)} over {', '.join(named_axes(scatter))}, dim "
                f"{scatter.params['scatter_dimension']}; {view.text(value)} over "
                f"{', '.join(tile.axes)}, dim {tile.dim}"
            ],
            "An all_reduce is a reduce_scatter and an all_gather along the same dim, over the same "
            "axes in the same order.",
            "Leave them as they are.",
        )
    raw = gather.outvars[0]
    unread = [(tile.tile, {view.maker[raw]})]
    if raw is not value:
        unread.append((raw, {view.maker[value]}))
    _check_unread(view, unread)
    operand = scatter.invars[0]
    if shape_of(operand) != shape_of(value):
        pad = _maker(view, operand)
        is_behind = pad is not None and pads_behind(pad, tile.dim)
        if pad is None or not is_behind or shape_of(pad.invars[0]) != shape_of(value):
            raise refuse(
                MOVE,
                [f"{view.text(operand)} is summed, {view.text(value)} kept of it"],
                "What is cut off after an all_gather must be what was padded before.",
                "Name the all_gather itself.",
            )
        operand = pad.invars[0]
    axes = view.mesh.permute_order(tile.axes)
    text = "merge of reduce_scatter and all_gather"
    return _done(view, value, lambda x: lax.psum(x, axes), [operand], text)


def _slice_of_sum(view: View, reduced: Any) -> Merged:
    """An all_reduce of which each device keeps its own part as one reduce_scatter."""
    eqn = _maker(view, reduced)
    if eqn is None or eqn.primitive.name not in SUMS:
        raise refuse(
            MOVE,
            [f"{view.text(reduced)} is no all_reduce"],
            "A part of an all_reduce is a reduce_scatter.",
            "Name a slice of an all_reduce that sums.",
        )
    _check_plain(view, [eqn])
    parts = [t for t in view.slices.values() if t.whole is reduced]
    if not parts:
        raise refuse(
            MOVE,
            [f"no slice keeps this device's part of {view.text(reduced)}"],
            "An all_reduce is merged with an all_reduce before it, or with the slices of it.",
            "Reorder the all_gathers and computations after it first.",
        )
    first = parts[0]
    _check_only_parts(view, reduced, parts)
    axes = named_axes(eqn)
    others = tuple([a for a in axes if a not in first.axes])
    if not {*first.axes} <= {*axes}:
        raise refuse(
            MOVE,
            [f"{view.text(reduced)} over {', '.join(axes)}, cut over {', '.join(first.axes)}"],
            "A reduce_scatter cuts over axes that it sums over.",
            "Sum over the axes that it is cut over; others remain an all_reduce.",
        )

    def scattered(x: jax.Array) -> jax.Array:
        part = reduce_scatter(x, first.dim, first.axes, view.mesh)
        return lax.psum(part, others) if others else part

    operand = eqn.invars[eqn.outvars.index(reduced)]
    text = "merge of all_reduce and the slices of it"
    return _done(view, first.tile, scattered, [operand], text, [t.tile for t in parts[1:]])


def _sum_of_two(view: View, value: Var) -> Merged:
    """The sum of two collectives' results as one collective of the sum."""
    add = view.eqns[view.maker[value]]
    eqns = [_maker(view, a) for a in add.invars]
    left, right = eqns
    if left is None or right is None or not _alike(left, right) or left is right:
        raise refuse(
            MOVE,
            [f"{view.text(value)}: of {view.text(a)}" for a in add.invars],
            "A sum of two collectives' results is one of the sum, if the two are of one kind, over "
            "the same axes and dims.",
            "Name the sum of two psums, or of two reduce_scatters, ...",
        )
    _check_plain(view, [left, right])
    _check_unread(view, [(e.outvars[0], {view.maker[value]}) for e in (left, right)])

    def of_sum(x: jax.Array, y: jax.Array) -> jax.Array:
        with _jax.at_source(add):
            (total,) = _jax.bind(add, [x, y])
        return _jax.bind(left, [total])[0]

    text = f"merge of two {left.primitive.name} that are added"
    return _done(view, value, of_sum, [left.invars[0], right.invars[0]], text)


def _done(
    view: View,
    value: Var,
    function: Callable[..., jax.Array],
    operands: Sequence[Any],
    text: str,
    same: Sequence[Var] = (),
) -> Merged:
    """The program with a value, and others that are the same, made in another way."""
    index = view.maker[value]
    eqn = view.eqns[index]
    scope = reason_scope(len(view.program.reasons))

    def made(*arrays: Any) -> list[jax.Array]:
        with _jax.at_source(eqn), jax.named_scope(scope):
            return [function(*arrays)]

    piece = trace_piece(made, operands, view.mesh, index)
    (result,) = piece.results
    jaxpr = replaced(view, MOVE, [index], [piece], dict.fromkeys((value, *same), result))
    reason = Reason(f"{text}, {view.text(value)}", _jax.source_summary(eqn))
    return Merged(view.with_jaxpr(jaxpr, [reason]), result)


def _maker(view: View, atom: Any) -> JaxprEqn | None:
    index = None if isinstance(atom, Literal) else view.maker.get(atom)
    return None if index is None else view.eqns[index]


def _raw(view: View, value: Var) -> JaxprEqn:
    """The all_gather of a gathered value, padding not cut off."""
    eqn = view.eqns[view.maker[value]]
    before = _maker(view, eqn.invars[0])
    return before if eqn.primitive.name == "slice" and before is not None else eqn


def _is_kind(eqn: JaxprEqn, name: str) -> bool:
    kinds = (SUMS, GATHERS, frozenset({name}))
    return any(name in kind and eqn.primitive.name in kind for kind in kinds)


def _alike(left: JaxprEqn, right: JaxprEqn) -> bool:
    """Whether two collectives do the same to two values."""
    name = left.primitive.name
    if right.primitive.name != name or name not in _ADDITIVE or len(left.invars) != 1:
        return False
    if name in SUMS:
        return {*named_axes(left)} == {*named_axes(right)}
    return left.params == right.params


def _check_plain(view: View, eqns: Sequence[JaxprEqn]) -> None:
    for eqn in eqns:
        grouped = eqn.params.get("axis_index_groups") is not None
        if grouped or not eqn.params.get("tiled", True) or len(eqn.invars) != 1:
            raise refuse(
                MOVE,
                [f"{view.text(eqn.outvars[0])} is not tiled, has axis_index_groups, or is of many"],
                "Collectives that are merged are of one array, over whole axes of the mesh.",
                "Use tiled=True, and an axis of the mesh for the groups.",
            )


def _check_unread(view: View, values: Sequence[tuple[Var, set[int]]]) -> None:
    """Nobody else reads values that are no longer made."""
    for var, known in values:
        who = [
            f"{view.eqns[i].primitive.name} at {_jax.source_summary(view.eqns[i])}"
            for i in view.readers[var]
            if i not in known
        ] + ["the program's results"] * (var in view.returned)
        if who:
            raise refuse(
                MOVE,
                [f"{view.text(var)} is read by {w} too" for w in who],
                "A merge makes the later value alone: if the earlier one were kept for others, it "
                "would be sent twice.",
                "Have them read the later value, or leave the two as they are.",
            )


def _check_only_parts(view: View, reduced: Var, parts: Sequence[Tile]) -> None:
    """All who read a sum keep one and the same part of it, perhaps padded first."""
    known = {view.maker[t.tile] for t in parts}
    pads = {i for i in view.readers[reduced] if view.eqns[i].primitive.name == "pad"}
    known |= {i for i in pads if {*view.readers[view.eqns[i].outvars[0]]} <= known}
    _check_unread(view, [(reduced, known)])
    ways = {(t.dim, t.axes) for t in parts}
    if len(ways) > 1:
        raise refuse(
            MOVE,
            [f"dim {d} of {view.text(reduced)} over {', '.join(a)}" for d, a in sorted(ways)],
            "A reduce_scatter makes one part.",
            "Keep all of the sum, or cut it in one way.",
        )
