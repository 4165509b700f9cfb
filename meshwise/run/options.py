"""How a per-device program is compiled for its devices: as the user says, or as is best."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from meshwise import _jax
from meshwise.cost.cpu.combined_where_it_fits import combined_where_it_fits
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.run.placement import off_mesh


@dataclass(frozen=True)
class Compiling:
    """What is passed on to `jax.jit` when a program is compiled, as the user gave it."""

    keep_unused: bool = False
    compiler_options: tuple[tuple[str, Any], ...] = ()


def best_on_cpu(program: PerDeviceProgram) -> tuple[PerDeviceProgram, dict[str, Any]]:
    """The program with short collectives as one, where no more is held for it; and options.

    These are by name, those of `_jax/on_cpu.py`.
    """
    sizes = program.mesh.axis_size
    jaxpr, held = combined_where_it_fits(program.jaxpr, sizes)
    options = _jax.cpu_options(jaxpr, sizes, held.is_less_as_wanted, held.products_alone)
    return (program if jaxpr is program.jaxpr else replace(program, jaxpr=jaxpr)), options


def as_platforms_compile(program: PerDeviceProgram, platforms: Collection[str]) -> _jax.ClosedJaxpr:
    """The jaxpr of local arrays as the compilers of some platforms take it right, and soon."""
    local = off_mesh(program.jaxpr)
    if "cpu" in platforms:
        local = _jax.as_cpu_compiles(local, program.mesh.axis_size)
    return _jax.as_tpu_compiles(local) if "tpu" in platforms else local
