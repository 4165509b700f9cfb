"""Reshards to compare on, what XLA's partitioners make of them, and what any program's bring.

    case = Case("2x4", (64, 64), P("x", None), P(None, "y"))
    report = xla_reshard(case, "shardy")
    report.wire_bytes, report.busiest, report.largest, report.kinds

`jax.jit` takes no argument and gives no result whose dims do not divide over their devices. So the
program is given the whole value on every device and returns it so; in it stand two barriers, each
between two equal constraints: source before and after the first, target before and after the
second. The partitioner then cuts the source's shards out of the argument, which sends nothing,
reshards between the barriers and nowhere else, and gathers the result after the second. Only what
stands between the barriers counts. For dims that divide, the collectives there are those of
`jax.jit(lambda x: x, in_shardings=source, out_shardings=target)`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations_with_replacement, pairwise, permutations
from math import prod
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from benchmarks.peers import hlo
from benchmarks.peers.hlo_text import Computation, Instruction, parse_module
from meshwise.reshard.tiles import Tiles, received_bytes, tiles_of

NAMES = ("x", "y", "z")
MESHES: dict[str, tuple[int, ...]] = {
    "8": (8,),
    "2x4": (2, 4),
    "4x2": (4, 2),
    "2x2x2": (2, 2, 2),
    "6": (6,),
    "2x3x2": (2, 3, 2),
}
ELEMENTS = 2**16  # of an array whose bytes are counted, roughly


@dataclass(frozen=True)
class Case:
    """One reshard: of an array of a global shape, on as many devices as its mesh has."""

    mesh: str
    shape: tuple[int, ...]
    source: P
    target: P
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.mesh} {self.dtype}{list(self.shape)} {self.source} -> {self.target}"

    @property
    def ends(self) -> tuple[NamedSharding, NamedSharding]:
        mesh = make_mesh(self.mesh)
        return NamedSharding(mesh, self.source), NamedSharding(mesh, self.target)

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @cached_property
    def tiles(self) -> tuple[Tiles, Tiles]:
        """What each device holds before and after."""
        sizes = dict(make_mesh(self.mesh).shape)
        found = []
        for sharding, padded in zip(self.ends, self.padded, strict=True):
            dims = [(e,) if isinstance(e, str) else e or () for e in sharding.spec]
            block = sharding.shard_shape(padded)
            found.append(tiles_of(self.shape, block, dims, sizes))
        return found[0], found[1]

    @property
    def padded(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes that devices hold before and after: dims rounded up to whole shards."""
        found = []
        for sharding in self.ends:
            counts = sharding.shard_shape(tuple([sharding.num_devices] * len(self.shape)))
            shards = [sharding.num_devices // n for n in counts]
            found.append(tuple(-(-n // k) * k for n, k in zip(self.shape, shards, strict=True)))
        return found[0], found[1]

    @property
    def is_even(self) -> bool:
        """Whether every dim divides over its devices at both ends."""
        return self.padded == (self.shape, self.shape)

    @property
    def larger_end(self) -> int:
        """Bytes of the larger of a device's shards before and after, padding included."""
        return max(prod(tiles.block) for tiles in self.tiles) * self.itemsize

    @property
    def bound(self) -> int:
        """The fewest bytes that the device which lacks most can do with."""
        return received_bytes(*self.tiles, self.itemsize)


@cache
def make_mesh(name: str) -> Mesh:
    """A mesh of the first devices."""
    sizes = MESHES[name]
    devices = np.array(jax.devices()[: prod(sizes)]).reshape(sizes)
    return Mesh(devices, NAMES[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def shardings(mesh: str, rank: int) -> Iterator[P]:
    """Every sharding of a rank over whole axes of a mesh, in every order."""
    names = NAMES[: len(MESHES[mesh])]
    for count in range(len(names) + 1):
        for axes in permutations(names, count):
            for cuts in combinations_with_replacement(range(count + 1), rank - 1):
                yield P(*(axes[a:b] or None for a, b in pairwise((0, *cuts, count))))


def some_pairs(mesh: str, rank: int, most: int, draw: random.Random) -> list[tuple[P, P]]:
    """All ordered pairs of different shardings, or as many as wanted of them by chance."""
    pairs = list(permutations(shardings(mesh, rank), 2))
    return pairs if len(pairs) <= most else draw.sample(pairs, most)


def even_case(mesh: str, rank: int, ends: tuple[P, P]) -> Case:
    """Dims of different sizes that divide over all devices."""
    devices = prod(MESHES[mesh])
    first = round(ELEMENTS ** (1 / rank) / devices) or 1
    return Case(mesh, tuple([devices * (first + dim) for dim in range(rank)]), *ends)


def uneven_case(mesh: str, rank: int, ends: tuple[P, P], draw: random.Random) -> Case:
    """A shape by chance; one dim in four is small, perhaps with fewer rows than devices."""
    size = ELEMENTS ** (1 / rank)
    while True:
        shape = [
            draw.randint(2, 2 * prod(MESHES[mesh]))
            if draw.random() < 1 / 4
            else draw.randint(round(0.7 * size), round(1.4 * size))
            for _ in range(rank)
        ]
        case = Case(mesh, tuple(shape), *ends)
        if not case.is_even:
            return case


def large_case(mesh: str, rank: int, dtype: str, draw: random.Random) -> Case:
    """An array of 16 to 256 MB between different shardings, all by chance; every dim divides."""
    ends = some_pairs(mesh, rank, 1, draw)[0]
    left = 2 ** draw.uniform(24, 28) / jnp.dtype(dtype).itemsize
    devices = prod(MESHES[mesh])
    shape: list[int] = []
    for others in reversed(range(rank)):
        size = left ** (1 / (others + 1)) * (2 ** draw.uniform(-1.5, 1.5) if others else 1)
        shape.append(devices * max(1, round(size / devices)))
        left /= shape[-1]
    return Case(mesh, tuple(shape), *ends, dtype)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one reshard.

    `wire_bytes` is what a device sends by the formulas of `hlo`. `received` is what reaches each
    device: nothing by a ppermute that sends it nothing, or its own. `largest` is the largest local
    array on the way, both ends included; masks and tables of indices, which no compiler keeps, are
    left out.
    """

    wire_bytes: float
    received: tuple[float, ...]
    largest: int
    kinds: str

    @property
    def busiest(self) -> float:
        """What the device that receives most does receive."""
        return max(self.received)


def marked_reshard(case: Case) -> Lowered:
    """The program described above: a whole value in and out, a reshard between two barriers."""
    whole = NamedSharding(make_mesh(case.mesh), P())

    def function(x: jax.Array) -> jax.Array:
        for sharding in case.ends:
            x = lax.with_sharding_constraint(x, sharding)
            x = lax.optimization_barrier(x)
            x = lax.with_sharding_constraint(x, sharding)
        return x

    value = jax.ShapeDtypeStruct(case.shape, case.dtype)
    return jax.jit(function, in_shardings=whole, out_shardings=whole).lower(value)


def xla_reshard(case: Case, which: hlo.Partitioner) -> Traffic:
    """What one of XLA's partitioners emits for a reshard."""
    with hlo.partitioner(which):
        text = hlo.partitioned_text(marked_reshard(case))
    return read_between_barriers(text)


def read_between_barriers(text: str) -> Traffic:
    """The traffic between the two barriers of a partitioned program."""
    module = parse_module(text)
    entry = module.computations[module.entry]
    first, last = (i.name for i in entry.instructions.values() if i.opcode == "opt-barrier")
    inside = _needed_for(entry, last) - _needed_for(entry, first) | {first}
    every = hlo.parse(text).collectives
    assert not {c.name for c in every} & _needed_for(entry, first), text
    found = [c for c in every if c.name in inside]
    return traffic(found, [entry.instructions[name] for name in inside], module.devices)


def read_program(text: str) -> Traffic:
    """The traffic of a whole partitioned program."""
    module = parse_module(text)
    instructions = [i for c in module.computations.values() for i in c.instructions.values()]
    return traffic(hlo.parse(text).collectives, instructions, module.devices)


def traffic(
    collectives: Iterable[hlo.Collective], instructions: Iterable[Instruction], devices: int
) -> Traffic:
    """The traffic of some collectives, and the largest array of some instructions."""
    sent, received, kinds = 0.0, [0.0] * devices, Counter[str]()
    for collective in collectives:
        sent += min(collective.wire_bytes, collective.credited_bytes)
        kinds[collective.kind] += collective.count
        for group in collective.groups:
            if collective.kind != "ppermute":
                for device in group:
                    received[device] += collective.wire_bytes
            elif group[0] != group[1]:
                received[group[1]] += collective.wire_bytes
    made = [shape for i in instructions if i.opcode != "tuple" for shape in i.shapes]
    floats = [shape for shape in made if shape.dtype.startswith(("f", "bf"))]
    return Traffic(
        sent,
        tuple(received),
        max((shape.size for shape in floats), default=0),
        ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "nothing",
    )


def _needed_for(computation: Computation, name: str) -> set[str]:
    """An instruction and all that it is computed from."""
    found: set[str] = set()
    open_names = [name]
    while open_names:
        name = open_names.pop()
        if name not in found and name in computation.instructions:
            found.add(name)
            open_names += computation.instructions[name].operands
    return found


def numbers(case: Case) -> jax.Array:
    """An array under the source sharding whose elements differ, made where it lies."""
    unsigned = jnp.dtype(f"uint{8 * case.itemsize}")

    def make() -> jax.Array:
        found = jnp.zeros(case.shape, unsigned)
        for dim in range(len(case.shape)):
            step = prod(case.shape[dim + 1 :]) % 2 ** (8 * case.itemsize)
            found += lax.broadcasted_iota(unsigned, case.shape, dim) * unsigned.type(step)
        return lax.bitcast_convert_type(found, case.dtype)

    return jax.jit(make, out_shardings=case.ends[0])()


def is_same(a: jax.Array, b: jax.Array) -> bool:
    """Whether two arrays have the same bits."""

    def compare(a: jax.Array, b: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        bits = (lax.bitcast_convert_type(x, unsigned) for x in (a, b))
        return jnp.all(lax.eq(*bits))

    return bool(jax.jit(compare)(a, b))


def milliseconds(calls: Sequence[Callable[[], jax.Array]], repeats: int) -> list[float]:
    """Medians of calls made in turns; results are freed at once."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats):
        for place in range(len(calls)):
            which = (place + turn) % len(calls)
            start = time.perf_counter()
            result = calls[which]().block_until_ready()
            found[which].append(1e3 * (time.perf_counter() - start))
            result.delete()
    return [median(times) for times in found]
