"""`mw.autotune`: legal schedules of a program, breadth first, and the best of them by measurement.

CoCoNeT section 4. From the program as it is, policies (`policies.py`) are applied one after the
other, level by level. A program that was reached already, by other moves, is not gone on from; nor
is one that the cost model predicts to be far slower than the best so far. The finalists are
compiled and timed on the devices, in turns, and compared with the program as it was: one whose
results differ by more than rounding is out, whatever its time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from meshwise import _jax
from meshwise.api.calibrate import kept, kept_of_mesh
from meshwise.api.meshes import platform_of
from meshwise.api.options import check_flags
from meshwise.api.policies import Policy, policies
from meshwise.api.schedule import Schedule
from meshwise.api.schedule_inputs import names_of
from meshwise.api.spmd_program import SpmdProgram
from meshwise.api.states import state_of
from meshwise.api.tuning_limits import TuningLimits, check_measure, tuning_limits
from meshwise.cost.hardware import CPU, GENERIC, Hardware
from meshwise.cost.kernels import kernels_of
from meshwise.cost.links import Links
from meshwise.cost.memory import memory_of_kernels
from meshwise.cost.timeline import timeline_of_kernels
from meshwise.ir.numbers import microseconds
from meshwise.report.progress import Progress
from meshwise.report.schedules import candidates_table
from meshwise.report.text import count

# A schedule that sends more than the program as it is, by this factor and bytes, is out: norms of
# slices and padding may add a little.
SENT_MORE, MORE_BYTES = 1.01, 1024
# So many applications of policies are tried at most.
MOST_TRIED = 200
# Of the schedules that so many policies led to, so many are gone on from.
WIDTH = 8
# A schedule this many times slower than the best, by prediction, is not gone on from.
PRUNED_ABOVE = 2.0


@dataclass(frozen=True, eq=False, repr=False)
class Candidate:
    """One schedule: the policies `applied`, in order, and its figures on one device.

    `predicted_s` is the cost model's time, `measured_s` the median of its runs where it was timed,
    `note` why it is out where it is.
    """

    schedule: Schedule
    applied: tuple[Policy, ...]
    predicted_s: float
    wire_bytes: float
    launches: int
    peak_bytes: int
    measured_s: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The policies, in order."""
        return ", ".join(policy.name for policy in self.applied) or "as it is"

    def __repr__(self) -> str:
        """Its policies and its time."""
        took = self.predicted_s if self.measured_s is None else self.measured_s
        how = "predicted" if self.measured_s is None else "measured"
        return f"<schedule {self.name}, {microseconds(took)} {how}>"


@dataclass(frozen=True, eq=False, repr=False)
class Tuned:
    """What the search found: the winner first, then all other candidates by their figures."""

    candidates: tuple[Candidate, ...]
    original: Candidate
    explored: int
    seconds: float
    measure: str
    machine: str

    @property
    def best(self) -> Candidate:
        """The winner."""
        return self.candidates[0]

    @property
    def program(self) -> SpmdProgram:
        """The winner's program."""
        return self.best.schedule.program

    def script(self) -> str:
        """The winner's moves, as code."""
        return self.best.schedule.script()

    def __repr__(self) -> str:
        """How many there were, and the winner; `print` shows all."""
        found = count(len(self.candidates), "schedule")
        name = self.original.schedule.original.name
        return f"<{found} of {name}, the best {self.best!r}>"

    def __str__(self) -> str:
        """All candidates with their figures, and the winner's script."""
        rows = [
            (c.name, c.predicted_s, c.measured_s, c.wire_bytes, c.launches, c.peak_bytes, c.note)
            for c in self.candidates
        ]
        found = count(len(self.candidates), "schedule")
        title = (
            f"{found} of {self.explored} tried in {self.seconds:.1f} s, by {self.measure}, "
            f"predicted for {self.machine}"
        )
        return "\n".join([title, *candidates_table(rows), "", self.script().rstrip()])


@_jax.hides_frames
def autotune(
    program: Any,
    *args: Any,
    measure: str = "time",
    budget_s: float = 60.0,
    states: Sequence[str] | None = None,
    hardware: Hardware | Links | None = None,
    overlaps: bool | None = None,
    finalists: int = 6,
    rounds: int = 10,
    progress: bool = False,
) -> Tuned:
    """The best legal schedule of a program.

    Args:
        program: an `SpmdProgram`, or what has `partition` (`mw.jit`, `mw.program`) with its `args`.
        args: the arguments; arrays among them are what finalists are timed and compared on, for
            the others random numbers are.
        measure: "time" times the finalists on the program's devices, "cost" takes the cost model's
            word and is deterministic.
        budget_s: with "time", seconds after half of which no more is tried, after all of which no
            more is timed. What is tried is bounded anyway.
        states: names of arguments that may be kept in slices; by default the states whose next
            value is computed on the way to another result (momentum, not weights).
        hardware: figures for predictions, of the devices or of each axis's link too (`Links`); by
            default those of the mesh's platform, with "time" those that `mw.calibrate` measured.
        overlaps: whether collectives run beside computation; by default where hardware does that.
        finalists: how many of the best by prediction are timed, beside the program as it is.
        rounds: how often each is timed, in turns.
        progress: show what is being tried, on the terminal.

    Raises ArgumentError for what does not fit.
    """
    limits = tuning_limits(budget_s, finalists, rounds, hardware)
    check_flags("mw.autotune", progress=progress, overlaps=overlaps)
    start = time.perf_counter()
    first = Schedule(program, *args)
    if args and isinstance(program, SpmdProgram):
        program.leaves(args, {}, or_types=True)
    if states is not None:
        first.may_slice = tuple(names_of("mw.autotune", states)) if states else ()
        for name in first.may_slice:
            state_of(first.original, name, None)
    mesh = first.original.user_mesh
    check_measure(measure, mesh)
    machine = hardware or _hardware_of(mesh, measure)
    beside = machine is not CPU and platform_of(mesh) != "cpu" if overlaps is None else overlaps
    deadline = start + limits.budget_s if measure == "time" else float("inf")
    with Progress(progress) as display:
        until = start + limits.budget_s / 2 if measure == "time" else float("inf")
        found, explored = _search(first, machine, beside, until, display)
        most = SENT_MORE * found[0].wire_bytes + MORE_BYTES
        found = [replace(c, note="sends more") if c.wire_bytes > most else c for c in found]
        ranked = sorted(found, key=lambda c: (bool(c.note), c.predicted_s, c.wire_bytes))
        if measure == "time":
            ranked = _timed(ranked, found[0], args, limits, deadline, display)
    seconds = time.perf_counter() - start
    name = (machine.device if isinstance(machine, Links) else machine).name
    return Tuned(tuple(ranked), found[0], explored, seconds, measure, name)


def scheduled(program: SpmdProgram, schedule: Any, hardware: Hardware | None) -> SpmdProgram:
    """A program after the moves of a script, or "auto" for the best by the cost model.

    The model's figures are `hardware`, or those of the mesh's platform.
    """
    if schedule is None:
        return program
    if schedule == "auto":
        figures = hardware or _hardware_of(program.user_mesh, "cost")
        return autotune(program, measure="cost", hardware=figures).program
    return Schedule(program).run(schedule).program


def _hardware_of(mesh: Any, measure: str) -> Hardware | Links:
    """Measured figures where programs are timed anyway; what goes by cost is alike everywhere."""
    measured = None
    if measure == "time":
        measured = kept_of_mesh(mesh) or kept(list(mesh.devices.flat))
    return measured or (CPU if platform_of(mesh) == "cpu" else GENERIC)


def _search(
    first: Schedule,
    hardware: Hardware | Links,
    overlaps: bool,
    until: float,
    display: Progress,
) -> tuple[list[Candidate], int]:
    """Every schedule that policies lead to, the program as it is first; and how many were tried."""
    candidate = _candidate(first, (), hardware, overlaps)
    known = {_jax.structure_key(first.view.program.jaxpr)}
    found = [candidate]
    level, explored = [candidate], 1
    while level:
        following: list[Candidate] = []
        best = min(c.predicted_s for c in found)
        for parent in sorted(level, key=lambda c: c.predicted_s)[:WIDTH]:
            if parent.predicted_s > PRUNED_ABOVE * best and parent is not candidate:
                continue
            for policy in policies(parent.schedule):
                if explored >= MOST_TRIED or time.perf_counter() > until:
                    return [*found, *following], explored
                if not policy.may_follow(parent.applied):
                    continue
                explored += 1
                display.show(f"{explored} schedules tried: {policy.name}")
                moved = parent.schedule.copy()
                if not policy.apply(moved):
                    continue
                key = _jax.structure_key(moved.view.program.jaxpr)
                if key in known:
                    continue
                known.add(key)
                applied = (*parent.applied, policy)
                following.append(_candidate(moved, applied, hardware, overlaps))
        found += following
        level = following
    return found, explored


def _candidate(
    schedule: Schedule, applied: tuple[Policy, ...], hardware: Hardware | Links, overlaps: bool
) -> Candidate:
    program = schedule.view.program
    sizes = program.mesh.axis_size
    kernels = kernels_of(program.jaxpr, sizes)
    predicted = timeline_of_kernels(kernels, sizes, hardware, overlaps).seconds
    memory = memory_of_kernels(kernels, schedule.original.donated)
    launches = sum(c.count for c in program.collectives)
    return Candidate(schedule, applied, predicted, program.wire_bytes, launches, memory.peak_bytes)


def _timed(
    ranked: Sequence[Candidate],
    original: Candidate,
    args: Sequence[Any],
    limits: TuningLimits,
    deadline: float,
    display: Progress,
) -> list[Candidate]:
    """The candidates again, those in the final with their time and ordered by it."""
    final = [original, *[c for c in ranked if c is not original and not c.note][: limits.finalists]]
    values = arguments_for(original.schedule.original, args)
    runs: list[_Run] = []
    notes: dict[int, str] = {}
    wanted: list[np.ndarray] | None = None
    for candidate in final:
        if runs and time.perf_counter() > deadline:
            break
        display.show(f"compiling {candidate.name}")
        run = _Run.of(candidate, values)
        results = run.results()
        wanted = results if wanted is None else wanted
        worst = _difference(results, wanted)
        if worst:
            notes[id(candidate)] = worst
        else:
            runs.append(run)
    for number in range(limits.rounds):
        if number >= 3 and time.perf_counter() > deadline:
            break
        display.show(f"timing {len(runs)} schedules, round {number + 1} of {limits.rounds}")
        for run in runs:
            run.time()
    measured = {id(run.candidate): run.median for run in runs}
    known = [
        replace(c, measured_s=measured.get(id(c)), note=notes.get(id(c), c.note)) for c in ranked
    ]
    return sorted(
        known,
        key=lambda c: (c.measured_s is None, c.measured_s or 0.0, bool(c.note), c.predicted_s),
    )


def arguments_for(program: SpmdProgram, args: Sequence[Any]) -> list[Any]:
    """Arrays for every argument: those given, else random floats and zeros."""
    given = jax.tree.leaves(tuple(args))
    types = program.per_device.in_types[len(program.held) :]
    draw = np.random.default_rng(0)
    values = []
    for i, wanted in enumerate(types):
        leaf = given[i] if len(given) == len(types) else None
        if leaf is not None and not isinstance(leaf, jax.ShapeDtypeStruct):
            values.append(leaf)
        elif jax.numpy.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            values.append(jax.random.split(jax.random.key(0), wanted.shape))
        elif jax.numpy.issubdtype(wanted.dtype, jax.numpy.inexact):
            values.append(np.abs(draw.normal(size=wanted.shape)).astype(wanted.dtype) + 0.1)
        else:
            values.append(np.zeros(wanted.shape, wanted.dtype))
    return values


@dataclass
class _Run:
    """A finalist, compiled, its arguments in their places."""

    candidate: Candidate
    program: SpmdProgram
    placed: list[Any]
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, candidate: Candidate, values: Sequence[Any]) -> "_Run":
        """Compile nothing yet; nothing is donated, as arguments are used again."""
        program = replace(candidate.schedule.program, donated=())
        return cls(candidate, program, program.executable.placed(values))

    def results(self) -> list[np.ndarray]:
        """Results, on the host."""
        outs = self.program.executable(self.placed)
        return [np.asarray(out) for out in outs if not _is_key(out)]

    def time(self) -> None:
        """One more run."""
        start = time.perf_counter()
        outs = self.program.executable(self.placed)
        jax.block_until_ready([getattr(out, "padded", out) for out in outs])
        self.seconds.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        """Seconds of the run in the middle; the first, which may warm something up, left out."""
        return float(np.median(self.seconds[1:] or self.seconds))


def _is_key(value: Any) -> bool:
    return jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _difference(results: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """Where results differ by more than rounding, in words; nothing where they do not."""
    for number, (got, want) in enumerate(zip(results, wanted, strict=True)):
        if not jax.numpy.issubdtype(want.dtype, jax.numpy.inexact):
            if not np.array_equal(got, want):
                return f"result {number} differs"
            continue
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        exact = want.astype(wide)
        scale = float(np.max(np.abs(exact[np.isfinite(exact)]), initial=0.0))
        rounding = float(jax.numpy.finfo(want.dtype).eps)
        bound = min(1e3 * rounding, max(20 * rounding, 0.05)) * (scale + 1e-30)
        if not np.allclose(got.astype(wide), exact, rtol=0.0, atol=bound, equal_nan=True):
            return f"result {number} differs by more than rounding"
    return ""
