"""What a step takes at the sizes of large machines: planned without devices, and printed.

A plan needs the types of the arguments and the shape of the mesh, no array and no device: a model
of a trillion parameters on thousands of devices is planned in seconds on a laptop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import jax
from rich import box
from rich.console import Console
from rich.table import Table

import meshwise as mw
from examples.cases import Case, program_of
from meshwise.ir.sharding import local_bytes

GIB, MIB, KIB = 2**30, 2**20, 2**10


@dataclass(frozen=True)
class Plan:
    """What one device holds, sends and computes in a step. Bytes and operations are of a device.

    `held` are the bytes of its arguments; `sent` and `kinds` are wire bytes and collectives;
    `flops` the multiplications and additions; `seconds` what planning took.
    """

    title: str
    mesh: str
    parameters: int
    held: int
    sent: int
    kinds: Mapping[str, int]
    flops: float
    seconds: float


def plan(case: Case) -> Plan:
    """Plan a step. Its first argument is its parameters (or its state)."""
    start = time.perf_counter()
    program = program_of(case)
    seconds = time.perf_counter() - start
    return Plan(
        case.title,
        mesh_text(case),
        sum(prod(leaf.shape) for leaf in jax.tree.leaves(case.types[0])),
        held_bytes(program),
        program.wire_bytes,
        count_kinds(program),
        device_flops(program),
        seconds,
    )


def mesh_text(case: Case) -> str:
    """The mesh of a case, as `x 2, y 4`."""
    return ", ".join(f"{name} {size}" for name, size in case.mesh.items())


def held_bytes(program: mw.SpmdProgram) -> int:
    """Bytes of all arguments on one device, padding included."""
    per_device = program.per_device
    return sum(
        local_bytes(aval.shape, aval.dtype.itemsize, sharding, per_device.mesh)
        for aval, sharding in zip(per_device.in_types, per_device.in_shardings, strict=True)
    )


def count_kinds(program: mw.SpmdProgram) -> Counter[str]:
    """How many collectives of each kind run in a step."""
    found: Counter[str] = Counter()
    for collective in program.collectives:
        found[str(collective.kind)] += collective.count
    return found


def device_flops(program: mw.SpmdProgram) -> float:
    """Operations of one device in a step: its share of what every operator's rule says it takes."""
    plan = program.plan
    total = 0.0
    decisions = zip(plan.rules, plan.equations, plan.program.trips, strict=True)
    for rule, decided, trips in decisions:
        factors = zip(rule.factors.sizes, decided.strategy.axes, strict=True)
        share = 1.0
        for size, axes in factors:
            if size:
                share *= -(-size // plan.program.mesh.size(axes)) / size
        total += rule.flops * share * trips
    return total


def show_sizes(console: Console, cases: Iterable[Case], caption: str) -> None:
    """Plan some steps and print what they take."""
    plans = []
    for case in cases:
        with console.status(f"planning {case.title} for {case.devices} devices"):
            plans.append(plan(case))
    console.print(sizes_table(plans, caption))


def sizes_table(plans: Iterable[Plan], caption: str = "") -> Table:
    """One row a plan."""
    made = Table(
        title="Planned without devices: what each device holds, sends and computes in a step",
        caption=caption,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_lines=True,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("model", "mesh", "numbers"):
        made.add_column(name)
    for name in ("held", "collectives", "sent", "flops", "planned"):
        made.add_column(name, justify="left" if name == "collectives" else "right")
    for row in plans:
        made.add_row(
            row.title,
            row.mesh.replace(", ", "\n"),
            number_text(row.parameters),
            bytes_text(row.held),
            kinds_text(row.kinds),
            bytes_text(row.sent),
            number_text(row.flops),
            f"{row.seconds:.1f} s",
        )
    return made


def kinds_text(kinds: Mapping[str, int]) -> str:
    """How many of each kind, a line each."""
    return "\n".join(f"{n:4d} {kind}" for kind, n in sorted(kinds.items())) or "none"


def number_text(number: float) -> str:
    """A count in words of three digits, as 618 B."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


def bytes_text(number: float) -> str:
    """Bytes in the unit that they fill."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,.0f} B"
