"""A case through the package's own steps: traced and completed once, then planned in many ways."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

import meshwise as mw
from meshwise._jax import without_dead
from meshwise.api.arguments import take_apart
from meshwise.api.build import Completed, completions, resolve
from meshwise.api.specs import given_out_specs
from meshwise.api.traced import trace_call
from meshwise.choose.choose import DRIVERS, choose
from meshwise.choose.plan import Plan
from meshwise.cost.hardware import GENERIC, Hardware
from meshwise.flatten import Enters
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.program import Program
from meshwise.partition.coarsen import coarsen
from meshwise.partition.partition import partition
from meshwise.trace import make_program
from tests.fuzz.programs import Case, abstract_mesh, arguments_of, function_of, spec_of
from tests.fuzz.strategies import random_plan

# "spread" is the default on a device where computing is slow and a collective costs no launch, so
# that small programs are split as large ones are; "dice 0" and so on choose at random.
COMPLETIONS = ("gspmd", "improved", "spread")
SLOW = replace(GENERIC, name="slow", flops_per_s=1e9, launch_s=0.0)


@dataclass(frozen=True, eq=False)
class Traced:
    """A case as the steps before choosing leave it, perhaps in two ways; the traced jaxpr."""

    closed: Any
    completions: Sequence[Completed]


def step_of(case: Case, way: str = "improved", mesh: Any = None) -> Any:
    """The case as a user would write it."""
    args = arguments_of(case)
    outs = tuple(spec_of(spec) for _, spec in case.outputs)
    if case.grad:
        results = jax.eval_shape(function_of(case, hinted=False), *args)
        outs += (None,) * (len(results) - len(outs))
    return mw.jit(
        function_of(case, hinted=True),
        mesh=mesh or abstract_mesh(case),
        in_shardings=tuple(spec_of(i.spec) for i in case.inputs),
        out_shardings=outs,
        completion="gspmd" if way == "gspmd" else "improved",
        hardware=hardware_of(way),
    )


def hardware_of(way: str) -> Hardware:
    """The device that a way of planning is for."""
    return SLOW if way == "spread" else GENERIC


def trace(case: Case, args: Sequence[Any]) -> Traced:
    """Trace, normalise, describe, complete."""
    outs = tuple(spec_of(spec) for _, spec in case.outputs)
    step = mw.jit(
        function_of(case, hinted=True),
        mesh=abstract_mesh(case),
        in_shardings=tuple(spec_of(i.spec) for i in case.inputs),
    )
    options = step.options
    arguments = take_apart(options, tuple(args), {})
    found = resolve("program", options, arguments, lambda _: None)
    closed, _, tree = trace_call("program", step.fn, options, arguments, found.in_specs, found.mesh)
    outs += (None,) * (len(closed.jaxpr.outvars) - len(outs))
    names = [f"result {k}" for k in range(len(outs))]
    mesh = refine_mesh(found.mesh.axis_names, found.mesh.axis_sizes)
    specs = found.in_specs, given_out_specs("program", outs, tree)
    live = without_dead(closed)

    def read(enters: Enters) -> Program:
        return make_program(live, mesh, *specs, found.paths, names, "program", enters)

    return Traced(closed, completions(read, options.choices))


def plan_of(traced: Traced, way: str, seed: int = 0) -> Plan:
    """The plan that a way of choosing makes."""
    if way.startswith("dice"):
        number = seed * 100 + int(way.split()[1])
        given = traced.completions[number % len(traced.completions)]
        plan = random_plan(*given, seed=number)
    else:
        driver = DRIVERS[way == "gspmd"]
        plans = [choose(*given, hardware_of(way), driver) for given in traced.completions]
        plan = min(plans, key=lambda plan: plan.seconds)
    return coarsen(plan)


def per_device(traced: Traced, way: str, seed: int = 0) -> tuple[Plan, PerDeviceProgram]:
    """The plan and the program of every device; what loops may hold differs."""
    plan = plan_of(traced, way, seed)
    return plan, partition(plan, (None, 0, 200)[seed % 3])
