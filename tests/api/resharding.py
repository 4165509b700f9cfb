"""Arrays laid out for `mw.reshard`, and what every device must hold afterwards."""

import math
from collections.abc import Callable, Sequence

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

XY = ("x", "y")
ORDER = [3, 1, 7, 0, 2, 6, 5, 4]  # of devices, where it is another than their own


def mesh(sizes: Sequence[int], order: Sequence[int] | None = None, kind: str = "Auto") -> Mesh:
    """Axes x, y, z of these sizes over the first devices, or over those of the numbers given."""
    numbers = range(math.prod(sizes)) if order is None else order
    devices = np.array([jax.devices()[n] for n in numbers]).reshape(sizes)
    types = (getattr(AxisType, kind),) * len(sizes)
    return Mesh(devices, tuple("xyz"[: len(sizes)]), axis_types=types)


def on(
    sizes: Sequence[int], *spec, order: Sequence[int] | None = None, kind: str = "Auto"
) -> Callable[[], NamedSharding]:
    """A sharding, its mesh made when devices are there."""
    return lambda: NamedSharding(mesh(sizes, order, kind), P(*spec))


def entries(spec: P, rank: int) -> list[tuple[str, ...]]:
    """The axes of each dim."""
    padded = [*spec, *[None] * (rank - len(spec))]
    return [(e,) if isinstance(e, str) else tuple(e or ()) for e in padded]


def padded(shape: Sequence[int], where: NamedSharding) -> tuple[int, ...]:
    """What the devices hold together: each dim a multiple of its shards."""
    sizes = dict(where.mesh.shape)
    shards = [math.prod(sizes[a] for a in e) for e in entries(where.spec, len(shape))]
    return tuple(-(-n // k) * k for n, k in zip(shape, shards, strict=True))


def is_key(x) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def bits(x) -> np.ndarray:
    """The numbers of an array as bytes on the host, the data of PRNG keys: [*shape, bytes]."""
    host = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    if host.dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        host = host.astype(np.int8)
    rank = len(x.shape)
    size = math.prod(host.shape[rank:]) * host.dtype.itemsize
    return np.frombuffer(host.tobytes(), np.uint8).reshape(*x.shape, size)


def numbers(shape: Sequence[int], dtype=np.float32) -> np.ndarray:
    """Values of which no two are equal where the type allows it, none of them zero."""
    return np.arange(1, 1 + math.prod(shape)).reshape(shape).astype(dtype)


def lay(value, where: NamedSharding):
    """An array as it is sharded before, with garbage in the padding where it does not divide."""
    held = padded(value.shape, where)
    if held == value.shape:  # a copy, as JAX may put the buffers that are there
        return jax.device_put(value.copy(), where)
    widths = [(0, n - size) for n, size in zip(held, value.shape, strict=True)]
    if not is_key(value):
        filled = np.pad(value, widths, constant_values=np.ones((), value.dtype))
        return mw.UnevenArray(jax.device_put(filled, where), value.shape)
    data = np.pad(np.asarray(jax.random.key_data(value)), [*widths, (0, 0)], constant_values=7)
    keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return mw.UnevenArray(jax.device_put(keys, where), value.shape)


def pointers(x) -> list[int]:
    """Where the numbers of an array stand in memory, device by device."""
    held = x if isinstance(x, jax.Array) else x.padded
    held = jax.random.key_data(held) if is_key(held) else held
    return [shard.data.unsafe_buffer_pointer() for shard in held.addressable_shards]


def check(found, value, where: NamedSharding) -> None:
    """Type, sharding and kind of an array, and the index and the bits of each device's shard."""
    held = padded(value.shape, where)
    assert isinstance(found, jax.Array if held == value.shape else mw.UnevenArray), type(found)
    assert (found.shape, found.dtype) == (value.shape, value.dtype)
    whole = found if isinstance(found, jax.Array) else found.padded
    assert whole.shape == held
    assert whole.sharding == where or is_key(value)  # JAX writes all dims of those of keys
    assert whole.sharding.is_equivalent_to(where, len(held))
    expected = bits(value)
    wanted = where.devices_indices_map(held)
    shards = {shard.device: shard for shard in found.addressable_shards}
    assert set(shards) == set(wanted)
    for device, index in wanted.items():
        ends = [
            [min(end, n) for end in part.indices(m)[:2]]
            for part, n, m in zip(index, value.shape, held, strict=True)
        ]
        logical = tuple(slice(*pair) for pair in ends)
        shard = shards[device]
        assert shard.data.devices() == {device}
        own = [part.indices(n)[:2] for part, n in zip(shard.index, value.shape, strict=False)]
        assert [tuple(pair) for pair in ends] == own, (device, shard.index)
        np.testing.assert_array_equal(bits(shard.data), expected[logical], err_msg=f"{device}")
    if not is_key(value):
        np.testing.assert_array_equal(bits(np.asarray(found)), expected)
