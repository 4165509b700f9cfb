"""All programs of the suite, in the order of the groups."""

import runpy
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suite.program import Program
from benchmarks.suite.programs import (
    again,
    control_flow,
    convolution,
    indexing,
    matmul,
    meeting,
    models,
    moe,
    numerics,
    ordering,
    pipeline,
    positions,
    reductions,
    reshape,
    reshard,
    science,
    transformer,
    walls,
)

PROGRAMS: tuple[Program, ...] = (
    *matmul.TABLE,
    *transformer.TABLE,
    *moe.TABLE,
    *convolution.TABLE,
    *indexing.TABLE,
    *ordering.TABLE,
    *reshape.TABLE,
    *control_flow.TABLE,
    *pipeline.TABLE,
    *reshard.TABLE,
    *science.TABLE,
    *models.TABLE,
    *numerics.TABLE,
    *reductions.TABLE,
    *meeting.TABLE,
    *again.TABLE,
    *positions.TABLE,
    *walls.TABLE,
)


def a_file(text: str) -> Path:
    """The type of options that name a file which is there."""
    if not (path := Path(text)).is_file():
        raise ArgumentTypeError(f"no such file: {text}")
    return path


def listed(path: Path | None) -> Sequence[Program]:
    """The programs that a Python file lists as `PROGRAMS`; those of the suite without one."""
    return PROGRAMS if path is None else tuple(runpy.run_path(str(path))["PROGRAMS"])


def chosen(
    groups: Sequence[str], parts: Sequence[str], programs: Sequence[Program]
) -> list[Program]:
    """The programs of some groups whose names hold one of some parts; ends where none is."""
    found = [p for p in programs if p.group in groups and any(part in p.name for part in parts)]
    if not found:
        named = " or ".join(map(repr, parts))
        raise SystemExit(f"no program of {', '.join(groups)} has {named} in its name")
    return found
