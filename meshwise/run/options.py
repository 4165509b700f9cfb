"""How a per-device program is best compiled for its devices, where the user says nothing."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from meshwise import _jax
from meshwise.cost.as_wanted import holds_less_as_wanted
from meshwise.cost.together import together_where_it_fits
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.run.placement import off_mesh


def sent_together(program: PerDeviceProgram) -> PerDeviceProgram:
    """The program with short collectives as one, where no more is held for it."""
    jaxpr = together_where_it_fits(program.jaxpr, program.mesh.axis_size)
    return program if jaxpr is program.jaxpr else replace(program, jaxpr=jaxpr)


def as_platforms_compile(program: PerDeviceProgram, platforms: Collection[str]) -> _jax.ClosedJaxpr:
    """The jaxpr of local arrays as the compilers of some platforms take it right, and soon."""
    local = off_mesh(program.jaxpr)
    if "cpu" in platforms:
        local = _jax.as_cpu_compiles(local, program.mesh.axis_size)
    return _jax.as_tpu_compiles(local) if "tpu" in platforms else local


def best_options(program: PerDeviceProgram, is_on_cpu: bool) -> dict[str, Any]:
    """By name: on CPU those of `_jax/on_cpu.py`, elsewhere none."""
    if not is_on_cpu:
        return {}
    what = program.jaxpr, program.mesh.axis_size
    return _jax.cpu_options(*what, as_wanted=holds_less_as_wanted(*what))
