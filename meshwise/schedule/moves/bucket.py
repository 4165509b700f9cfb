"""bucket: many tensors in one collective, laid end to end (CoCoNeT's scattered tensors, 5.4).

A launch is paid once for all of them. Each device's part of a bucket is its part of every tensor,
so tiles stay the tiles they were. `max_bytes` bounds what a bucket holds beside the tensors.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn, Literal, Var, named_axes
from meshwise.ir.mesh import Axes
from meshwise.ir.per_device import Reason, reason_scope
from meshwise.ir.program import bytes_of, type_of
from meshwise.schedule.moves.refusal import equation_of, refuse, replaced
from meshwise.schedule.rewrite import Piece, trace_piece
from meshwise.schedule.view import GATHERS, SUMS, View

MOVE = "bucket"

Together = Callable[[Sequence[jax.Array], Sequence[JaxprEqn], Axes], list[jax.Array]]


@dataclass(frozen=True)
class Bucketed:
    """The program after a move, and the collectives' results, in the order they were given."""

    view: View
    values: tuple[Var, ...]


def bucket(view: View, values: Sequence[Var], max_bytes: int | None = None) -> Bucketed:
    """Collectives of one kind, over the same axes, as few as `max_bytes` of operands each allow.

    Tensors of several dtypes go in buckets of their own. Raises `IllegalMove`.
    """
    indices = [equation_of(view, v, MOVE, _TOGETHER.__contains__, _KINDS) for v in values]
    _check_alike(view, indices)
    _check_apart(view, indices)
    pieces: list[Piece] = []
    renamed: dict[Var, Any] = {}
    reasons = []
    for members in _buckets(view, indices, max_bytes):
        if len(members) == 1:
            continue
        number = len(view.program.reasons) + len(reasons)
        piece = _one_collective(view, members, reason_scope(number))
        lines = dict.fromkeys(_jax.source_summary(view.eqns[i]) for i in members)
        name = view.eqns[members[0]].primitive.name
        reasons.append(Reason(f"bucket of {len(members)} {name}", next(iter(lines))))
        pieces.append(piece)
        made = [v for i in members for v in view.eqns[i].outvars]
        renamed.update(zip(made, piece.results, strict=True))
    if not pieces:
        dtypes = dict.fromkeys(str(type_of(view.eqns[i].invars[0]).dtype) for i in indices)
        bound = "" if max_bytes is None else f", of which no two fit in {max_bytes:,} bytes"
        raise refuse(
            MOVE,
            [f"{len(indices)} of {', '.join(dtypes)}{bound}"],
            "A bucket joins two collectives or more, of one dtype.",
            "Raise max_bytes, or name more collectives.",
        )
    gone = [view.maker[v] for v in renamed]
    jaxpr = replaced(view, MOVE, gone, pieces, renamed)
    return Bucketed(view.with_jaxpr(jaxpr, reasons), tuple([renamed.get(v, v) for v in values]))


def _check_alike(view: View, indices: Sequence[int]) -> None:
    found = defaultdict(list)
    for i in indices:
        eqn = view.eqns[i]
        plain = eqn.params.get("axis_index_groups") is None and eqn.params.get("tiled", True)
        kind = eqn.primitive.name.removesuffix("_invariant"), named_axes(eqn), plain
        found[kind].append(i)
    if len(found) > 1 or not all(plain for *_, plain in found):
        raise refuse(
            MOVE,
            [
                f"{len(members)} {name} over {view.mesh.show(axes)}"
                + ("" if plain else ", untiled or in axis_index_groups")
                + f", first {view.text(view.eqns[members[0]].outvars[0])}"
                for (name, axes, plain), members in found.items()
            ],
            "A bucket is one collective: all are of one kind, over the same axes (groups).",
            "Make a bucket of each kind.",
        )


def _check_apart(view: View, indices: Sequence[int]) -> None:
    """None is needed to compute another one's operand."""
    members = {v for i in indices for v in view.eqns[i].outvars}
    origin: dict[Var, Var] = {v: v for v in members}
    for index, eqn in enumerate(view.eqns):
        needed = [a for a in eqn.invars if not isinstance(a, Literal) and a in origin]
        if not needed:
            continue
        if index in indices:
            raise refuse(
                MOVE,
                [f"{view.text(eqn.outvars[0])} is computed from {view.text(origin[needed[0]])}"],
                "What travels together is there at the same time: none may wait for another.",
                "Leave one of the two out.",
            )
        for var in eqn.outvars:
            origin.setdefault(var, origin[needed[0]])


def _buckets(view: View, indices: Sequence[int], max_bytes: int | None) -> list[list[int]]:
    """Equations in order, as many to a bucket as there is room for."""
    found: list[list[int]] = []
    for dtype in dict.fromkeys(type_of(view.eqns[i].invars[0]).dtype for i in indices):
        room = 0.0
        for i in sorted(set(indices)):
            if type_of(view.eqns[i].invars[0]).dtype != dtype:
                continue
            size = bytes_of(*view.eqns[i].invars)
            if not found or room < size or not _same_dtype(view, found[-1][0], dtype):
                found.append([])
                room = math.inf if max_bytes is None else float(max_bytes)
            found[-1].append(i)
            room -= size
    return found


def _same_dtype(view: View, index: int, dtype: Any) -> bool:
    return type_of(view.eqns[index].invars[0]).dtype == dtype


def _one_collective(view: View, members: Sequence[int], scope: str) -> Piece:
    eqns = [view.eqns[i] for i in members]
    together, axes = _TOGETHER[eqns[0].primitive.name], named_axes(eqns[0])

    def joined(*arrays: jax.Array) -> list[jax.Array]:
        with _jax.at_source(eqns[0]), jax.named_scope(scope):
            return together(arrays, eqns, axes)

    operands = [a for eqn in eqns for a in eqn.invars]
    return trace_piece(joined, operands, view.mesh, max(members))


def _end_to_end(arrays: Sequence[jax.Array]) -> tuple[jax.Array, list[int]]:
    """Rows of arrays [n, ...] laid end to end, [n, total], and where each begins and ends."""
    rows = [x.reshape(x.shape[0], -1) for x in arrays]
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + row.shape[1])
    return jnp.concatenate(rows, axis=1), ends


def _cut_up(rows: jax.Array, ends: Sequence[int]) -> list[jax.Array]:
    return [lax.slice_in_dim(rows, a, b, axis=1) for a, b in pairwise(ends)]


def _sums(arrays: Sequence[jax.Array], eqns: Sequence[JaxprEqn], axes: Axes) -> list[jax.Array]:
    del eqns
    flat, ends = _end_to_end([x.reshape(1, -1) for x in arrays])
    flat = lax.psum(flat, axes)
    return [part.reshape(x.shape) for part, x in zip(_cut_up(flat, ends), arrays, strict=True)]


def _scatters(arrays: Sequence[jax.Array], eqns: Sequence[JaxprEqn], axes: Axes) -> list[jax.Array]:
    """Each tensor's parts to the front, so that a device's part of the bucket is one row."""
    rows, shapes = [], []
    for x, eqn in zip(arrays, eqns, strict=True):
        dim, count = eqn.params["scatter_dimension"], eqn.params["axis_size"]
        part = x.shape[dim] // count
        split = x.reshape(*x.shape[:dim], count, part, *x.shape[dim + 1 :])
        rows.append(jnp.moveaxis(split, dim, 0))
        shapes.append((*x.shape[:dim], part, *x.shape[dim + 1 :]))
    flat, ends = _end_to_end(rows)
    flat = lax.psum_scatter(flat, axes, scatter_dimension=0, tiled=True)
    return [part.reshape(s) for part, s in zip(_cut_up(flat, ends), shapes, strict=True)]


def _gathers(arrays: Sequence[jax.Array], eqns: Sequence[JaxprEqn], axes: Axes) -> list[jax.Array]:
    flat, ends = _end_to_end([x.reshape(1, -1) for x in arrays])
    flat = lax.all_gather(flat, axes, axis=0, tiled=True)
    wholes = []
    for part, x, eqn in zip(_cut_up(flat, ends), arrays, eqns, strict=True):
        dim, count = eqn.params["all_gather_dimension"], eqn.params["axis_size"]
        stacked = jnp.moveaxis(part.reshape(count, *x.shape), 0, dim)
        wholes.append(stacked.reshape(*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :]))
    return wholes


_TOGETHER: dict[str, Together] = {
    **dict.fromkeys(SUMS, _sums),
    **dict.fromkeys(GATHERS, _gathers),
    "reduce_scatter": _scatters,
}
_KINDS = "all_reduces, reduce_scatters and all_gathers"
