"""What a per-device program is, whoever made it: figures, what goes in and out, what is sent."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from meshwise import _jax
from meshwise.cost.memory import Memory
from meshwise.ir.collectives import Collective
from meshwise.ir.mesh import Mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.sharding import Sharding, local_bytes
from meshwise.ir.source import place
from meshwise.report.memory import held_listing, memory_of, peak_figure
from meshwise.report.text import (
    aligned,
    array_text,
    count,
    hint_text,
    in_user_axes,
    kib,
    percent,
    sharding_text,
    wrapped,
)


def explain_program(
    program: PerDeviceProgram,
    name: str,
    in_paths: Sequence[str],
    out_paths: Sequence[str],
    donated: Sequence[int] = (),
    hints: Sequence[Sequence[str | None]] = ((), ()),
) -> str:
    """A program without a plan in words: what goes in and out, and each collective.

    It was made in another way, or moved since it was planned. `hints` are what the user said of
    arguments and results.
    """
    said_of_arguments, said_of_results = hints
    memory = memory_of(program, donated)
    equations = ("equations", f"{_jax.equation_count(program.jaxpr):,} for each device")
    ins = zip(program.in_types, program.in_shardings, strict=True)
    outs = zip(program.out_types, program.out_shardings, strict=True)
    sections = [
        titled(program, name, [equations, *figures(program, memory)]),
        whole_listing(program),
        _given("Arguments", in_paths, ins, said_of_arguments, program.mesh),
        _given("Results", out_paths, outs, said_of_results, program.mesh),
        collectives_listing(program),
        held_listing(memory),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _given(
    title: str,
    paths: Sequence[str],
    lie: Iterable[tuple[Any, Sharding]],
    hints: Sequence[str | None],
    mesh: Mesh,
) -> list[str]:
    """Arguments or results, with how each lies and what the user said of it."""
    said = [hint_text(hint) if hint else "" for hint in hints] or [""] * len(paths)
    rows = [
        (path, array_text(t.shape, t.dtype), sharding_text(s, mesh), hint)
        for path, (t, s), hint in zip(paths, lie, said, strict=True)
    ]
    return [title, *aligned(rows, "<<<<")] if rows else []


def whole_listing(program: PerDeviceProgram) -> list[str]:
    """A warning of operators without a rule, and the way out."""
    if not program.whole:
        return []
    found: dict[str, int] = defaultdict(int)
    for operator in program.whole:
        name, _, source = operator.partition(" at ")
        found[f"{name} at {place(source)}"] += 1
    lines = ["Warning: computed whole on every device, because there is no rule"]
    lines += [f"  {text}{f', {times} times' if times > 1 else ''}" for text, times in found.items()]
    way_out = (
        "Operands are gathered first, and every device does all of the work. Write it with "
        "operators that have a rule, or say how it is partitioned, with mw.register_rule or, for a "
        "kernel, mw.like: docs/extending.md. strict=True makes it an error."
    )
    return [*lines, *wrapped(way_out)]


def titled(program: PerDeviceProgram, name: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of figures under a title that names the program and the mesh."""
    mesh = program.mesh
    axes = ", ".join(f"{axis} {mesh.size(subs)}" for axis, subs in mesh.user_axes)
    devices = count(mesh.device_count, "device")
    return [f"{name}, one program for {devices} (mesh: {axes})", "", *aligned(rows, "<<")]


def figures(program: PerDeviceProgram, memory: Memory) -> list[tuple[str, str]]:
    """What a device holds and sends."""
    mesh, sent = program.mesh, program.collectives
    trip = "" if all(c.is_count_known for c in sent) else "; a `while` counts for one trip"
    return [
        ("arguments", _held(program.in_types, program.in_shardings, mesh)),
        ("results", _held(program.out_types, program.out_shardings, mesh)),
        ("sent", f"{kib(program.wire_bytes)} by each device in a call, in "
                 f"{count(sum(c.count for c in sent), 'collective')}{trip}"),
        *(("", text) for text in _kinds(sent)),
        peak_figure(memory),
    ]  # fmt: skip


def _held(types: Sequence[Any], shardings: Sequence[Sharding], mesh: Mesh) -> str:
    """What a device holds of some values, beside what they are together."""
    whole = held = 0
    for aval, sharding in zip(types, shardings, strict=True):
        itemsize = int(getattr(aval.dtype, "itemsize", 0))
        whole += local_bytes(aval.shape, itemsize, Sharding(((),) * len(aval.shape)), mesh)
        held += local_bytes(aval.shape, itemsize, sharding, mesh)
    return f"{kib(held)} on each device, of {kib(whole)}"


def _kinds(collectives: Sequence[Collective]) -> list[str]:
    """How many collectives of each kind, and their bytes; dearest kind first."""
    sent: dict[str, float] = defaultdict(float)
    runs: dict[str, int] = defaultdict(int)
    for collective in collectives:
        sent[collective.kind.value] += collective.wire_bytes
        runs[collective.kind.value] += collective.count
    kinds = sorted(sent, key=lambda kind: (-sent[kind], kind))
    rows = [(str(runs[kind]), kind, kib(sent[kind])) for kind in kinds]
    return aligned(rows, "><>", indent=0) if rows else []


def collectives_listing(program: PerDeviceProgram) -> list[str]:
    """Every collective, those of one line, kind, type and reason in one row, dearest first."""
    mesh = program.mesh
    alike: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for c in program.collectives:
        kind = (c.kind.value, mesh.show(c.axes), array_text(c.shape, c.dtype))
        alike[(*kind, place(c.source), in_user_axes(c.reason, mesh))].append(c)
    total = sum(c.wire_bytes for c in program.collectives)
    if not alike:
        return ["Collectives", "  none: nothing is sent"]
    by_bytes = sorted(alike.items(), key=lambda item: -sum(c.wire_bytes for c in item[1]))
    rows = [("KiB", "share", "times", "kind", "over", "local operand", "line")]
    for (kind, axes, operand, line, _), found in by_bytes:
        sent = sum(c.wire_bytes for c in found)
        known = all(c.is_count_known for c in found)
        times = f"{sum(c.count for c in found)}{'' if known else ' a trip'}"
        size = kib(sent).removesuffix(" KiB")
        rows.append((size, percent(sent, total), times, kind, axes, operand, line))
    table = aligned(rows, ">>><<<<")
    lines = ["Collectives, by the bytes that each device sends", table[0]]
    for line, (key, _) in zip(table[1:], by_bytes, strict=True):
        lines += [line, *wrapped(key[-1], indent=8, hang=2)]
    return lines
