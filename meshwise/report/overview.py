"""What a per-device program is, whoever made it: figures, what goes in and out, what is sent."""

from collections import defaultdict
from collections.abc import Sequence
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
) -> str:
    """A program that was not planned in words: what goes in and out, and each collective."""
    memory = memory_of(program, donated)
    equations = ("equations", f"{_jax.equation_count(program.jaxpr):,} for each device")
    sections = [
        titled(program, name, [equations, *figures(program, memory)]),
        _given("Arguments", in_paths, program.in_types, program.in_shardings, program.mesh),
        _given("Results", out_paths, program.out_types, program.out_shardings, program.mesh),
        collectives_listing(program),
        held_listing(memory),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _given(
    title: str,
    paths: Sequence[str],
    types: Sequence[Any],
    shardings: Sequence[Sharding],
    mesh: Mesh,
) -> list[str]:
    """Arguments or results, with how each lies."""
    rows = [
        (path, array_text(t.shape, t.dtype), sharding_text(s, mesh))
        for path, t, s in zip(paths, types, shardings, strict=True)
    ]
    return [title, *aligned(rows, "<<<")] if rows else []


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
