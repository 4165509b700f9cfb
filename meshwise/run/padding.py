"""From logical arrays to padded ones and back.

A dim that does not divide over its devices is kept with padding at its end. Arrays outside a
program are padded and cut by small programs of their own, compiled for one shape and placement,
so that no sharding is left to XLA to guess and meshes of explicit axes work like others.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshwise import _jax

_KEPT_PROGRAMS = 1024


def pad_end(array: Any, padded: Sequence[int]) -> Any:
    """Zeros at the end of each dim: from the logical shape to the padded one. Can be traced."""
    widths = [(0, p - n, 0) for p, n in zip(padded, array.shape, strict=True)]
    if not any(width for _, width, _ in widths):
        return array
    if jnp.issubdtype(array.dtype, _jax.extended):
        raw = jax.random.key_data(array)
        raw = jax.lax.pad(raw, np.zeros((), raw.dtype), [*widths, (0, 0, 0)])
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(array))
    return jax.lax.pad(array, np.zeros((), array.dtype), widths)


def cut_end(array: Any, shape: Sequence[int]) -> Any:
    """From the padded shape to the logical one. Can be traced."""
    return array[tuple(slice(n) for n in shape)]


def even_sharding(
    sharding: NamedSharding, shape: Sequence[int], padded: Sequence[int]
) -> NamedSharding:
    """The sharding with the dims left whole that are padded."""
    spec = [*sharding.spec, *([None] * (len(shape) - len(sharding.spec)))]
    even = [entry if n == p else None for entry, n, p in zip(spec, shape, padded, strict=True)]
    return NamedSharding(sharding.mesh, PartitionSpec(*even), memory_kind=sharding.memory_kind)


def pad_array(array: Any, padded: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """A padded array in its place, from a logical one on the host or on the same devices."""
    if not isinstance(array, jax.Array):
        host = np.asarray(array)
        widths = [(0, p - n) for p, n in zip(padded, host.shape, strict=True)]
        return jax.device_put(np.pad(host, widths), sharding)
    shape = tuple(array.shape)
    source = even_sharding(sharding, shape, padded)
    run = _pad_program(_type_of(array), padded, source, sharding)
    return run(jax.device_put(array, source))


def cut_array(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logical array of a padded one; whole along the dims that are padded."""
    sharding: Any = array.sharding
    target = even_sharding(sharding, shape, array.shape)
    return _cut_program(_type_of(array), shape, sharding, target)(array)


def _type_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=_jax.is_weak(array))


@functools.lru_cache(_KEPT_PROGRAMS)
def _pad_program(
    given: jax.ShapeDtypeStruct,
    padded: tuple[int, ...],
    source: NamedSharding,
    target: NamedSharding,
) -> Any:
    jitted = jax.jit(lambda x: pad_end(x, padded), in_shardings=source, out_shardings=target)
    with _jax.moving():
        compiled = jitted.lower(given).compile()
    return _jax.mover(_jax.caller(compiled), [given.dtype])


@functools.lru_cache(_KEPT_PROGRAMS)
def _cut_program(
    given: jax.ShapeDtypeStruct,
    shape: tuple[int, ...],
    source: NamedSharding,
    target: NamedSharding,
) -> Any:
    jitted = jax.jit(lambda x: cut_end(x, shape), in_shardings=source, out_shardings=target)
    with _jax.moving():
        compiled = jitted.lower(given).compile()
    return _jax.mover(_jax.caller(compiled), [given.dtype])


def positions_of_uneven(types: Sequence[Any], padded: Sequence[tuple[int, ...]]) -> list[int]:
    """Which values have a padded layout of another shape than their own."""
    return [
        i for i, (t, p) in enumerate(zip(types, padded, strict=True)) if tuple(t.shape) != tuple(p)
    ]


def structs_of(
    types: Sequence[Any], shapes: Sequence[Sequence[int]], shardings: Sequence[Any] = ()
) -> list[jax.ShapeDtypeStruct]:
    """Arrays of other shapes than their types', and shardings."""
    places = shardings or [None] * len(types)
    return [
        jax.ShapeDtypeStruct(n, t.dtype, sharding=s, weak_type=getattr(t, "weak_type", False))
        for t, n, s in zip(types, shapes, places, strict=True)
    ]
