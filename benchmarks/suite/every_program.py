"""All programs of the suite, in the order of the groups."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

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
)


def chosen(
    groups: Sequence[str], parts: Sequence[str], programs: Sequence[Program] = PROGRAMS
) -> list[Program]:
    """The programs of some groups whose names hold one of some parts."""
    return [p for p in programs if p.group in groups and any(part in p.name for part in parts)]


class Asked(Protocol):
    """What a command line asks for."""

    groups: Sequence[str]
    programs: Sequence[str]
    saved: Sequence[Path] | None


def nothing_of(asked: Asked, programs: Sequence[Program] = PROGRAMS) -> str:
    """What there is not of what was asked for, as a sentence; empty where all is there."""
    missing = [str(path) for path in asked.saved or () if not path.is_file()]
    if missing:
        return f"no such file: {', '.join(missing)}; --json FILE writes one"
    if not asked.saved and not chosen(asked.groups, asked.programs, programs):
        parts = " or ".join(map(repr, asked.programs))
        return f"no program of {', '.join(asked.groups)} has {parts} in its name"
    return ""
