"""A value of every pretended device at once, and the collectives between them.

A `Stacked` value is one array with the devices' local values along a leading dim. Devices are
told apart only by the mesh axes over which the value may differ: a value that no axis
distinguishes has no leading dim and exists once. So replicated work is done once; on real devices
too every copy of it is the same instruction on the same bits.

Shapes below: `[devices, *local]`, where `devices` is the product of the sizes of `Stacked.axes`,
the first axis varying slowest.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwise import _jax
from meshwise.errors import MeshwiseError
from meshwise.ir.mesh import Axes, Mesh


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Local values of all devices: `[devices, *local]`, or `[*local]` where `axes` is empty."""

    array: Any
    # The axes over which devices may differ, in the mesh's order.
    axes: Axes = field(default=(), metadata={"static": True})

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on one device."""
        return tuple(self.array.shape[1:] if self.axes else self.array.shape)


def join_axes(values: Sequence[Stacked], mesh: Mesh, more: Collection[str] = ()) -> Axes:
    """Every axis over which one of the values may differ, in the mesh's order."""
    used = set(more).union(*(v.axes for v in values))
    return tuple(axis for axis in mesh.names if axis in used)


def expand(value: Stacked, axes: Axes, mesh: Mesh) -> Stacked:
    """The same values, told apart by more axes: each value is repeated along the new ones."""
    if value.axes == axes:
        return value
    local = value.local_shape
    sizes = mesh.axis_size
    kept = [sizes[a] if a in value.axes else 1 for a in axes]
    grid = jnp.reshape(value.array, (*kept, *local))
    grid = jnp.broadcast_to(grid, (*(sizes[a] for a in axes), *local))
    return Stacked(jnp.reshape(grid, (mesh.size(axes), *local)), axes)


def is_collective(eqn: _jax.JaxprEqn, mesh: Mesh) -> bool:
    """Whether an equation itself names axes of the mesh (its bodies not looked into)."""
    return eqn.primitive.name in COLLECTIVES or any(a in mesh.axis_size for a in _axes(eqn.params))


def sends_over(eqn: _jax.JaxprEqn, mesh: Mesh) -> Axes:
    """The axes along which devices must run an equation together (bodies not looked into).

    For a permute all devices meet, on CPU at least, whatever axes it is over.
    """
    if COLLECTIVES.get(eqn.primitive.name) is _ppermute:
        return mesh.names
    if not is_collective(eqn, mesh) or COLLECTIVES.get(eqn.primitive.name) in (
        _axis_index,
        _as_it_is,
    ):
        return ()
    return _axes(eqn.params)


def apply_collective(eqn: _jax.JaxprEqn, values: Sequence[Stacked], mesh: Mesh) -> list[Stacked]:
    """The results of one collective equation."""
    name, params = eqn.primitive.name, eqn.params
    collective = COLLECTIVES.get(name)
    if collective is None:
        raise MeshwiseError(f"the simulator does not know the collective {name}")
    if params.get("axis_index_groups") is not None:
        raise MeshwiseError(f"the simulator takes no axis_index_groups, as {name} has")
    unknown = [a for a in _axes(params) if a not in mesh.axis_size]
    if unknown:
        raise MeshwiseError(f"{name} is over {unknown}, the mesh has {list(mesh.names)}")
    group = _axes(params)
    if not values:
        return [collective(Stacked(jnp.zeros(())), group, params, mesh)]
    return [_on_data(v, partial(collective, group=group, params=params, mesh=mesh)) for v in values]


def _axes(params: Mapping[str, Any]) -> Axes:
    named = params.get("axes", params.get("axis_name", ()))
    return tuple(named) if isinstance(named, tuple | list) else (named,)


def _on_data(value: Stacked, function: Callable[[Stacked], Stacked]) -> Stacked:
    """Apply a function to key arrays by their raw data, which has one more dim at the end."""
    if not jnp.issubdtype(value.array.dtype, _jax.extended):
        return function(value)
    kind = jax.random.key_impl(value.array)
    out = function(Stacked(jax.random.key_data(value.array), value.axes))
    return Stacked(jax.random.wrap_key_data(out.array, impl=kind), out.axes)


# Below, `grouped` arrays are `[group, others, *local]`: the axes of the collective in its own
# order, then the remaining axes of the value in the mesh's order.


def _grouped(value: Stacked, group: Axes, mesh: Mesh) -> tuple[jax.Array, Axes]:
    """`[group, others, *local]`, and the other axes."""
    value = expand(value, join_axes([value], mesh, group), mesh)
    others = tuple(a for a in value.axes if a not in group)
    grid = jnp.reshape(value.array, (*(mesh.axis_size[a] for a in value.axes), *value.local_shape))
    order = [value.axes.index(a) for a in (*group, *others)]
    grid = jnp.transpose(grid, (*order, *range(len(order), grid.ndim)))
    return jnp.reshape(grid, (mesh.size(group), mesh.size(others), *value.local_shape)), others


def _same_in_group(array: jax.Array, others: Axes) -> Stacked:
    """From `[others, *local]`: one value for all devices of a group."""
    return Stacked(array if others else array[0], others)


def _own_in_group(array: jax.Array, group: Axes, others: Axes, mesh: Mesh) -> Stacked:
    """From `[group, others, *local]`: a value of its own for each device."""
    local = array.shape[2:]
    axes = tuple(a for a in mesh.names if a in group or a in others)
    grid = jnp.reshape(array, (*(mesh.axis_size[a] for a in (*group, *others)), *local))
    order = [(*group, *others).index(a) for a in axes]
    grid = jnp.transpose(grid, (*order, *range(len(order), grid.ndim)))
    return Stacked(jnp.reshape(grid, (mesh.size(axes), *local)), axes)


def _reducer(reduce: Callable[..., jax.Array]) -> Callable[..., Stacked]:
    def collective(x: Stacked, group: Axes, params: Mapping[str, Any], mesh: Mesh) -> Stacked:
        """`[*local]` to `[*local]`."""
        del params
        array, others = _grouped(x, group, mesh)
        return _same_in_group(reduce(array, axis=0), others)

    return collective


def _sum(array: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(array, axis=axis, dtype=array.dtype)


def _all_gather(x: Stacked, group: Axes, params: Mapping[str, Any], mesh: Mesh) -> Stacked:
    """`[.., s, ..]` to `[.., group * s, ..]` if tiled, else to `[.., group, s, ..]`."""
    array, others = _grouped(x, group, mesh)
    dim = params["all_gather_dimension"]
    array = jnp.moveaxis(array, 0, dim + 1)  # [others, ..., group, s, ...]
    if params["tiled"]:
        array = _merge(array, dim + 1)
    return _same_in_group(array, others)


def _reduce_scatter(x: Stacked, group: Axes, params: Mapping[str, Any], mesh: Mesh) -> Stacked:
    """`[.., group * s, ..]` to `[.., s, ..]` if tiled, else `[.., group, ..]` to `[..]`."""
    array, others = _grouped(x, group, mesh)
    array = _sum(array, 0)  # [others, *local]
    dim = params["scatter_dimension"]
    if params["tiled"]:
        array = _split(array, dim + 1, mesh.size(group))
    return _own_in_group(jnp.moveaxis(array, dim + 1, 0), group, others, mesh)


def _all_to_all(x: Stacked, group: Axes, params: Mapping[str, Any], mesh: Mesh) -> Stacked:
    """`[.., group * s, .., c, ..]` to `[.., s, .., group * c, ..]`.

    `lax.all_to_all` writes its untiled form with the tiled primitive and reshapes.
    """
    array, others = _grouped(x, group, mesh)
    split, concat = params["split_axis"], params["concat_axis"]
    array = _split(array, split + 2, mesh.size(group))  # [from, others, ..., to, s, ...]
    array = jnp.moveaxis(array, (split + 2, 0), (0, 1))  # [to, from, others, ..., s, ...]
    array = jnp.moveaxis(array, 1, concat + 2)  # [to, others, ..., from, c, ...]
    return _own_in_group(_merge(array, concat + 2), group, others, mesh)


def _ppermute(x: Stacked, group: Axes, params: Mapping[str, Any], mesh: Mesh) -> Stacked:
    """`[*local]` to `[*local]`; zeros where nobody sends.

    JAX 0.10 numbers the devices of this one collective in the mesh's order of the axes, in whatever
    order they are given (`_pcollectives_lowering_common` sorts the group); 0.11 takes no other.
    """
    group = tuple(a for a in mesh.names if a in group)
    array, others = _grouped(x, group, mesh)
    source = dict((to, origin) for origin, to in params["perm"])
    index = jnp.array([source.get(i, 0) for i in range(mesh.size(group))])
    receives = jnp.array([i in source for i in range(mesh.size(group))])
    receives = jnp.reshape(receives, (-1,) + (1,) * (array.ndim - 1))
    moved = jnp.where(receives, array[index], jnp.zeros((), array.dtype))
    return _own_in_group(moved, group, others, mesh)


def _axis_index(x: Stacked, group: Axes, params: Mapping[str, Any], mesh: Mesh) -> Stacked:
    """No operand, to an index `[]`."""
    del x, params
    index = jnp.arange(mesh.size(group), dtype=jnp.int32)
    return _own_in_group(index[:, None], group, (), mesh)


def _as_it_is(x: Stacked, group: Axes, params: Mapping[str, Any], mesh: Mesh) -> Stacked:
    """A change of type that moves nothing: `[*local]` to `[*local]`."""
    del group, params, mesh
    return x


def _split(array: jax.Array, dim: int, parts: int) -> jax.Array:
    """`[.., parts * s, ..]` to `[.., parts, s, ..]`."""
    shape = array.shape
    return jnp.reshape(array, (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]))


def _merge(array: jax.Array, dim: int) -> jax.Array:
    """`[.., n, s, ..]` to `[.., n * s, ..]`."""
    shape = array.shape
    return jnp.reshape(array, (*shape[:dim], math.prod(shape[dim : dim + 2]), *shape[dim + 2 :]))


# The second name is what JAX traces where it checks which values vary (check_vma=True).
COLLECTIVES: Mapping[str, Callable[..., Stacked]] = {
    "psum": _reducer(_sum),
    "psum_invariant": _reducer(_sum),
    "pmax": _reducer(jnp.max),
    "pmin": _reducer(jnp.min),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "axis_index": _axis_index,
    "pvary": _as_it_is,
}
