"""The kernels that XLA on CPU makes of a per-device program, with the values that they write.

Those of `cost/kernels.py` stand for any device, and tell of flops and traffic. These tell what lies
in memory.
"""

from collections.abc import Set as AbstractSet
from dataclasses import replace

from meshwise.cost.cpu.combining import combined
from meshwise.cost.cpu.fusion import Fused, fused
from meshwise.cost.cpu.instruction import Use
from meshwise.cost.cpu.instructions import instructions_of
from meshwise.cost.cpu.library import with_library
from meshwise.cost.cpu.wanted import wanted_first
from meshwise.cost.kernels import Kernel, KernelBody, KernelProgram
from meshwise.cost.steps import LITERAL, Body, Step, Steps
from meshwise.cost.work import Work, updates_operand


def cpu_kernels_of(steps: Steps, products_alone: bool = False, scanned: int = 0) -> KernelProgram:
    """The kernels of a per-device program's steps, in their order; their work is not counted.

    Where the library makes `products_alone`, sums and extremes are left to XLA. Of a loop's body so
    many inputs come last that are cut in each step.
    """
    cut = steps.inputs[len(steps.inputs) - scanned :]
    found, values = instructions_of(steps, cut, products_alone)
    instructions = wanted_first(found, steps.outputs)
    results = frozenset(steps.outputs) - {LITERAL}
    groups = fused(with_library(combined(instructions), results), values, results)
    reshaped = frozenset[int]().union(*(own.reshapes for own in instructions))
    kernels = tuple(_kernel(group, reshaped, products_alone) for group in groups)
    inputs = steps.inputs[: len(steps.inputs) - scanned]
    return KernelProgram(replace(steps, values=tuple(values), inputs=inputs), kernels)


def _kernel(group: Fused, reshaped: AbstractSet[int], products_alone: bool) -> Kernel:
    """A kernel, whose result may lie where one of some values lay that it reads in place.

    Values that are `reshaped` are of another shape than those that they are made of.
    """
    own, step = group.last, group.last.step
    if own.is_fusible:
        same = (value for value, use in group.reads.items() if use is Use.SAME)
        is_reshaped = not reshaped.isdisjoint(own.writes)
        replaces = frozenset(value for value in same if (value in reshaped) is is_reshaped)
    else:
        replaces = frozenset(group.reads if _is_in_place(step) else ())
    return Kernel(
        step.name,
        step.equation,
        Work(),
        tuple(group.reads),
        own.writes,
        bodies=tuple(_body(body, step.is_choice, products_alone) for body in step.bodies),
        is_choice=step.is_choice,
        is_count_known=step.is_count_known,
        replaces=replaces,
    )


def _body(body: Body, is_choice: bool, products_alone: bool) -> KernelBody:
    scanned = 0 if is_choice else len(body.steps.inputs) - sum(body.carried)
    return KernelBody(cpu_kernels_of(body.steps, products_alone, scanned), body)


def _is_in_place(step: Step) -> bool:
    is_loop = bool(step.bodies) and not step.is_choice
    return is_loop or step.name == "sort" or updates_operand(step.eqn) is not None
