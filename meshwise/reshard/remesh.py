"""From one mesh to another, over the same devices in another order, over more or over fewer.

The devices of both are one list. Each fetches the pieces of its new tile straight from those who
hold them (`rounds`). Where that would take many rounds, as the target is on few devices or is
replicated, they fetch less, and an ordinary reshard on the target's mesh makes it the target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from meshwise.cost.hardware import Hardware
from meshwise.errors import MemoryLimitError
from meshwise.ir.mesh import Mesh
from meshwise.ir.numbers import microseconds
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.reshard.plan import Reshard, ReshardPlan, Step
from meshwise.reshard.rounds import Round, plan_rounds
from meshwise.reshard.search import plan_within_shards, too_large
from meshwise.reshard.tiles import Tiles, tiles_of

# Programs that only reshard may have more rounds than a step of a larger one.
MOST_ROUNDS = 64


@dataclass(frozen=True)
class RemeshPlan:
    """How an array gets from one mesh to another: rounds, then a reshard on the target's mesh.

    `fetched` are the tiles after the rounds. `wire_bytes` are those of the busiest device and
    `peak_bytes` of the largest array that a device holds on the way, padding included; `seconds`
    are on the hardware it was planned for.
    """

    source: Tiles
    fetched: Tiles
    rounds: tuple[Round, ...]
    then: ReshardPlan
    itemsize: int
    wire_bytes: float
    launches: int
    seconds: float
    peak_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.source.shape

    @property
    def steps(self) -> tuple[Step, ...]:
        """What follows the rounds, on the target's mesh."""
        return self.then.steps

    def __str__(self) -> str:
        """A head line with the totals, then a line a step."""
        launches = sum(each.is_sent for each in self.rounds)
        collectives = "1 collective" if self.launches == 1 else f"{self.launches} collectives"
        head = (
            f"{list(self.shape)} over {len(self.source.starts)} devices: "
            f"{self.wire_bytes:,.0f} wire bytes in {collectives}, "
            f"{microseconds(self.seconds)}, peak {self.peak_bytes:,} bytes"
        )
        rounds = (
            f"rounds between meshes: {list(self.source.block)} -> {list(self.fetched.block)}, "
            f"{round_bytes(self.rounds, self.itemsize):,} bytes in {launches} launches"
        )
        return "\n".join([head, *(f"  {line}" for line in (rounds, *self.steps))])


def plan_remesh(
    source: Tiles,
    itemsize: int,
    mesh: Mesh,
    target: Sharding,
    places: Sequence[int],
    hardware: Hardware,
    max_bytes: int | None = None,
) -> RemeshPlan | None:
    """The cheapest plan from tiles of a list of devices to a sharding on a mesh of some of them.

    `places` are the target mesh's devices in the list, in the mesh's order. None where the rounds
    would be too many for one program.

    Raises MemoryLimitError where no plan that fits in `max_bytes` is found.
    """
    found: list[RemeshPlan] = []
    for sharding in _before_gathers(source.shape, mesh, target):
        plan = _by_way_of(sharding, source, itemsize, mesh, target, places, hardware)
        if plan is not None:
            found.append(plan)
    if not found:
        return None
    least = min(plan.peak_bytes for plan in found)
    if max_bytes is not None and least > max_bytes:
        asked = f"tiles of {list(source.block)}", f"{target}"
        ends = prod(source.block), prod(local_shape(source.shape, target, mesh))
        is_least = least <= max(ends) * itemsize
        raise MemoryLimitError(too_large(source.shape, *asked, max_bytes, least, is_least))
    cap = least if max_bytes is None else max_bytes
    return min((p for p in found if p.peak_bytes <= cap), key=lambda p: p.seconds)


def round_bytes(rounds: Sequence[Round], itemsize: int) -> int:
    """Bytes that travel in some rounds, from the busiest device."""
    return sum(prod(each.shape) * itemsize for each in rounds if each.is_sent)


def _by_way_of(
    sharding: Sharding,
    source: Tiles,
    itemsize: int,
    mesh: Mesh,
    target: Sharding,
    places: Sequence[int],
    hardware: Hardware,
) -> RemeshPlan | None:
    """The plan that fetches a sharding in rounds and makes it the target."""
    shape = source.shape
    on_mesh = tiles_of(shape, local_shape(shape, sharding, mesh), sharding.dims, mesh.axis_size)
    starts = dict(zip(places, on_mesh.starts, strict=True))
    everywhere = tuple(starts.get(place) for place in range(len(source.starts)))
    fetched = Tiles(shape, on_mesh.block, everywhere)
    rounds = plan_rounds(source, fetched, MOST_ROUNDS)
    if rounds is None:
        return None
    then = plan_within_shards(Reshard(shape, itemsize, mesh, sharding, target, hardware))
    sent = round_bytes(rounds, itemsize)
    launches = sum(each.is_sent for each in rounds)
    round_s = hardware.launch_s if hardware.round_s is None else hardware.round_s
    byte_s = hardware.byte_factor("round") / hardware.link_bytes_per_s
    return RemeshPlan(
        source,
        fetched,
        rounds,
        then,
        itemsize,
        sent + then.wire_bytes,
        launches + then.launches,
        launches * round_s + sent * byte_s + then.seconds,
        max(prod(source.block) * itemsize, prod(on_mesh.block) * itemsize, then.peak_bytes),
    )


def _before_gathers(shape: Sequence[int], mesh: Mesh, target: Sharding) -> Iterator[Sharding]:
    """The target, then with ever more of the axes that it leaves free, on its largest dims."""
    yield target
    dims = list(target.dims)
    for axis in mesh.names:
        if axis in target.used_axes:
            continue
        block = local_shape(shape, Sharding(tuple(dims)), mesh)
        able = [d for d, n in enumerate(block) if n % mesh.axis_size[axis] == 0 and n]
        if able:
            dim = max(able, key=lambda d: block[d])
            dims[dim] = (*dims[dim], axis)
            yield Sharding(tuple(dims))
