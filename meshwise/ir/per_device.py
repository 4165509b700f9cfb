"""A per-device program: what every device runs, and how its arguments and results lie."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwise._jax import ClosedJaxpr, names_of, source_summary
from meshwise.ir.collectives import Collective, collectives_of, whole_or_exact
from meshwise.ir.mesh import Mesh
from meshwise.ir.sharding import Sharding

_TAG = re.compile(r"meshwise_reason_(\d+)")


@dataclass(frozen=True)
class Reason:
    """Why a collective stands in the program: the decision in words, and the user's line."""

    text: str
    line: str


def reason_scope(number: int) -> str:
    """The name scope that ties the equations traced in it to a program's reason of that number."""
    return f"meshwise_reason_{number}"


@dataclass(frozen=True, eq=False)
class PerDeviceProgram:
    """A closed jaxpr of local arrays with explicit collectives over the axes of a refined mesh.

    `in_types` and `out_types` are the global abstract values; shardings say which part of each a
    device holds. `loop_reads` says of each value that a loop reads in another sharding whether it
    is made once before the loop or in each step. `whole` lists operators that had no rule and are
    computed whole on every device, as `name at file:line`. `reasons` are of the collectives traced
    in their scopes (`reason_scope`).
    """

    jaxpr: ClosedJaxpr
    mesh: Mesh
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    in_types: tuple[Any, ...]
    out_types: tuple[Any, ...]
    whole: tuple[str, ...] = ()
    loop_reads: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective in order, with the user's line and the decision behind it."""
        found = []
        for collective in collectives_of(self.jaxpr, self.mesh.axis_size):
            eqn = collective.equation
            assert eqn is not None
            tags = _TAG.findall(names_of(eqn))
            if tags:
                reason = self.reasons[int(tags[-1])]
            else:
                reason = Reason("part of the operator's own computation", source_summary(eqn))
            found.append(replace(collective, source=reason.line, reason=reason.text, equation=None))
        return tuple(found)

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends in one call, in all trips of loops; of unknown trips in one."""
        return whole_or_exact(sum(c.wire_bytes for c in self.collectives))
