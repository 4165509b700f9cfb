"""Of several ways to write a program, the one whose plan is best.

Rows in parts send less where few travel beside them, and more where all do; only plans tell which
it is. What is sent is read off per-device programs: what exchanges have in common is sent once
there, which prices do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from meshwise.choose.choose import DRIVERS, choose
from meshwise.choose.plan import Plan
from meshwise.choose.weighing import MUCH, POWER
from meshwise.cost.hardware import Hardware
from meshwise.cost.memory import peak_memory
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.partition.partition import partition
from meshwise.propagate.complete import Completed, in_parts


@dataclass(frozen=True, eq=False)
class _Way:
    """A plan, and what its per-device program comes to."""

    plan: Plan

    @cached_property
    def program(self) -> PerDeviceProgram:
        return partition(self.plan)

    @cached_property
    def peak_bytes(self) -> float:
        return peak_memory(self.program.jaxpr, self.program.mesh.axis_size).peak_bytes

    def is_better(self, other: _Way) -> bool:
        """Whether it sends less, and has no more of anything than that is worth."""
        if not self.plan.hardware.least_bytes:
            return self.plan.seconds < other.plan.seconds
        sent, others = self.program.wire_bytes, other.program.wire_bytes
        worth = max(MUCH, (others / max(sent, 1)) ** POWER)
        return sent < others and all(of(self) <= worth * of(other) for of in _OTHER_COSTS)


# What more may be had of for fewer bytes, as seconds may where plans are weighed.
_OTHER_COSTS: tuple[Callable[[_Way], float], ...] = (
    lambda way: way.peak_bytes,
    lambda way: way.plan.work_seconds,
)


def plan_of(completed: Completed, hardware: Hardware, driver: str = DRIVERS[0]) -> Plan:
    """The plan of a program as it is completed, or with rows in parts if that is better."""
    best = _Way(choose(*completed, hardware, driver))
    for other in in_parts(completed):
        way = _Way(choose(*other, hardware, driver))
        best = way if way.is_better(best) else best
    return best.plan
