"""Programs beside XLA's two partitioners: the bytes each device sends, and the numbers, in one run.

Every program is written as for one device; operands and results are sharded as its row says, over
a mesh of eight devices. Bytes are read from what each partitioner emits, before the passes of one
backend change it (of XLA the lower of "as emitted" and "as its compilers leave them", with
reduce-scatters, and out of loops what is the same in every step of these); what else a loop runs
counts once a step. Ours also runs on the eight devices, and its result is compared with one
device's; so is XLA's, which is not always right.
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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import meshwise as mw
from benchmarks.peers import hlo

KIB = 2**10


@dataclass(frozen=True)
class Row:
    """A program, the shapes of its operands, and how they and the result lie on the mesh.

    A shape of integers has their bound as its last entry, behind None: `(64, None, 9)`.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int | None, ...], ...]
    ins: tuple[P, ...]
    outs: P
    mesh: tuple[int, ...] = (8,)


@dataclass(frozen=True)
class Outcome:
    """What a partitioner makes of a row; `error` is the largest one beside one device's result."""

    sent: float
    kinds: str
    error: float


def operands(row: Row) -> list[np.ndarray]:
    """Random operands, the same in every run."""
    draw = np.random.default_rng(0)
    found = []
    for shape in row.shapes:
        if None in shape:
            dims = tuple(n for n in shape[: shape.index(None)] if n is not None)
            found.append(draw.integers(0, shape[-1], dims, np.int32))
        else:
            found.append(draw.normal(size=shape).astype(np.float32))
    return found


def short(counts: Counter[str]) -> str:
    """Kinds of collectives and how many, as text."""
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"


def error(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest number."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return float(np.max(np.abs(found - wanted)) / max(np.max(np.abs(wanted)), 1e-30))


def measure(row: Row) -> dict[str, Outcome]:
    """One row: XLA's partitioners, and ours."""
    names = ("x", "y")[: len(row.mesh)]
    mesh = jax.make_mesh(row.mesh, names, axis_types=(AxisType.Auto,) * len(names))
    args = operands(row)
    wanted = jax.jit(row.function)(*args)
    found = {}
    for which in hlo.PARTITIONERS:
        jax.clear_caches()
        ins = tuple(NamedSharding(mesh, spec) for spec in row.ins)
        placed = [*zip(row.shapes, row.ins, strict=True), (wanted.shape, row.outs)]
        uneven = any(
            n and entry and n % mesh.shape[entry]
            for shape, spec in placed
            for n, entry in zip(shape, spec, strict=False)
        )
        if uneven:  # refused at the boundary: constrained inside
            step = jax.jit(constrained(row, mesh))
        else:
            step = jax.jit(row.function, in_shardings=ins,
                           out_shardings=NamedSharding(mesh, row.outs))  # fmt: skip
        with hlo.partitioner(which):
            lowered = step.lower(*args)
            report = hlo.read(lowered)
            result = lowered.compile()(*args)
        sent = min(report.wire_bytes, report.credited_bytes)
        kinds = Counter({k: int(n) for k, n in report.by_kind.items()})
        found[which] = Outcome(sent, short(kinds), error(result, wanted))
    ours = mw.jit(row.function, mesh=mesh, in_shardings=row.ins, out_shardings=row.outs)
    program = ours.partition(*args)
    kinds = Counter()
    for collective in program.collectives:
        kinds[collective.kind.value] += collective.count
    found["meshwise"] = Outcome(program.wire_bytes, short(kinds), error(ours(*args), wanted))
    return found


def constrained(row: Row, mesh: Any) -> Callable[..., Any]:
    """The program with its shardings as constraints inside."""

    def function(*args: Any) -> Any:
        given = [
            lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, row.ins, strict=True)
        ]
        return lax.with_sharding_constraint(row.function(*given), NamedSharding(mesh, row.outs))

    return function


def kib(sent: float) -> str:
    """Bytes as text."""
    return f"{sent / KIB:,.1f}" if sent else "0"


def ratio(outcomes: dict[str, Outcome]) -> str:
    """What the better of XLA's two sends, in units of what ours does."""
    best, ours = min(outcomes[w].sent for w in hlo.PARTITIONERS), outcomes["meshwise"].sent
    if not ours:
        return "-" if not best else "all"
    return f"{best / ours:,.2f}"


def main(table: Sequence[Row], about: str) -> None:
    """Measure the rows asked for and print the table."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all rows without any")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    options = parser.parse_args()
    rows = [r for r in table if not options.names or any(n in r.name for n in options.names)]
    heads = ("program", "GSPMD KiB", "Shardy KiB", "ours KiB", "ratio", "ours", "errors")
    lines = []
    for row in rows:
        found = measure(row)
        sent = [kib(found[w].sent) for w in (*hlo.PARTITIONERS, "meshwise")]
        errors = " ".join(f"{found[w].error:.0e}" for w in (*hlo.PARTITIONERS, "meshwise"))
        lines.append((row.name, *sent, ratio(found), found["meshwise"].kinds, errors))
        if not options.markdown:
            print(*lines[-1], sep=" | ", flush=True)
    if options.markdown:
        print(f"| {' | '.join(heads[:5])} |\n|{'---|' * 5}")
        for line in lines:
            print(f"| {' | '.join(line[:5])} |")
        return
    shown = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for line in lines:
        shown.add_row(*line)
    Console(width=140).print(shown)
