"""The rows as text for a terminal and for a page in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from benchmarks.suite.figures import Figure, is_wrong, losses, ratios
from benchmarks.suite.measure import COLUMNS, OURS, PEERS, Measured

KIB = 2**10
HEADS = ("program", "mesh", "Shardy KiB", "GSPMD KiB", "ours KiB", "best", "bytes", "memory",
         "flops", "compile", "run", "run here", "ours sends", "behind in")  # fmt: skip

RATIOS = ("bytes", "memory", "flops", "compile", "run", "run here")


def cells(measured: Measured) -> list[str]:
    """A row of text under `HEADS`; ratios are XLA / ours."""
    program, found = measured.program, ratios(measured)
    sent = [
        "failed" if (o := measured.outcomes[c]).failed
        else kib(o.sent) + (" wrong" if is_wrong(measured, c) else "")
        for c in (*PEERS, OURS)
    ]  # fmt: skip
    best = kib(program.best.sent) if program.best else ""
    parts = [ratio(found.get(name)) for name in RATIOS]
    kinds = measured.outcomes[OURS].kinds
    said = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "nothing"
    mesh = "x".join(map(str, program.mesh))
    return [program.name, mesh, *sent, best, *parts, said, ", ".join(losses(measured))]


def kib(sent: float) -> str:
    """Bytes as KiB."""
    return f"{sent / KIB:,.1f}" if sent >= KIB / 10 else f"{sent / KIB:.3g}"


def ratio(found: float | None) -> str:
    """A ratio as text."""
    if found is None:
        return ""
    return "all" if found == inf else f"{found:,.2f}"


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table for a page."""
    return "\n".join(
        [
            f"| {' | '.join(heads)} |",
            f"|{'---|' * len(heads)}",
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )


def markdown_of_figures(figures: Sequence[Figure]) -> str:
    """The summary for a page."""
    lines = [(f.name, f.value, f.goal, "yes" if f.reached else "no") for f in figures]
    return markdown(("figure", "measured", "goal", "reached"), lines)


def wrong_answers(rows: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Programs of which XLA's results are not one device's, with the errors."""
    return [
        (m.program.name, *(f"{m.outcomes[c].error:.1g}" for c in COLUMNS))
        for m in rows
        if any(is_wrong(m, c) for c in PEERS)
    ]
