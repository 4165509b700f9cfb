"""The rows as text for a terminal and for a page in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf

from benchmarks.suite.figures import (
    Figure,
    at_best,
    geomean,
    is_read_otherwise,
    is_wrong,
    losses,
    ratios,
)
from benchmarks.suite.measure import OURS, PEERS, Measured

KIB = 2**10
HEADS = ("program", "mesh", "Shardy KiB", "GSPMD KiB", "ours KiB", "best", "bytes", "memory",
         "flops", "compile", "run", "run here", "ours sends", "behind in")  # fmt: skip

RATIOS = ("bytes", "memory", "flops", "compile", "run", "run here")


def cells(measured: Measured) -> list[str]:
    """A row of text under `HEADS`; ratios are XLA / ours."""
    program, found = measured.program, ratios(measured)
    sent = [_sent(measured, column) for column in (*PEERS, OURS)]
    best = kib(program.best.sent) if program.best else ""
    parts = [ratio(found.get(name)) for name in RATIOS]
    kinds = measured.outcomes[OURS].kinds
    said = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "nothing"
    mesh = "x".join(map(str, program.mesh))
    return [program.name, mesh, *sent, best, *parts, said, ", ".join(losses(measured))]


def _sent(measured: Measured, column: str) -> str:
    """What a column sends, and what is not as it should be with it."""
    outcome = measured.outcomes[column]
    if outcome.failed:
        return "failed"
    wrong = " wrong" if is_wrong(measured, column) else ""
    other = f" read as {kib(outcome.read_back or 0)}" if is_read_otherwise(measured, column) else ""
    return kib(outcome.sent) + wrong + other


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


def wrong_answers(rows: Sequence[Measured]) -> str:
    """Programs of which XLA's results are not one device's, with the errors, for a page."""
    heads = ("program", "Shardy off by", "GSPMD off by", "ours off by")
    lines = [
        (m.program.name, *(f"{m.outcomes[c].error:.1g}" for c in (*PEERS, OURS)))
        for m in rows
        if any(is_wrong(m, c) for c in PEERS)
    ]
    return markdown(heads, lines)


def by_group(rows: Sequence[Measured]) -> str:
    """A line a group, for a page: how many programs, means of the ratios, rows behind."""
    heads = ("group", "programs", *RATIOS, "behind")
    lines = []
    for group in dict.fromkeys(m.program.group for m in rows):
        part = [m for m in rows if m.program.group == group]
        found = [ratios(m) for m in part]
        means = [
            ratio(geomean(values)) if (values := [r[name] for r in found if name in r]) else ""
            for name in RATIOS
        ]
        lines.append((group, str(len(part)), *means, str(sum(bool(losses(m)) for m in part))))
    return markdown(heads, lines)


def behind(rows: Sequence[Measured], columns: Collection[str]) -> str:
    """Rows that lose in one of some columns, the largest loss first, with reasons; for a page."""
    found = []
    for measured in rows:
        lost = [name for name in losses(measured) if name in columns]
        known = ratios(measured)
        if lost:
            said = ", ".join(f"{name} {ratio(known.get(name))}" for name in lost)
            worst = min(known.get(name, 0.0) for name in lost)
            program = measured.program
            name = f"{program.group}: {program.name}"
            found.append((worst, (name, said, program.reason or "not looked into yet")))
    lines = [line for _, line in sorted(found, key=lambda pair: pair[0])]
    return markdown(("program", "XLA / ours", "why"), lines)


def not_at_best(rows: Sequence[Measured]) -> str:
    """Rows that send more than the best known program and not more than XLA, for a page."""
    heads = ("program", "best known KiB", "ours KiB", "XLA KiB", "the best known is")
    lines = [
        (
            f"{m.program.group}: {m.program.name}",
            kib(best.sent),
            kib(m.outcomes[OURS].sent),
            kib(min(m.outcomes[w].sent for w in PEERS)),
            best.why,
        )
        for m in rows
        if (best := m.program.best) and not at_best(m, OURS) and "bytes" not in losses(m)
    ]
    return markdown(heads, lines)
