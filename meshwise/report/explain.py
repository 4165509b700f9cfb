"""Why the program is what it is, as text."""

from meshwise.choose.plan import Plan
from meshwise.ir.per_device import PerDeviceProgram


def explain_plan(plan: Plan, program: PerDeviceProgram, name: str) -> str:
    """The decisions, each collective with its line and reason, and what beat what."""
    return f"{name}: {len(program.collectives)} collectives"
