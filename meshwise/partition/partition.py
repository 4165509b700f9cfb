"""Plan -> PerDeviceProgram: emit, and keep the reason of every reshard."""

from meshwise import _jax
from meshwise.choose.plan import Plan
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.partition.emit import emit
from meshwise.partition.sooner import scatter_sooner


def partition(plan: Plan, most_hoisted_bytes: int | None = None) -> PerDeviceProgram:
    """Write the per-device program of a plan."""
    jaxpr, reasons, reads = emit(scatter_sooner(plan), most_hoisted_bytes)
    program = plan.program
    return PerDeviceProgram(
        jaxpr=jaxpr,
        mesh=program.mesh,
        in_shardings=plan.in_shardings,
        out_shardings=plan.out_shardings,
        in_types=tuple(v.aval for v in program.inputs),
        out_types=tuple(v.aval for v in program.outputs),
        reasons=tuple(reasons),
        loop_reads=tuple(map(str, reads)),
        whole=tuple(
            f"{_jax.operator_name(eqn)} at {_jax.source_summary(eqn)}"
            for eqn, rule in zip(program.equations, plan.rules, strict=True)
            if rule.opaque
        ),
    )
