"""A schedule as tables of numbers, by which a loop over ticks knows what each device is to do.

Between its arrival and its last use an activation, and the gradient of one, lies in a *slot* of the
device's buffer. Slots are given out here, so a buffer has as many as are needed at one time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwise.pipeline.schedules import Action, Direction, Schedule, actions

NONE = -1
Key = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True, eq=False)
class Table:
    """For each device and tick: what it does, and where things are. Arrays `[S, T]` of int32.

    `forward` and `backward` are the stages to pass, `NONE` for nothing, `*_microbatch` whose turn
    it is and `*_input` the slot of the stage's input. `gradient` is the slot of the gradient that a
    backward begins with. After the tick's sends `keep_input` and `keep_gradient` are the slots for
    what has arrived, `NONE` where it is nothing. `inputs` and `gradients` are how many slots there
    are.
    """

    forward: np.ndarray
    forward_microbatch: np.ndarray
    forward_input: np.ndarray
    backward: np.ndarray
    backward_microbatch: np.ndarray
    backward_input: np.ndarray
    gradient: np.ndarray
    keep_input: np.ndarray
    keep_gradient: np.ndarray
    inputs: int
    gradients: int

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, np.ndarray)}


def make_table(schedule: Schedule) -> Table:
    """The tables of a schedule, and the slots of everything that waits."""
    input_slots, inputs = _slots(schedule, dict(_waiting_inputs(schedule)))
    gradient_slots, gradients = _slots(schedule, dict(_waiting_gradients(schedule)))
    names = ("forward", "forward_microbatch", "forward_input", "backward", "backward_microbatch")
    names += ("backward_input", "gradient", "keep_input", "keep_gradient")
    shape = schedule.devices, len(schedule.ticks)
    columns = {name: np.full(shape, NONE, np.int32) for name in names}

    def put(name: str, stage: int, tick: int, value: int) -> None:
        columns[name][stage % schedule.devices, tick] = value

    for action in actions(schedule.stages, schedule.microbatches, schedule.trains):
        tick, key = schedule.tick_of[action], (action.stage, action.microbatch)
        name = str(action.direction)
        put(name, action.stage, tick, action.stage)
        put(f"{name}_microbatch", action.stage, tick, action.microbatch)
        put(f"{name}_input", action.stage, tick, input_slots.get(key, NONE))
        if action.direction is Direction.BACKWARD:
            put("gradient", action.stage, tick, gradient_slots.get(key, NONE))
    for key, (arrived, _) in _waiting_inputs(schedule):
        put("keep_input", key[0], arrived - 1, input_slots[key])
    for key, (arrived, _) in _waiting_gradients(schedule):
        put("keep_gradient", key[0], arrived - 1, gradient_slots[key])
    return Table(**columns, inputs=inputs, gradients=gradients)


def _waiting_inputs(schedule: Schedule) -> Iterable[tuple[Key, tuple[int, int]]]:
    """From when to when each stage's input is kept; the first stage's is the microbatch itself."""
    return [(key, span) for key, span in schedule.saved.items() if key[0]]


def _waiting_gradients(schedule: Schedule) -> Iterable[tuple[Key, tuple[int, int]]]:
    """From when to when the gradient of what each stage made is kept."""
    for action, tick in schedule.tick_of.items():
        if action.direction is Direction.BACKWARD and action.stage < schedule.stages - 1:
            later = Action(Direction.BACKWARD, action.stage + 1, action.microbatch)
            yield (action.stage, action.microbatch), (schedule.tick_of[later] + 1, tick)


def _slots(schedule: Schedule, spans: dict[Key, tuple[int, int]]) -> tuple[dict[Key, int], int]:
    """A slot for each span of ticks, of those of its device that are free, the lowest."""
    slot_of: dict[Key, int] = {}
    used_until: list[list[int]] = [[] for _ in range(schedule.devices)]
    for key, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        ends = used_until[key[0] % schedule.devices]
        free = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[free : free + 1] = [last]
        slot_of[key] = free
    return slot_of, max(map(len, used_until), default=0)
