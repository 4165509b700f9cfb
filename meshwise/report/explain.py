"""Why the program is what it is, as text.

First the program in numbers, and a warning of what is computed whole. Then the arguments and
results: how each lies, and which hint says so or led to it. Then every collective, dearest first:
what it moves, for which line, why; and what is held where memory is most. At last the strategies
that matter most, and what they beat.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise import _jax
from meshwise._jax import Literal
from meshwise.choose.losers import losers
from meshwise.choose.plan import Plan, Rejected
from meshwise.cost.hardware import GENERIC
from meshwise.cost.memory import Memory
from meshwise.ir.factors import FactorRule, Strategy
from meshwise.ir.mesh import Mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.program import Hint
from meshwise.ir.sharding import Sharding, local_shape
from meshwise.ir.source import place
from meshwise.propagate.priorities import preserves_dims
from meshwise.report.memory import held_listing, memory_of
from meshwise.report.origins import Origin, find_origin
from meshwise.report.overview import collectives_listing, figures, titled, whole_listing
from meshwise.report.text import (
    WIDTH,
    aligned,
    array_text,
    axes_text,
    count,
    distinct,
    hint_text,
    listed,
    microseconds,
    percent,
    sharding_text,
    short_spec,
    wrapped,
)

MOST_DECISIONS = 12
MOST_LINES_OF_A_CHAIN = 3


def explain_plan(
    plan: Plan, program: PerDeviceProgram, name: str, donated: Sequence[int] = ()
) -> str:
    """The decisions, each collective with its line and reason, what is held, what beat what."""
    memory = memory_of(program, donated)
    sections = [
        _head(plan, program, name, memory),
        whole_listing(program),
        _boundary(plan, program, is_result=False),
        _boundary(plan, program, is_result=True),
        collectives_listing(program),
        held_listing(memory),
        _loops(program),
        _decisions(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(plan: Plan, program: PerDeviceProgram, name: str, memory: Memory) -> list[str]:
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
        ("modelled time", _time(plan)),
        *([] if plan.hardware.name == GENERIC.name else [("figures", plan.hardware.name)]),
    ]  # fmt: skip
    return titled(program, name, rows)


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


def _loops(program: PerDeviceProgram) -> list[str]:
    """What loops read in another sharding, and where it is made."""
    if not program.loop_reads:
        return []
    lines = ["What loops read from around them (hoist_bytes limits what is held)"]
    for read in program.loop_reads:
        lines += wrapped(read, indent=2, hang=2)
    return lines


def _boundary(plan: Plan, program: PerDeviceProgram, *, is_result: bool) -> list[str]:
    """Arguments or results: type, sharding, and where it comes from; equal ones in one row."""
    traced, mesh = plan.program, program.mesh
    if is_result:
        values, hints, paths = traced.outputs, traced.out_hints, traced.out_paths
        types, shardings = program.out_types, program.out_shardings
    else:
        values, hints, paths = traced.inputs, traced.in_hints, traced.in_paths
        types, shardings = program.in_types, program.in_shardings
    alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    every = zip(values, hints, paths, types, shardings, strict=True)
    for var, hint, path, aval, sharding in every:
        origin = (
            hint_text(hint.given_as)
            if hint is not None and hint.closed is not None
            else (_completed_text(plan, var, hint, sharding))
        )
        why = "; ".join([origin, *_uneven(aval.shape, sharding, mesh)])
        kind = array_text(aval.shape, aval.dtype)
        alike[kind, sharding_text(sharding, mesh), why].append(path)
    rows = [(_first_of(found), *key) for key, found in alike.items()]
    return ["Results" if is_result else "Arguments", *_noted(rows)] if rows else []


def _first_of(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} like it"


def _noted(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligned rows whose last cell is a note: beside them where it fits, else below."""
    lines = aligned([row[:-1] for row in rows], "<" * (len(rows[0]) - 1))
    start = max(map(len, lines)) + 2
    shown = []
    for line, row in zip(lines, rows, strict=True):
        if start + len(row[-1]) <= WIDTH:
            shown.append(f"{line:{start}}{row[-1]}")
        else:
            shown += [line, *wrapped(row[-1], indent=6, hang=2)]
    return shown


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
        unreached = "a scalar" if not sharding.dims else f"completed: no hint reaches {what}"
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


@dataclass(frozen=True, slots=True)
class _Decision:
    """One equation's strategy in words; `margin` is what the next best would add, in seconds."""

    operator: str
    line: str
    rule: str
    taken: str
    beaten: str
    margin: float


def _decisions(plan: Plan) -> list[str]:
    """The strategies of single equations whose next best costs most, and what they beat."""
    alike: dict[tuple[str, ...], list[_Decision]] = defaultdict(list)
    for index, lost in sorted(losers(plan).items()):
        if lost and not plan.equations[index].remade and _matters(plan, index):
            made = _decision(plan, index, lost)
            alike[made.operator, made.line, made.rule, made.taken, made.beaten].append(made)
    if not alike:
        return []
    ordered = sorted(alike.values(), key=lambda found: -sum(d.margin for d in found))
    lines = ["Decisions, by what the next best strategy would add to the modelled time"]
    for found in ordered[:MOST_DECISIONS]:
        first = found[0]
        times = f", {len(found)} times" if len(found) > 1 else ""
        added = _added(sum(d.margin for d in found), plan)
        lines.append(f"  {added:>8}  {first.operator} at {first.line}{times}: {first.rule}")
        lines += wrapped(f"taken   {first.taken}", indent=12, hang=8)
        lines += wrapped(f"beaten  {first.beaten}", indent=12, hang=8)
    left = sum(map(len, ordered[MOST_DECISIONS:]))
    return [*lines, f"  and {count(left, 'other equation')} with less at stake"] if left else lines


def _matters(plan: Plan, index: int) -> bool:
    """Whether an equation is more than element-wise, or reads something that is resharded."""
    eqn = plan.program.equations[index]
    reshards = any(plan.copies.get(a) for a in eqn.invars if not isinstance(a, Literal))
    return reshards or not preserves_dims(plan.rules[index].factors)


def _decision(plan: Plan, index: int, lost: Sequence[Rejected]) -> _Decision:
    mesh, rule = plan.program.mesh, plan.rules[index].factors
    beaten = [
        f"{_strategy_text(rule, one.strategy, mesh)} ({_added(one.dearer_by_seconds, plan)})"
        for one in lost
    ]
    return _Decision(
        _jax.operator_name(plan.program.equations[index]),
        place(plan.program.source(index)),
        str(rule),
        _strategy_text(rule, plan.equations[index].strategy, mesh),
        "; ".join(beaten),
        lost[0].dearer_by_seconds,
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
