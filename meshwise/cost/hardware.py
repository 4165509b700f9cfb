"""Figures of hardware, each with its unit in its name and where it comes from beside it.

A figure is for one device (a chip), in both directions of use: `link_bytes_per_s` is what one
device can send to the rest of its group in a ring collective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

# What a name costs that is not listed: as another.
_LIKE = {"round": "ppermute", "minor all_gather": "all_gather"}


@dataclass(frozen=True, repr=False)
class Hardware:
    """What one device does in a second, and what it takes to start a collective.

    `launch_s` is the time a collective takes before its first byte, `round_s` that of one of the
    rounds in which pieces travel, with the cutting and writing of the piece. `byte_factors` lists
    kinds of collectives (by JAX's name) whose bytes take longer than the link says, and how many
    times: `(("all_to_all", 5.0),)`. Kinds that are not listed count once. Three more names are
    known: "round" is a byte of a piece that is cut, sent and written (as "ppermute" where not
    listed); "minor all_gather" one of an all_gather of a dim that is not the leading one, which
    must be put in order afterwards (as "all_gather"); "slice" a byte that is only copied (free).
    `launch_factors` lists in the same way kinds that take longer to start, and how many times.

    `serial_flops_per_s` are those that are done one after the other, as a sort compares: as many as
    others where it is None.

    `call_s` is the time that a function of one number takes for which there is no vector unit, as a
    sine; nothing where there is one.

    `kernel_s` is the time a kernel on the compute unit takes before it does anything.

    With `bytes_first` every byte that is sent costs so many times more when plans are compared:
    of those that send least the fastest is taken. It is no part of a plan's seconds.

    With `least_bytes`, the few plans that a search ends with are compared by bytes and work alone,
    however many launches they take.
    """

    name: str
    link_bytes_per_s: float
    launch_s: float
    flops_per_s: float
    memory_bytes_per_s: float
    source: str
    byte_factors: tuple[tuple[str, float], ...] = ()
    launch_factors: tuple[tuple[str, float], ...] = ()
    round_s: float | None = None
    bytes_first: float = 0.0
    kernel_s: float = 0.0
    least_bytes: bool = False
    serial_flops_per_s: float | None = None
    call_s: float = 0.0

    def __repr__(self) -> str:
        """Its name; `print` shows the figures."""
        return f"<Hardware {self.name}>"

    def __str__(self) -> str:
        """The name, then a line a figure that is known."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        del said["name"]
        lines = [f"  {name:18} {_shown(value)}" for name, value in said.items() if value]
        return "\n".join([self.name, *lines])

    def compute_s(self, flops: float, serial_flops: float = 0.0, calls: float = 0.0) -> float:
        """The time of so many flops, some of which are done one after the other, and of calls."""
        serial = serial_flops / (self.serial_flops_per_s or self.flops_per_s)
        return (flops - serial_flops) / self.flops_per_s + serial + calls * self.call_s

    def byte_factor(self, kind: str) -> float:
        """How many times longer than the link says a byte of this kind of collective takes."""
        listed = dict(self.byte_factors)
        if kind == "slice":
            return listed.get(kind, 0.0)
        return listed.get(kind, listed.get(_LIKE.get(kind, kind), 1.0))

    def start_s(self, kind: str) -> float:
        """The time that a collective of this kind takes before its first byte."""
        return self.launch_s * dict(self.launch_factors).get(kind, 1.0)


def _shown(figure: Any) -> str:
    """A figure, factors of kinds, or a text."""
    if isinstance(figure, tuple):
        return ", ".join(f"{kind} {factor:.3g}" for kind, factor in figure)
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


# To compare designs by wire bytes where nothing is known of the machine. A launch costs as much as
# 32 bytes. That is far less than on any real machine (tens of kilobytes), and it is meant: plans
# are compared on small examples too, where a real launch time would make every byte look free,
# and the choice must be the one that is right at full size. It is still more than nothing, so that
# of two plans with the same bytes the one with fewer collectives wins; the plans that a search ends
# with, completion among them, are compared as if it were nothing. A reduce_scatter and an
# all_gather after it take a little longer than the all_reduce of the same bytes (measured on CPU:
# 13 ms against 12 ms), so that one is split only where that saves something. A ppermute and an
# all_to_all are priced alike, between the two: two exchanges are no cheaper than one permute of as
# many bytes. A round of pieces adds half a dozen equations to the program, and must save more than
# a launch to be worth them.
GENERIC = Hardware(
    name="generic",
    link_bytes_per_s=100e9,
    launch_s=32 / 100e9,
    flops_per_s=100e12,
    memory_bytes_per_s=1e12,
    source="round figures; the launch time is the time of 32 bytes",
    round_s=512 / 100e9,
    least_bytes=True,
    byte_factors=(
        ("all_gather", 1.02),
        ("all_to_all", 1.01),
        ("ppermute", 1.01),
        ("reduce_scatter", 1.02),
    ),
)

# Fewest bytes, then fewest launches: as `GENERIC` for arrays so large that launches take no time.
LARGE_ARRAYS = replace(
    GENERIC,
    name="generic, for large arrays",
    launch_s=1e-3 / 100e9,
    round_s=1e-3 / 100e9,
    byte_factors=(),
    bytes_first=1.0,
    source="GENERIC with the launch time of a thousandth of a byte",
)

# Devices that are threads of one machine, as in tests. There is no link: each byte is copied, and
# what counts is how often, and in what order it is read and written. A ppermute copies whole
# shards; an all_to_all and an all_gather of a minor dim put everything in another order before or
# after. Shards of many megabytes, which fit no cache, take several times as long a byte. A
# comparison of a sort takes 11 ns; it counts as 7, as what a sort in shards does between its
# exchanges takes as long as these, and is not counted.
CPU = Hardware(
    name="CPU",
    link_bytes_per_s=3.5e9,
    launch_s=110e-6,
    flops_per_s=24e9,
    memory_bytes_per_s=3e9,
    source="mw.calibrate, 2026: 8 devices on 2 cores, float32 shards of 64 KiB to 1 MiB, rounded; "
    "flops and memory: products and sums on all devices at once, which share the machine's; serial "
    "ones: a sort; call: a cosine",
    byte_factors=(
        ("all_gather", 1.5),
        ("minor all_gather", 4.5),
        ("all_to_all", 8.0),
        ("round", 9.0),
        ("reduce_scatter", 0.9),
        ("all_reduce", 0.9),
        ("slice", 1.1),
    ),
    launch_factors=(("all_gather", 1.2), ("all_to_all", 1.3)),
    round_s=145e-6,
    serial_flops_per_s=140e6,
    call_s=24e-9,
)

TPU_V5E = Hardware(
    name="TPU v5e",
    link_bytes_per_s=200e9,
    launch_s=1e-6,
    flops_per_s=197e12,
    memory_bytes_per_s=819e9,
    source="cloud.google.com/tpu/docs/v5e, read in 2026: 197 TFLOP/s bf16, 819 GB/s HBM, interchip "
    "links 400 GB/s a chip both ways, 200 GB/s each; launch: an order of magnitude, not published",
)

H100 = Hardware(
    name="H100 SXM",
    link_bytes_per_s=450e9,
    launch_s=5e-6,
    flops_per_s=989e12,
    memory_bytes_per_s=3.35e12,
    source="NVIDIA H100 data sheet, SXM: 989 TFLOP/s bf16 dense, 3.35 TB/s, NVLink 900 GB/s both "
    "ways, 450 GB/s each; launch: order of magnitude of an NCCL kernel, not published; kernel: "
    "order of magnitude of a launch from a CUDA graph, not published",
    kernel_s=2e-6,
)

# The machine of CoCoNeT's evaluation (arXiv 2105.05720): 16 DGX-2, of 16 V100 each, which NVSwitch
# joins inside a node and eight network cards of 100 Gb/s each between nodes.
V100 = Hardware(
    name="V100 in a DGX-2",
    link_bytes_per_s=150e9,
    launch_s=10e-6,
    flops_per_s=125e12,
    memory_bytes_per_s=900e9,
    source="NVIDIA V100 and DGX-2 data sheets: 125 TFLOP/s of fp16 on tensor cores, 900 GB/s HBM2, "
    "NVLink 300 GB/s both ways, 150 GB/s each; estimates: launch, kernel (orders of magnitude of "
    "an NCCL 2.6 kernel and of a CUDA launch)",
    kernel_s=5e-6,
)

# Between the nodes: each device in a group of its own, as for tensors that lie sharded over the
# node, so that 16 devices share the 100 GB/s of the eight cards.
DGX2_SHARED_CARDS = replace(
    V100,
    name="InfiniBand of a DGX-2, a sixteenth of it",
    link_bytes_per_s=100e9 / 16,
    launch_s=20e-6,
    source="NVIDIA DGX-2 data sheet: eight cards of 100 Gb/s a node, 100 GB/s together, a "
    "sixteenth for each device; estimate: launch",
)

# Between the nodes: one group over all devices, whose rings cross a card each, so that all of the
# 100 GB/s serve every device's bytes.
DGX2_RING = replace(
    DGX2_SHARED_CARDS,
    name="rings over all devices of several DGX-2",
    link_bytes_per_s=100e9,
    launch_s=100e-6,
    source="as the cards, all of them for one group; launch: of 2^10 elements on 128 devices, "
    "0.11 ms in the artefact's log (parasailteam/coconet, examples/adam)",
)

# The same as the artefact's log has it: what a NCCL 2.6 ring reached there.
DGX2_RING_MEASURED = replace(
    DGX2_RING,
    name="rings over all devices of several DGX-2, as logged",
    link_bytes_per_s=41e9,
    source="the artefact's log of 128 devices: 2^30 fp16 elements reduced and gathered in 0.105 s, "
    "2 * 127/128 * 2^31 bytes / 0.105 s; the unit of the log is read from its context",
)

# Figures of platforms, by JAX's names, whose kinds of collectives differ by more than bytes.
OF_PLATFORM: Mapping[str, Hardware] = {"cpu": replace(CPU, bytes_first=1000.0)}
