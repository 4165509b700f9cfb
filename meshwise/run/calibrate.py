"""Measure what collectives really take on the devices at hand, as figures to plan by.

Bytes alone mislead where devices are threads of one machine: there a byte of an all_gather of a
minor dim takes three times as long as one of the leading dim, and pieces sent one after the other
are faster than one all_to_all. Each kind is run at three sizes: the slope between the larger two is
the time of a byte, and what the smallest, of a few numbers, takes longer than a program that sends
nothing is the time of a launch.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.cost.links import Links
from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.ir.mesh import Mesh
from meshwise.reshard.exchange import Parcel, apply_rounds
from meshwise.reshard.rounds import plan_rounds
from meshwise.reshard.tiles import Tiles, tiles_of

_AXIS = "devices"
_TINY_BYTES = 1 << 10
# Short calls differ much: they are made until together they take so long.
_ENOUGH_S, _MOST_REPEATS = 0.05, 100


@dataclass(frozen=True)
class Trial:
    """One kind of collective on a local array [rows, columns], and how many launches it is."""

    name: str
    kind: CollectiveKind | None
    per_device: Callable[[jax.Array], jax.Array]
    launches: int = 1


@dataclass(frozen=True)
class Sizes:
    """Bytes of a shard in the trials, and how often each is run."""

    small_bytes: int = 1 << 18
    large_bytes: int = 1 << 23
    repeats: int = 5


def calibrate(devices: Sequence[Any] | None = None, sizes: Sizes | None = None) -> Hardware:
    """Figures of the devices at hand, by running each kind of collective on all of them.

    `sizes` should be like those to be moved. Flops are those of a float32 product, serial ones
    the comparisons of a sort, calls cosines, and memory's bytes those of a sum of large arrays, on
    all devices at once: devices of one host share what it has. It takes seconds.
    """
    devices, sizes = list(devices or jax.devices()), sizes or Sizes()
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    return replace(
        _link(mesh, _AXIS, sizes),
        name=f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}, measured",
        flops_per_s=_flops_per_s(mesh, sizes.repeats),
        serial_flops_per_s=_serial_flops_per_s(mesh, sizes.repeats),
        call_s=_call_s(mesh, sizes.repeats),
        memory_bytes_per_s=_memory_bytes_per_s(mesh, sizes),
    )


def calibrate_axes(mesh: jax.sharding.Mesh, sizes: Sizes | None = None) -> Links:
    """Figures of a mesh's devices, and of the link of each axis, all its groups at once."""
    sizes = sizes or Sizes()
    device = calibrate(list(mesh.devices.flat), sizes)
    plain = jax.sharding.Mesh(
        mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
    )
    axes = [
        (axis, replace(_link(plain, axis, sizes), name=f"{axis} of {device.name}"))
        for axis, size in mesh.shape.items()
        if size > 1
    ]
    return Links(device, tuple(axes) if len(axes) > 1 else ())


def _link(mesh: jax.sharding.Mesh, axis: str, sizes: Sizes) -> Hardware:
    """What sending along an axis takes."""
    small, large, count = sizes.small_bytes, sizes.large_bytes, mesh.shape[axis]
    if count == 1:
        return replace(GENERIC, source=f"measured; one device sends nothing, links: {GENERIC.name}")
    trials = _trials(axis, count)
    nothing = _seconds(lambda x: x + 1.0, mesh, count, _TINY_BYTES, sizes.repeats)
    per_byte, launches = dict[str, float](), dict[str, float]()
    for trial in trials:
        tiny_s, small_s, large_s = [
            _seconds(trial.per_device, mesh, count, size, sizes.repeats)
            for size in (_TINY_BYTES, small, large)
        ]
        sent = _sent(trial, count)
        per_byte[trial.name] = max(large_s - small_s, 0.0) / ((large - small) * sent)
        launches[trial.name] = max(tiny_s - nothing, 1e-6) / trial.launches
    link = per_byte["ppermute"] or min((s for s in per_byte.values() if s), default=1e-9)
    launch = launches["ppermute"]
    kinds = {t.name for t in trials} & set(CollectiveKind)
    return replace(
        GENERIC,
        link_bytes_per_s=1 / link,
        launch_s=launch,
        round_s=launches["round"],
        source=f"measured with shards of {small:,} and {large:,} bytes",
        # Where the machine's noise hides what bytes take, nothing is known: as a permute's.
        byte_factors=tuple((n, (s or link) / link) for n, s in per_byte.items() if n != "ppermute"),
        launch_factors=tuple((n, launches[n] / launch) for n in sorted(kinds - {"ppermute"})),
    )


def _trials(axis: str, count: int) -> list[Trial]:
    def circle(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, axis, [(i, (i + 1) % count) for i in range(count)])

    def gather(dim: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: lax.all_gather(x, axis, axis=dim, tiled=True)

    def exchange(x: jax.Array) -> jax.Array:
        """From rows to columns, in the form that programs have."""
        rows, columns = x.shape
        parts = x.reshape(rows, count, columns // count)
        got = lax.all_to_all(parts, axis, 1, 1, tiled=True)
        return got.transpose(1, 0, 2).reshape(rows * count, columns // count)

    def cut(x: jax.Array) -> jax.Array:
        size = x.shape[0] // count
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size)

    kinds = CollectiveKind
    return [
        Trial("ppermute", kinds.PERMUTE, circle),
        Trial("all_gather", kinds.ALL_GATHER, gather(0)),
        Trial("minor all_gather", kinds.ALL_GATHER, gather(1)),
        Trial("all_to_all", kinds.ALL_TO_ALL, exchange),
        Trial("round", kinds.ALL_TO_ALL, _in_rounds(axis, count), count - 1),
        Trial(
            "reduce_scatter",
            kinds.REDUCE_SCATTER,
            lambda x: lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True),
        ),
        Trial("all_reduce", kinds.ALL_REDUCE, lambda x: lax.psum(x, axis)),
        Trial("slice", None, cut),
    ]


def _in_rounds(axis: str, count: int) -> Callable[[jax.Array], jax.Array]:
    """The all_to_all of a dim to another, in rounds."""
    mesh = Mesh((axis,), (count,), ((axis, (axis,)),))

    def tiles(shape: tuple[int, int], dim: int) -> Tiles:
        block = tuple(n // count if d == dim else n for d, n in enumerate(shape))
        return tiles_of(shape, block, [[axis] if d == dim else [] for d in (0, 1)], {axis: count})

    def exchange(x: jax.Array) -> jax.Array:
        shape = x.shape[0] * count, x.shape[1]
        source, target = tiles(shape, 0), tiles(shape, 1)
        rounds = plan_rounds(source, target, most=count)
        assert rounds is not None, "one round for each other device"
        return apply_rounds([Parcel(x, rounds, source, target)], (axis,), mesh)[0]

    return exchange


def _sent(trial: Trial, count: int) -> float:
    """Wire bytes for each byte of a shard; of a slice the bytes that are kept."""
    if trial.kind is None:
        return 1 / count
    return wire_bytes(trial.kind, 1.0, float(count), count)


def _flops_per_s(mesh: jax.sharding.Mesh, repeats: int, size: int = 1024) -> float:
    """Flops a second of one device in a product of two matrices, all devices at once."""
    both = np.random.default_rng(0).random((2, size, size), np.float32)
    taken = _median_seconds(lambda x: x[0] @ x[1], mesh, both, PartitionSpec(), repeats)
    return 2 * size**3 / taken


def _serial_flops_per_s(mesh: jax.sharding.Mesh, repeats: int, size: int = 128) -> float:
    """Comparisons a second of one device in sorts of rows, all devices at once."""
    rows = np.random.default_rng(0).random((size, size), np.float32)
    taken = _median_seconds(
        lambda x: lax.sort(x, dimension=1), mesh, rows, PartitionSpec(), repeats
    )
    return size * size * math.log2(size) / taken


def _call_s(mesh: jax.sharding.Mesh, repeats: int, size: int = 128) -> float:
    """Seconds of one device for a number's cosine, beyond those of a sum, all devices at once."""
    numbers = np.random.default_rng(0).random((size, size), np.float32)
    summed, called = [
        _median_seconds(function, mesh, numbers, PartitionSpec(), repeats)
        for function in (lambda x: x + 1.0, lax.cos)
    ]
    return max(called - summed, 0.0) / size**2


def _memory_bytes_per_s(mesh: jax.sharding.Mesh, sizes: Sizes) -> float:
    """Bytes a second that one device reads and writes, all devices at once."""
    shape = mesh.size, sizes.large_bytes // 4
    numbers = np.random.default_rng(0).random(shape, np.float32)
    lies = PartitionSpec(mesh.axis_names)
    taken = _median_seconds(lambda x: 0.5 * x + 1.0, mesh, numbers, lies, sizes.repeats)
    return 2 * sizes.large_bytes / taken


def _seconds(
    per_device: Callable[[jax.Array], jax.Array],
    mesh: jax.sharding.Mesh,
    count: int,
    shard_bytes: int,
    repeats: int,
) -> float:
    """Seconds of a function of a shard [rows, columns], both multiples of `count`."""
    columns = max(count, int((shard_bytes / 4) ** 0.5) // count * count)
    rows = max(count, shard_bytes // (4 * columns) // count * count)
    numbers = np.random.default_rng(0).random((rows * mesh.size, columns), np.float32)
    return _median_seconds(per_device, mesh, numbers, PartitionSpec(mesh.axis_names), repeats)


def _median_seconds(
    per_device: Callable[[jax.Array], jax.Array],
    mesh: jax.sharding.Mesh,
    numbers: np.ndarray,
    spec: PartitionSpec,
    repeats: int,
) -> float:
    """Seconds of a function of each device's part of an array, on all devices."""
    array = jax.device_put(numbers, NamedSharding(mesh, spec))
    if mesh.devices.flat[0].platform == "cpu":
        per_device = _as_programs_are(per_device, mesh, array)
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped)
    for _ in range(2):
        jax.block_until_ready(program(array))
    taken = []
    while len(taken) < repeats or (sum(taken) < _ENOUGH_S and len(taken) < _MOST_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(array))
        taken.append(time.perf_counter() - start)
    return median(taken)


def _as_programs_are(
    per_device: Callable[[jax.Array], jax.Array], mesh: jax.sharding.Mesh, array: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """A function of an array's shards, written as programs are for CPU devices."""
    shard = jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)
    sizes = dict(mesh.shape)
    closed = jax.make_jaxpr(per_device, axis_env=[*sizes.items()])(shard)
    flat = _jax.jaxpr_as_fun(_jax.as_cpu_compiles(closed, sizes))
    return lambda x: flat(x)[0]
