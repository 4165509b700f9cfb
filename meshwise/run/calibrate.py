"""Measure what collectives really take on the devices at hand, as figures to plan by.

Bytes alone mislead where devices are threads of one machine: there a byte of an all_gather of a
minor dim takes three times as long as one of the leading dim, and pieces sent one after the other
are faster than one all_to_all. Each kind is run at two sizes; the slope is the time of a byte, what
is left of the smaller one the time of a launch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.ir.mesh import Mesh
from meshwise.reshard.exchange import Parcel, apply_rounds
from meshwise.reshard.rounds import plan_rounds
from meshwise.reshard.tiles import Tiles, tiles_of

_AXIS = "devices"


@dataclass(frozen=True)
class Trial:
    """One kind of collective on a local array [rows, columns], and how many launches it is."""

    name: str
    kind: CollectiveKind | None
    per_device: Callable[[jax.Array], jax.Array]
    launches: int = 1


def calibrate(
    devices: Sequence[Any] | None = None,
    small_bytes: int = 1 << 18,
    large_bytes: int = 1 << 23,
    repeats: int = 5,
) -> Hardware:
    """Figures of the devices at hand, by running each kind of collective on all of them.

    `small_bytes` and `large_bytes` are those of a shard; use sizes like those to be moved. Flops
    are those of a float32 product and memory's bytes those of a sum of large arrays, on all devices
    at once: devices of one host share what it has. It takes seconds.
    """
    devices = list(devices or jax.devices())
    seconds = {
        trial.name: [_seconds(trial, devices, size, repeats) for size in (small_bytes, large_bytes)]
        for trial in _trials(len(devices))
    }
    sent = {t.name: _sent(t, len(devices)) for t in _trials(len(devices))}
    per_byte = {
        name: max(large - small, 0.0) / ((large_bytes - small_bytes) * sent[name])
        for name, (small, large) in seconds.items()
    }
    link = per_byte["ppermute"] or min(slope for slope in per_byte.values() if slope)

    def launch(name: str, launches: int) -> float:
        rest = seconds[name][0] - per_byte[name] * sent[name] * small_bytes
        return max(rest, 1e-6) / launches

    return replace(
        GENERIC,
        name=f"{len(devices)} {devices[0].platform} devices, measured",
        link_bytes_per_s=1 / link,
        flops_per_s=_flops_per_s(devices, repeats),
        memory_bytes_per_s=_memory_bytes_per_s(devices, large_bytes, repeats),
        launch_s=launch("ppermute", 1),
        round_s=launch("round", len(devices) - 1),
        source=f"measured with shards of {small_bytes:,} and {large_bytes:,} bytes",
        byte_factors=tuple((n, s / link) for n, s in per_byte.items() if n != "ppermute"),
    )


def _trials(count: int) -> list[Trial]:
    def circle(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, _AXIS, [(i, (i + 1) % count) for i in range(count)])

    def gather(dim: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: lax.all_gather(x, _AXIS, axis=dim, tiled=True)

    def cut(x: jax.Array) -> jax.Array:
        size = x.shape[0] // count
        return lax.dynamic_slice_in_dim(x, lax.axis_index(_AXIS) * size, size)

    kinds = CollectiveKind
    return [
        Trial("ppermute", kinds.PERMUTE, circle),
        Trial("all_gather", kinds.ALL_GATHER, gather(0)),
        Trial("minor all_gather", kinds.ALL_GATHER, gather(1)),
        Trial("all_to_all", kinds.ALL_TO_ALL, lambda x: lax.all_to_all(x, _AXIS, 1, 0, tiled=True)),
        Trial("round", kinds.ALL_TO_ALL, _in_rounds(count), count - 1),
        Trial(
            "reduce_scatter",
            kinds.REDUCE_SCATTER,
            lambda x: lax.psum_scatter(x, _AXIS, scatter_dimension=0, tiled=True),
        ),
        Trial("all_reduce", kinds.ALL_REDUCE, lambda x: lax.psum(x, _AXIS)),
        Trial("slice", None, cut),
    ]


def _in_rounds(count: int) -> Callable[[jax.Array], jax.Array]:
    """The all_to_all of a dim to another, in rounds."""
    mesh = Mesh((_AXIS,), (count,), ((_AXIS, (_AXIS,)),))

    def tiles(shape: tuple[int, int], dim: int) -> Tiles:
        block = tuple(n // count if d == dim else n for d, n in enumerate(shape))
        return tiles_of(shape, block, [[_AXIS] if d == dim else [] for d in (0, 1)], {_AXIS: count})

    def exchange(x: jax.Array) -> jax.Array:
        shape = x.shape[0] * count, x.shape[1]
        source, target = tiles(shape, 0), tiles(shape, 1)
        rounds = plan_rounds(source, target, most=count)
        assert rounds is not None, "one round for each other device"
        return apply_rounds([Parcel(x, rounds, source, target)], (_AXIS,), mesh)[0]

    return exchange


def _sent(trial: Trial, count: int) -> float:
    """Wire bytes for each byte of a shard; of a slice the bytes that are kept."""
    if trial.kind is None:
        return 1 / count
    return wire_bytes(trial.kind, 1.0, float(count), count)


def _flops_per_s(devices: Sequence[Any], repeats: int, size: int = 1024) -> float:
    """Flops a second of one device in a product of two matrices, all devices at once."""
    both = np.random.default_rng(0).random((2, size, size), np.float32)
    taken = _median_seconds(lambda x: x[0] @ x[1], devices, both, PartitionSpec(), repeats)
    return 2 * size**3 / taken


def _memory_bytes_per_s(devices: Sequence[Any], shard_bytes: int, repeats: int) -> float:
    """Bytes a second that one device reads and writes, all devices at once."""
    numbers = np.random.default_rng(0).random((len(devices), shard_bytes // 4), np.float32)
    lies = PartitionSpec(_AXIS)
    taken = _median_seconds(lambda x: 0.5 * x + 1.0, devices, numbers, lies, repeats)
    return 2 * shard_bytes / taken


def _seconds(trial: Trial, devices: Sequence[Any], shard_bytes: int, repeats: int) -> float:
    count = len(devices)
    columns = max(count, int((shard_bytes / 4) ** 0.5) // count * count)
    rows = max(count, shard_bytes // (4 * columns) // count * count)
    numbers = np.random.default_rng(0).random((rows * count, columns), np.float32)
    return _median_seconds(trial.per_device, devices, numbers, PartitionSpec(_AXIS), repeats)


def _median_seconds(
    per_device: Callable[[jax.Array], jax.Array],
    devices: Sequence[Any],
    numbers: np.ndarray,
    spec: PartitionSpec,
    repeats: int,
) -> float:
    """Seconds of a function of each device's part of an array, on all devices."""
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped)
    array = jax.device_put(numbers, NamedSharding(mesh, spec))
    jax.block_until_ready(program(array))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(array))
        taken.append(time.perf_counter() - start)
    return median(taken)
