"""The shardings that `mw.plan` finds for models of the examples, beside those of people.

    python -m benchmarks.plans [--meshes SHAPE ...] [--large] [--markdown]

The demonstration's GPT with each of the four schemes of `examples/gpt/hints.py`, with all its
hints, and the plan of the same step without any: what a device is predicted to take, what it sends
and what it holds at most. With `--large` the smallest dense model of the GSPMD paper, of 64 billion
parameters on 128 devices, beside the paper's scheme.

Nothing is run, so that figures do not vary; seconds are those that planning took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table

import meshwise as mw
from benchmarks.gpt import LEFT_OUT, MESHES, NAMES, STYLE, WIDTH
from examples.cases import abstract_mesh
from examples.gpt import hints, model
from examples.transformer.hints import large_cases
from meshwise.cost.hardware import GENERIC
from meshwise.cost.memory import peak_memory
from meshwise.cost.timeline import timeline

KIB = 2**10
HEADS = ("mesh", "scheme", "predicted us", "KiB sent", "KiB held", "plans", "seconds")


@dataclass(frozen=True)
class Row:
    """What a scheme comes to on a mesh; of the planner also how many plans it compared."""

    mesh: str
    scheme: str
    predicted_s: float
    wire_bytes: float
    peak_bytes: int
    tried: int
    seconds: float

    @property
    def cells(self) -> list[str]:
        """The row as text."""
        sizes = [f"{size / KIB:,.1f}" for size in (self.wire_bytes, self.peak_bytes)]
        took = [str(self.tried), f"{self.seconds:.0f}"] if self.tried else ["", ""]
        return [self.mesh, self.scheme, f"{self.predicted_s * 1e6:.1f}", *sizes, *took]


def of_program(mesh: str, scheme: str, program: mw.SpmdProgram) -> Row:
    """What a program comes to."""
    sizes = program.per_device.mesh.axis_size
    seconds = timeline(program.jaxpr, sizes, GENERIC, overlaps=False).seconds
    peak = peak_memory(program.jaxpr, sizes, donated=program.donated).peak_bytes
    return Row(mesh, scheme, seconds, program.wire_bytes, peak, 0, 0.0)


def planned(mesh: str, step: Any, *types: Any) -> Row:
    """What the planner makes of a step under `mw.jit`."""
    start = time.perf_counter()
    found = mw.plan(step, *types, progress=True)
    row = of_program(mesh, "planned", found.program)
    return replace(row, tried=found.tried, seconds=time.perf_counter() - start)


def gpt(shape: str) -> Iterator[Row]:
    """The demonstration's schemes on a mesh, and its step with no hint at all."""
    config, mesh = model.DEMO, AbstractMesh(MESHES[shape], NAMES[: len(MESHES[shape])])
    state = jax.eval_shape(partial(model.init, config=config), jax.random.key(0))
    tokens: Any = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32)
    batch, key = model.Batch(tokens, tokens), jax.eval_shape(lambda: jax.random.key(0))
    for scheme in hints.SCHEMES:
        if (scheme.name, shape) not in LEFT_OUT:
            step, ins, outs = hints.hinted_step(scheme, mesh, config)
            given: dict[str, Any] = {"in_shardings": ins, "out_shardings": outs}
            jitted = mw.jit(step, mesh=mesh, donate_argnums=0, **given)
            yield of_program(shape, scheme.title, jitted.partition(state, batch, key))
    step = mw.jit(partial(model.train_step, config=config), mesh=mesh, donate_argnums=0)
    yield planned(shape, step, state, batch, key)


def dense() -> Iterator[Row]:
    """The smallest of the paper's dense models, hinted as there, and with no hint."""
    case = next(large_cases())
    mesh, shape = abstract_mesh(case), "x".join(map(str, case.mesh.values()))
    given: dict[str, Any] = {"in_shardings": case.ins, "out_shardings": case.outs}
    hinted = mw.jit(case.step, mesh=mesh, donate_argnums=0, **given)
    yield of_program(shape, case.title, hinted.partition(*case.types))
    yield planned(shape, mw.jit(case.step, mesh=mesh, donate_argnums=0), *case.types)


def main() -> None:
    """Print a table of all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=["8", "2x4"])
    parser.add_argument("--large", action="store_true", help="a large model, in their place")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    given = parser.parse_args()
    rows = list(dense()) if given.large else [row for shape in given.meshes for row in gpt(shape)]
    if given.markdown:
        print("|", " | ".join(HEADS), "|\n|" + "---|" * len(HEADS))
        for row in rows:
            print("|", " | ".join(row.cells), "|")
        return
    table = Table(**STYLE)
    for number, head in enumerate(HEADS):
        table.add_column(head, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*row.cells)
    Console(width=WIDTH).print(table)


if __name__ == "__main__":
    main()
