"""All programs of the suite, in the order of the groups."""

from benchmarks.suite.program import Program
from benchmarks.suite.programs import (
    control_flow,
    convolution,
    indexing,
    matmul,
    moe,
    ordering,
    pipeline,
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
)
