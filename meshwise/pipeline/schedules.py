"""Schedules of pipelines: which device does what in which tick, as data.

A model is cut into K stages, and stage k lies on device `k % S` of the S devices along the axis.
With K = S each device has one stage; with more, V = K / S of them, its *chunks* (Narayanan and
others 2021, section 2.2; a circular pipeline's repeats). M microbatches pass through all stages
forward, and, in training, backward.

A **tick** is the unit of time. In a tick each device takes its actions and then everything that
was made is sent on, so what one tick makes can be used in the next. All devices are in the same
tick: each is joined to its neighbours by what they send, so a tick lasts as long as its longest
action. Most schedules give a device one action a tick, forward or backward, as the figures in the
literature do (`slots` of 1). Eager 1F1B gives it one of each (`slots` of 2): where a backward takes
longer than a forward no device waits for another, for about twice the saved activations.

What is saved for the backward of a stage is its input alone; the backward computes the stage again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain, product

from meshwise.errors import PipelineError, message


class Direction(StrEnum):
    """Which way a microbatch passes a stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One microbatch passes one stage."""

    direction: Direction
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.direction} of microbatch {self.microbatch} through stage {self.stage}"

    def before(self, stages: int) -> "Action | None":
        """What makes that which this action needs; None for the first stage's forward."""
        if self.direction is Direction.FORWARD:
            return Action(self.direction, self.stage - 1, self.microbatch) if self.stage else None
        if self.stage == stages - 1:
            return Action(Direction.FORWARD, self.stage, self.microbatch)
        return Action(self.direction, self.stage + 1, self.microbatch)


Cell = tuple[Action, ...]  # what one device does in one tick


@dataclass(frozen=True, slots=True)
class Message:
    """What one device sends another at the end of a tick: an activation, or its gradient."""

    direction: Direction
    source: int
    target: int


@dataclass(frozen=True)
class Schedule:
    """Ticks x devices of actions.

    Invariants, checked when one is made:

    - each microbatch passes each stage once in each direction that there is, on the stage's device;
    - in a tick a device takes at most `slots` actions, no two of one direction, a forward first;
    - an action comes at least a tick after the one that makes what it needs; only where a forward
      and a backward fit in one tick may the last stage's two share it.
    """

    name: str
    devices: int
    stages: int
    microbatches: int
    ticks: tuple[tuple[Cell, ...], ...]
    trains: bool = True
    slots: int = 1

    def __post_init__(self) -> None:
        """Check the invariants."""
        offenders = list(chain(self._misplaced(), self._too_early()))
        if offenders:
            raise PipelineError(
                message(
                    f"{self.name} is no schedule of {self.microbatches} microbatches through "
                    f"{self.stages} stages on {self.devices} devices",
                    offenders[:8],
                    "Each microbatch passes each stage once in each direction, on the stage's "
                    "device, a tick or more after what it needs was made.",
                    "Use one of the constructors of meshwise.pipeline.schedules.",
                )
            )

    def _misplaced(self) -> Iterator[str]:
        """What is missing, twice, on another device, or too much for a tick."""
        if self.devices < 1 or self.stages % self.devices:
            yield f"{self.stages} stages cannot be dealt out evenly to {self.devices} devices"
            return
        if self.microbatches < 1:
            yield f"{self.microbatches} microbatches are none"
        seen: set[Action] = set()
        for tick, cells in enumerate(self.ticks):
            if len(cells) != self.devices:
                yield f"tick {tick} has {len(cells)} cells"
            for device, cell in enumerate(cells):
                directions = [action.direction for action in cell]
                if len(cell) > self.slots or directions != sorted(set(directions))[::-1]:
                    yield f"device {device} is to do {len(cell)} actions in tick {tick}"
                for action in cell:
                    if action in seen or action.stage % self.devices != device:
                        how = "twice" if action in seen else f"on device {device}"
                        yield f"{action} is done {how}, in tick {tick}"
                    seen.add(action)
        wanted = set(actions(self.stages, self.microbatches, self.trains))
        yield from (f"{action} is missing" for action in sorted(wanted - seen))
        yield from (f"{action} is none of it" for action in sorted(seen - wanted))

    def _too_early(self) -> Iterator[str]:
        """Actions that come before what they need."""
        for action, tick in self.tick_of.items():
            needed = action.before(self.stages)
            made = self.tick_of.get(needed, -1) if needed else -1
            is_own = needed is not None and needed.direction is not action.direction
            if tick < made + (0 if is_own and self.slots > 1 else 1):
                yield f"{action} in tick {tick} comes before the {needed} of tick {made} arrives"

    @cached_property
    def tick_of(self) -> dict[Action, int]:
        """The tick of each action."""
        return {a: t for t, cells in enumerate(self.ticks) for cell in cells for a in cell}

    @property
    def chunks(self) -> int:
        """How many stages a device has."""
        return self.stages // self.devices

    @property
    def bubble_fraction(self) -> float:
        """The part of all slots in which a device has nothing to do."""
        slots = len(self.ticks) * self.devices * self.slots
        return (slots - sum(len(cell) for cells in self.ticks for cell in cells)) / slots

    def duration(self, forward: float = 1.0, backward: float = 3.0) -> float:
        """How long all ticks take, each as long as its longest device, given what actions take.

        By default a backward takes three forwards: the stage again, and twice as much for its
        derivatives.
        """
        cost = {Direction.FORWARD: forward, Direction.BACKWARD: backward}
        each = [[sum(cost[a.direction] for a in cell) for cell in cells] for cells in self.ticks]
        return sum(max(devices) for devices in each)

    @cached_property
    def saved(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each (stage, microbatch) the ticks from when its input is there to its last use.

        The first stage's input is there when its forward begins; any other's from the tick after
        the one in which it was made. Its last use is the backward, or, without one, the forward.
        """
        last = Direction.BACKWARD if self.trains else Direction.FORWARD
        made = {
            (a.stage + 1, a.microbatch): tick + 1
            for a, tick in self.tick_of.items()
            if a.direction is Direction.FORWARD
        }
        return {
            (a.stage, a.microbatch): (
                made[a.stage, a.microbatch] if a.stage else self._forward(0, a.microbatch),
                tick,
            )
            for a, tick in self.tick_of.items()
            if a.direction is last
        }

    def _forward(self, stage: int, microbatch: int) -> int:
        return self.tick_of[Action(Direction.FORWARD, stage, microbatch)]

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each device the most stage inputs that it holds at one time."""
        peaks = []
        for device in range(self.devices):
            spans = [span for (k, _), span in self.saved.items() if k % self.devices == device]
            peaks.append(overlap(spans))
        return tuple(peaks)

    @cached_property
    def messages(self) -> tuple[tuple[Message, ...], ...]:
        """For each tick what is sent at its end."""
        return tuple(
            tuple(m for device, cell in enumerate(cells) for m in self._sent(device, cell))
            for cells in self.ticks
        )

    def _sent(self, device: int, cell: Cell) -> Iterator[Message]:
        for action in cell:
            ahead = action.direction is Direction.FORWARD
            to = action.stage + (1 if ahead else -1)
            if 0 <= to < self.stages and self.devices > 1:
                yield Message(action.direction, device, to % self.devices)

    def __str__(self) -> str:
        """One line: what it is, and its figures."""
        return (
            f"{self.name}: {self.stages} stages on {self.devices} devices, {self.microbatches} "
            f"microbatches, {len(self.ticks)} ticks, {self.bubble_fraction:.1%} idle, at most "
            f"{max(self.peak_activations)} activations held"
        )


def actions(stages: int, microbatches: int, trains: bool = True) -> Iterator[Action]:
    """Everything that is to be done."""
    directions = list(Direction) if trains else [Direction.FORWARD]
    for direction, stage, microbatch in product(directions, range(stages), range(microbatches)):
        yield Action(direction, stage, microbatch)


def overlap(spans: Sequence[tuple[int, int]]) -> int:
    """The most spans of ticks (first, last) that have one tick in common."""
    changes = sorted([(a, 1) for a, _ in spans] + [(b + 1, -1) for _, b in spans])
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


def gpipe(devices: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang and others, GPipe, 2018).

    `2 (M + S - 1)` ticks, of which a device is idle in the part `(S - 1) / (M + S - 1)`; all M
    activations are held.
    """
    last = devices - 1

    def when(action: Action) -> int:
        if action.direction is Direction.FORWARD:
            return action.stage + action.microbatch
        return (microbatches + last) + (last - action.stage) + action.microbatch

    return _timed("GPipe", devices, devices, microbatches, when)


def one_f_one_b(devices: int, microbatches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush; Narayanan and others 2021, section 2.2.1).

    As many ticks as GPipe, but a backward begins as soon as it can: stage k holds at most `S - k`
    activations, however many microbatches there are. Forwards are not done earlier than they are
    needed, so that each activation and gradient is used in the tick after it was made; the
    literature draws the first forwards of a stage side by side, which takes the same time.
    """

    def when(action: Action) -> int:
        if action.direction is Direction.FORWARD:
            return action.stage + 2 * action.microbatch
        return 2 * devices - 1 - action.stage + 2 * action.microbatch

    return _timed("1F1B", devices, devices, microbatches, when)


def eager_one_f_one_b(devices: int, microbatches: int) -> Schedule:
    """1F1B with a forward and a backward in each tick (Zhuang and others 2023, section 4).

    `M + 2 (S - 1)` ticks of a forward and a backward each. No tick in which some devices do a
    forward and others a backward, so none waits for the longer of the two, and each tick's sends
    are all of use. Stage k holds `2 (S - k) - 1` activations.
    """
    last = devices - 1

    def when(action: Action) -> int:
        ahead = action.direction is Direction.FORWARD
        return action.microbatch + (action.stage if ahead else 2 * last - action.stage)

    return _timed("eager 1F1B", devices, devices, microbatches, when, slots=2)


def circular(devices: int, microbatches: int, repeats: int = 1) -> Schedule:
    """Forward only, R times around the devices (GSPMD 2021, section 3.3; circular in Praxis).

    `R M + S - 1` ticks, of which the part `(S - 1) / (R M + S - 1)` is idle. A microbatch comes
    back to the first device after S ticks, so `M >= S` keeps the devices busy; fewer are refused
    where R is more than 1. With R = 1 it is GPipe's forward half.
    """
    if repeats > 1 and microbatches < devices:
        raise PipelineError(
            message(
                f"A circular schedule of {repeats} repeats on {devices} devices",
                [f"{microbatches} microbatches"],
                "A microbatch is back at the first device after as many ticks as there are "
                "devices, so there are to be as many microbatches, or more.",
                "Use more and smaller microbatches, or no repeats.",
            )
        )

    def when(action: Action) -> int:
        repeat, device = divmod(action.stage, devices)
        return repeat * microbatches + device + action.microbatch

    return _timed("circular", devices, devices * repeats, microbatches, when, trains=False)


def interleaved_one_f_one_b(devices: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B with V stages a device (Narayanan and others 2021, section 2.2.2).

    Microbatches go through in groups of S. Where S divides M, of the `2 (V M + S - 1)` ticks the
    part `(S - 1) / (V M + S - 1)` is idle; else the last group has gaps. What is held does not
    grow with M.
    """
    total = devices * chunks
    ahead = [  # a group of S passes all chunks, then the next does
        (chunk, microbatch)
        for start in range(0, microbatches, devices)
        for chunk in range(chunks)
        for microbatch in range(start, start + devices)
    ]
    queues = []
    for device in range(devices):
        forwards = [Action(Direction.FORWARD, c * devices + device, m) for c, m in ahead]
        backwards = [
            Action(Direction.BACKWARD, (chunks - 1 - c) * devices + device, m) for c, m in ahead
        ]
        first = min(len(ahead), (chunks - 1) * devices + 2 * (devices - 1 - device))
        paired = chain.from_iterable(zip(forwards[first:], backwards, strict=False))
        left = backwards[len(forwards) - first :]
        queue = [*forwards[:first], *paired, *left]
        queues.append([action for action in queue if action.microbatch < microbatches])
    placed = in_order(queues, total)
    return _timed("interleaved 1F1B", devices, total, microbatches, placed.__getitem__)


def in_order(queues: Sequence[Sequence[Action]], stages: int) -> Mapping[Action, int]:
    """The tick of each action where every device takes its queue in order, as early as it can."""
    placed: dict[Action, int] = {}
    heads, tick = [0] * len(queues), 0
    while any(head < len(queue) for head, queue in zip(heads, queues, strict=True)):
        ready = []
        for device, queue in enumerate(queues):
            if heads[device] < len(queue):
                action = queue[heads[device]]
                needed = action.before(stages)
                if needed is None or placed.get(needed, tick) < tick:
                    ready.append((device, action))
        assert ready, "devices wait for each other"
        for device, action in ready:
            placed[action] = tick
            heads[device] += 1
        tick += 1
    return placed


def _timed(
    name: str,
    devices: int,
    stages: int,
    microbatches: int,
    when: Callable[[Action], int],
    trains: bool = True,
    slots: int = 1,
) -> Schedule:
    """The schedule in which each action has its tick."""
    timed = sorted((when(a), a) for a in actions(stages, microbatches, trains))
    cells: list[list[list[Action]]] = [
        [[] for _ in range(devices)] for _ in range(timed[-1][0] + 1 if timed else 0)
    ]
    for tick, action in timed:
        cells[tick][action.stage % devices].append(action)
    ticks = tuple(tuple(tuple(sorted(cell, key=_forward_first)) for cell in row) for row in cells)
    return Schedule(name, devices, stages, microbatches, ticks, trains, slots)


def _forward_first(action: Action) -> bool:
    return action.direction is Direction.BACKWARD


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "1f1b": one_f_one_b,
    "eager": eager_one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved_one_f_one_b,
}
