"""Train on eight devices, go on with four, and come back to eight, without leaving the devices.

    python -m examples.remesh [--steps N]

A small GPT with AdamW is trained on a mesh of 2 x 4 devices. Then its whole training state (the
parameters, both moments of the optimiser, the step counters, the PRNG key) moves to a mesh of
2 x 2, and later to one of 4 x 2, each time by one call of `mw.reshard`. After a move what every
device holds is compared, bit for bit, with what it should hold. The losses stand beside those of a
run that never moved.
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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

import meshwise as mw
from examples.gpt import hints, model
from examples.gpt.data import batch

CONFIG = model.Config(sequence=32, batch=8, layers=1)
SHAPES = ((2, 4), (2, 2), (4, 2))
KIB = 2**10
WIDTH = 100  # columns, where there is no terminal to ask


class Training(NamedTuple):
    """All that a run needs to go on: what the optimiser changes, the next step, and the key."""

    state: model.State
    step: jax.Array
    key: jax.Array


@dataclass(frozen=True)
class Move:
    """What one move of the state took. Bytes are those of one device, but for `state_bytes`."""

    title: str
    arrays: int
    state_bytes: int
    launches: int
    wire_bytes: float
    held_before: int
    held_after: int
    largest: int
    seconds: float
    is_identical: bool
    is_freed: bool


@dataclass(frozen=True)
class Report:
    """The moves, and the losses of each step, beside those of the run that stayed."""

    moves: tuple[Move, ...]
    shapes: tuple[tuple[int, int], ...]
    losses: tuple[float, ...]
    stayed: tuple[float, ...]


def make_mesh(shape: tuple[int, int]) -> Mesh:
    """The first devices, as many as the shape has."""
    devices = np.array(jax.devices()[: prod(shape)]).reshape(shape)
    return Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def shardings_on(mesh: Mesh, config: model.Config) -> Training:
    """Where the state lies on a mesh: weights and moments over both axes, the rest everywhere."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = hints.state_shardings(hints.TWO_DIMENSIONAL, mesh, config)
    return Training(state, everywhere, everywhere)


def train_step_on(mesh: Mesh, config: model.Config) -> Any:
    """The training step of the model as one program for every device of a mesh."""
    scheme = hints.TWO_DIMENSIONAL
    hinted = hints.hint_activations(scheme, mesh, partial(model.train_step, config=config))

    def train_step(training: Training, data: model.Batch) -> tuple[Training, jax.Array]:
        key = jax.random.fold_in(training.key, training.step)
        state, metrics = hinted(training.state, data, key)
        return Training(state, training.step + 1, training.key), metrics["loss"]

    held = shardings_on(mesh, config)
    rows = NamedSharding(mesh, hints.resolve(scheme, mesh, scheme.batch))
    return mw.jit(
        train_step,
        mesh=mesh,
        in_shardings=(held, model.Batch(rows, rows)),
        out_shardings=(held, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )


@partial(jax.jit, static_argnums=0)
def start(config: model.Config) -> Training:
    """The state before the first step, on one device."""
    key, init_key = jax.random.split(jax.random.key(0))
    return Training(model.init(init_key, config), jnp.int32(0), key)


def train(
    step: Any, training: Training, steps: int, config: model.Config
) -> tuple[Training, list[float]]:
    """Some steps from where the state is, and their losses."""
    losses: list[float] = []
    for _ in range(steps):
        training, loss = step(training, batch(int(training.step), config))
        losses.append(float(loss))
    return training, losses


def move(training: Training, shardings: Training, title: str) -> tuple[Training, Move]:
    """The state under other shardings, and what that took."""
    before = to_host(training)
    held_before = held_bytes(training)
    plans = plans_of(training, shardings)
    old = jax.tree.leaves(training)
    begin = time.perf_counter()
    training = jax.block_until_ready(mw.reshard(training, shardings, donate=True))
    seconds = time.perf_counter() - begin
    made = Move(
        title,
        arrays=len(old),
        state_bytes=sum(array.nbytes for array in before),
        launches=sum(plan.launches for plan in plans),
        wire_bytes=sum(plan.wire_bytes for plan in plans),
        held_before=held_before,
        held_after=held_bytes(training),
        largest=max(plan.peak_bytes for plan in plans),
        seconds=seconds,
        is_identical=is_identical(training, before),
        is_freed=all(array.is_deleted() for array in old),
    )
    return training, made


def plans_of(training: Training, shardings: Training) -> list[Any]:
    """How each array gets to its new place."""
    pairs = zip(jax.tree.leaves(numbers(training)), jax.tree.leaves(shardings), strict=True)
    return [
        mw.reshard_plan(array.shape, array.dtype, None, array.sharding, sharding)
        for array, sharding in pairs
    ]


def numbers(training: Training) -> Training:
    """The state with the numbers that the PRNG key is made of."""
    return training._replace(key=jax.random.key_data(training.key))


def to_host(training: Training) -> list[np.ndarray]:
    """Copies of all arrays in NumPy."""
    return [np.array(array) for array in jax.tree.leaves(numbers(training))]


def is_identical(training: Training, before: Sequence[np.ndarray]) -> bool:
    """Whether every device holds its part of every array, to the bit."""
    pairs = zip(jax.tree.leaves(numbers(training)), before, strict=True)
    return all(
        array.dtype == old.dtype and np.asarray(shard.data).tobytes() == old[shard.index].tobytes()
        for array, old in pairs
        for shard in array.addressable_shards
    )


def held_bytes(training: Training) -> int:
    """Bytes of the state on one device."""
    arrays = jax.tree.leaves(numbers(training))
    return sum(array.addressable_shards[0].data.nbytes for array in arrays)


def run(steps: int, config: model.Config = CONFIG) -> Report:
    """Train so many steps on each mesh in turn, and as many without moving."""
    meshes = [make_mesh(shape) for shape in SHAPES]
    places = [shardings_on(mesh, config) for mesh in meshes]
    first = train_step_on(meshes[0], config)
    training = jax.device_put(start(config), places[0])
    training, losses = train(first, training, steps, config)
    moves: list[Move] = []
    for i in range(1, len(meshes)):
        title = f"{_title(SHAPES[i - 1])} to {_title(SHAPES[i])}"
        training, made = move(training, places[i], title)
        moves.append(made)
        training, more = train(train_step_on(meshes[i], config), training, steps, config)
        losses += more
    whole = jax.device_put(start(config), places[0])
    _, stayed = train(first, whole, len(losses), config)
    shapes = tuple(shape for shape in SHAPES for _ in range(steps))
    return Report(tuple(moves), shapes, tuple(losses), tuple(stayed))


def _title(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def moves_table(moves: Sequence[Move]) -> Table:
    """One row a move."""
    made = Table(
        title="The state moves: one call of mw.reshard each",
        caption="Collectives and KiB sent: the sum over the plans of all arrays, for the busiest "
        "device. Small arrays travel together, so fewer collectives run. Seconds include "
        "compilation.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_lines=True,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("from\nto", "state", "plans", "KiB a device,\nbefore, after"):
        made.add_column(name, no_wrap=True)
    made.add_column("largest on\nthe way, KiB", justify="right")
    made.add_column("seconds", justify="right")
    made.add_column("afterwards", no_wrap=True)
    for row in moves:
        bits = "[green]identical[/]" if row.is_identical else "[bold red]DIFFERENT[/]"
        made.add_row(
            row.title.replace(" to ", "\n"),
            f"{row.arrays} arrays\n{row.state_bytes / KIB:,.1f} KiB",
            f"{row.launches} collectives\n{row.wire_bytes / KIB:,.1f} KiB sent",
            f"{row.held_before / KIB:,.1f}\n{row.held_after / KIB:,.1f}",
            f"{row.largest / KIB:,.1f}",
            f"{row.seconds:.2f}",
            f"bits {bits}\nold arrays {'freed' if row.is_freed else 'kept'}",
        )
    return made


def losses_table(report: Report) -> Table:
    """One row a step."""
    made = Table(
        title="The loss goes on",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    for name in ("step", "mesh", "loss", "of a run that stayed", "difference"):
        made.add_column(name, justify="left" if name == "mesh" else "right")
    rows = zip(report.shapes, report.losses, report.stayed, strict=True)
    for step, (shape, loss, stayed) in enumerate(rows):
        is_last = step + 1 < len(report.shapes) and report.shapes[step + 1] != shape
        difference = f"{loss - stayed:+.1e}" if loss != stayed else "0"
        made.add_row(
            f"{step}",
            _title(shape),
            f"{loss:.6f}",
            f"{stayed:.6f}",
            difference,
            end_section=is_last,
        )
    return made


def main(arguments: Sequence[str] | None = None, config: model.Config = CONFIG) -> Report:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="steps on each mesh (default: 4)")
    options = parser.parse_args(arguments)
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    begin = time.perf_counter()
    with console.status("training on three meshes"):
        report = run(options.steps, config)
    console.print(moves_table(report.moves))
    console.print(losses_table(report))
    console.print(f"{time.perf_counter() - begin:.0f} s in all")
    return report


if __name__ == "__main__":
    main()
