"""The demonstration's training step at several meshes, beside XLA's own partitioners, in one run.

    python -m benchmarks.gpt [--schemes NAME ...] [--meshes SHAPE ...] [--steps N] [--peers-only]

Three comparisons a scheme and mesh: bytes sent in a step (as emitted, and with XLA's all-reduces
of which a device keeps a part counted as reduce-scatters), seconds from the function to a
per-device program (ours: trace, complete, partition; XLA: lower and compile, which cannot be told
apart), and seconds that XLA takes to compile our program and its own.
"""

from __future__ import annotations

import os

# Before JAX is imported, which reads them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.table import Table

from benchmarks.peers import hlo
from examples.gpt import hints, model
from examples.gpt.data import batch

KIB = 2**10
NAMES = ("x", "y", "z")
MESHES: dict[str, tuple[int, ...]] = {
    "8": (8,),
    "2x4": (2, 4),
    "4x2": (4, 2),
    "2x2x2": (2, 2, 2),
}
# Two-dimensional sharding on a mesh of one dim is another scheme, and not one to recommend.
LEFT_OUT = {("2d", "8")}


@dataclass(frozen=True)
class Peer:
    """XLA with one of its partitioners. Bytes are per device and step."""

    wire_bytes: float
    credited_bytes: float
    lower_seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class Ours:
    """Meshwise: `partition` is trace, completion and partition; `compile` is XLA's, of the result.

    `deviation` is the largest relative one of the losses from one device's; None if not trained.
    """

    wire_bytes: float
    collectives: int
    partition_seconds: float
    compile_seconds: float
    deviation: float | None


def make_mesh(shape: tuple[int, ...]) -> Mesh:
    """A mesh of eight devices with axes x, y, z."""
    return jax.make_mesh(shape, NAMES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


@cache
def arguments() -> tuple[Any, ...]:
    """State, batch and key of the first step; the state on the host, where no step can take it."""
    state = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    return state, batch(0), jax.random.key(1)


def losses(step: hints.Step, steps: int) -> list[float]:
    """The losses of the first steps of training."""
    state, found = arguments()[0], list[float]()
    for number in range(steps):
        state, metrics = step(state, batch(number), jax.random.fold_in(jax.random.key(1), number))
        found.append(float(metrics["loss"]))
    return found


@cache
def one_device(steps: int) -> list[float]:
    """The losses to compare with."""
    return losses(jax.jit(model.train_step), steps)


def measure_peer(scheme: hints.Scheme, mesh: Mesh, which: hlo.Partitioner) -> Peer:
    """XLA's figures. The time is taken without the dump that the bytes are read from."""
    function, given, returned = hints.hinted_step(scheme, mesh)
    with hlo.partitioner(which):
        start = time.perf_counter()
        step = jax.jit(function, in_shardings=given, out_shardings=returned, donate_argnums=0)
        lowered = step.lower(*arguments())
        middle = time.perf_counter()
        lowered.compile()
        end = time.perf_counter()
        report = hlo.read(lowered)
    return Peer(report.wire_bytes, report.credited_bytes, middle - start, end - middle)


def measure_ours(scheme: hints.Scheme, mesh: Mesh, steps: int) -> Ours:
    """Our figures, for the same function and shardings."""
    import meshwise as mw  # not needed, and perhaps not there, with --peers-only

    function, given, returned = hints.hinted_step(scheme, mesh)
    start = time.perf_counter()
    step = mw.jit(function, mesh=mesh, in_shardings=given, out_shardings=returned, donate_argnums=0)
    program = step.partition(*arguments())
    middle = time.perf_counter()
    program.compile()
    end = time.perf_counter()
    deviation = None
    if steps:
        pairs = zip(losses(step, steps), one_device(steps), strict=True)
        deviation = max(abs(found - wanted) / wanted for found, wanted in pairs)
    runs = sum(collective.count for collective in program.collectives)
    return Ours(program.wire_bytes, runs, middle - start, end - middle, deviation)


def cases(schemes: list[str], meshes: list[str]) -> Iterator[tuple[hints.Scheme, str]]:
    """The schemes and meshes asked for, without those that make no sense together."""
    for scheme in hints.SCHEMES:
        for shape in MESHES:
            asked = scheme.name in schemes and shape in meshes
            if asked and (scheme.name, shape) not in LEFT_OUT:
                yield scheme, shape


def make_table() -> Table:
    table = Table(
        title="GPT training step: XLA (GSPMD / Shardy) and meshwise",
        caption="KiB: sent by a device in a step; in brackets with XLA's sliced all-reduces "
        "counted as reduce-scatters. Ratio: the lower of XLA's two to ours, plain and credited. "
        "Seconds: XLA lower + compile (Shardy); ours trace + complete + partition, then XLA's "
        "compile of our program.",
    )
    for name in ("scheme", "mesh", "GSPMD KiB", "Shardy KiB", "meshwise KiB", "ratio"):
        table.add_column(name, justify="left" if name in ("scheme", "mesh") else "right")
    for name in ("XLA s", "partition s", "compile s", "loss off by"):
        table.add_column(name, justify="right")
    return table


def cells(scheme: str, mesh: str, peers: dict[str, Peer], ours: Ours | None) -> list[str]:
    """One row of the table."""
    shown = [f"{p.wire_bytes / KIB:,.1f} ({p.credited_bytes / KIB:,.1f})" for p in peers.values()]
    shardy = peers["shardy"]
    row = [scheme, mesh, *shown]
    seconds = f"{shardy.lower_seconds:.2f} + {shardy.compile_seconds:.2f}"
    if ours is None:
        return [*row, "", "", seconds, "", "", ""]
    plain = min(p.wire_bytes for p in peers.values()) / ours.wire_bytes
    credited = min(p.credited_bytes for p in peers.values()) / ours.wire_bytes
    return [
        *row,
        f"{ours.wire_bytes / KIB:,.1f}",
        f"{plain:.2f} ({credited:.2f})",
        seconds,
        f"{ours.partition_seconds:.2f}",
        f"{ours.compile_seconds:.2f}",
        "" if ours.deviation is None else f"{ours.deviation:.1e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = [scheme.name for scheme in hints.SCHEMES]
    parser.add_argument("--schemes", nargs="+", choices=every, default=every)
    parser.add_argument("--meshes", nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--steps", type=int, default=0, help="also train this many steps")
    parser.add_argument("--peers-only", action="store_true", help="leave meshwise out")
    options = parser.parse_args()
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=150)
    table = make_table()
    jax.jit(model.train_step).lower(*arguments())  # so that nobody's first trace pays the imports
    for scheme, shape in cases(options.schemes, options.meshes):
        mesh = make_mesh(MESHES[shape])
        with console.status(f"{scheme.title} on {shape}"):
            peers = {which: measure_peer(scheme, mesh, which) for which in hlo.PARTITIONERS}
            ours = None if options.peers_only else measure_ours(scheme, mesh, options.steps)
        table.add_row(*cells(scheme.name, shape, peers, ours))
    console.print(table)


if __name__ == "__main__":
    main()
