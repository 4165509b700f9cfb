"""The demonstration's training step at several meshes, beside XLA's own partitioners, in one run.

    python -m benchmarks.gpt [--schemes NAME ...] [--meshes SHAPE ...] [--repeats N] [--steps N]
                             [--markdown]

Three comparisons a scheme and mesh: bytes sent in a step (as emitted, and with XLA's all-reduces
of which a device keeps a part counted as reduce-scatters), seconds from the function to a
per-device program (ours: trace, complete, choose, partition; XLA: lower and compile, which cannot
be told apart), and seconds that XLA takes to compile our program and its own.

Seconds are medians of some rounds; in each, every contestant starts without anything remembered
of the rounds before. Bytes do not vary.
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
import functools
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.stages import Lowered
from rich import box
from rich.console import Console
from rich.table import Table

import meshwise as mw
from benchmarks.peers import hlo
from examples.gpt import hints, model
from examples.gpt.data import batch

KIB = 2**10
WIDTH = 100  # columns, where there is no terminal to ask
STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "title_justify": "left",
    "caption_justify": "left",
}
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
class Bytes:
    """What a device sends in a step. Ours are as emitted, so `credited` is the same."""

    plain: float
    credited: float


@dataclass
class Times:
    """Seconds of each round.

    `before` is until there is something to compile: ours is the per-device program (trace to
    partition), whose lowering is in `compile`; XLA's is the function lowered.
    """

    before: list[float] = field(default_factory=list)
    compile: list[float] = field(default_factory=list)


@dataclass
class Row:
    """One scheme and mesh: "gspmd", "shardy" and, unless left out, "meshwise".

    `deviation` is the largest relative one of the losses from one device's; None if not trained.
    """

    scheme: str
    mesh: str
    sent: dict[str, Bytes] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=lambda: defaultdict(Times))
    deviation: float | None = None


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


def forget() -> None:
    """Drop what JAX and meshwise remember, so that every round starts as a first one."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "meshwise":
            for function in vars(module).values():
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()
    gc.collect()


def time_peer(scheme: hints.Scheme, mesh: Mesh, which: hlo.Partitioner, times: Times) -> Lowered:
    """One round of XLA: lower and compile the hinted step."""
    function, given, returned = hints.hinted_step(scheme, mesh)
    forget()
    with hlo.partitioner(which):
        start = time.perf_counter()
        step = jax.jit(function, in_shardings=given, out_shardings=returned, donate_argnums=0)
        lowered = step.lower(*arguments())
        middle = time.perf_counter()
        lowered.compile()
        times.before.append(middle - start)
        times.compile.append(time.perf_counter() - middle)
    return lowered


def time_ours(scheme: hints.Scheme, mesh: Mesh, times: Times) -> tuple[Any, Any]:
    """One round of ours: partition the hinted step, then compile what comes of it."""
    function, given, returned = hints.hinted_step(scheme, mesh)
    forget()
    start = time.perf_counter()
    step = mw.jit(function, mesh=mesh, in_shardings=given, out_shardings=returned, donate_argnums=0)
    program = step.partition(*arguments())
    partitioned = time.perf_counter()
    program.compile()
    times.before.append(partitioned - start)
    times.compile.append(time.perf_counter() - partitioned)
    return step, program


def measure(scheme: hints.Scheme, shape: str, options: argparse.Namespace) -> Row:
    """Everything about one scheme and mesh; the contestants take turns."""
    row, mesh = Row(scheme.name, shape), make_mesh(MESHES[shape])
    for turn in range(options.repeats):
        for which in hlo.PARTITIONERS:
            lowered = time_peer(scheme, mesh, which, row.times[which])
            if not turn:
                with hlo.partitioner(which):
                    report = hlo.read(lowered)
                row.sent[which] = Bytes(report.wire_bytes, report.credited_bytes)
        if options.peers_only:
            continue
        step, program = time_ours(scheme, mesh, row.times["meshwise"])
        row.sent["meshwise"] = Bytes(program.wire_bytes, program.wire_bytes)
        if not turn and options.steps:
            pairs = zip(losses(step, options.steps), one_device(options.steps), strict=True)
            row.deviation = max(abs(found - wanted) / wanted for found, wanted in pairs)
    return row


def cases(schemes: list[str], meshes: list[str]) -> Iterator[tuple[hints.Scheme, str]]:
    """The schemes and meshes asked for, without those that make no sense together."""
    for scheme in hints.SCHEMES:
        for shape in MESHES:
            asked = scheme.name in schemes and shape in meshes
            if asked and (scheme.name, shape) not in LEFT_OUT:
                yield scheme, shape


def bytes_table(rows: list[Row]) -> Table:
    """Who sends how much."""
    table = Table(
        title="KiB that a device sends in a training step",
        caption="In brackets: with those of XLA's all-reduces of which a device keeps only a part "
        "counted as reduce-scatters. XLA / ours: the lower of XLA's two over ours.",
        **STYLE,
    )
    for name in ("scheme", "mesh", "GSPMD", "Shardy", "meshwise", "XLA / ours", "loss off by"):
        table.add_column(name, justify="left" if name in ("scheme", "mesh") else "right")
    for row in rows:
        peers = [row.sent[which] for which in hlo.PARTITIONERS]
        cells = [f"{p.plain / KIB:,.1f} ({p.credited / KIB:,.1f})" for p in peers]
        ours = row.sent.get("meshwise")
        if ours is not None:
            plain = min(p.plain for p in peers) / ours.plain
            credited = min(p.credited for p in peers) / ours.credited
            cells += [f"{ours.plain / KIB:,.1f}", f"{plain:.2f} ({credited:.2f})"]
        if row.deviation is not None:
            cells.append(f"{row.deviation:.1e}")
        table.add_row(row.scheme, row.mesh, *cells)
    return table


def seconds_table(rows: list[Row], repeats: int) -> Table:
    """Who takes how long to a program, and to compile it."""
    table = Table(
        title=f"Seconds, medians of {repeats}",
        caption="GSPMD and Shardy: lower + compile of the step. partition: ours from the function "
        "to the per-device program (trace, complete, choose, partition). compile: our program "
        "lowered and compiled. XLA / ours: Shardy's lower + compile over our partition, and "
        "Shardy's compile over the compile of our program.",
        **STYLE,
    )
    ours = "partition", "XLA / ours", "compile", "XLA / ours"
    for name in ("scheme", "mesh", "GSPMD", "Shardy", *ours):
        table.add_column(name, justify="left" if name in ("scheme", "mesh") else "right")
    for row in rows:
        cells = [_two(row.times[which]) for which in hlo.PARTITIONERS]
        own, shardy = row.times.get("meshwise"), row.times["shardy"]
        if own is not None:
            whole = median(shardy.before) + median(shardy.compile)
            cells += [f"{median(own.before):.2f}", f"{whole / median(own.before):.2f}"]
            compiled = median(shardy.compile) / median(own.compile)
            cells += [f"{median(own.compile):.2f}", f"{compiled:.2f}"]
        table.add_row(row.scheme, row.mesh, *cells)
    return table


def markdown(rows: list[Row]) -> str:
    """The table of the README."""
    lines = [
        "| scheme | mesh | XLA with GSPMD | XLA with Shardy | meshwise | XLA / meshwise |",
        "|---|---|---|---|---|---|",
    ]
    titles = {scheme.name: scheme.title for scheme in hints.SCHEMES}
    for row in rows:
        peers, ours = [row.sent[which] for which in hlo.PARTITIONERS], row.sent["meshwise"].plain
        cells = [f"{p.plain / KIB:,.1f} ({p.credited / KIB:,.1f})" for p in peers]
        ratios = [min(p.plain for p in peers) / ours, min(p.credited for p in peers) / ours]
        cells += [f"**{ours / KIB:,.1f}**", "{:.2f} ({:.2f})".format(*ratios)]
        lines.append("| " + " | ".join([titles[row.scheme], row.mesh, *cells]) + " |")
    return "\n".join(lines)


def _two(times: Times) -> str:
    return f"{median(times.before):.2f} + {median(times.compile):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = [scheme.name for scheme in hints.SCHEMES]
    parser.add_argument("--schemes", nargs="+", choices=every, default=every)
    parser.add_argument("--meshes", nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--repeats", type=int, default=3, help="rounds of timing (default: 3)")
    parser.add_argument("--steps", type=int, default=0, help="also train this many steps")
    parser.add_argument("--markdown", action="store_true", help="also print the README's table")
    parser.add_argument("--peers-only", action="store_true", help="leave meshwise out")
    options = parser.parse_args()
    if options.steps < 0:
        parser.error("--steps is 0 or more")
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=WIDTH)
    jax.jit(model.train_step).lower(*arguments())  # so that nobody's first trace pays the imports
    rows = []
    for scheme, shape in cases(options.schemes, options.meshes):
        start = time.perf_counter()
        with console.status(f"{scheme.title} on {shape}"):
            rows.append(measure(scheme, shape, options))
        console.print(f"[dim]{time.perf_counter() - start:6.1f} s[/]  {scheme.title} on {shape}")
    console.print(bytes_table(rows))
    console.print(seconds_table(rows, options.repeats))
    if options.markdown:
        print(markdown(rows))


if __name__ == "__main__":
    main()
