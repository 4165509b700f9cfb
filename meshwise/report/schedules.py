"""What moves changed, and how values lie, as text."""

from collections import defaultdict
from collections.abc import Sequence

from meshwise import _jax
from meshwise.cost.memory import Memory
from meshwise.cost.work import Work
from meshwise.ir.numbers import microseconds
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.source import place
from meshwise.report.text import aligned, in_user_axes, kib, wrapped
from meshwise.schedule.handles import kind_of
from meshwise.schedule.view import View

Figures = tuple[PerDeviceProgram, Work, Memory]


def compared(name: str, before: Figures, after: Figures) -> str:
    """A table of figures of two programs, and the collectives of each."""
    rows = [("", "before", "after", "")]
    for title, (old, new), show in (
        ("sent", (before[0].wire_bytes, after[0].wire_bytes), kib),
        ("collectives", (_launches(before[0]), _launches(after[0])), str),
        ("flops", (before[1].flops, after[1].flops), lambda x: f"{x:,.0f}"),
        ("memory traffic", (before[1].memory_bytes, after[1].memory_bytes), kib),
        ("arguments", (before[2].argument_bytes, after[2].argument_bytes), kib),
        ("results", (before[2].result_bytes, after[2].result_bytes), kib),
        ("peak memory", (before[2].peak_bytes, after[2].peak_bytes), kib),
    ):
        rows.append((title, show(old), show(new), f"{new / old:.2f}x" if old else ""))
    lines = [f"{name}, on each device", *aligned(rows, "<>>>")]
    for title, (program, _, _) in (("Before", before), ("After", after)):
        lines += ["", title, *_collectives(program)]
    return "\n".join(lines)


def _launches(program: PerDeviceProgram) -> int:
    return sum(c.count for c in program.collectives)


def _collectives(program: PerDeviceProgram) -> list[str]:
    alike: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for c in program.collectives:
        why = in_user_axes(c.reason, program.mesh)
        alike[c.kind.value, program.mesh.show(c.axes), place(c.source), why].append(c.wire_bytes)
    rows: Sequence[tuple[str, ...]] = [
        (str(len(sent)), kind, f"over {axes}", kib(sum(sent)), line, why)
        for (kind, axes, line, why), sent in alike.items()
    ]
    return aligned(rows, "><<><<") if rows else ["  nothing is sent"]


def listing(view: View) -> str:
    """Every value of a program: type, layout, what makes it and where."""
    rows = [
        ("argument", v.aval.str_short(short_dtypes=True), str(view.layout(v)), "")
        for v in view.inputs
    ]
    for eqn in view.eqns:
        for var in eqn.outvars:
            short = var.aval.str_short(short_dtypes=True)
            rows.append(
                (kind_of(eqn), short, str(view.layouts[var]), place(_jax.source_summary(eqn)))
            )
    return "\n".join(aligned(rows, "<<<<"))


def candidates_table(
    rows: Sequence[tuple[str, float, float | None, float, int, int, str]],
) -> list[str]:
    """Schedules with what was predicted and measured of each."""
    shown = [("predicted", "measured", "sent", "launches", "peak memory")]
    for _, predicted, measured, sent, launches, peak, _ in rows:
        taken = "" if measured is None else microseconds(measured)
        shown.append((microseconds(predicted), taken, kib(sent), str(launches), kib(peak)))
    if all(measured is None for _, _, measured, *_ in rows):
        shown = [(predicted, *rest) for predicted, _, *rest in shown]
    names = ["schedule", *(f"{name} ({note})" if note else name for name, *_, note in rows)]
    figures = aligned(shown, ">" * len(shown[0]))
    width = max(map(len, figures)) + 2
    return [
        (line if n == 0 else "").ljust(width) + part.strip()
        for line, name in zip(figures, names, strict=True)
        for n, part in enumerate(wrapped(name, width))
    ]
