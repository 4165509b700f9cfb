"""The suite compiled for a mesh of TPUs that is not there, beside XLA's two partitioners.

    pip install libtpu
    python -m benchmarks.suite.tpu [--groups NAME ...] [--programs PART ...] [--json FILE]
                                   [--saved FILE ...] [--markdown]

That pipeline repairs much that the one for CPU does not, so its final HLO is the peer to beat.
Nothing is run, and no array made: the group "real sizes" has programs as large as those in use
(`--groups "real sizes"`, which the rest is compiled without). Read from each compiled program:
wire bytes, the peak of temporaries, and `optimal_seconds`, the compiler's own estimate, which does
not know what a link takes.
"""

from __future__ import annotations

import os

# Before JAX and the TPU compiler are imported, which read them.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

from benchmarks.suite import devices  # then: it sets JAX up

# isort: split
import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.peers import hlo
from benchmarks.suite import contestants
from benchmarks.suite.every_program import PROGRAMS, a_file, chosen
from benchmarks.suite.figures import SMALL_BYTES, geomean
from benchmarks.suite.measure import OURS, PEERS
from benchmarks.suite.program import GROUPS, Program
from benchmarks.suite.programs import large
from benchmarks.suite.tables import kib, markdown, ratio

EVERY = (*PROGRAMS, *large.TABLE)
HEADS = ("program", "mesh", "Shardy KiB", "GSPMD KiB", "ours KiB", "best", "bytes", "memory")


@dataclass(frozen=True)
class Compiled:
    """What the TPU compiler made of one program: wire bytes and peak temporaries of a device.

    Loops whose trips are not in the text, `uncounted_loops`, count as one trip.
    """

    sent: float = 0.0
    memory: int = 0
    optimal_s: float | None = None
    uncounted_loops: int = 0
    failed: str = ""


@dataclass(frozen=True)
class Row:
    """One program by column."""

    group: str
    name: str
    mesh: tuple[int, ...]
    best: float | None
    columns: dict[str, Compiled]

    def ratio(self, value: Callable[[Compiled], float], least: float = 0.0) -> float | None:
        """The better of XLA's two over ours; None where somebody failed."""
        peers = [c for which in PEERS if not (c := self.columns[which]).failed]
        ours = self.columns[OURS]
        if not peers or ours.failed:
            return None
        theirs, mine = max(min(map(value, peers)), least), max(value(ours), least)
        return theirs / mine if mine else (inf if theirs else 1.0)

    @property
    def sent(self) -> float | None:
        """Wire bytes, XLA / ours."""
        return self.ratio(lambda c: c.sent)

    @property
    def memory(self) -> float | None:
        """Peak of temporaries, XLA / ours; below `SMALL_BYTES` all are alike."""
        return self.ratio(lambda c: c.memory, SMALL_BYTES)


class Compiler:
    """A process of its own to compile in: on some programs the TPU compiler ends it."""

    def __init__(self, topology: str):
        """Start nothing yet."""
        self.topology = topology
        self._pool: ProcessPoolExecutor | None = None

    def row(self, program: Program) -> Row:
        """Every column of a program."""
        columns = {which: self._column(program, which) for which in (*PEERS, OURS)}
        best = None if program.best is None else program.best.sent
        return Row(program.group, program.name, program.mesh, best, columns)

    def _column(self, program: Program, which: str) -> Compiled:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        named = program.group, program.name
        try:
            return self._pool.submit(compiled, named, which, self.topology).result()
        except BrokenProcessPool:
            self._pool = None
            return Compiled(failed="the compiler ended the process")


def compiled(named: tuple[str, str], which: str, topology: str) -> Compiled:
    """What comes of a program, of that group and name, for chips of a topology."""
    # Products in full precision: otherwise float32 travels in half of its bytes, or not, by chance.
    jax.config.update("jax_default_matmul_precision", "highest")
    (program,) = (p for p in EVERY if (p.group, p.name) == named)
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    axes = devices.AXES[: len(program.mesh)]
    types = (AxisType.Auto,) * len(axes)
    mesh = Mesh(np.array(chips).reshape(program.mesh), axes, axis_types=types)
    args = contestants.shapes(program)
    try:
        made = _ours(program, args, mesh) if which == OURS else _peer(which, program, args, mesh)
    except Exception:
        return Compiled(failed=traceback.format_exc(limit=-3))
    report = hlo.parse(made.as_text())
    sent = min(report.wire_bytes, report.credited_bytes)
    seconds = (made.cost_analysis() or {}).get("optimal_seconds")
    memory = int(made.memory_analysis().temp_size_in_bytes)
    return Compiled(sent, memory, seconds, len(report.unknown_trips))


def _peer(which: Any, program: Program, args: tuple[Any, ...], mesh: Mesh) -> Any:
    jitted, shapes = contestants.jax_program(program, args, mesh)
    structs = jax.tree.map(
        lambda x, shape, spec: jax.ShapeDtypeStruct(
            tuple(shape), x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        args,
        shapes,
        contestants.specs_of(program),
    )
    with hlo.partitioner(which):
        return jitted.lower(*structs).compile()


def _ours(program: Program, args: tuple[Any, ...], mesh: Mesh) -> Any:
    return contestants.our_program(program, mesh).partition(*args).compile()


def cells(row: Row) -> list[str]:
    """A row of text under `HEADS`."""
    sent = [
        "failed" if (c := row.columns[which]).failed else kib(c.sent) for which in (*PEERS, OURS)
    ]
    best = "" if row.best is None else kib(row.best)
    return [row.name, "x".join(map(str, row.mesh)), *sent, best, ratio(row.sent), ratio(row.memory)]


def summary(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The figures of all rows."""
    sent = [r.sent for r in rows if r.sent is not None]
    memory = [r.memory for r in rows if r.memory is not None]
    known = [r for r in rows if r.best is not None and r.sent is not None]
    far = [r for r in known if min(r.columns[w].sent for w in PEERS) > 1.2 * (r.best or 0) + 0.5]
    at_best = [
        sum(r.columns[OURS].sent <= (r.best or 0) * (1 + 1e-6) + 0.5 for r in some)
        for some in (far, known)
    ]
    failed = {which: sum(bool(r.columns[which].failed) for r in rows) for which in (*PEERS, OURS)}
    return [
        ("wire bytes, XLA / ours", f"geomean {geomean(sent):.2f}, {_below(sent, 1 - 1e-6)}"),
        ("at the best known bytes, where XLA is over 1.2x", f"{at_best[0]} of {len(far)}"),
        ("at the best known bytes, of all", f"{at_best[1]} of {len(known)}"),
        ("peak temporary memory, XLA / ours", f"geomean {geomean(memory):.2f}, "
         f"{_below(memory, 0.95)}"),
        ("refused or crashed", ", ".join(f"{which} {n}" for which, n in failed.items())),
    ]  # fmt: skip


def _below(values: Sequence[float], least: float) -> str:
    return f"{sum(v < least for v in values)} of {len(values)} below {least:.2g}"


def show(rows: Sequence[Row], as_markdown: bool) -> None:
    """The tables, for a terminal or for a page."""
    if as_markdown:
        print(markdown(("figure", "measured"), summary(rows)), "\n")
        print(markdown(HEADS, map(cells, rows)))
        return
    console = Console(width=None if Console().is_terminal else 160)
    for group in dict.fromkeys(row.group for row in rows):
        table = Table(*HEADS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=group)
        for row in (r for r in rows if r.group == group):
            behind = (row.sent or 0) < 1 - 1e-6 or (row.memory or 0) < 0.95
            table.add_row(*cells(row), style="red" if behind else "")
        console.print(table)
    table = Table("figure", "measured", box=box.SIMPLE_HEAD)
    for line in summary(rows):
        table.add_row(*line)
    console.print(table)


def read(path: Path) -> list[Row]:
    """The rows of a file that `--json` wrote."""
    return [
        Row(
            r["group"],
            r["name"],
            tuple(r["mesh"]),
            r["best"],
            {which: Compiled(**column) for which, column in r["columns"].items()},
        )
        for r in json.loads(path.read_text())
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.suite.tpu")
    parser.add_argument("--topology", default="v5e:2x4", help="a mesh of eight chips")
    parser.add_argument("--groups", nargs="+", choices=(*GROUPS, large.GROUP), default=GROUPS)
    parser.add_argument("--programs", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--json", type=Path, help="write everything read")
    parser.add_argument("--saved", nargs="+", type=a_file, help="show what such files hold")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    asked = parser.parse_args(argv)
    if asked.saved:
        show([row for path in asked.saved for row in read(path)], asked.markdown)
        return
    compiler, rows = Compiler(asked.topology), list[Row]()
    for program in chosen(asked.groups, asked.programs, EVERY):
        rows.append(compiler.row(program))
        print(" | ".join([program.group, *cells(rows[-1])]), file=sys.stderr, flush=True)
        if asked.json:  # after each: it takes long
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    show(rows, asked.markdown)


if __name__ == "__main__":
    main()
