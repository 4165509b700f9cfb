"""How long a program takes from the function to the executable, beside XLA's two partitioners.

    python -m benchmarks.compile_time [--every N] [--gpt N ...] [--repeats N] [--layers N ...]
                                      [--devices N ...]

Five tables: whole compiles of programs of the suite, each N-th of them; of a training step of a GPT
in Flax with so many layers, none in a loop; a model planned for more and more devices, that are not
there; for more and more layers; and where the time of such a plan goes. All in seconds of the
processor, so that other work on the machine changes them little, nothing remembered from before.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import math
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.suite import devices  # first: it sets JAX up for eight devices

# isort: split
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from benchmarks.gpt import MESHES, forget, make_mesh
from benchmarks.peers import hlo
from benchmarks.suite import contestants
from benchmarks.suite.contestants import Contestant
from benchmarks.suite.every_program import PROGRAMS
from benchmarks.suite.program import Program
from examples.gpt import hints
from examples.gpt.model import Batch, Config, init

LAYERS = (10, 50, 200)
GPT_LAYERS = (2, 8)
DEVICES = (8, 64, 512)
ROWS, WIDTH = 1 << 16, 512

# Steps of a plan, by the function that takes them.
PHASES = {
    "trace": "trace_call",
    "flatten, read hints": "make_program",
    "describe equations": "describe_all",
    "complete": "propagate",
    "cost graph": "build_graph",
    "start at completion": "completion_start",
    "start in order": "forward_start",
    "descend": "descend",
    "join sub-axes": "coarsen",
    "emit": "emit",
}


WHOLE = "whole compile, milliseconds of the processor"
HEADS = ("Shardy", "GSPMD", "ours", "plan", "compile", "XLA / ours")


@dataclass(frozen=True)
class Seconds:
    """Of one compile: up to the emitted program (0 for XLA), from there to the executable."""

    plan: float
    compile: float

    @property
    def whole(self) -> float:
        """All of it."""
        return self.plan + self.compile


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=10, help="each N-th program of the suite")
    parser.add_argument("--gpt", type=int, nargs="*", default=GPT_LAYERS, help="layers of the GPT")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--devices", type=int, nargs="*", default=DEVICES, help="multiples of 4")
    return parser.parse_args()


def load_once() -> None:
    """What the first plan that needs it imports, once a process: no part of a compile."""
    importlib.import_module("scipy.optimize")


def clock() -> float:
    """Seconds of the processor, of all threads."""
    return time.process_time()


def medians(repeats: int, make: Callable[[], Seconds]) -> Seconds:
    """Of each step by itself."""
    found = [make() for _ in range(repeats)]
    return Seconds(*(median(getattr(s, n) for s in found) for n in ("plan", "compile")))


def peer(which: hlo.Partitioner, contestant: Contestant) -> Seconds:
    """A compile by one of XLA's partitioners."""
    with hlo.partitioner(which):
        forget()
        start = clock()
        contestant.function.lower(*contestant.args).compile()
        return Seconds(0.0, clock() - start)


def ours(contestant: Contestant) -> Seconds:
    """Our compile."""
    forget()
    start = clock()
    partitioned = contestant.function.partition(*contestant.args)
    planned = clock()
    partitioned.compile()
    return Seconds(planned - start, clock() - planned)


def row(
    repeats: int, of_xla: Callable[[], Contestant], of_ours: Callable[[], Contestant]
) -> tuple[list[str], float]:
    """The cells of one program, and how many times as long the better of XLA's takes as ours."""
    shardy = medians(repeats, lambda: peer("shardy", of_xla())).whole
    gspmd = medians(repeats, lambda: peer("gspmd", of_xla())).whole
    mine = medians(repeats, lambda: ours(of_ours()))
    ratio = min(shardy, gspmd) / mine.whole
    figures = shardy, gspmd, mine.whole, mine.plan, mine.compile
    return [*(f"{1e3 * s:,.0f}" for s in figures), f"{ratio:.2f}"], ratio


def compiles(console: Console, programs: Sequence[Program], repeats: int) -> None:
    """Whole compiles of the suite's, ours and XLA's."""
    table = Table("program", *HEADS, box=box.SIMPLE_HEAD, title=WHOLE)
    ratios = []
    for program in programs:
        args = contestants.operands(program)
        cells, ratio = row(
            repeats,
            lambda p=program, a=args: contestants.xla(p, a),
            lambda p=program, a=args: contestants.ours(p, a),
        )
        ratios.append(ratio)
        table.add_row(f"{program.group}: {program.name}", *cells)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    table.add_row(f"geomean of {len(ratios)}", *[""] * 5, f"{mean:.2f}")
    console.print(table)


def gpt(jit: Callable[..., Any], scheme: hints.Scheme, mesh: Mesh, config: Config) -> Contestant:
    """A training step of a GPT, and the types of what it takes."""
    state = jax.eval_shape(partial(init, config=config), jax.random.key(0))
    rows = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    function, given, returned = hints.hinted_step(scheme, mesh, config)
    step = jit(function, in_shardings=given, out_shardings=returned, donate_argnums=0)
    return Contestant(step, (state, Batch(rows, rows), key))


def models(console: Console, layers: Sequence[int], repeats: int) -> None:
    """Whole compiles of training steps of a GPT, ours and XLA's."""
    table = Table("scheme", "mesh", "layers", *HEADS, box=box.SIMPLE_HEAD, title=WHOLE)
    for scheme, shape in ((hints.FULLY_SHARDED, "8"), (hints.MEGATRON, "2x4")):
        for count in layers:
            what = scheme, make_mesh(MESHES[shape]), Config(layers=count)
            cells, _ = row(repeats, partial(gpt, jax.jit, *what), partial(gpt, mw.jit, *what))
            table.add_row(scheme.title, shape, str(count), *cells)
    console.print(table)


def loss(x: Any, weights: Any) -> Any:
    """Of layers one after another, with tensors split over y."""
    for first, second in weights:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        x = x + mw.shard(jax.nn.gelu(normed @ first), P("x", "y")) @ second
    return (x**2).sum()


def planned(layers: int, mesh: AbstractMesh) -> Any:
    """The program of a training step of such layers."""
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))]
    weights = [tuple(types)] * layers
    specs = [(P(None, "y"), P("y"))] * layers

    def step(x: Any, weights: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss, 1)(x, weights))

    jitted = mw.jit(step, mesh=mesh, in_shardings=(P("x"), specs), out_shardings=specs)
    forget()
    return jitted.partition(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), weights)


def mesh_of(devices: int) -> AbstractMesh:
    """A mesh of rows over x and tensors over 4."""
    return AbstractMesh((devices // 4, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def sizes(console: Console, layers: Sequence[int], devices: Sequence[int], repeats: int) -> None:
    """Plans for more devices and for more layers."""
    heads = ("devices", "layers", "equations", "emitted", "seconds", "ms an equation")
    table = Table(*heads, box=box.SIMPLE_HEAD, title="plans: from the function to our program")
    cases = [(n, 10) for n in devices] + [(8, n) for n in layers]
    planned(1, mesh_of(8))
    for devices_here, layers_here in dict.fromkeys(cases):
        program, found = None, list[float]()
        for _ in range(repeats):
            start = clock()
            program = planned(layers_here, mesh_of(devices_here))
            found.append(clock() - start)
        assert program is not None, "it is planned at least once"
        count, seconds = len(program.plan.program.equations), median(found)
        numbers = (devices_here, layers_here, count, len(program.jaxpr.eqns))
        table.add_row(*map(str, numbers), f"{seconds:.2f}", f"{1e3 * seconds / count:.2f}")
    console.print(table)


def phases(console: Console, layers: int) -> None:
    """Where the time of a plan goes, by a profiler, which makes all of it slower."""
    profile = cProfile.Profile()
    planned(1, mesh_of(8))
    profile.enable()
    planned(layers, mesh_of(8))
    profile.disable()
    stats: Any = pstats.Stats(profile)
    spent = {name: 0.0 for name in PHASES}
    for (file, _, function), (_, _, _, cumulative, _) in stats.stats.items():
        for name, taken_by in PHASES.items():
            if function == taken_by and "meshwise" in file:
                spent[name] += cumulative
    table = Table("phase", "share", box=box.SIMPLE_HEAD, title=f"a plan of {layers} layers")
    for name, seconds in spent.items():
        table.add_row(name, f"{seconds / stats.total_tt:.0%}")
    table.add_row("calls of functions", f"{stats.total_calls:,}")
    console.print(table)


def main() -> None:
    asked = options()
    load_once()
    console = Console(width=None if Console().is_terminal else 140)
    compiles(console, PROGRAMS[:: asked.every], asked.repeats)
    models(console, asked.gpt, asked.repeats)
    sizes(console, asked.layers, asked.devices, asked.repeats)
    phases(console, min(asked.layers, default=10))
    assert devices.jax.device_count() == 8


if __name__ == "__main__":
    main()
