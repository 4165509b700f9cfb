"""Links: over which one each mesh axis runs, and the seconds of a collective over several.

A collective over one axis takes what `communication.wire_seconds` says, with the figures of the
axis's link. One over axes of different links goes axis by axis: reductions over the fastest link
first, so that the slower ones carry only the shards; gathers the other way round; an all_to_all
over the slowest first. Each part waits for the one before, and there is one launch, the longest.
Where all links are alike this is the same as one ring over all devices. A ppermute of several axes
takes the slowest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwise.cost.hardware import DGX2_RING, DGX2_SHARED_CARDS, V100, Hardware
from meshwise.ir.collectives import Collective, CollectiveKind


@dataclass(frozen=True)
class Links:
    """A machine: the figures of its devices, and of the link that each mesh axis runs over.

    Of a link's figures the launch, the bytes a second and the factors of kinds are read. Axes not
    listed run over the device's own link. Each axis has a link to itself, as on a torus; axes that
    are `shared` in one group have one link together, as the devices of one switch. An axis is one
    of the user's mesh; its sub-axes (`model.0`, `model.1`) run where it runs.
    """

    device: Hardware
    axes: tuple[tuple[str, Hardware], ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()

    def figures(self, axis: str) -> Hardware:
        """The figures of an axis's link."""
        return dict(self.axes).get(self._listed(axis), self.device)

    def name(self, axis: str) -> str:
        """The link that an axis runs over: the user's axis, or all that share it."""
        own = self._listed(axis)
        return "+".join(next((group for group in self.shared if own in group), (own,)))

    def launch_s(self, collective: Collective, axis_sizes: Mapping[str, int]) -> float:
        """What one collective takes before its first byte: the longest of its links."""
        used = self._used(collective, axis_sizes)
        return max((figures.start_s(collective.kind) for figures, _ in used), default=0.0)

    def seconds(self, collective: Collective, axis_sizes: Mapping[str, int]) -> float:
        """How long all runs of a collective take, one after another, alone on its links."""
        used = self._used(collective, axis_sizes)
        parts = _parts(collective.kind, [size for _, size in used])
        kind = _priced_as(collective)
        byte_s = sum(
            part * figures.byte_factor(kind) / figures.link_bytes_per_s
            for (figures, _), part in zip(used, parts, strict=True)
        )
        launches = collective.count * self.launch_s(collective, axis_sizes)
        return launches + collective.wire_bytes * byte_s

    def _used(
        self, collective: Collective, axis_sizes: Mapping[str, int]
    ) -> list[tuple[Hardware, int]]:
        """The links of a collective, the fastest first, and over how many devices each goes."""
        sizes: dict[tuple[str, Hardware], int] = {}
        for axis in collective.axes:
            link = self.name(axis), self.figures(axis)
            sizes[link] = sizes.get(link, 1) * axis_sizes[axis]
        used = [(figures, size) for (_, figures), size in sizes.items() if size > 1]
        return sorted(used, key=lambda item: -item[0].link_bytes_per_s)

    def _listed(self, axis: str) -> str:
        """The name by which an axis is known here: its own, or that of the axis it is part of."""
        known = {name for name, _ in self.axes}.union(*self.shared)
        user, _, number = axis.rpartition(".")
        return user if axis not in known and user and number.isdigit() else axis


def _parts(kind: CollectiveKind, sizes: Sequence[int]) -> list[float]:
    """Which part of all wire bytes goes over each link, from the fastest to the slowest."""
    if not sizes:
        return []
    if kind is CollectiveKind.PERMUTE:
        return [0.0] * (len(sizes) - 1) + [1.0]
    is_exchange = kind is CollectiveKind.ALL_TO_ALL
    ordered = sizes[::-1] if is_exchange else sizes
    parts = []
    left = 1.0
    for size in ordered:
        parts.append(left * (size - 1) / size)
        left /= size
    whole = 1 - 1 / math.prod(sizes)
    parts = [part / whole for part in parts]
    return parts[::-1] if is_exchange else parts


def _priced_as(collective: Collective) -> str:
    """The name whose bytes cost what this collective's do."""
    eqn = collective.equation
    minor = eqn is not None and eqn.params.get("all_gather_dimension", 0) > 0
    is_gather = collective.kind is CollectiveKind.ALL_GATHER
    return "minor all_gather" if is_gather and minor else collective.kind


def dgx2(inside: Sequence[str], between: Sequence[str] = (), over_all: Sequence[str] = ()) -> Links:
    """The links of CoCoNeT's machine, DGX-2 nodes of 16 V100, for the axes of a mesh.

    Axes `inside` a node run over NVSwitch and share each device's port; axes `between` nodes, with
    a group for each device of a node, share its network cards; an axis `over_all` devices of
    several nodes has all of the cards for its one group.
    """
    axes = [(axis, V100) for axis in inside]
    axes += [(axis, DGX2_SHARED_CARDS) for axis in between]
    axes += [(axis, DGX2_RING) for axis in over_all]
    groups = (tuple(inside), (*between, *over_all))
    return Links(V100, tuple(axes), tuple(g for g in groups if len(g) > 1))
