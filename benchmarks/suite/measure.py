"""What each partitioner makes of a program: bytes, flops, memory, seconds, numbers.

XLA's wire bytes are read right after its SPMD pass, the lower of "as emitted" and "as its compilers
leave them" (`hlo.Collective.credited_bytes`). Ours are those of the emitted program,
and are read again from the same place with the same reader (`read_back`): a row in which these
differ says so. Flops are counted there
too (`work.py`), for all alike. We have two columns: what `mw.jit` makes without being told more,
and what it makes of the figures of CPU devices, on which all of this runs: there few launches and
no exchanges are worth more bytes.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.gpt import forget
from benchmarks.peers import hlo
from benchmarks.suite import contestants
from benchmarks.suite.program import Program
from benchmarks.suite.work import flops
from meshwise.cost.hardware import CPU, GENERIC, Hardware

PEERS: tuple[hlo.Partitioner, ...] = ("shardy", "gspmd")
OURS: Literal["meshwise"] = "meshwise"
HERE: Literal["meshwise_cpu"] = "meshwise_cpu"
COLUMNS = (*PEERS, OURS, HERE)
ENOUGH_S, MOST_REPEATS = 0.4, 401
HARDWARE = {OURS: GENERIC, HERE: CPU}
# By which XLA on CPU is right on one device, too (design note 20).
RIGHT = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


@dataclass(frozen=True)
class Outcome:
    """What one partitioner makes of one program.

    `sent` are wire bytes per device and `kinds` how many collectives of each kind run, loop trips
    included. `flops` are those of `work.py`, `compiler_flops` and `memory` (peak bytes of
    temporaries) the compiler's own figures, all per device. `compile_s` is from the function to
    the executable, nothing cached; `run_s` a median. `error` is the largest one beside one
    device's result, relative to its largest number. `read_back` are our wire bytes as read from
    HLO. `failed` is an exception's text.
    """

    sent: float = 0.0
    kinds: Mapping[str, int] = field(default_factory=dict)
    flops: float = 0.0
    compiler_flops: float = 0.0
    memory: int = 0
    compile_s: float = 0.0
    run_s: float | None = None
    error: float = 0.0
    read_back: float | None = None
    failed: str = ""


@dataclass(frozen=True)
class Measured:
    """A program and its outcomes, by column."""

    program: Program
    outcomes: Mapping[str, Outcome]


def measure(program: Program, repeats: int = 0) -> Measured:
    """Every column of a program; run times where `repeats` is not 0."""
    args = contestants.operands(program)
    wanted = jax.jit(contestants.one_device(program), compiler_options=RIGHT)(*args)
    outcomes: dict[str, Outcome] = {}
    calls: dict[str, Callable[[], Any]] = {}
    makers = {which: partial(_peer, which) for which in PEERS} | {
        which: partial(_ours, hardware) for which, hardware in HARDWARE.items()
    }
    for which, make in makers.items():
        try:
            outcome, calls[which] = make(program, args)
            error = largest_error(calls[which](), wanted)
            outcomes[which] = replace(outcome, error=error)
        except Exception:
            outcomes[which] = Outcome(failed=traceback.format_exc(limit=-3))
            calls.pop(which, None)
    if repeats:
        for which, seconds in _run_seconds(calls, repeats).items():
            outcomes[which] = replace(outcomes[which], run_s=seconds)
    return Measured(program, outcomes)


def _peer(
    which: hlo.Partitioner, program: Program, args: tuple[Any, ...]
) -> tuple[Outcome, Callable[[], Any]]:
    """What one of XLA's partitioners makes of it, and a call."""
    contestant = contestants.xla(program, args)
    with hlo.partitioner(which):
        forget()
        start = time.perf_counter()
        lowered = contestant.function.lower(*contestant.args)
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        text = hlo.partitioned_text(lowered)
    report = hlo.parse(text)
    sent = min(report.wire_bytes, report.credited_bytes)
    outcome = Outcome(sent, dict(report.by_kind), flops(text), *_figures(compiled), seconds)
    return outcome, _call(compiled, contestant.args)


def _ours(
    hardware: Hardware, program: Program, args: tuple[Any, ...]
) -> tuple[Outcome, Callable[[], Any]]:
    """What we make of it for some devices, and a call."""
    contestant = contestants.ours(program, args, hardware)
    forget()
    start = time.perf_counter()
    partitioned = contestant.function.partition(*contestant.args)
    compiled = partitioned.compile()
    seconds = time.perf_counter() - start
    kinds = Counter[str]()
    for collective in partitioned.collectives:
        kinds[collective.kind.value] += collective.count
    text = hlo.partitioned_text(partitioned.executable.lower())
    outcome = Outcome(
        partitioned.wire_bytes,
        dict(kinds),
        flops(text),
        *_figures(compiled),
        seconds,
        read_back=hlo.parse(text).wire_bytes,
    )
    return outcome, _call(contestant.function, contestant.args)


def _figures(compiled: Any) -> tuple[float, int]:
    """Flops and peak bytes of temporaries of a device, as the compiler counts them."""
    cost = compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    return float(cost.get("flops", 0.0)), int(compiled.memory_analysis().temp_size_in_bytes)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function(*args))


def _run_seconds(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Medians of calls made in turns, each round in another order; short ones are made oftener."""
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}

    def turn(number: int) -> None:
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            start = time.perf_counter()
            calls[name]()
            found[name].append(time.perf_counter() - start)

    for number in range(3):  # the first calls are slower, and say nothing
        turn(number)
    longest = max((times[-1] for times in found.values()), default=1.0)
    for times in found.values():
        times.clear()
    for number in range(max(repeats, min(MOST_REPEATS, int(ENOUGH_S / longest)))):
        turn(number)
    return {name: median(times) for name, times in found.items()}


def largest_error(found: Any, wanted: Any) -> float:
    """The largest difference of any leaf, relative to the largest number in it; inf for NaNs."""
    pairs = zip(jax.tree.leaves(found, is_leaf=_has_shape), jax.tree.leaves(wanted), strict=True)
    return max((_error(a, b) for a, b in pairs), default=0.0)


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape")


def _error(found: Any, wanted: Any) -> float:
    wide = np.complex128 if np.iscomplexobj(wanted) else np.float64
    found, wanted = np.asarray(found), np.asarray(wanted).astype(wide)
    found = found[tuple(slice(n) for n in wanted.shape)].astype(wide)  # without padding
    if not wanted.size:
        return 0.0
    both = np.isnan(found) & np.isnan(wanted)
    same = both | (found == wanted)
    difference = np.where(same, 0, np.abs(found - wanted))
    scale = max(float(np.max(np.abs(np.where(same & ~np.isfinite(wanted), 0, wanted)))), 1e-30)
    worst = float(np.max(difference)) / scale
    return worst if np.isfinite(worst) else float("inf")
