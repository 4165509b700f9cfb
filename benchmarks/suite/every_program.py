"""All programs of the suite, in the order of the groups."""

from collections.abc import Sequence

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
)


def chosen(
    groups: Sequence[str], parts: Sequence[str], programs: Sequence[Program] = PROGRAMS
) -> list[Program]:
    """The programs of some groups whose names hold one of some parts."""
    return [p for p in programs if p.group in groups and any(part in p.name for part in parts)]
