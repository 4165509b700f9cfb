"""Plan -> PerDeviceProgram: emit, then list every collective with its line and reason."""

import re
from dataclasses import replace

from meshwise import _jax
from meshwise.choose.plan import Plan
from meshwise.cost.hardware import Hardware
from meshwise.ir.collectives import Collective, collectives_of
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.partition.emit import emit
from meshwise.partition.walk import Reason

_TAG = re.compile(r"meshwise_reason_(\d+)")


def partition(
    plan: Plan, hardware: Hardware, most_hoisted_bytes: int | None = None
) -> PerDeviceProgram:
    """Write the per-device program of a plan."""
    jaxpr, reasons, reads = emit(plan, hardware, most_hoisted_bytes)
    program = plan.program
    return PerDeviceProgram(
        jaxpr=jaxpr,
        mesh=program.mesh,
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
        in_types=tuple(v.aval for v in program.inputs),
        out_types=tuple(v.aval for v in program.outputs),
        collectives=_collectives(jaxpr, plan, reasons),
        loop_reads=tuple(map(str, reads)),
        whole=tuple(
            f"{_jax.operator_name(eqn)} at {_jax.source_summary(eqn)}"
            for eqn, rule in zip(program.equations, plan.rules, strict=True)
            if rule.opaque
        ),
    )


def _collectives(
    jaxpr: _jax.ClosedJaxpr, plan: Plan, reasons: list[Reason]
) -> tuple[Collective, ...]:
    """Every collective of the emitted program, with the user's line and the decision behind it."""
    found = []
    for collective in collectives_of(jaxpr, plan.program.mesh.axis_size):
        assert collective.equation is not None
        tag = _TAG.search(_jax.names_of(collective.equation))
        if tag:
            reason = reasons[int(tag.group(1))]
            text, line = reason.text, reason.line
        else:
            text = "part of the operator's own computation"
            line = _jax.source_summary(collective.equation)
        found.append(replace(collective, source=line, reason=text, equation=None))
    return tuple(found)
