"""Train a small GPT on one device, and the same step on eight under four sets of hints.

    python -m examples.gpt.demo [--steps N] [--peers-only]

Ends in a table: the loss beside one device's, the collectives of the per-device program, and the
bytes that each device sends in a step beside what XLA's two partitioners send for the same hints.
And in a page of HTML for each program.
"""

from __future__ import annotations

import os

# Before JAX is imported, which reads them: eight devices on one host, without C++ chatter.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import meshwise as mw
from benchmarks.peers import hlo
from examples.gpt import hints, model
from examples.gpt.data import batch

MESHES: dict[str, dict[str, int]] = {
    "data": {"data": 8},
    "zero3": {"data": 8},
    "megatron": {"data": 2, "model": 4},
    "2d": {"x": 2, "y": 4},
}
KIB, MIB = 2**10, 2**20
PAGES = Path("build", "gpt")
WIDTH = 100  # columns, where there is no terminal to ask


@dataclass
class Row:
    """What is known of one scheme so far. Bytes are per device, and per step where sent."""

    title: str
    loss: float = float("nan")
    collectives: Mapping[str, int] = field(default_factory=dict)
    wire_bytes: float = float("nan")
    peers: dict[str, hlo.Report] = field(default_factory=dict)
    peak_bytes: int = 0
    page: str = ""


class Screen:
    """Progress while it works: a bar on a terminal, a line a stage where there is none."""

    def __init__(self, stages: int) -> None:
        console = Console()
        self.console = console if console.is_terminal else Console(width=WIDTH)
        self.bars = Progress(
            TextColumn("{task.description:<54}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.overall = self.bars.add_task("the whole demonstration", total=stages)

    @contextmanager
    def stage(self, what: str, steps: int = 1) -> Iterator[Callable[[], None]]:
        """One stage of the work; call what is given once a step."""
        task, start = self.bars.add_task(what, total=steps), time.perf_counter()
        yield lambda: self.bars.advance(task)
        self.bars.remove_task(task)
        self.bars.advance(self.overall)
        self.console.print(f"[dim]{time.perf_counter() - start:6.1f} s[/]  {what}")

    def note(self, text: str) -> None:
        """A line under the stage that was last."""
        self.console.print(f"          [dim]{text}[/]", highlight=False)


def train(
    step: hints.Step, state: model.State, steps: int, advance: Callable[[], None]
) -> tuple[list[float], float]:
    """The losses of some steps, and the seconds of one, its compilation aside."""
    losses: list[float] = []
    start = 0.0
    for number in range(steps):
        state, metrics = step(state, batch(number), jax.random.fold_in(jax.random.key(1), number))
        losses.append(float(metrics["loss"]))
        start = start or time.perf_counter()
        advance()
    return losses, (time.perf_counter() - start) / max(1, steps - 1)


def progress_text(losses: list[float], seconds: float) -> str:
    """What a training run did, in a line."""
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {seconds * 1000:.0f} ms a step"


def peak_bytes(compiled: Any) -> int:
    """Bytes that a device holds at once, at most: arguments, results and temporaries.

    XLA's own `peak_memory_in_bytes` leaves the temporaries out on CPU.
    """
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def run_scheme(
    scheme: hints.Scheme, state: model.State, steps: int, screen: Screen, *, peers_only: bool
) -> Row:
    """Train under one scheme, and read what XLA's partitioners make of the same hints."""
    axes = MESHES[scheme.name]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    shape = " x ".join(f"{name} {size}" for name, size in axes.items())
    row = Row(f"{scheme.title.replace(' (', chr(10) + '(')}\n[dim]{shape}[/]")
    state = jax.device_put(state, hints.state_shardings(scheme, mesh))
    arguments = (state, batch(0), jax.random.key(1))
    with screen.stage(f"{scheme.title}, {prod(axes.values())} devices", steps + 1) as advance:
        if peers_only:
            step, row.peak_bytes = _xla_step(scheme, mesh, arguments)
        else:
            step, program = _our_step(scheme, mesh, arguments)
            row.peak_bytes = peak_bytes(program.compile())
            row.wire_bytes = program.wire_bytes
            row.page = write_page(scheme, program)
            row.collectives = count_kinds(program.collectives)
        advance()
        losses, seconds = train(step, state, steps, advance)
        row.loss = losses[-1]
    screen.note(progress_text(losses, seconds))
    for which in hlo.PARTITIONERS:
        with screen.stage(f"{scheme.title}, as XLA partitions it ({which})"):
            row.peers[which] = _peer(scheme, mesh, arguments, which)
    return row


def _our_step(scheme: hints.Scheme, mesh: Mesh, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """The hinted step through meshwise, and its per-device program."""
    import meshwise as mw  # not needed, and perhaps not there, with --peers-only

    function, given, returned = hints.hinted_step(scheme, mesh)
    step = mw.jit(function, mesh=mesh, in_shardings=given, out_shardings=returned, donate_argnums=0)
    return step, step.partition(*arguments)


def _xla_step(scheme: hints.Scheme, mesh: Mesh, arguments: tuple[Any, ...]) -> tuple[Any, int]:
    """The hinted step through `jax.jit`, and its peak bytes."""
    function, given, returned = hints.hinted_step(scheme, mesh)
    step = jax.jit(function, in_shardings=given, out_shardings=returned, donate_argnums=0)
    return step, peak_bytes(step.lower(*arguments).compile())


def _peer(
    scheme: hints.Scheme, mesh: Mesh, arguments: tuple[Any, ...], which: hlo.Partitioner
) -> hlo.Report:
    """The collectives that one of XLA's partitioners emits for the hinted step."""
    function, given, returned = hints.hinted_step(scheme, mesh)
    with hlo.partitioner(which):
        return hlo.read(
            jax.jit(function, in_shardings=given, out_shardings=returned).lower(*arguments)
        )


def write_page(scheme: hints.Scheme, program: mw.SpmdProgram) -> str:
    """Write the program as a page; where to."""
    PAGES.mkdir(parents=True, exist_ok=True)
    page = PAGES / f"{scheme.name}.html"
    page.write_text(program.to_html(), encoding="utf-8")
    return str(page)


def count_kinds(collectives: Any) -> Mapping[str, int]:
    """How many collectives of each kind run in a step, trips included."""
    found: Counter[str] = Counter()
    for collective in collectives:
        found[str(collective.kind)] += collective.count
    return found


def table(rows: list[Row], single: float, steps: int, *, peers_only: bool) -> Table:
    """The result: one row a scheme."""
    who = "jax.jit" if peers_only else "meshwise"
    made = Table(
        title=f"{steps} steps; one device ends at a loss of {single:.6f}",
        caption="KiB: what each device sends in a step. In brackets: if each of XLA's all-reduces "
        "of which a device keeps only a part were a reduce-scatter.",
        box=box.SIMPLE_HEAD,
        show_lines=True,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    made.add_column(f"scheme ({who})")
    made.add_column("final loss\n(beside one)", justify="right", min_width=12)
    made.add_column("collectives")
    for name in ("meshwise", "GSPMD", "Shardy"):
        made.add_column(f"{name}\nKiB", justify="right", min_width=9)
    made.add_column("peak MiB\na device", justify="right", min_width=8)
    for row in rows:
        made.add_row(
            row.title,
            f"{row.loss:.6f}\n({(row.loss - single) / single:+.1e})",
            "\n".join(f"{n:3d} {kind}" for kind, n in sorted(row.collectives.items())),
            "" if np.isnan(row.wire_bytes) else f"[bold]{row.wire_bytes / KIB:,.1f}[/]",
            *(_sent(row.peers[which]) for which in hlo.PARTITIONERS),
            f"{row.peak_bytes / MIB:.2f}",
        )
    return made


def _sent(report: hlo.Report) -> str:
    return f"{report.wire_bytes / KIB:,.1f}\n({report.credited_bytes / KIB:,.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument(
        "--peers-only", action="store_true", help="train through jax.jit; leave meshwise out"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps is 1 or more")
    screen = Screen(stages=1 + 3 * len(hints.SCHEMES))
    start = time.perf_counter()
    with screen.bars:
        # On the host, so that a step that donates its state cannot take it from the next scheme.
        state = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
        with screen.stage("one device", options.steps) as advance:
            losses, seconds = train(jax.jit(model.train_step), state, options.steps, advance)
        screen.note(progress_text(losses, seconds))
        rows = [
            run_scheme(scheme, state, options.steps, screen, peers_only=options.peers_only)
            for scheme in hints.SCHEMES
        ]
    screen.console.print(table(rows, losses[-1], options.steps, peers_only=options.peers_only))
    pages = [row.page for row in rows if row.page]
    if pages:
        screen.console.print("Each program with its timeline, its lines and why:", *pages)
    screen.console.print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
