"""What a reshard does, as data: steps, their bytes, and what they add up to."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from meshwise.cost.hardware import Hardware
from meshwise.ir.collectives import CollectiveKind
from meshwise.ir.mesh import Axes, Mesh
from meshwise.ir.numbers import microseconds
from meshwise.ir.sharding import Sharding, local_bytes
from meshwise.reshard.rounds import Round


class Reshard(NamedTuple):
    """What is asked: a value of a global shape from one sharding to another, on some hardware.

    `itemsize` is in bytes. A tuple, as it is the key under which answers are kept.
    """

    shape: tuple[int, ...]
    itemsize: int
    mesh: Mesh
    source: Sharding
    target: Sharding
    hardware: Hardware

    @property
    def end_bytes(self) -> int:
        """Bytes of the larger of a device's two shards."""
        what = self.shape, self.itemsize
        return max(local_bytes(*what, s, self.mesh) for s in (self.source, self.target))


class StepKind(StrEnum):
    """What one step does to the local array.

    - SLICE: each device keeps its part of a dim; nothing is sent.
    - ALL_GATHER: the minor axes of a dim are gathered.
    - ALL_TO_ALL: the minor axes of a dim move to be the minor axes of another.
    - PERMUTE: shards of equal size change places.
    - ROUNDS: each device fetches its new shard, piece by piece, straight from those who hold it.
    - REALIGN: the rows of an uneven dim move to the neighbours, to shards of another size.
    - REDUCE_SCATTER: unreduced axes are reduced, and become the minor axes of a dim.
    - ALL_REDUCE: unreduced axes are reduced.
    - TERM: a value becomes one device's term of a sum, and zero is the others'; nothing is sent.
    """

    SLICE = "slice"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    PERMUTE = "ppermute"
    ROUNDS = "rounds"
    REALIGN = "realign"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    TERM = "term"

    __hash__ = str.__hash__  # that of enums is written in Python; kinds are in the keys of a search

    @property
    def collective(self) -> CollectiveKind | None:
        """The collective it runs, None where nothing is sent."""
        if self in (StepKind.SLICE, StepKind.TERM):
            return None
        if self in (StepKind.ROUNDS, StepKind.REALIGN):
            return CollectiveKind.PERMUTE
        return CollectiveKind(self.value)


@dataclass(frozen=True, slots=True)
class Part:
    """Axes that one step takes away from a dim, adds to a dim, or both.

    `dim` loses the axes and `to_dim` gains them. SLICE and REDUCE_SCATTER have only `to_dim`,
    ALL_GATHER and REALIGN only `dim`, ALL_REDUCE, PERMUTE, ROUNDS and TERM neither.
    """

    axes: Axes
    dim: int | None = None
    to_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One collective (or slice) on the local array, over all its parts at once.

    `source_shape` and `target_shape` are local, before and after; the tail of an uneven dim is
    padding. `wire_bytes` are those of one device. `rounds`, of ROUNDS alone, number the devices
    over `axes` and count indices in the shard that the axes common to both ends cut out.
    """

    kind: StepKind
    parts: tuple[Part, ...]
    source: Sharding
    target: Sharding
    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    wire_bytes: float
    launches: int
    rounds: tuple[Round, ...] = ()

    @property
    def axes(self) -> Axes:
        """The axes of all parts in order: the group of the collective."""
        return tuple(axis for part in self.parts for axis in part.axes)

    @property
    def dim(self) -> int | None:
        """The dim that loses axes, of the first part."""
        return self.parts[0].dim

    @property
    def to_dim(self) -> int | None:
        """The dim that gains axes, of the first part."""
        return self.parts[0].to_dim

    def __str__(self) -> str:
        """One line, e.g. `all_to_all x: dim 0 -> dim 1, f[4, 8] -> [8, 4], 64 bytes`."""
        moves = ", ".join(_move_text(part) for part in self.parts)
        shapes = f"{list(self.source_shape)} -> {list(self.target_shape)}"
        sent = f", {self.wire_bytes:,.0f} bytes" if self.launches else ""
        several = f" in {self.launches} launches" if self.launches > 1 else ""
        return f"{self.kind.value} {moves}: {shapes}{sent}{several}"


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """How a value of a global shape gets from one sharding to another.

    `wire_bytes` and `peak_bytes` are those of one device; the peak is the largest local array
    before, after or inside any step, padding included. The steps are of the value as an array of
    shape `view`, where some dims are several: those that no step takes apart are one.
    """

    shape: tuple[int, ...]
    itemsize: int
    source: Sharding
    target: Sharding
    steps: tuple[Step, ...]
    wire_bytes: float
    launches: int
    seconds: float
    peak_bytes: int
    view: tuple[int, ...]

    def __str__(self) -> str:
        """A head line with the totals, then a line a step."""
        head = f"{list(self.shape)} from {self.source} to {self.target}: "
        if not self.steps:
            return head + "nothing to do"
        collectives = "1 collective" if self.launches == 1 else f"{self.launches} collectives"
        head += (
            f"{self.wire_bytes:,.0f} wire bytes in {collectives}, "
            f"{microseconds(self.seconds)}, peak {self.peak_bytes:,} bytes"
        )
        view = [] if self.view == self.shape else [f"seen as {list(self.view)}"]
        return "\n".join([head, *(f"  {line}" for line in (*view, *self.steps))])


def _move_text(part: Part) -> str:
    axes = "*".join(part.axes)
    if part.dim is None and part.to_dim is None:
        return axes
    if part.dim is None:
        return f"{axes} on dim {part.to_dim}"
    if part.to_dim is None:
        return f"{axes} of dim {part.dim}"
    return f"{axes} from dim {part.dim} to {part.to_dim}"
