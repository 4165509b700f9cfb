"""A simulated schedule: when each kernel and collective of a per-device program runs.

Resources are the compute unit and a link for each mesh axis (`links.py`). A kernel (`kernels.py`)
takes as long as its flops or its memory traffic, whichever is longer, and a launch. A collective
takes its link, and nothing else: what it costs the compute unit and the memory is left out.

Without overlap everything runs one after another. With overlap a collective runs beside whatever
does not wait for it, as where XLA's latency hiding scheduler puts starts early and dones late. Each
resource takes its work in a fixed order, the best of ten that do not depend on times (`orders.py`),
so that more work never ends sooner. Memory bounds nothing: all gathers of a step may start at once.

Loops are not entered by what is around them, as XLA schedules each body by itself: a body's own
timeline, times its trips, keeps the compute unit and the body's links. A `while` loop counts once.
Of a choice the longest branch counts. A call named `fused_...` with collectives inside keeps the
compute unit and its links for as long as the longer of its computation and all its collectives,
which are launched once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise._jax import ClosedJaxpr, Jaxpr
from meshwise.cost.gantt import Event, chrome_trace, draw, show_seconds
from meshwise.cost.hardware import Hardware
from meshwise.cost.kernels import Kernel, KernelProgram, kernels_of
from meshwise.cost.links import Links
from meshwise.cost.orders import Ordered, orders_of
from meshwise.cost.work import Work

COMPUTE = "compute"


@dataclass(frozen=True)
class Timeline:
    """When what runs, predicted.

    `events` are in order of their start; what keeps several resources busy has one on each.
    `busy` lists seconds of work of each resource: less than its events where a loop keeps it and
    does not use it. `critical_path` is a chain of events, each of which waits for the one before,
    from the start to the end. `longest_chain_s` is how long the longest chain of values takes: no
    schedule is shorter. `notes` say what was assumed.
    """

    events: tuple[Event, ...]
    seconds: float
    busy: tuple[tuple[str, float], ...]
    critical_path: tuple[Event, ...]
    longest_chain_s: float
    overlaps: bool
    machine: str
    notes: tuple[str, ...] = ()

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Seconds of work of each resource, by its name."""
        return dict(self.busy)

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which nothing is computed, in loops too: what communication costs."""
        return max(0.0, self.seconds - self.busy_seconds[COMPUTE])

    def __str__(self) -> str:
        """A Gantt chart of at most 100 columns, with the longest events listed."""
        mode = "communication beside computation" if self.overlaps else "one after another"
        lines = [f"{show_seconds(self.seconds)} on {self.machine}, {mode}"[:100]]
        for resource, busy in self.busy:
            share = busy / self.seconds if self.seconds else 0.0
            lines.append(f"  {resource}: busy {show_seconds(busy)}, {share:.0%}"[:100])
        lines.append(f"  longest chain of values: {show_seconds(self.longest_chain_s)}")
        lines += [f"  {note}" for note in self.notes]
        chart = draw(self.events, [name for name, _ in self.busy], self.seconds)
        return "\n".join([*lines, chart])

    def to_chrome_trace(self) -> str:
        """The events as JSON text for Perfetto or `chrome://tracing`, a track a resource."""
        return chrome_trace(self.events, [name for name, _ in self.busy], self.machine)


def timeline(
    jaxpr: ClosedJaxpr | Jaxpr,
    axis_sizes: Mapping[str, int],
    hardware: Hardware | Links,
    *,
    overlaps: bool,
) -> Timeline:
    """When each kernel and collective of one call of a per-device program runs, predicted.

    `hardware` alone gives every axis a link of its own with the hardware's figures; `Links` gives
    each axis its own figures. `overlaps` lets collectives run beside the compute unit.
    """
    return timeline_of_kernels(kernels_of(jaxpr, axis_sizes), axis_sizes, hardware, overlaps)


def timeline_of_kernels(
    program: KernelProgram,
    axis_sizes: Mapping[str, int],
    hardware: Hardware | Links,
    overlaps: bool,
) -> Timeline:
    """The same of a program whose kernels are known."""
    machine = hardware if isinstance(hardware, Links) else Links(hardware)
    found = _simulate(program, axis_sizes, machine, overlaps)
    return Timeline(
        tuple(_events(found)),
        found.seconds,
        tuple(found.busy.items()),
        tuple(_critical_path(found)),
        max(found.chains, default=0.0),
        overlaps,
        machine.device.name,
        tuple(dict.fromkeys(_notes(program))),
    )


def kernel_seconds(work: Work, hardware: Hardware) -> float:
    """Seconds of one kernel: a launch, and its flops or its bytes, whichever takes longer."""
    computed = hardware.compute_s(work.flops, work.serial_flops, work.calls)
    moved = work.memory_bytes / hardware.memory_bytes_per_s
    return hardware.kernel_s + max(computed, moved)


@dataclass(frozen=True, eq=False)
class _Task:
    """One kernel as the schedule sees it: how long it keeps which resources, and for what it waits.

    `busy` is the work on each resource, which in a loop is less than its seconds.
    """

    kernel: Kernel
    seconds: float
    resources: tuple[str, ...]
    busy: Mapping[str, float]
    waits: tuple[int, ...]

    @property
    def ordered(self) -> Ordered:
        """What its place in an order depends on."""
        return Ordered(self.resources, self.waits, self.kernel.is_collective)


@dataclass(frozen=True, eq=False)
class _Schedule:
    """Tasks with their starts, in the program's order; `after` is what each start waited for."""

    tasks: Sequence[_Task]
    starts: Sequence[float]
    after: Sequence[int | None]
    chains: Sequence[float]
    seconds: float
    busy: Mapping[str, float]

    def end(self, task: int) -> float:
        """When a task ends."""
        return self.starts[task] + self.tasks[task].seconds


def _simulate(
    program: KernelProgram, axis_sizes: Mapping[str, int], machine: Links, overlaps: bool
) -> _Schedule:
    tasks = list(_tasks(program, axis_sizes, machine, overlaps))
    chains: list[float] = []
    for task in tasks:
        chains.append(max((chains[w] for w in task.waits), default=0.0) + task.seconds)
    busy: dict[str, float] = {COMPUTE: 0.0}
    for task in tasks:
        for resource, seconds in task.busy.items():
            busy[resource] = busy.get(resource, 0.0) + seconds
    orders = orders_of([t.ordered for t in tasks]) if overlaps else [range(len(tasks))]
    ways = [_start(tasks, order, overlaps) for order in orders]
    starts, after, end = min(ways, key=lambda way: way[2])
    return _Schedule(tasks, starts, after, chains, end, busy)


def _tasks(
    program: KernelProgram, axis_sizes: Mapping[str, int], machine: Links, overlaps: bool
) -> Iterator[_Task]:
    maker = {value: k for k, kernel in enumerate(program.kernels) for value in kernel.writes}
    for k, kernel in enumerate(program.kernels):
        waits = tuple(dict.fromkeys(maker[v] for v in kernel.reads if maker.get(v, k) != k))
        if kernel.bodies:
            seconds, busy = _body_seconds(kernel, axis_sizes, machine, overlaps)
        else:
            seconds, busy = _own_seconds(kernel, axis_sizes, machine)
        yield _Task(kernel, seconds, tuple(busy), busy, waits)


def _own_seconds(
    kernel: Kernel, axis_sizes: Mapping[str, int], machine: Links
) -> tuple[float, dict[str, float]]:
    """How long a kernel without bodies takes, and its work on each resource."""
    computed = 0.0 if kernel.is_collective else kernel_seconds(kernel.work, machine.device)
    busy = {} if kernel.is_collective else {COMPUTE: computed}
    sent = launched = 0.0
    for collective in kernel.collectives:
        launch = machine.launch_s(collective, axis_sizes)
        seconds = machine.seconds(collective, axis_sizes)
        if not kernel.is_collective:  # of one kernel, which is launched once
            seconds += max(0.0, launch - launched) - collective.count * launch
            launched = max(launched, launch)
        sent += seconds
        for link in dict.fromkeys(f"link {machine.name(a)}" for a in collective.axes):
            busy[link] = busy.get(link, 0.0) + seconds
    return max(computed, sent), busy


def _body_seconds(
    kernel: Kernel, axis_sizes: Mapping[str, int], machine: Links, overlaps: bool
) -> tuple[float, dict[str, float]]:
    """How long a loop or choice takes, and its work on each resource."""
    found: list[tuple[float, dict[str, float]]] = []
    for body in kernel.bodies:
        inner = _simulate(body.program, axis_sizes, machine, overlaps)
        trips = body.body.trips
        found.append((inner.seconds * trips, {r: s * trips for r, s in inner.busy.items()}))
    if kernel.is_choice:
        return max(found, key=lambda item: item[0])
    busy: dict[str, float] = {}
    for _, inner_busy in found:
        for resource, seconds in inner_busy.items():
            busy[resource] = busy.get(resource, 0.0) + seconds
    return sum(seconds for seconds, _ in found), busy


def _start(
    tasks: Sequence[_Task], order: Sequence[int], overlaps: bool
) -> tuple[list[float], list[int | None], float]:
    """The start of each task where every resource takes tasks in this order; and the end of all."""
    starts = [0.0] * len(tasks)
    after: list[int | None] = [None] * len(tasks)
    last: dict[str, int] = {}  # the last task of each resource so far
    end = 0.0
    for k in order:
        task = tasks[k]
        resources = task.resources if overlaps else (COMPUTE,)
        for other in (*task.waits, *(last[r] for r in resources if r in last)):
            ready = starts[other] + tasks[other].seconds
            if ready > starts[k]:
                starts[k], after[k] = ready, other
        last.update(dict.fromkeys(resources, k))
        end = max(end, starts[k] + task.seconds)
    return starts, after, end


def _events_of(schedule: _Schedule, task: int) -> Iterator[Event]:
    kernel = schedule.tasks[task].kernel
    trips = max((b.body.trips for b in kernel.bodies), default=1)
    name = f"{kernel.name} x{trips}" if trips > 1 else kernel.name
    for resource in schedule.tasks[task].resources:
        yield Event(name, resource, schedule.starts[task], schedule.end(task), kernel.equation)


def _events(schedule: _Schedule) -> list[Event]:
    found = [e for k in range(len(schedule.tasks)) for e in _events_of(schedule, k)]
    return sorted(found, key=lambda e: (e.start_s, e.end_s))


def _critical_path(schedule: _Schedule) -> list[Event]:
    """From the task that ends last back through what each start waited for."""
    places = range(len(schedule.tasks))
    at = max(places, key=lambda k: (schedule.end(k), -k), default=None)
    found: list[Event] = []
    while at is not None:
        found.append(next(_events_of(schedule, at)))
        at = schedule.after[at]
    return found[::-1]


def _notes(program: KernelProgram) -> Iterator[str]:
    """What a reader should know of a prediction."""
    for kernel in program.kernels:
        if not kernel.is_count_known:
            yield "a while loop is counted once: how often it runs is not known"
        elif kernel.is_choice:
            yield "of a choice the longest branch is counted"
        for body in kernel.bodies:
            yield from _notes(body.program)
