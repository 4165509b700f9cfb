"""Annotated programs beside XLA's two partitioners, in one run.

    python -m benchmarks.suite [--groups NAME ...] [--programs PART ...] [--from FILE] [--time]
                               [--saved FILE ...] [--json FILE] [--html FILE] [--markdown]

Bytes, flops, memory, compile seconds and numbers of every program; run times with `--time`.
With `--saved` nothing is measured: rows come from files that `--json` wrote. With `--from` the
programs are your own: those that a Python file lists as `PROGRAMS`, each a `program.Program`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.suite import devices  # first: it sets JAX up for eight devices

# isort: split
from benchmarks.suite.apart import DISPATCH, dispatch
from benchmarks.suite.every_program import a_file, chosen, listed
from benchmarks.suite.figures import Figure, losses, summary
from benchmarks.suite.measure import OURS, Measured, measure
from benchmarks.suite.page import page
from benchmarks.suite.program import GROUPS, Program
from benchmarks.suite.records import machine, read, read_figures, record
from benchmarks.suite.tables import (
    HEADS,
    behind,
    by_group,
    cells,
    markdown,
    markdown_of_figures,
    not_at_best,
    wrong_answers,
)

REPEATS = 15


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--programs", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--from", dest="file", type=a_file, help="a Python file with PROGRAMS")
    parser.add_argument("--time", action="store_true", help="also measure run times")
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="timed calls of each column, at least"
    )
    parser.add_argument("--saved", nargs="+", type=a_file, help="show what such files hold")
    parser.add_argument("--json", type=Path, help="write everything measured")
    parser.add_argument("--html", type=Path, help="write a self-contained page")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    return parser.parse_args()


def show(rows: Sequence[Measured], figures: Sequence[Figure]) -> None:
    """The tables for a terminal."""
    console = Console(width=None if Console().is_terminal else 200)
    for group in dict.fromkeys(m.program.group for m in rows):
        table = Table(*HEADS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=group)
        for column in table.columns[2:12]:
            column.justify = "right"
        for measured in (m for m in rows if m.program.group == group):
            table.add_row(*cells(measured), style="red" if losses(measured) else "")
        console.print(table)
    table = Table("figure", "measured", "goal", "reached", box=box.SIMPLE_HEAD)
    for figure in figures:
        table.add_row(figure.name, figure.value, figure.goal, "yes" if figure.reached else "no")
    console.print(table)
    for measured in rows:
        for reason in (measured.program.reason, measured.outcomes[OURS].failed):
            if reason and losses(measured):
                console.print(f"{measured.program.name}: {reason}", style="red", markup=False)


def show_markdown(rows: Sequence[Measured], figures: Sequence[Figure]) -> None:
    """The tables for a page."""
    for table in (
        markdown_of_figures(figures),
        by_group(rows),
        wrong_answers(rows),
        behind(rows, ("bytes", "memory", "flops", "numbers", "failed")),
        behind(rows, ("run here",)),
        not_at_best(rows),
        markdown(HEADS, map(cells, rows)),
    ):
        print(table, "\n")


def measured(asked: argparse.Namespace, programs: Sequence[Program]) -> dict[str, Any]:
    """The record of programs measured now; a line each as it goes."""
    start, rows = time.perf_counter(), list[Measured]()
    for program in chosen(asked.groups, asked.programs, programs):
        rows.append(measure(program, asked.repeats if asked.time else 0))
        print(" | ".join([program.group, *cells(rows[-1])]), file=sys.stderr, flush=True)
    figures = [*summary(rows), *([dispatch()] if asked.time else [])]
    where = machine(time.perf_counter() - start, asked.repeats if asked.time else 0)
    return record(rows, figures, where)


def saved(paths: Sequence[Path], programs: Sequence[Program]) -> dict[str, Any]:
    """One record of several, in the order of the programs, as they are described today."""
    records = [json.loads(path.read_text()) for path in paths]
    rows = {(m.program.group, m.program.name): m for r in records for m in read(r, programs)}
    ordered = [rows[key] for p in programs if (key := (p.group, p.name)) in rows]
    seconds = sum(r["machine"]["seconds"] for r in records)
    apart = [f for r in records for f in read_figures(r) if f.name == DISPATCH]
    figures = [*summary(ordered), *apart[-1:]]
    return record(ordered, figures, {**records[-1]["machine"], "seconds": seconds})


def main() -> None:
    asked = options()
    programs = listed(asked.file)
    found = saved(asked.saved, programs) if asked.saved else measured(asked, programs)
    rows = read(found, programs)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=1))
    if asked.html:
        asked.html.parent.mkdir(parents=True, exist_ok=True)
        asked.html.write_text(page(found))
    (show_markdown if asked.markdown else show)(rows, read_figures(found))
    assert devices.jax.device_count() == 8


if __name__ == "__main__":
    main()
