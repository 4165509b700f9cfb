"""Collectives of one kind that wait for the same as one, which XLA on CPU sees to in part alone.

On GPU and TPU it has passes that combine them; on CPU it joins all_reduces, each with a buffer of
its own, which held more. There every collective takes the time in which the
threads of all devices come to meet: for eight devices on two cores as long as to send some hundred
kilobytes. So short arrays are laid end to end, and travel at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax._src import dtypes as _dtypes

from meshwise._jax.effects import has_effects
from meshwise._jax.groups import group_size
from meshwise._jax.jaxprs import (
    JaxprEqn,
    Literal,
    are_same,
    extended,
    in_place_of,
    new_eqn,
    opened,
    rewritten,
    shape_of,
    var_like,
    with_bodies,
)
from meshwise._jax.tracing import without_mesh

# An array that is copied twice before another collective has begun.
SHORT_BYTES = 2**16


@dataclass(frozen=True)
class _Rows:
    """An operand of a collective as rows [n, a], the result as rows [m, b] of these, and back.

    `params` are those of the collective of the leading dim of such rows.
    """

    operand: Callable[[Any], Any]
    result: Callable[[Any], Any]
    sent: tuple[int, int]
    received: tuple[int, int]
    params: Mapping[str, Any]


@without_mesh()  # types of what is traced here would speak of a mesh in context
def combine_collectives(jaxpr: Any, sizes: Mapping[str, int], most_bytes: int) -> Any:
    """The same per-device jaxpr, over axes of some sizes, with fewer collectives.

    Those that are made one have no more than so many bytes together. Itself where none are.
    """
    body = opened(jaxpr)
    eqns = [
        with_bodies(e, lambda inner: combine_collectives(inner, sizes, most_bytes))
        for e in body.eqns
    ]
    if not any(map(has_effects, eqns)):  # what is done beside making values keeps its order
        groups = _groups(eqns, most_bytes)
        eqns = list(_in_order(eqns, groups, sizes)) if groups else eqns
    return jaxpr if are_same(eqns, body.eqns) else rewritten(jaxpr, eqns=eqns)


def _groups(eqns: Sequence[JaxprEqn], most_bytes: int) -> list[list[int]]:
    """Places of collectives that may be one: of a kind, and behind as many others.

    None of them waits for another, nor do groups wait for each other in a ring.
    """
    behind: dict[Any, int] = {}
    alike: dict[Any, list[int]] = defaultdict(list)
    for place, eqn in enumerate(eqns):
        read = (behind.get(a, 0) for a in eqn.invars if not isinstance(a, Literal))
        steps, kind = max(read, default=0), _kind(eqn)
        if kind is not None:
            steps += 1
            alike[steps, *kind].append(place)
        behind.update(dict.fromkeys(eqn.outvars, steps))
    found: list[list[int]] = []
    for places in alike.values():
        room = 0
        for place in places:
            room -= _bytes(eqns[place])
            if room < 0:
                found.append([])
                room = most_bytes - _bytes(eqns[place])
            found[-1].append(place)
    return [group for group in found if len(group) > 1]


def _kind(eqn: JaxprEqn) -> tuple[Any, ...] | None:
    """What collectives have in common that can be one; None for any that cannot."""
    if eqn.primitive.name not in _ROWS or len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return None
    (x,), params = eqn.invars, eqn.params
    aval: Any = x.aval
    if isinstance(x, Literal) or jnp.issubdtype(aval.dtype, extended) or 0 in aval.shape:
        return None
    if _dtypes.itemsize_bits(aval.dtype) < 8 or _bytes(eqn) > SHORT_BYTES:  # packed, or long
        return None
    if not params.get("tiled", True) and eqn.primitive is lax.all_to_all_p:
        return None
    axes, groups = params.get("axes", params.get("axis_name")), params.get("axis_index_groups")
    axes = axes if isinstance(axes, tuple) else (axes,)
    if any(isinstance(axis, int) for axis in axes):  # a dim, as of what `vmap` gave a name
        return None
    name = eqn.primitive.name
    dtype = _bits(aval.dtype) if name in _MOVES else aval.dtype
    return name, axes, params.get("perm"), str(groups), dtype


def _bits(dtype: Any) -> Any:
    """What is sent in place of numbers of a type, where other types travel with them."""
    is_real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if is_real else dtype


def _bytes(eqn: JaxprEqn) -> int:
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    return max(prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def _in_order(
    eqns: Sequence[JaxprEqn], groups: Sequence[Sequence[int]], sizes: Mapping[str, int]
) -> Iterator[JaxprEqn]:
    """Each equation after what it reads, else as they were, and each group as one."""
    group_of = {place: group for group in groups for place in group}
    makers = {var: place for place, eqn in enumerate(eqns) for var in eqn.outvars}
    done: set[int] = set()
    for last in range(len(eqns)):
        waiting = [last]
        while waiting:
            place = waiting[-1]
            if place in done:
                waiting.pop()
                continue
            own = [eqns[m] for m in group_of.get(place, (place,))]
            read = [a for eqn in own for a in eqn.invars if not isinstance(a, Literal)]
            missing = [makers[a] for a in read if a in makers and makers[a] not in done]
            waiting += reversed(missing)
            if not missing:
                done.update(group_of.get(place, (place,)))
                yield from _as_one(own, sizes) if len(own) > 1 else own


def _as_one(eqns: Sequence[JaxprEqn], sizes: Mapping[str, int]) -> list[JaxprEqn]:
    """One collective of all operands' rows, laid end to end, and the results cut out of it."""
    first = eqns[0]
    operands: list[Any] = [e.invars[0] for e in eqns]
    results = [e.outvars[0] for e in eqns]
    rows = [_ROWS[eqn.primitive.name](eqn, sizes) for eqn in eqns]
    ends = [0, *accumulate(row.received[1] for row in rows)]
    types = [x.aval.dtype for x in operands]
    sent_as = types[0] if len(set(types)) == 1 else _bits(types[0])

    def laid(*arrays: Any) -> Any:
        given = zip(rows, arrays, strict=True)
        return lax.concatenate([row.operand(_as_type(x, sent_as)) for row, x in given], 1)

    def cut(received: Any) -> list[Any]:
        parts = [lax.slice_in_dim(received, a, b, axis=1) for a, b in pairwise(ends)]
        found = [row.result(part) for row, part in zip(rows, parts, strict=True)]
        return [_as_type(x, dtype) for x, dtype in zip(found, types, strict=True)]

    width = sum(row.sent[1] for row in rows)
    sent = var_like(operands[0], (rows[0].sent[0], width), sent_as)
    received = var_like(results[0], (rows[0].received[0], ends[-1]), sent_as)
    params = {**first.params, **rows[0].params}
    return [
        *_traced(laid, operands, [sent], first),
        new_eqn(first.primitive, [sent], [received], params, first).replace(effects=first.effects),
        *_traced(cut, [received], results, first),
    ]


def _as_type(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _traced(
    function: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any], like: JaxprEqn
) -> list[JaxprEqn]:
    closed = jax.make_jaxpr(function)(
        *[jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in operands]
    )
    return in_place_of(like.replace(outvars=list(results)), closed, operands)


def _flat(eqn: JaxprEqn, sizes: Mapping[str, int]) -> _Rows:
    """What is done to every element alone: a row."""
    shape = shape_of(eqn.invars[0])
    row = 1, prod(shape)
    return _Rows(lambda x: x.reshape(row), lambda x: x.reshape(shape), row, row, {})


def _gathered(eqn: JaxprEqn, sizes: Mapping[str, int]) -> _Rows:
    """A row, and of the result one of each device."""
    shape, whole = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    group, dim = eqn.params["axis_size"], eqn.params["all_gather_dimension"]
    sent, received = (1, prod(shape)), (group, prod(shape))
    return _Rows(
        lambda x: x.reshape(sent),
        lambda x: jnp.moveaxis(x.reshape(group, *shape), 0, dim).reshape(whole),
        sent,
        received,
        {"all_gather_dimension": 0, "tiled": True},
    )


def _scattered(eqn: JaxprEqn, sizes: Mapping[str, int]) -> _Rows:
    """A row for each device, and of the result one."""
    part = shape_of(eqn.outvars[0])
    group, dim = eqn.params["axis_size"], eqn.params["scatter_dimension"]
    sent, received = (group, prod(part)), (1, prod(part))
    return _Rows(
        lambda x: _led(x, dim, group).reshape(sent),
        lambda x: x.reshape(part),
        sent,
        received,
        {"scatter_dimension": 0, "tiled": True},
    )


def _exchanged(eqn: JaxprEqn, sizes: Mapping[str, int]) -> _Rows:
    """A row for each device, and one of each."""
    shape, result = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    split, along = eqn.params["split_axis"], eqn.params["concat_axis"]
    group = group_size(eqn, sizes)
    piece = (*shape[:split], shape[split] // group, *shape[split + 1 :])
    rows = group, prod(piece)
    return _Rows(
        lambda x: _led(x, split, group).reshape(rows),
        lambda x: jnp.moveaxis(x.reshape(group, *piece), 0, along).reshape(result),
        rows,
        rows,
        {"split_axis": 0, "concat_axis": 0},
    )


def _led(x: Any, dim: int, pieces: int) -> Any:
    """An array with the pieces of a dim along a leading one."""
    cut = x.reshape(*x.shape[:dim], pieces, x.shape[dim] // pieces, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0)


_ROWS: Mapping[str, Callable[[JaxprEqn, Mapping[str, int]], _Rows]] = {
    **dict.fromkeys(("psum", "pmax", "pmin", "ppermute"), _flat),
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
}
# Those that only move: so do they the bits of numbers of another type.
_MOVES = ("all_gather", "all_to_all", "ppermute")
