"""A per-device program as XLA on TPU compiles its collectives for what they are.

XLA on TPU gathers and scatters whole tiles, of 8 rows and 128 columns. Where shards are none, it
makes an all_gather of one dim an all_reduce of arrays that are zero but for the own shard, and a
reduce_scatter an all_reduce of which each device cuts its part, however large they are: either
sends twice the bytes. So what is gathered along the only dim that it has is a row of an array of
rows here; what is scattered is brought into whole tiles, or where there is too little for that,
exchanged and added up by whom it is for. Found by compiling for v5e.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from meshwise._jax.groups import named_axes
from meshwise._jax.jaxprs import JaxprEqn, in_place_of, jaxpr_as_fun, with_bodies, with_each
from meshwise._jax.tracing import without_mesh

_ROWS, _COLUMNS = 8, 128
# Both directions of a ring take half of a shard, each of whole tiles.
_PAIR_OF_TILES = 2 * _ROWS * _COLUMNS
# Padding that is worth more than another way to send.
_LITTLE = 1 / 8


def as_tpu_compiles(jaxpr: Any) -> Any:
    """The same per-device jaxpr; itself where nothing is said otherwise."""
    return with_each(jaxpr, lambda eqn: _said(with_bodies(eqn, as_tpu_compiles)))


def as_tpu_runs(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The same for a function of local arrays, called where the named axes are bound."""

    def in_tiles(*args: Any) -> list[Any]:
        return jaxpr_as_fun(as_tpu_compiles(jax.make_jaxpr(function)(*args)))(*args)

    return in_tiles


def _said(eqn: JaxprEqn) -> list[JaxprEqn]:
    if not eqn.params.get("tiled", False):
        return [eqn]
    if eqn.primitive.name == "all_gather" and _is_row(eqn):
        return _traced(eqn, _gathered_in_rows)
    if eqn.primitive.name != "reduce_scatter":
        return [eqn]
    shard: Any = eqn.outvars[0].aval
    if _is_in_tiles(shard.shape) or not shard.size:
        return [eqn]
    is_little = _padding(shard.size) <= _LITTLE * shard.size
    return _traced(eqn, _scattered_in_tiles if is_little else _exchanged_and_added)


def _traced(eqn: JaxprEqn, way: Callable[[dict[str, Any], Any], Any]) -> list[JaxprEqn]:
    """What a function makes of an equation's parameters and operand, in its place."""
    (x,) = eqn.invars
    aval: Any = x.aval
    traced = jax.make_jaxpr(lambda operand: way(eqn.params, operand), axis_env=_axes(eqn))
    with without_mesh():  # types would speak of a mesh in context
        closed = traced(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return in_place_of(eqn, closed, eqn.invars)


def _axes(eqn: JaxprEqn) -> list[tuple[str, int]]:
    """The named axes with sizes for which the trace asks: only their product is known, and used."""
    first, *rest = named_axes(eqn)
    groups = eqn.params["axis_index_groups"]
    size = eqn.params["axis_size"] * (len(groups) if groups else 1)
    return [(first, size), *((name, 1) for name in rest)]


def _is_row(eqn: JaxprEqn) -> bool:
    """Whether what is gathered has but the one dim, and shards that are no whole rows of tiles."""
    aval: Any = eqn.invars[0].aval
    size = aval.shape[eqn.params["all_gather_dimension"]]
    return size == prod(aval.shape) and size % _COLUMNS != 0


def _gathered_in_rows(params: dict[str, Any], x: Any) -> Any:
    shape = list(x.shape)
    shape[params["all_gather_dimension"]] *= params["axis_size"]
    row = _as_it_is(lax.reshape(x, (1, 1, x.size)))
    rows = lax.all_gather(row, **_group(params), axis=0, tiled=True)
    return lax.reshape(_as_it_is(rows), shape)


def _is_in_tiles(shape: tuple[int, ...]) -> bool:
    """Whether a shard is whole tiles, an even number of them, as it lies or turned."""
    if len(shape) < 2:
        return False
    rows, columns = shape[-2:]
    whole = any(a % _ROWS == 0 == b % _COLUMNS for a, b in ((rows, columns), (columns, rows)))
    return whole and prod(shape) % _PAIR_OF_TILES == 0


def _padding(size: int) -> int:
    """How many elements are missing to an even number of whole tiles."""
    return -size % _PAIR_OF_TILES


def _parts(params: dict[str, Any], x: Any) -> tuple[Any, tuple[int, ...]]:
    """What each device is for, end to end along a new leading dim, and the shape of its shard."""
    dim, count = params["scatter_dimension"], params["axis_size"]
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    size = x.shape[dim] // count
    parts = jnp.moveaxis(lax.reshape(x, (*before, count, size, *after)), dim, 0)
    return parts, (*before, size, *after)


def _scattered_in_tiles(params: dict[str, Any], x: Any) -> Any:
    parts, shape = _parts(params, x)
    size = prod(shape)
    flat = jnp.pad(lax.reshape(parts, (len(parts), size)), ((0, 0), (0, _padding(size))))
    tiles = _as_it_is(lax.reshape(flat, (len(parts), flat.shape[1] // _COLUMNS, _COLUMNS)))
    own = lax.psum_scatter(tiles, **_group(params), scatter_dimension=0, tiled=True)
    return lax.reshape(lax.reshape(_as_it_is(own), (flat.shape[1],))[:size], shape)


def _exchanged_and_added(params: dict[str, Any], x: Any) -> Any:
    parts, _ = _parts(params, x)
    own = lax.all_to_all(parts, **_group(params), split_axis=0, concat_axis=0, tiled=True)
    return jnp.sum(own, 0).astype(x.dtype)


def _group(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in ("axis_name", "axis_index_groups")}


def _as_it_is(x: Any) -> Any:
    """Behind a barrier: XLA would make a reshape before a collective one after it."""
    return lax.optimization_barrier(x)
