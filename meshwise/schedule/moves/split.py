"""split: an all_reduce as a reduce_scatter and an all_gather, or a reduce and a broadcast.

CoCoNeT section 3.2 (ARSplitRSAG, ARSplitReduceBroadcast). A ring sends the same bytes either way;
between the two, every device holds only its part of the sum, and can compute with that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax import lax

from meshwise import _jax
from meshwise._jax import Var, named_axes
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import shape_of
from meshwise.schedule.moves.refusal import equation_of, refuse, replaced
from meshwise.schedule.rewrite import Piece, trace_piece
from meshwise.schedule.tiling import gather, one_dim, pad_dim
from meshwise.schedule.view import SUMS, View

MOVE = "split"


@dataclass(frozen=True)
class Split:
    """The program after a split, and the two halves of each all_reduce by their results."""

    view: View
    firsts: tuple[Var, ...]
    seconds: tuple[Var, ...]


def split(view: View, reduced: Sequence[Var], dim: int | None = None, pad: bool = True) -> Split:
    """All_reduces as reduce_scatter along a dim (by default the first that divides) + all_gather.

    A dim that does not divide is padded with zeros, unless `pad` is False. Raises `IllegalMove`.
    """
    pieces = []
    reasons = []
    reduced = list(dict.fromkeys(reduced))
    for var in reduced:
        index = equation_of(view, var, MOVE, SUMS.__contains__, "all_reduces that sum (psum)")
        eqn = view.eqns[index]
        _check_plain(view, var, eqn)
        cut = _dim_of(view, var, dim, pad)
        scope = reason_scope(len(view.program.reasons) + len(reasons))
        pieces.append(_halves(view, var, index, cut, scope))
        reasons.append(Reason(f"split of all_reduce {view.text(var)}", _jax.source_summary(eqn)))
    return _replaced(view, reduced, pieces, reasons)


def _halves(view: View, var: Var, index: int, dim: int, scope: str) -> Piece:
    eqn, shape = view.eqns[index], shape_of(var)
    axes = named_axes(eqn)
    tile = one_dim(len(shape), dim, axes)

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with _jax.at_source(eqn), jax.named_scope(scope):
            part = reduce_scatter(x, dim, axes, view.mesh)
            return part, gather(part, shape, tile)

    operand = eqn.invars[eqn.outvars.index(var)]
    return trace_piece(halves, [operand], view.mesh, index)


def _dim_of(view: View, var: Var, dim: int | None, pad: bool) -> int:
    axes, shape = named_axes(view.eqns[view.maker[var]]), shape_of(var)
    count = view.mesh.size(axes)
    dim = _dim_to_cut(shape, count) if dim is None else dim
    if not 0 <= dim < len(shape):
        raise refuse(
            MOVE,
            [f"{view.text(var)} {f'has no dim {dim}' if shape else 'is a scalar'}"],
            "A reduce_scatter cuts the sum along a dim.",
            "Name one of its dims; a scalar's all_reduce cannot be split.",
        )
    if not shape[dim]:
        raise refuse(
            MOVE,
            [f"{view.text(var)}: dim {dim} has no elements"],
            "A reduce_scatter cuts the sum along a dim.",
            "Name one that has elements, or leave the all_reduce as it is.",
        )
    if shape[dim] % count and not pad:
        raise refuse(
            MOVE,
            [f"{view.text(var)}: dim {dim} over {view.mesh.show(axes)}, {count} devices"],
            "A reduce_scatter makes parts of equal size.",
            "Choose a dim that divides, or let it be padded with pad=True.",
        )
    return dim


def _replaced(
    view: View, reduced: Sequence[Var], pieces: Sequence[Piece], reasons: Sequence[Reason]
) -> Split:
    """The all_reduces as their two halves; an equation goes when all its results have."""
    renamed = {v: p.results[1] for v, p in zip(reduced, pieces, strict=True)}
    gone = [i for i in {view.maker[v] for v in reduced} if {*view.eqns[i].outvars} <= {*renamed}]
    jaxpr = replaced(view, MOVE, gone, pieces, renamed)
    return Split(
        view.with_jaxpr(jaxpr, reasons),
        tuple([p.results[0] for p in pieces]),
        tuple([p.results[1] for p in pieces]),
    )


def reduce_scatter(x: jax.Array, dim: int, axes: Axes, mesh: Mesh) -> jax.Array:
    """This device's part of the sum of what devices hold, the end padded where uneven."""
    count = mesh.size(axes)
    x = pad_dim(x, dim, -(-x.shape[dim] // count) * count)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def split_to_root(view: View, reduced: Var, root: int = 0) -> Split:
    """An all_reduce as a reduce to one device and a broadcast from it, each a tree of ppermutes.

    JAX has no collective for either. Each takes log2(n) rounds in which the whole array travels,
    so the bytes are more than an all_reduce's; the computation between happens on one device.
    """
    move = "split_to_root"
    index = equation_of(view, reduced, move, SUMS.__contains__, "an all_reduce that sums (psum)")
    eqn = view.eqns[index]
    _check_plain(view, reduced, eqn, move)
    axes = named_axes(eqn)
    operand = eqn.invars[eqn.outvars.index(reduced)]
    if len(axes) != 1 or not 0 <= root < view.mesh.size(axes):
        raise refuse(
            move,
            [f"{view.text(reduced)} over {view.mesh.show(axes)}, root {root}"],
            "A tree is over one axis, and its root one of the axis' devices.",
            f"Name one from 0 to {view.mesh.size(axes) - 1}."
            if len(axes) == 1
            else "Split an all_reduce over several axes in one over each first.",
        )
    (axis,) = axes
    scope = reason_scope(len(view.program.reasons))

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with _jax.at_source(eqn), jax.named_scope(scope):
            total = reduce_to(x, axis, view.mesh.size(axes), root)
            return total, broadcast_from(total, axis, view.mesh.size(axes), root)

    piece = trace_piece(halves, [operand], view.mesh, index)
    reason = Reason(f"split of all_reduce {view.text(reduced)}", _jax.source_summary(eqn))
    return _replaced(view, [reduced], [piece], [reason])


def reduce_to(x: jax.Array, axis: str, count: int, root: int) -> jax.Array:
    """The sum over an axis on its device `root`; partial sums elsewhere (binomial tree)."""
    distance = 1
    while distance < count:
        pairs = [
            ((i + root) % count, (i - distance + root) % count)
            for i in range(distance, count, 2 * distance)
        ]
        x = x + lax.ppermute(x, axis, pairs)
        distance *= 2
    return x


def broadcast_from(x: jax.Array, axis: str, count: int, root: int) -> jax.Array:
    """What device `root` of an axis holds, on all of them (binomial tree, the other way round)."""
    rank = (lax.axis_index(axis) - root) % count
    distance = 1 << (count - 1).bit_length()
    while distance > 1:
        distance //= 2
        pairs = [
            ((i + root) % count, (i + distance + root) % count)
            for i in range(0, count - distance, 2 * distance)
        ]
        came = lax.ppermute(x, axis, pairs)
        x = lax.select(lax.broadcast(rank % (2 * distance) == distance, x.shape), came, x)
    return x


def _check_plain(view: View, reduced: Var, eqn: _jax.JaxprEqn, move: str = MOVE) -> None:
    if eqn.params.get("axis_index_groups") is not None:
        raise refuse(
            move,
            [f"{view.text(reduced)} has axis_index_groups"],
            "Groups within an axis are no axis of the mesh, by which tiles are counted.",
            "Give the mesh an axis for the groups.",
        )


def _dim_to_cut(shape: tuple[int, ...], count: int) -> int:
    """The first dim that divides, else the largest; -1 of a scalar."""
    dividing = [d for d, n in enumerate(shape) if n and n % count == 0]
    return dividing[0] if dividing else max(range(len(shape)), key=lambda d: shape[d], default=-1)
