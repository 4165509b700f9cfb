"""The shardings that `mw.plan` finds for the demonstration's GPT, beside those of people.

    python -m benchmarks.plans [--meshes SHAPE ...] [--layers N] [--markdown]

Each of the four schemes of `examples/gpt/hints.py`, with all its hints, and the plan, of the same
step without any: what a device is predicted to take, what it sends and what it holds at most.
Nothing is run, so that figures do not vary; seconds are those that planning took.
"""

from __future__ import annotations

import argparse
import time
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
from examples.gpt import hints, model
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


def arguments(config: model.Config) -> tuple[Any, ...]:
    """The types of a step's state, batch and key."""
    state = jax.eval_shape(partial(model.init, config=config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32)
    return state, model.Batch(tokens, tokens), jax.eval_shape(lambda: jax.random.key(0))


def hinted(shape: str, scheme: hints.Scheme, config: model.Config) -> Row:
    """A scheme of the demonstration, with all its hints."""
    mesh = abstract(shape)
    step, ins, outs = hints.hinted_step(scheme, mesh, config)
    given: dict[str, Any] = {"in_shardings": ins, "out_shardings": outs, "donate_argnums": 0}
    program = mw.jit(step, mesh=mesh, **given).partition(*arguments(config))
    sizes = program.per_device.mesh.axis_size
    seconds = timeline(program.jaxpr, sizes, GENERIC, overlaps=False).seconds
    peak = peak_memory(program.jaxpr, sizes, donated=program.donated).peak_bytes
    return Row(shape, scheme.title, seconds, program.wire_bytes, peak, 0, 0.0)


def planned(shape: str, config: model.Config) -> Row:
    """The same step with no hint at all."""
    step = mw.jit(partial(model.train_step, config=config), mesh=abstract(shape), donate_argnums=0)
    start = time.perf_counter()
    found = mw.plan(step, *arguments(config), progress=True)
    seconds, best = time.perf_counter() - start, found.best
    return Row(
        shape, "planned", best.seconds, best.wire_bytes, best.peak_bytes, found.tried, seconds
    )


def abstract(shape: str) -> AbstractMesh:
    """A mesh of the benchmarks, without devices."""
    sizes = MESHES[shape]
    return AbstractMesh(sizes, NAMES[: len(sizes)])


def main() -> None:
    """Print a table of all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=["8", "2x4"])
    parser.add_argument("--layers", type=int, default=model.DEMO.layers)
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    given = parser.parse_args()
    config = replace(model.DEMO, layers=given.layers)
    rows = []
    for shape in given.meshes:
        schemes = [s for s in hints.SCHEMES if (s.name, shape) not in LEFT_OUT]
        rows += [hinted(shape, scheme, config) for scheme in schemes]
        rows.append(planned(shape, config))
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
