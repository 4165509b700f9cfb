"""Arrays from one sharding to another: bytes and seconds, beside XLA's two partitioners.

    python -m benchmarks.reshard [bytes] [time] [--meshes NAME ...] [--ranks N ...] [--seed N]
        [--pairs N] [--run N] [--timed N] [--repeats N] [--dtypes NAME ...] [--verbose]
        [--markdown]

`bytes` takes pairs of shardings over whole axes, all there are or `--pairs` of them by chance, and
reads what each partitioner's program sends between the two, before the passes of one backend
change it. Our program is read in the same way, and `--verbose` lists where it sends or holds more
than our plan says. With uneven dims at least one does not divide over its devices at one end; how
XLA is asked for that is in `peers/resharding.py`, and it refuses no pair. Of each group `--run`
pairs are run, and each device's shard is compared bit for bit. The bound is what the device that
lacks most of its new shard lacks, padding not counted; where few devices hold all they may have to
send more.

`time` takes pairs by chance, of arrays of 16 to 256 MB on 8 devices, and calls `mw.reshard` and
`jax.jit(lambda x: x, out_shardings=...)` in turns, until the result is there; medians. A pair with
a ratio below 0.9 is measured once more with three times the repetitions, and that is what counts.
"""

from __future__ import annotations

import os

# Before JAX is imported, which reads them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=12"
).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import geometric_mean
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import meshwise as mw
from benchmarks.peers import hlo
from benchmarks.peers.resharding import (
    MESHES,
    Case,
    Traffic,
    even_case,
    is_same,
    large_case,
    make_mesh,
    milliseconds,
    numbers,
    read_program,
    some_pairs,
    uneven_case,
    xla_reshard,
)
from meshwise.ir.mesh import refine_mesh
from meshwise.reshard.emit import apply_steps
from meshwise.reshard.plan import ReshardPlan, StepKind
from meshwise.run.placement import partition_spec, refined_jax_mesh

MIB = 2**20
WIDTH = 150  # columns, where there is no terminal to ask
SLOW = 0.9
TIMED_MESHES = ("8", "2x4", "2x2x2")
TIMED_RANKS = (2, 3)


def plan_of(case: Case) -> ReshardPlan:
    """What `mw.reshard` does."""
    plan = mw.reshard_plan(case.shape, case.dtype, make_mesh(case.mesh), case.source, case.target)
    assert isinstance(plan, ReshardPlan), "both ends are on one mesh"
    return plan


def program(case: Case) -> jax.stages.Lowered:
    """The program that `mw.reshard` runs."""
    mesh, plan = make_mesh(case.mesh), plan_of(case)
    refined = refine_mesh(mesh.axis_names, tuple(mesh.shape.values()))
    step = jax.shard_map(
        lambda x: apply_steps(x, plan, refined),
        mesh=refined_jax_mesh(refined, mesh),
        in_specs=partition_spec(plan.source),
        out_specs=partition_spec(plan.target),
        check_vma=False,
    )
    source, target = case.ends
    held = jax.ShapeDtypeStruct(case.padded[0], case.dtype)
    return jax.jit(step, in_shardings=source, out_shardings=target).lower(held)


@dataclass(frozen=True)
class Outcome:
    """The bytes of one pair. `is_right` says whether ours put the right values, None if not run."""

    case: Case
    peers: Mapping[str, Traffic]
    ours: Traffic
    is_right: bool | None

    @property
    def best(self) -> Traffic:
        """What the better of XLA's partitioners makes of it."""
        return min(self.peers.values(), key=lambda found: (found.wire_bytes, found.largest))

    @property
    def ratio(self) -> float | None:
        """XLA's bytes over ours; None where one of them sends nothing."""
        if not self.ours.wire_bytes or not self.best.wire_bytes:
            return None
        return self.best.wire_bytes / self.ours.wire_bytes

    @property
    def sends_more(self) -> bool:
        """Whether XLA sends less."""
        return self.ours.wire_bytes > self.best.wire_bytes * (1 + 1e-9)

    @property
    def gathers_all(self) -> bool:
        """Whether XLA makes the array whole on the way, where it is whole at neither end."""
        whole = prod(self.case.shape) * self.case.itemsize
        return self.case.larger_end < whole <= self.best.largest

    @property
    def is_as_planned(self) -> bool:
        """Whether our program sends and holds no more than our plan says."""
        plan = plan_of(self.case)
        return self.ours.wire_bytes <= plan.wire_bytes * (1 + 1e-9) and (
            self.ours.largest <= plan.peak_bytes
        )

    @property
    def reason(self) -> str:
        """Why ours sends more than the bound: what cannot be avoided by these steps."""
        kinds = [step.kind for step in plan_of(self.case).steps if step.launches]
        if len(kinds) > 1:
            return "a piece travels more than once"
        if kinds[0] is StepKind.ROUNDS:
            return "a buffer is as large as the largest piece of its round"
        return "padding travels" if not self.case.is_even else "unknown"

    def __str__(self) -> str:
        case = self.case
        lines = [f"{case}: bound {case.bound:,}, larger shard {case.larger_end:,}"]
        for name, found in (*self.peers.items(), ("meshwise", self.ours)):
            lines.append(
                f"  {name}: {found.wire_bytes:,.0f} bytes in {found.kinds}; the busiest device "
                f"receives {found.busiest:,.0f}, the largest array is {found.largest:,}"
            )
        return "\n".join([*lines, *(f"    {step}" for step in plan_of(case).steps)])


def is_least(found: Traffic, case: Case) -> bool:
    """Whether no reshard could send less."""
    return found.wire_bytes <= case.bound * (1 + 1e-9)


def measure(case: Case, is_run: bool) -> Outcome:
    """The bytes of one pair and, if it is to be run, whether ours puts the right values."""
    peers = {which: xla_reshard(case, which) for which in hlo.PARTITIONERS}
    ours = read_program(hlo.partitioned_text(program(case)))
    return Outcome(case, peers, ours, puts_right(case) if is_run else None)


def puts_right(case: Case) -> bool:
    """Whether every device ends with its part of the array, bit for bit. The bits are random."""
    bits = np.random.default_rng(0).integers(0, 2**32, case.shape, np.uint32)
    source, target = case.ends
    rest = [(0, m - n) for n, m in zip(case.shape, case.padded[0], strict=True)]
    held = jax.device_put(np.pad(bits.view(np.float32), rest), source)
    array = held if held.shape == case.shape else mw.UnevenArray(held, case.shape)
    result = mw.reshard(array, target)
    return result.sharding == target and all(
        np.array_equal(np.ascontiguousarray(shard.data).view(np.uint32), bits[shard.index])
        for shard in result.addressable_shards
    )


BYTES_HEADS = (
    *("mesh", "rank", "dims", "pairs", "XLA / ours", "ours more", "at the bound", "received"),
    *("XLA at it", "XLA whole", "ours holds", "XLA holds", "wrong"),
)
BYTES_CAPTION = (
    "XLA: the better of GSPMD and Shardy. XLA / ours: bytes that a device sends, geometric mean of "
    "the pairs in which both send. Ours more: pairs in which ours sends more. At the bound: of "
    "ours, by what is sent and by what the busiest device receives; then of XLA's. Whole: pairs in "
    "which XLA makes the array whole on the way. Holds: the largest array on the way over the "
    "larger shard, at most. Wrong: of the pairs that were run."
)


def bytes_row(mesh: str, rank: str, dims: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """What a group of pairs comes to."""
    ratios = [o.ratio for o in outcomes if o.ratio is not None]
    run = [o.is_right for o in outcomes if o.is_right is not None]

    def share(hits: Sequence[bool]) -> str:
        return f"{100 * sum(hits) / len(outcomes):.0f}%"

    return (
        *(mesh, rank, dims, str(len(outcomes))),
        f"{geometric_mean(ratios):.2f}" if ratios else "-",
        str(sum(o.sends_more for o in outcomes)),
        share([is_least(o.ours, o.case) for o in outcomes]),
        share([o.ours.busiest <= o.case.bound for o in outcomes]),
        share([is_least(o.best, o.case) for o in outcomes]),
        str(sum(o.gathers_all for o in outcomes)),
        f"{max(o.ours.largest / o.case.larger_end for o in outcomes):.2f}",
        f"{max(o.best.largest / o.case.larger_end for o in outcomes):.2f}",
        f"{run.count(False)} of {len(run)}",
    )


def bytes_part(options: argparse.Namespace, console: Console) -> None:
    """Count the bytes of all groups asked for; then list what is out of order."""
    draw = random.Random(options.seed)
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for mesh in options.meshes or MESHES:
        for rank in options.ranks or (1, 2, 3, 4):
            pairs = some_pairs(mesh, rank, options.pairs, draw)
            run = set(draw.sample(range(len(pairs)), min(options.run, len(pairs))))
            even = [even_case(mesh, rank, ends) for ends in pairs]
            uneven = [uneven_case(mesh, rank, ends, draw) for ends in pairs]
            for dims, cases in (("even", even), ("uneven", uneven)):
                with console.status(f"{len(cases)} pairs on {mesh}, rank {rank}, {dims}"):
                    found = [measure(case, i in run) for i, case in enumerate(cases)]
                groups[mesh, str(rank), dims] = found
    every = [o for outcomes in groups.values() for o in outcomes]
    for dims in ("even", "uneven"):
        some = [o for name, outcomes in groups.items() if name[2] == dims for o in outcomes]
        groups["all", "all", dims] = some
    rows = [bytes_row(*name, outcomes) for name, outcomes in groups.items()]
    console.print(table("Bytes of a reshard", BYTES_HEADS, rows, BYTES_CAPTION, options))
    listed = {
        "Ours sends more than XLA": [o for o in every if o.sends_more],
        "Ours is wrong": [o for o in every if o.is_right is False],
    }
    if options.verbose:
        for o in every:
            if not is_least(o.ours, o.case):
                listed.setdefault(f"Ours sends more than the bound: {o.reason}", []).append(o)
        listed["Ours holds more than the larger shard"] = [
            o for o in every if o.ours.largest > o.case.larger_end
        ]
        listed["Our program sends or holds more than planned"] = [
            o for o in every if not o.is_as_planned
        ]
    for title, outcomes in listed.items():
        print(f"\n{title}: {len(outcomes)} of {len(every)} pairs", *outcomes, sep="\n")


@dataclass(frozen=True)
class Timing:
    """One pair: milliseconds and bytes of memory of a call, of ours and of XLA's."""

    case: Case
    ours_ms: float
    peer_ms: float
    ours_bytes: int
    peer_bytes: int
    is_again: bool
    is_right: bool

    @property
    def ratio(self) -> float:
        """XLA's time over ours."""
        return self.peer_ms / self.ours_ms


def memory(lowered: jax.stages.Lowered) -> int:
    """Bytes of a device for the result and on the way to it."""
    found: Any = lowered.compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


def time_pair(case: Case, repeats: int) -> Timing:
    """One pair: a first call of each to compile and compare, then calls in turns."""
    source, target = case.ends
    x = numbers(case)
    step = jax.jit(lambda x: x, out_shardings=target)
    calls = [lambda: mw.reshard(x, target), lambda: step(x)]
    results = [call() for call in calls]
    is_right = is_same(*results)
    for result in results:
        result.delete()
    again = False
    ours_ms, peer_ms = milliseconds(calls, repeats)
    if peer_ms / ours_ms < SLOW:
        again = True
        ours_ms, peer_ms = milliseconds(calls, 3 * repeats)
    x.delete()
    held = jax.ShapeDtypeStruct(case.shape, case.dtype)
    peer = jax.jit(lambda x: x, in_shardings=source, out_shardings=target).lower(held)
    return Timing(case, ours_ms, peer_ms, memory(program(case)), memory(peer), again, is_right)


TIME_HEADS = ("pair", "MB", "XLA ms", "ours ms", "ratio", "XLA MB", "ours MB", "steps")


def time_row(timing: Timing) -> tuple[str, ...]:
    """One pair as text."""
    case = timing.case
    size = prod(case.shape) * case.itemsize
    return (
        str(case),
        *(f"{size / MIB:.0f}", f"{timing.peer_ms:.1f}", f"{timing.ours_ms:.1f}"),
        f"{timing.ratio:.2f}{' again' if timing.is_again else ''}",
        *(f"{timing.peer_bytes / MIB:.1f}", f"{timing.ours_bytes / MIB:.1f}"),
        ", ".join(steps_of(timing.case)),
    )


def steps_of(case: Case) -> list[str]:
    """The steps of our plan in a few words."""
    steps = plan_of(case).steps
    return [s.kind.value + (f" in {s.launches}" if s.launches > 1 else "") for s in steps]


def time_part(options: argparse.Namespace, console: Console) -> None:
    """Time all pairs; a row each, and what they come to."""
    draw = random.Random(options.seed)
    meshes, ranks = options.meshes or TIMED_MESHES, options.ranks or TIMED_RANKS
    timings = []
    for number in range(options.timed):
        rank, dtype = draw.choice(ranks), draw.choice(options.dtypes)
        case = large_case(meshes[number % len(meshes)], rank, dtype, draw)
        with console.status(str(case)):
            timings.append(time_pair(case, options.repeats))
        console.print("  ".join(time_row(timings[-1])), highlight=False)
    ratios = [t.ratio for t in timings]
    more_memory = sum(t.ours_bytes > 1.001 * t.peer_bytes for t in timings)
    caption = (
        f"Medians of {options.repeats} calls. MB: of the array; then what a device needs for the "
        "result and on the way. XLA / ours in time: geometric mean "
        f"{geometric_mean(ratios):.2f}, least {min(ratios):.2f}, most {max(ratios):.2f}; "
        f"{sum(r < SLOW for r in ratios)} of {len(timings)} below {SLOW}. "
        f"Ours needs a thousandth more memory in {more_memory}. "
        f"Wrong: {sum(not t.is_right for t in timings)}."
    )
    rows = [time_row(timing) for timing in timings]
    console.print(table("Milliseconds of a reshard", TIME_HEADS, rows, caption, options))


def table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str,
    options: argparse.Namespace,
) -> Table | Text:
    """A table, for a terminal or for a page."""
    if options.markdown:
        lines = [heads, ["---"] * len(heads), *rows]
        return Text("\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", caption]))
    found = Table(*heads, title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        found.add_row(*row)
    return found


PARTS = {"bytes": bytes_part, "time": time_part}


def main() -> None:
    """Run the parts asked for, both without any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help="bytes, time; both without any")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, help="default: all; 8 devices timed")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: 1 to 4; 2 and 3 timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of a mesh and rank")
    parser.add_argument("--run", type=int, default=5, help="how many of them are run")
    parser.add_argument("--timed", type=int, default=24, help="pairs that are timed")
    parser.add_argument("--repeats", type=int, default=7, help="calls of a timed pair")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="of timed arrays")
    parser.add_argument("--verbose", action="store_true", help="list pairs off the bound, and why")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    options = parser.parse_args()
    if strangers := set(options.parts).difference(PARTS):
        parser.error(f"no part is called {', '.join(sorted(strangers))}")
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    for part in options.parts or PARTS:
        PARTS[part](options, console)


if __name__ == "__main__":
    main()
