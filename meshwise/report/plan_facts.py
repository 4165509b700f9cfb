"""The facts of a program that was planned: what hints led to, and what its strategies beat."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from meshwise import _jax
from meshwise._jax import Literal
from meshwise.choose.losers import losers
from meshwise.choose.plan import Plan, Rejected
from meshwise.cost.hardware import GENERIC
from meshwise.ir.factors import FactorRule, Strategy
from meshwise.ir.mesh import Mesh
from meshwise.ir.numbers import microseconds
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.program import Hint
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.ir.source import place
from meshwise.propagate.priorities import preserves_dims
from meshwise.report.facts import Decision, Facts, Row, figures, memory_of, title_of
from meshwise.report.origins import Origin, find_origin
from meshwise.report.text import (
    array_text,
    axes_text,
    count,
    distinct,
    hint_text,
    listed,
    percent,
    sharding_text,
    short_spec,
)

MOST_DECISIONS = 12
MOST_LINES_OF_A_CHAIN = 3


def facts_of_plan(
    plan: Plan,
    program: PerDeviceProgram,
    name: str,
    donated: Sequence[int] = (),
    is_moved: bool = False,
) -> Facts:
    """What a planned program is, and why.

    Of one that was moved since (`is_moved`) time and decisions of the plan do not hold any more.
    """
    memory = memory_of(program, donated)
    traced = plan.program
    given = [sum(h is not None for h in hints) for hints in (traced.in_hints, traced.out_hints)]
    hints = (*traced.in_hints, *traced.out_hints, *traced.hints.values())
    # A pipeline shares work out, and says so where no hint does.
    shards = any(hint is not None and hint.shards for hint in hints) or program.collectives
    said = f"{given[0]} on arguments, {given[1]} on results, {len(traced.hints)} inside"
    rows = [
        ("hints", said if shards else f"{said}: none shards, each device does everything"),
        ("equations", f"{len(traced.equations):,} in the function, "
                      f"{_jax.equation_count(program.jaxpr):,} for each device"),
        *figures(program, memory),
        *([] if is_moved else [("modelled time", _time(plan))]),
        *([] if plan.hardware.name == GENERIC.name else [("figures", plan.hardware.name)]),
    ]  # fmt: skip
    decisions, others = ([], 0) if is_moved else _decisions(plan)
    return Facts(
        program,
        title_of(program, name),
        tuple(rows),
        memory,
        tuple(_boundary(plan, program, is_result=False)),
        tuple(_boundary(plan, program, is_result=True)),
        plan.hardware,
        tuple(decisions),
        others,
    )


def _time(plan: Plan) -> str:
    chosen, completed = plan.seconds, plan.completion_seconds
    if plan.driver == "gspmd":
        return f"{microseconds(chosen)}, with every value as completion has it"
    saved = completed - chosen
    if saved <= completed * 1e-9:
        return f"{microseconds(chosen)}; completion alone is as good"
    return (
        f"{microseconds(chosen)}; with completion alone {microseconds(completed)}, "
        f"{percent(saved, completed)} saved"
    )


def _boundary(plan: Plan, program: PerDeviceProgram, *, is_result: bool) -> Iterable[Row]:
    """Arguments or results: type, sharding, and where it comes from; equal ones in one row."""
    traced, mesh = plan.program, program.mesh
    if is_result:
        values, hints, paths = traced.outputs, traced.out_hints, traced.out_paths
        types, shardings, planned = program.out_types, program.out_shardings, plan.out_shardings
    else:
        values, hints, paths = traced.inputs, traced.in_hints, traced.in_paths
        types, shardings, planned = program.in_types, program.in_shardings, plan.in_shardings
    alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    every = zip(values, hints, paths, types, shardings, planned, strict=True)
    for var, hint, path, aval, sharding, before in every:
        if sharding != before:
            origin = f"by its schedule; planned was {sharding_text(before, mesh)}"
        elif hint is not None and hint.closed is not None:
            origin = hint_text(hint.given_as)
        else:
            origin = _completed_text(plan, var, hint, sharding)
        why = "; ".join([origin, *_uneven(aval.shape, sharding, mesh)])
        kind = array_text(aval.shape, aval.dtype)
        alike[kind, sharding_text(sharding, mesh), why].append(path)
    for key, found in alike.items():
        yield (_first_of(found), *key)


def _first_of(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} like it"


def _completed_text(plan: Plan, var: Any, hint: Hint | None, sharding: Sharding) -> str:
    """Which hints led to the dims that completion filled in."""
    if isinstance(var, Literal):
        return "a constant"
    given = [hint_text(hint.given_as)] if hint is not None else []
    dims_of: dict[str, list[str]] = defaultdict(list)
    for dim, axes in enumerate(sharding.dims):
        is_open = hint is None or hint.dims[dim] is None
        origin = find_origin(plan, var, dim) if axes and is_open else None
        if origin is not None:
            dims_of[_origin_text(plan, origin)].append(str(dim))
    if not dims_of:
        what = "its open dims" if given else "it"
        how = "returned as it is made" if sharding.used_axes else "completed"
        unreached = f"{how}: no hint reaches {what}" if sharding.dims else "a scalar"
        return "; ".join([*given, unreached])
    found = [
        f"{'dim' if len(dims) == 1 else 'dims'} {listed(dims)} {text}"
        for text, dims in dims_of.items()
    ]
    return "; ".join([*given, "completed: " + "; ".join(found)])


def _origin_text(plan: Plan, origin: Origin) -> str:
    spec, _, source = origin.hint.rpartition(" at ")
    owner = _owner(plan, origin, source)
    hint = f"from {short_spec(spec)} on {owner}" if spec else "from inside"
    if not origin.equations:
        return hint
    eqns = plan.program.equations
    sources = [plan.program.source(e) for e in reversed(origin.equations)]
    lines = distinct(place(source) for source in sources)
    lines = [line for line in lines if line not in ("unknown", owner)]
    if not lines:
        return hint
    if len(lines) > MOST_LINES_OF_A_CHAIN:
        last = origin.equations[0]
        passed = count(len(origin.equations), "equation")
        return f"{hint}, through {passed}, the last {_jax.operator_name(eqns[last])} at {lines[-1]}"
    return f"{hint}, through {listed(lines)}"


def _owner(plan: Plan, origin: Origin, source: str) -> str:
    """The hinted value by its path, or by its line."""
    traced = plan.program
    if origin.var in traced.inputs and source == "in_shardings":
        return traced.in_paths[traced.inputs.index(origin.var)]
    if source == "out_shardings":
        return traced.out_paths[[v is origin.var for v in traced.outputs].index(True)]
    return place(source)


def _uneven(shape: Sequence[int], sharding: Sharding, mesh: Mesh) -> Iterable[str]:
    """What padding adds, for each dim that does not divide."""
    kept = local_shape(shape, sharding, mesh)
    for dim, (size, local, axes) in enumerate(zip(shape, kept, sharding.dims, strict=True)):
        shards = mesh.size(axes)
        if local * shards != size:
            more = percent(local * shards - size, size)
            yield f"uneven: dim {dim} of {size} on {shards} keeps {local * shards}, +{more}"


def _decisions(plan: Plan) -> tuple[list[Decision], int]:
    """The strategies of single equations whose next best costs most, and how many others."""
    alike: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for index, lost in sorted(losers(plan).items()):
        if lost and not plan.equations[index].remade and _matters(plan, index):
            alike[_decision(plan, index, lost)].append(lost[0].dearer_by_seconds)
    ordered = sorted(alike.items(), key=lambda item: -sum(item[1]))
    made = []
    for (operator, line, rule, taken, beaten), margins in ordered[:MOST_DECISIONS]:
        added, each = _added(sum(margins), plan), ", each time" if len(margins) > 1 else ""
        made.append(Decision(added, operator, line, len(margins), rule, taken, beaten + each))
    return made, sum(len(margins) for _, margins in ordered[MOST_DECISIONS:])


def _matters(plan: Plan, index: int) -> bool:
    """Whether an equation is more than element-wise, or reads something that is resharded."""
    eqn = plan.program.equations[index]
    reshards = any(plan.copies.get(a) for a in eqn.invars if not isinstance(a, Literal))
    return reshards or not preserves_dims(plan.rules[index].factors)


def _decision(plan: Plan, index: int, lost: Sequence[Rejected]) -> tuple[str, str, str, str, str]:
    """One equation's strategy in words: operator, line, rule, what was taken, what was beaten."""
    mesh, rule = plan.program.mesh, plan.rules[index].factors
    beaten = [
        f"{_strategy_text(rule, one.strategy, mesh)} ({_added(one.dearer_by_seconds, plan)})"
        for one in lost
    ]
    return (
        _jax.operator_name(plan.program.equations[index]),
        place(plan.program.source(index)),
        str(rule),
        _strategy_text(rule, plan.equations[index].strategy, mesh),
        "; ".join(beaten),
    )


def _added(seconds: float, plan: Plan) -> str:
    """Seconds beside those of the whole program."""
    share = seconds / plan.seconds if plan.seconds else 0.0
    return f"+{share:.1%}" if share < 1 else f"+{share:,.0%}"


def _strategy_text(rule: FactorRule, strategy: Strategy, mesh: Mesh) -> str:
    """Which factor is sharded over what, e.g. `i over data, k over model`."""
    names = _factor_names(rule)
    shown = [
        f"{names[factor]} over {axes_text(axes, mesh)}"
        for factor, axes in enumerate(strategy.axes)
        if axes
    ]
    if strategy.carried:
        shown.append(f"unreduced over {mesh.show(strategy.carried)}")
    return ", ".join(shown) or "nothing sharded"


def _factor_names(rule: FactorRule) -> dict[int, str]:
    """The letter of each factor in the rule's text."""
    tensors = (*rule.operands, *rule.results)
    factors = [f for tensor in tensors for dim in tensor for f in (dim or (-1,))]
    letters = re.findall(r"\w+", str(rule).partition("|")[0])
    return dict(zip(factors, letters, strict=True))
