"""One array on its way from one placement to another: what its program is compiled for."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from meshwise import _jax
from meshwise.cost.hardware import Hardware
from meshwise.run.uneven import UnevenArray

Array = jax.Array | UnevenArray

# Arrays of fewer bytes a device travel together with their like: a launch takes longer.
SMALL_BYTES = 1 << 20

# How many programs that move arrays are kept, and how many answers about them.
KEPT_PROGRAMS = 1 << 10
KEPT_ANSWERS = 1 << 14


@dataclass(frozen=True)
class Limits:
    """What plans are priced by, and how many bytes a device may hold of an array on its way.

    Without `hardware` a plan sends as few bytes as can be, and of those that do the fastest on the
    platform of the devices is taken.
    """

    hardware: Hardware | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class Transfer:
    """One array on its way: what it is, and both placements.

    `shape` is logical, `padded` the shape that the devices hold. `data_dtype` and `item` are type
    and dims of the numbers as which an element is moved: of a PRNG key several, else one and `()`.
    Where it `is_of_each`, each of several processes has one for itself, on no device in particular.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: Any
    data_dtype: Any
    item: tuple[int, ...]
    source: jax.sharding.Sharding
    target: NamedSharding
    is_of_each: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.data_dtype.itemsize * prod(self.item)

    @property
    def target_padded(self) -> tuple[int, ...]:
        """The shape that the devices hold under the target."""
        axis_sizes = dict(self.target.mesh.shape)
        dims = _jax.axes_of(self.target.spec, self.rank)
        counts = (prod(axis_sizes[a] for a in axes) for axes in dims)
        return tuple(-(-n // k) * k for n, k in zip(self.shape, counts, strict=True))

    @property
    def rank(self) -> int:
        """How many dims the array has."""
        return len(self.shape)

    @property
    def platform(self) -> str:
        """What kind of devices the array lies on; empty where there are none."""
        if isinstance(self.source, NamedSharding) and isinstance(self.source.mesh, AbstractMesh):
            return ""
        return next(iter(self.source.device_set)).platform

    @property
    def moved_bytes(self) -> int:
        """Bytes of a shard before and after."""
        shards = (
            self.source.shard_shape(self.padded),
            self.target.shard_shape(self.target_padded),
        )
        return sum(prod(shard) * self.itemsize for shard in shards)

    @property
    def stays(self) -> bool:
        """Whether every device holds its new shard already, in the same order of devices."""
        return self.padded == self.target_padded and self.source.is_equivalent_to(
            self.target, self.rank
        )


def transfer_of(array: Array, target: NamedSharding) -> Transfer:
    """What it takes to bring an array to a placement."""
    held = held_by(array)
    transfer = transfer_between(array.shape, held.shape, held.dtype, held.sharding, target)
    is_of_each = not array.committed and not target.is_fully_addressable
    return replace(transfer, is_of_each=True) if is_of_each else transfer


def transfer_between(
    shape: tuple[int, ...],
    padded: tuple[int, ...],
    dtype: Any,
    source: jax.sharding.Sharding,
    target: NamedSharding,
) -> Transfer:
    """What it takes to bring an array of some type from one placement to another."""
    data = jax.ShapeDtypeStruct((), dtype)
    if jnp.issubdtype(dtype, _jax.extended):
        data = jax.eval_shape(jax.random.key_data, data)
    number = travelling_type(data.dtype)
    return Transfer(shape, padded, dtype, number, data.shape, source, target)


def travelling_type(dtype: Any) -> Any:
    """The type of numbers as which others are moved, itself for most.

    Some backends select and write short floats as longer ones, which changes the bits of NaNs, and
    have no collectives of integers shorter than a byte.
    """
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2:
        return jnp.dtype(jnp.uint16)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.dtype(jnp.int8)
    return dtype


def as_travelling(x: jax.Array) -> jax.Array:
    """The same numbers, or their bits, in the type that is moved; can be traced."""
    return _converted(x, travelling_type(x.dtype))


def as_before(x: jax.Array, dtype: Any) -> jax.Array:
    """What `as_travelling` was given, in its own type; can be traced."""
    return _converted(x, dtype)


def _converted(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x, dtype)
    return jax.lax.convert_element_type(x, dtype)


def held_by(array: Array) -> jax.Array:
    """The `jax.Array` that the devices hold."""
    return array.padded if isinstance(array, UnevenArray) else array


def data_of(array: Array) -> jax.Array:
    """The numbers that the devices hold, those of PRNG keys too."""
    held = held_by(array)
    return jax.random.key_data(held) if jnp.issubdtype(held.dtype, _jax.extended) else held


def wrapped_as(data: jax.Array, dtype: Any) -> jax.Array:
    """What `data_of` an array of some type gave, as that again."""
    if not jnp.issubdtype(dtype, _jax.extended):
        return data
    impl = _jax.key_impl_name(jax.ShapeDtypeStruct((), dtype))
    return jax.random.wrap_key_data(data, impl=impl)


def shown_as(held: jax.Array, shape: tuple[int, ...]) -> Array:
    """What the devices hold, as an array of the logical shape."""
    return held if held.shape == shape else UnevenArray(held, shape)


def placed_anew(held: jax.Array, shape: tuple[int, ...], target: NamedSharding) -> jax.Array:
    """The same buffers under another name for where they lie. Moves nothing."""
    on_device = {shard.device: shard.data for shard in held.addressable_shards}
    mesh: Any = target.mesh
    buffers = [on_device[d] for d in mesh.devices.flat if d in on_device]
    return of_shards(shape, target, buffers, held.dtype)


def of_shards(
    shape: tuple[int, ...], sharding: NamedSharding, shards: list[jax.Array], dtype: Any
) -> jax.Array:
    """An array of the shards that are in this process; where none are, only `dtype` says of what.

    Beside shards it says nothing: JAX would make it narrower where wide numbers are off.
    """
    said = None if shards else dtype
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=said)
