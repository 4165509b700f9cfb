"""What `mw.autotune` is held to, and compares schedules by; an error for what is none."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh

from meshwise.cost.hardware import Hardware
from meshwise.cost.links import Links
from meshwise.errors import ArgumentError, message
from meshwise.ir.numbers import real_number, whole_number
from meshwise.run.placement import other_processes

MEASURES = ("time", "cost")


@dataclass(frozen=True)
class TuningLimits:
    """How long is tried and timed, how many schedules are timed, and how often."""

    budget_s: float
    finalists: int
    rounds: int


def tuning_limits(budget_s: Any, finalists: Any, rounds: Any, hardware: Any) -> TuningLimits:
    """The limits, as Python has them. Raises ArgumentError for what is none."""
    problems = []
    seconds = real_number(budget_s)
    if seconds is None or not seconds >= 0:
        problems.append(f"budget_s={budget_s!r}")
    counts = []
    for name, count, least in (("finalists", finalists, 0), ("rounds", rounds, 1)):
        number = whole_number(count)
        if number is None or number < least:
            problems.append(f"{name}={count!r}")
        counts.append(number)
    if not isinstance(hardware, Hardware | Links | None):
        problems.append(f"hardware={hardware!r}")
    if problems:
        raise ArgumentError(
            message(
                "mw.autotune was given limits that are none",
                problems,
                "budget_s is a number of seconds, finalists and rounds are whole numbers, rounds "
                "from one on, hardware is of the classes in meshwise.cost.",
                "Leave them out for what is tried by default.",
            )
        )
    assert seconds is not None, "named above"
    return TuningLimits(seconds, *counts)


def check_measure(measure: str, mesh: Any) -> None:
    """Raise ArgumentError for what schedules of a program on a mesh cannot be compared by."""
    if measure not in MEASURES:
        raise ArgumentError(
            message(
                "mw.autotune was given a measure that is none",
                [f"measure={measure!r}"],
                f"It is one of {', '.join(map(repr, MEASURES))}.",
                'Leave it out to have finalists timed, or give "cost" to go by the cost model.',
            )
        )
    if measure != "time":
        return
    if isinstance(mesh, AbstractMesh):
        what = "that has no devices"
        rule = "An AbstractMesh has the shape of a mesh, and nothing to run on."
    elif other_processes(mesh.devices.flat):
        what = "of other processes"
        rule = "All processes must come to one schedule, and each has a clock of its own."
    else:
        return
    asked = f"mw.autotune was asked to time a program {what}"
    way_out = 'Give measure="cost", or a mesh of jax.local_devices().'
    raise ArgumentError(message(asked, [f"its mesh is {mesh}"], rule, way_out))
