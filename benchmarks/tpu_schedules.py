"""What the TPU compiler makes of schedules: compiled for a mesh of TPUs that is not there.

    pip install libtpu
    python -m benchmarks.tpu_schedules [--topology v5e:2x4] [--markdown]

Nothing is run. Read from the compiled program: collectives that block; those that run in the
background (a start and a done), and how many of these have a matrix product scheduled between the
two; kernels of ours; and `optimal_seconds`, the compiler's own estimate, which knows neither what
a link takes nor what a kernel of ours does.
"""

from __future__ import annotations

import os

# Before JAX and the TPU compiler are imported, which read them.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import meshwise as mw

KINDS = "all-reduce|reduce-scatter|all-gather|collective-permute|all-to-all"
NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ")
START = re.compile(rf"\s({KINDS})-start\(|async-start\(")
DONE = re.compile(rf"\s(?:{KINDS})-done\(%?([\w.-]+)|async-done\(%?([\w.-]+)")
BLOCKING = re.compile(rf"\s({KINDS})\(")
PRODUCT = re.compile(r"\s(convolution|dot)\(|calls=.*(convolution|dot|matmul)")


@dataclass(frozen=True)
class Compiled:
    """What stands in a compiled program."""

    blocking: int
    background: int
    overlapped: int
    kernels: int
    optimal_seconds: float | None


def read(program: Any) -> Compiled:
    """Count, in the order in which instructions are scheduled."""
    compiled = program.compile()
    text = compiled.as_text()
    products = _with_products(text)
    blocking = background = overlapped = 0
    begun: dict[str, int] = {}
    seen = 0
    for line in text.splitlines():
        name = NAME.match(line)
        if name and START.search(line):
            begun[name.group(1)] = seen
            background += 1
        elif done := DONE.search(line):
            of = done.group(1) or done.group(2)
            overlapped += of in begun and seen > begun[of]
        elif BLOCKING.search(line):
            blocking += 1
        elif PRODUCT.search(line) or any(f"calls=%{p}" in line for p in products):
            seen += 1
    kernels = text.count('custom_call_target="tpu_custom_call"')
    seconds = (compiled.cost_analysis() or {}).get("optimal_seconds")
    return Compiled(blocking, background, overlapped, kernels, seconds)


def _with_products(text: str) -> list[str]:
    """The names of fusions' bodies that hold a matrix product."""
    found, current = [], ""
    for line in text.splitlines():
        if line.endswith("{") and "(" in line:
            current = line.split()[0].lstrip("%")
        elif re.search(r"\s(convolution|dot)\(", line):
            found.append(current)
    return found


def adam(mesh: Mesh) -> mw.SpmdProgram:
    """Adam on 2^23 parameters, gradients in bfloat16."""

    def step(g, w, m, v):
        g = lax.psum(g[0], "x").astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - 0.1 * m / (jnp.sqrt(v) + 1e-6), m, v

    of = jax.ShapeDtypeStruct
    state = [of((2**23,), jnp.float32)] * 3
    specs = (P("x"), P(), P(), P())
    return mw.SpmdProgram.from_shard_map(
        step, mesh, specs, (P(), P(), P()), of((mesh.size, 2**23), jnp.bfloat16), *state
    )


def gathered_product(mesh: Mesh) -> mw.SpmdProgram:
    """Rows gathered, times a matrix."""

    def step(a, b):
        return lax.all_gather(a, "x", axis=0, tiled=True) @ b

    of = jax.ShapeDtypeStruct
    args = of((8192, 4096), jnp.bfloat16), of((4096, 8192), jnp.bfloat16)
    specs = (P("x"), P(None, "x"))
    return mw.SpmdProgram.from_shard_map(step, mesh, specs, P(None, "x"), *args)


def layer_end(mesh: Mesh) -> mw.SpmdProgram:
    """Megatron: a product that leaves terms, their sum, bias, residual, norm."""

    def step(a, b, residual, bias):
        y = lax.psum(a @ b, "x") + bias + residual
        y = y - y.mean(-1, keepdims=True)
        return y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)

    of = jax.ShapeDtypeStruct
    args = [of(s, jnp.bfloat16) for s in ((8192, 16384), (16384, 4096), (8192, 4096), (4096,))]
    specs = (P(None, "x"), P("x"), P(), P())
    return mw.SpmdProgram.from_shard_map(step, mesh, specs, P(), *args)


def on_slices(s: mw.Schedule) -> None:
    """The sum in two halves, computation between."""
    _, gathered = s.split(s.find("all_reduce")[0], dim=0)
    s.reorder(gathered, more_bytes=True)
    if "m" in s.original.in_paths:
        s.slice_state(["m", "v"])


def fused(s: mw.Schedule) -> None:
    """The same as one kernel."""
    on_slices(s)
    products = s.find("dot_general")
    s.fuse([*products, s.find("reduce_scatter")[0], s.find("all_gather")[0]], kernel="pallas")


def ring(s: mw.Schedule) -> None:
    """The product in a ring with what is gathered, or scattered."""
    if s.find("all_reduce"):
        on_slices(s)
        s.overlap(s.find("reduce_scatter")[0])
    else:
        s.overlap(s.find("all_gather")[0])


def both_ways(s: mw.Schedule) -> None:
    """The ring in both directions of the links."""
    s.overlap(s.find("all_gather")[0], bidirectional=True)


def nothing(s: mw.Schedule) -> None:
    """As it is."""


CASES: dict[str, tuple[Callable[[Mesh], mw.SpmdProgram], dict[str, Callable[..., None]]]] = {
    "adam": (adam, {"as it is": nothing, "on slices": on_slices, "one kernel": fused}),
    "gathered product": (
        gathered_product,
        {"as it is": nothing, "ring": ring, "ring, both ways": both_ways},
    ),
    "layer end": (
        layer_end,
        {"as it is": nothing, "on slices": on_slices, "ring": ring, "one kernel": fused},
    ),
}


def compiled_cases(mesh: Mesh) -> Iterator[tuple[str, str, Compiled]]:
    """Every program under each of its schedules."""
    for name, (make, schedules) in CASES.items():
        for title, moves in schedules.items():
            s = mw.Schedule(make(mesh))
            moves(s)
            yield name, title, read(s.program.executable.lower())


def main(argv: Sequence[str] | None = None) -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.tpu_schedules")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args(argv)
    devices = np.array(topologies.get_topology_desc(given.topology, "tpu").devices)
    mesh = Mesh(devices.ravel(), ("x",))
    shown = Table(box=box.MARKDOWN if given.markdown else box.SIMPLE_HEAD)
    for i, head in enumerate(("program", "schedule", "blocking", "background",
                              "with a product between", "kernels", "optimal ms")):  # fmt: skip
        shown.add_column(head, justify="left" if i < 2 else "right")
    for name, title, c in compiled_cases(mesh):
        known = c.optimal_seconds is not None and c.optimal_seconds > 0
        seconds = f"{c.optimal_seconds * 1e3:,.2f}" if known else "unknown"
        counts = (c.blocking, c.background, c.overlapped, c.kernels)
        shown.add_row(name, title, *map(str, counts), seconds)
    Console(width=None if Console().is_terminal else 120).print(shown)


if __name__ == "__main__":
    main()
