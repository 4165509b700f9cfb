"""What `mw.plan` is given, checked; an error for what does not fit, and where nothing is found."""

import math
import time
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import Arguments
from meshwise.api.jit import JitFunction, jit
from meshwise.api.meshes import process_count
from meshwise.api.options import Options, check_flags, check_is_mesh
from meshwise.errors import ArgumentError, MemoryLimitError, message
from meshwise.ir.numbers import number_of_bytes, real_number, whole_number
from meshwise.planner.search import Outcome, Searched, Until
from meshwise.report.text import count


def check_call(name: str, options: Options, arguments: Arguments) -> None:
    """An error for a call that nothing can be planned for."""
    if _jax.is_tracing() or any(isinstance(x, _jax.Tracer) for x in arguments.leaves):
        raise ArgumentError(
            message(
                "mw.plan was called while a function is traced",
                [f"to plan {name}"],
                "It compares programs for arguments of known types; nothing of a trace is one.",
                "Call it before, with jax.ShapeDtypeStruct for what is not there yet.",
            )
        )
    if options.choices.schedule is not None:
        raise ArgumentError(
            message(
                "mw.plan was given a function with a schedule",
                [f"{name} is under mw.jit(..., schedule=...)"],
                "Programs are compared as they are partitioned, before any is scheduled.",
                "Plan it without, and give the schedule to mw.jit with the shardings found.",
            )
        )


def check_trees(name: str, mesh: Any, arguments: Any, results: Any) -> None:
    """An error for trees of arguments or results that cannot be trees of shardings."""
    offenders = []
    for what, tree in (("arguments", arguments), ("results", results)):
        try:
            jax.tree.unflatten(tree, [NamedSharding(mesh, PartitionSpec())] * tree.num_leaves)
        except Exception as refusal:
            offenders.append(f"{what}: {type(refusal).__name__}: {refusal}".rstrip(": "))
    if offenders:
        raise ArgumentError(
            message(
                f"mw.plan cannot give the shardings of {name} as trees",
                offenders,
                "Shardings come in trees of the classes of arguments and results; a class whose "
                "constructor takes nothing but arrays refuses them.",
                "Plan a function of the arrays themselves, or let the class take other leaves.",
            )
        )


def as_jit(fun: Any, mesh: Any) -> JitFunction:
    """The function under `mw.jit`."""
    check_is_mesh(mesh, "mw.plan")
    if not isinstance(fun, JitFunction):
        return jit(fun, mesh=mesh)
    if mesh is not None:
        raise ArgumentError(
            message(
                "mw.plan was given a mesh twice",
                [f"mesh={mesh!r}", f"{fun.name} is under mw.jit"],
                "A function under mw.jit has the mesh that is given there.",
                "Leave it out here, or give the function itself.",
            )
        )
    return fun


def plan_limits(
    max_bytes: Any, most_tried: Any, budget_s: Any, **flags: Any
) -> tuple[int | None, Until]:
    """The limits as Python has them; seconds count from here on.

    Raises ArgumentError for what is none, and for flags that are neither so nor not.
    """
    check_flags("mw.plan", **flags)
    given = {"max_bytes": max_bytes, "most_tried": most_tried}
    read = {"max_bytes": number_of_bytes, "most_tried": whole_number}
    numbers = {name: read[name](n) for name, n in given.items() if n is not None}
    problems = [f"{name}={given[name]!r}" for name, n in numbers.items() if n is None or n <= 0]
    seconds = None if budget_s is None else real_number(budget_s)
    if budget_s is not None and (seconds is None or not seconds > 0):
        problems.append(f"budget_s={budget_s!r}")
    if most_tried is None:
        problems.append("most_tried=None")
    if problems:
        raise ArgumentError(
            message(
                "mw.plan was given limits that are none",
                problems,
                "They are whole numbers from one on, of bytes on a device and of plans compared; "
                "and seconds.",
                "Leave max_bytes and budget_s out for no limit, most_tried for the default.",
            )
        )
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    until = Until(int(numbers["most_tried"] or 0), lambda: time.monotonic() >= end)
    return numbers.get("max_bytes"), until


def check_budget(budget_s: float | None, mesh: Any) -> None:
    """An error for seconds on a mesh of several processes."""
    if budget_s is not None and process_count(mesh) > 1:
        raise ArgumentError(
            message(
                "mw.plan was given seconds to search for a mesh of several processes",
                [f"budget_s={budget_s!r}", f"its mesh is {mesh}"],
                "All processes must come to one plan, and each has a clock of its own.",
                "Leave budget_s out: most_tried ends the search at one place in all of them.",
            )
        )


def no_room(name: str, most: int, best: Outcome, found: Searched) -> MemoryLimitError:
    """The error where the best plan is over the limit."""
    more = "Compare more plans (most_tried, budget_s), use" if found.was_ended else "Use"
    return MemoryLimitError(
        message(
            f"{name} has no plan that fits",
            [f"max_bytes={most:,}", f"the least found is {best.peak_bytes:,}"],
            "A device may hold so much at once, arguments included; "
            f"{count(found.tried, 'plan')} compared.",
            f"{more} more devices, recompute (jax.checkpoint), donate what is replaced, or allow "
            "more.",
        )
    )
