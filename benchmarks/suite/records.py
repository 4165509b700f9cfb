"""The rows as data for a file and a page, and back."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

import jax

from benchmarks.suite.figures import Figure, at_best, is_read_otherwise, is_wrong, losses, ratios
from benchmarks.suite.measure import COLUMNS, OURS, Measured, Outcome
from benchmarks.suite.program import Program


def machine(seconds: float, repeats: int) -> dict[str, Any]:
    """Where and how it was measured; `load` is the machine's at the end."""
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": [round(n, 1) for n in os.getloadavg()],
        "seconds": round(seconds),
        "repeats": repeats,
    }


def record(
    rows: Sequence[Measured], figures: Sequence[Figure], machine: dict[str, Any]
) -> dict[str, Any]:
    """Everything measured, in JSON's numbers; what is not finite becomes text."""
    found = {
        "machine": machine,
        "summary": [asdict(figure) for figure in figures],
        "rows": [_row(measured) for measured in rows],
    }
    return _plain(found)


def read(record: dict[str, Any], programs: Sequence[Program]) -> list[Measured]:
    """The rows of a record; of programs that are no more, none."""
    known = {(program.group, program.name): program for program in programs}
    return [
        Measured(
            known[row["group"], row["name"]],
            {name: _outcome(values) for name, values in row["columns"].items()},
        )
        for row in record["rows"]
        if (row["group"], row["name"]) in known
    ]


def read_figures(record: dict[str, Any]) -> list[Figure]:
    """The summary of a record."""
    return [Figure(**values) for values in record["summary"]]


def _outcome(values: dict[str, Any]) -> Outcome:
    known: dict[str, Any] = {**values, "error": float(values["error"])}  # "inf" is text in JSON
    return Outcome(**known)


def _row(measured: Measured) -> dict[str, Any]:
    program = measured.program
    return {
        "group": program.group,
        "name": program.name,
        "mesh": "x".join(map(str, program.mesh)),
        "best": asdict(program.best) if program.best else None,
        "at_best": at_best(measured, OURS),
        "columns": {name: asdict(measured.outcomes[name]) for name in COLUMNS},
        "wrong": [name for name in COLUMNS if is_wrong(measured, name)],
        "read_otherwise": [name for name in COLUMNS if is_read_otherwise(measured, name)],
        "ratios": ratios(measured),
        "losses": losses(measured),
        "reason": program.reason,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
