"""Arrays without elements, with which XLA needs help."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshwise import _jax
from meshwise.ir.mesh import Mesh


def is_made_inside(aval: Any) -> bool:
    """Whether an argument is made where it is read instead of being passed."""
    numeric = jnp.issubdtype(aval.dtype, np.number) or aval.dtype == np.bool_
    return numeric and 0 in aval.shape


def with_made(closed: _jax.ClosedJaxpr, made: Collection[int], mesh: Mesh) -> _jax.ClosedJaxpr:
    """A per-device jaxpr without some of its inputs: zeros in their place."""
    run = _jax.jaxpr_as_fun(closed)

    def function(*args: Any) -> list[Any]:
        given = iter(args)
        types = enumerate(closed.in_avals)
        return run(*[jnp.zeros(t.shape, t.dtype) if i in made else next(given) for i, t in types])

    types = [t for i, t in enumerate(closed.in_avals) if i not in made]
    return _jax.make_jaxpr_over_axes(function, mesh.named_sizes, types)


def cut_empty(array: Any, sharding: NamedSharding) -> Any:
    """A result without elements in shards of its shape: XLA may give each device all of it."""
    local = sharding.shard_shape(array.shape)
    held = [shard.data for shard in array.addressable_shards]  # none where others have all devices
    if all(data.shape == local for data in held):
        return array
    cut = [data[tuple(map(slice, local))] for data in held]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, cut)
