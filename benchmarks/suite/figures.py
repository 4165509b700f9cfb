"""Ratios of the better of XLA's two columns to ours, where we lose, and the suite's summary.

A column of wrong numbers is no peer; a row in which both are counts among the wrong answers alone.
Differences too small to mean anything are none: sizes below `SMALL_BYTES` of memory and
`SMALL_FLOPS` count as that much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log

from benchmarks.suite.measure import COLUMNS, HERE, OURS, PEERS, Measured, Outcome

SMALL_BYTES = 4096
SMALL_FLOPS = 1000
LEAST = {"memory": 0.95, "flops": 0.98, "run here": 0.9}


@dataclass(frozen=True)
class Figure:
    """One line of the summary: what was counted, what came out, and what is to be reached."""

    name: str
    value: str
    goal: str
    reached: bool


def ratios(measured: Measured) -> dict[str, float]:
    """XLA / ours per column; above 1 ours is better. Bytes that only XLA sends give inf."""
    ours = measured.outcomes[OURS]
    peers = _peers(measured)
    if ours.failed or not peers:
        return {}

    def over(value: Callable[[Outcome], float], least: float) -> float:
        return max(min(map(value, peers)), least) / max(value(ours), least)

    sent = min(p.sent for p in peers)
    found = {
        "bytes": sent / ours.sent if ours.sent else (inf if sent else 1.0),
        "memory": over(lambda o: o.memory, SMALL_BYTES),
        "flops": over(lambda o: o.flops, SMALL_FLOPS),
        "compile": over(lambda o: o.compile_s, 0.0),
    }
    for name, column in (("run", OURS), ("run here", HERE)):
        seconds = measured.outcomes[column].run_s
        if seconds is not None:
            found[name] = min(p.run_s or inf for p in peers) / seconds
    return found


def _peers(measured: Measured) -> list[Outcome]:
    outcomes = {w: measured.outcomes[w] for w in PEERS if not is_wrong(measured, w)}
    return [outcome for outcome in outcomes.values() if not outcome.failed]


def losses(measured: Measured) -> list[str]:
    """The columns in which ours is behind, none if it is not.

    Run times count where the program is made for the machine that runs it.
    """
    if any(measured.outcomes[column].failed for column in (OURS, HERE)):
        return ["failed"]
    found = ratios(measured)
    lost = ["bytes"] if found.get("bytes", 1) < 1 - 1e-6 else []
    lost += [name for name, least in LEAST.items() if found.get(name, least) < least]
    return lost + (["numbers"] if any(is_wrong(measured, c) for c in (OURS, HERE)) else [])


def is_wrong(measured: Measured, column: str) -> bool:
    """Whether a column's numbers are not one device's."""
    outcome = measured.outcomes[column]
    return not outcome.failed and not outcome.error <= measured.program.tolerance


def is_read_otherwise(measured: Measured, column: str) -> bool:
    """Whether XLA's text of our program sends other bytes than we say."""
    outcome = measured.outcomes[column]
    read, sent = outcome.read_back, outcome.sent
    return read is not None and not outcome.failed and abs(read - sent) > 1e-6 * sent + 0.5


def at_best(measured: Measured, column: str) -> bool:
    """Whether a column sends no more than the best known program; False where none is known."""
    best, outcome = measured.program.best, measured.outcomes[column]
    return best is not None and not outcome.failed and outcome.sent <= best.sent * (1 + 1e-6) + 0.5


def geomean(numbers: Sequence[float]) -> float:
    """The geometric mean of what is finite."""
    finite = [n for n in numbers if 0 < n < inf]
    return exp(sum(map(log, finite)) / len(finite)) if finite else 1.0


def summary(rows: Sequence[Measured]) -> list[Figure]:
    """The figures of the whole suite beside their goals."""
    found = [(m, r) for m in rows if (r := ratios(m))]
    figures = [_bytes(found), *_best(rows)]
    for name, title, floor, goal in (
        ("memory", "peak temporary memory", 0.95, 1.1),
        ("flops", "flops per device", 0.98, 1.0),
        ("run", "run time", 0.9, 1.3),
        ("run here", "run time, ours made with CPU figures", 0.9, 1.3),
        ("compile", "whole compile", 0.0, 1.0),
    ):
        values = [r[name] for _, r in found if name in r]
        if not values:
            continue
        worst = f", worst {min(values):.2f}, {sum(v < floor for v in values)} below {floor}"
        least = f", none below {floor}" if floor else ""
        figures.append(
            Figure(
                f"{title}, XLA / ours",
                f"geomean {geomean(values):.2f}{worst if floor else f', worst {min(values):.2f}'}",
                f"geomean ≥ {goal}{least}" if name != "flops" else f"none below {floor}",
                min(values) >= floor and (name == "flops" or geomean(values) >= goal),
            )
        )
    wrong = {c: sum(is_wrong(m, c) for m in rows) for c in COLUMNS}
    failed = {c: sum(bool(m.outcomes[c].failed) for m in rows) for c in COLUMNS}
    for name, counts in (("wrong answers", wrong), ("refused or crashed", failed)):
        mine = max(counts[OURS], counts[HERE])
        said = f"ours {mine}, Shardy {counts['shardy']}, GSPMD {counts['gspmd']}"
        figures.append(Figure(name, said, "ours 0", not mine))
    return figures


def _bytes(found: Sequence[tuple[Measured, dict[str, float]]]) -> Figure:
    values = [r["bytes"] for _, r in found]
    more = sum(v < 1 - 1e-6 for v in values)
    said = (
        f"geomean {geomean(values):.2f} over {sum(v < inf for v in values)}, "
        f"{sum(v == inf for v in values)} where only XLA sends, {more} where ours sends more"
    )
    reached = not more and geomean(values) >= 1.35
    return Figure("wire bytes, XLA / ours", said, "geomean ≥ 1.35, never < 1.0", reached)


def _best(rows: Sequence[Measured]) -> list[Figure]:
    known = [m for m in rows if m.program.best is not None]
    far = [m for m in known if _peers_far(m)]
    reached = [sum(at_best(m, OURS) for m in some) for some in (far, known)]
    names = ("at the best known bytes, where XLA is over 1.2x", "at the best known bytes, of all")
    return [
        Figure(
            name, f"{n} of {len(some)}", "≥ 90%", not some or n >= 0.9 * len(some)
        )
        for name, n, some in zip(names, reached, (far, known), strict=True)
    ]  # fmt: skip


def _peers_far(measured: Measured) -> bool:
    best = measured.program.best
    sent = [peer.sent for peer in _peers(measured)]
    return best is not None and bool(sent) and min(sent) > 1.2 * best.sent + 0.5
