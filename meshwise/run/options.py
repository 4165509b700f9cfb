"""Options of the compiler that are best for a per-device program, where the user says nothing."""

from typing import Any

from meshwise import _jax
from meshwise.cost.as_wanted import holds_less_as_wanted
from meshwise.ir.per_device import PerDeviceProgram


def best_options(program: PerDeviceProgram, is_on_cpu: bool) -> dict[str, Any]:
    """By name: on CPU those of `_jax/on_cpu.py`, elsewhere none."""
    if not is_on_cpu:
        return {}
    what = program.jaxpr, program.mesh.axis_size
    return _jax.cpu_options(*what, as_wanted=holds_less_as_wanted(*what))
