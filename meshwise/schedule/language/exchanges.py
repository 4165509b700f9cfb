"""Each verb on local arrays, inside a `shard_map` whose axes are all manual."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.sharding import Reduction
from meshwise.reshard.emit import all_reduce
from meshwise.schedule.layouts import Layout
from meshwise.schedule.moves.split import broadcast_from, reduce_scatter, reduce_to
from meshwise.schedule.tiling import pad_dim


@dataclass(frozen=True)
class Exchange:
    """One verb: its parameters, its axes of more than one device, layouts before and after.

    `shape` is the value's in the program.
    """

    params: Mapping[str, Any]
    axes: Axes
    before: Layout
    after: Layout
    shape: tuple[int, ...]
    mesh: Mesh

    @property
    def count(self) -> int:
        """How many devices it goes over."""
        return self.mesh.size(self.axes)

    def local_size(self, layout: Layout, dim: int) -> int:
        """The size of a dim on each device."""
        return -(-self.shape[dim] // self.mesh.size(layout.dims[dim]))


def run_verb(name: str, exchange: Exchange, x: Any) -> jax.Array:
    """The local array after a verb; over one device alone a value stays as it is."""
    x = jnp.asarray(x)
    if name == "mw_send":
        return _send(x, exchange)
    return _EXCHANGES[name](x, exchange) if exchange.axes else x


def _all_reduce(x: jax.Array, exchange: Exchange) -> jax.Array:
    return all_reduce(x, exchange.axes, exchange.params["op"])


def _reduce_scatter(x: jax.Array, exchange: Exchange) -> jax.Array:
    """A sum by JAX's collective, another operator by an exchange of parts."""
    op, dim = exchange.params["op"], exchange.params["dim"] % x.ndim
    if op is Reduction.SUM:
        return reduce_scatter(x, dim, exchange.axes, exchange.mesh)
    part = -(-x.shape[dim] // exchange.count)
    x = pad_dim(x, dim, part * exchange.count)
    x = x.reshape((*x.shape[:dim], exchange.count, part, *x.shape[dim + 1 :]))
    x = lax.all_to_all(jnp.moveaxis(x, dim, 0), exchange.axes, 0, 0, tiled=True)
    return _JOINED[op](x)


def _all_gather(x: jax.Array, exchange: Exchange) -> jax.Array:
    for dim, axes in enumerate(exchange.before.dims):
        joined = tuple([a for a in axes if a in exchange.axes])
        if joined:
            x = lax.all_gather(x, joined, axis=dim, tiled=True)
            x = _cut_end(x, dim, exchange.local_size(exchange.after, dim))
    return x


def _all_to_all(x: jax.Array, exchange: Exchange) -> jax.Array:
    before, after = exchange.before.dims, exchange.after.dims
    source = next(d for d, axes in enumerate(before) if {*axes} & {*exchange.axes})
    dim = exchange.params["dim"] % x.ndim
    axes = tuple([a for a in before[source] if a in exchange.axes])
    assert after[dim][-len(axes) :] == axes, exchange
    x = pad_dim(x, dim, exchange.local_size(exchange.after, dim) * exchange.count)
    x = lax.all_to_all(x, axes, split_axis=dim, concat_axis=source, tiled=True)
    return _cut_end(x, source, exchange.local_size(exchange.after, source))


def _broadcast(x: jax.Array, exchange: Exchange) -> jax.Array:
    for axis, root in _roots(exchange):
        x = broadcast_from(x, axis, exchange.mesh.axis_size[axis], root)
    return x


def _reduce(x: jax.Array, exchange: Exchange) -> jax.Array:
    op = exchange.params["op"]
    for axis, root in _roots(exchange):
        size = exchange.mesh.axis_size[axis]
        is_sum = op is Reduction.SUM and jnp.issubdtype(x.dtype, jnp.number)
        x = reduce_to(x, axis, size, root) if is_sum else _join_to(x, axis, size, root, op)
    return x


def _join_to(x: jax.Array, axis: str, count: int, root: int, op: Reduction) -> jax.Array:
    """As `reduce_to`, for an operator to which the zeros of who gets nothing are something."""
    rank = (lax.axis_index(axis) - root) % count
    distance = 1
    while distance < count:
        senders = range(distance, count, 2 * distance)
        pairs = [((i + root) % count, (i - distance + root) % count) for i in senders]
        joined = _JOINED[op](jnp.stack([x, lax.ppermute(x, axis, pairs)]))
        gets = (rank % (2 * distance) == 0) & (rank + distance < count)
        x = jnp.where(gets, joined, x)
        distance *= 2
    return x


def _roots(exchange: Exchange) -> list[tuple[str, int]]:
    """The root's place along each axis."""
    sizes = [exchange.mesh.axis_size[a] for a in exchange.axes]
    places = np.unravel_index(exchange.params["root"], sizes)
    return [(a, int(p)) for a, p in zip(exchange.axes, places, strict=True)]


def _send(x: jax.Array, exchange: Exchange) -> jax.Array:
    shift = exchange.params["shift"]
    if not shift:
        return x
    if abs(shift) >= exchange.count:
        return jnp.zeros_like(x)
    (axis,) = exchange.axes
    count = exchange.count
    pairs = [(i, i + shift) for i in range(count) if 0 <= i + shift < count]
    return lax.ppermute(x, axis, pairs)


def _cut_end(x: jax.Array, dim: int, size: int) -> jax.Array:
    return x if x.shape[dim] == size else lax.slice_in_dim(x, 0, size, axis=dim)


_EXCHANGES: Mapping[str, Callable[[jax.Array, Exchange], jax.Array]] = {
    "mw_all_reduce": _all_reduce,
    "mw_reduce_scatter": _reduce_scatter,
    "mw_all_gather": _all_gather,
    "mw_all_to_all": _all_to_all,
    "mw_broadcast": _broadcast,
    "mw_reduce": _reduce,
}

_JOINED: Mapping[Reduction, Callable[[jax.Array], jax.Array]] = {
    Reduction.SUM: lambda x: jnp.sum(x, 0, dtype=x.dtype),
    Reduction.MAX: lambda x: lax.reduce_max(x, (0,)),
    Reduction.MIN: lambda x: lax.reduce_min(x, (0,)),
    Reduction.PROD: lambda x: lax.reduce_prod(x, (0,)),
    Reduction.AND: lambda x: lax.reduce_and(x, (0,)),
    Reduction.OR: lambda x: lax.reduce_or(x, (0,)),
}
