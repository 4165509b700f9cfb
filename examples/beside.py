"""A step run for real on one device and on a mesh, beside what XLA's partitioners would send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.peers import hlo
from examples.cases import Case, ours, peer, real_mesh
from examples.sizes import KIB, count_kinds, kinds_text, mesh_text

WIDTH = 100  # columns, where there is no terminal to ask
Advance = Callable[[Any], tuple[Any, float]]  # from a step's result: the next state, and a figure


@dataclass(frozen=True)
class Run:
    """Some steps: the last state, the figure of each step, and seconds a step but for the first."""

    state: Any
    figures: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Row:
    """One case: what it sends, how far it is from one device, and what XLA would send."""

    title: str
    mesh: str
    kinds: Mapping[str, int]
    sent: float
    figure: float
    deviation: float
    seconds: float
    peers: Mapping[str, float] = field(default_factory=dict)


def terminal() -> Console:
    """The console; of a fixed width where it is none."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def trained(result: Any) -> tuple[Any, float]:
    """A training step's result is the next parameters and the loss."""
    state, loss = result
    return state, float(loss)


def run(
    step: Callable[..., Any], state: Any, data: Iterable[tuple[Any, ...]], advance: Advance
) -> Run:
    """Some steps, each with the data of its own."""
    figures: list[float] = []
    start = 0.0
    for batch in data:
        state, figure = advance(step(state, *batch))
        figures.append(figure)
        start = start or time.perf_counter()
    jax.block_until_ready(state)
    return Run(state, tuple(figures), (time.perf_counter() - start) / max(1, len(figures) - 1))


def measure(
    case: Case, state: Any, data: list[tuple[Any, ...]], wanted: Any, advance: Advance = trained
) -> Row:
    """Run a case on its devices, from where one device began to `wanted`, where it ended."""
    step = ours(case, real_mesh(case))
    program = step.partition(*case.types)
    found = run(step, state, data, advance)
    return Row(
        case.title,
        mesh_text(case),
        count_kinds(program),
        program.wire_bytes,
        found.figures[-1],
        deviation(found.state, wanted),
        found.seconds,
        {which: peer(case, which).wire_bytes for which in hlo.PARTITIONERS},
    )


def deviation(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, relative to the largest number of its array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    arrays = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in arrays)


def runs_table(rows: Iterable[Row], title: str, figure: str = "loss") -> Table:
    """One row a case."""
    made = Table(
        title=title,
        caption="KiB: what each device sends in a step. Off: the largest difference between the "
        "last states, relative to the largest number of the array.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_lines=True,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("hints", "mesh", "collectives"):
        made.add_column(name)
    for name in (f"{figure}\noff", "meshwise\nKiB", "GSPMD\nKiB", "Shardy\nKiB", "ms a\nstep"):
        made.add_column(name, justify="right")
    for row in rows:
        made.add_row(
            row.title,
            row.mesh.replace(", ", "\n"),
            kinds_text(row.kinds),
            f"{row.figure:.6g}\n{row.deviation:.0e}",
            f"[bold]{row.sent / KIB:,.1f}[/]",
            *(f"{row.peers[which] / KIB:,.1f}" for which in hlo.PARTITIONERS),
            f"{row.seconds * 1000:,.0f}",
        )
    return made
