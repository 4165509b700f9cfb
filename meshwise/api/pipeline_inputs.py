"""What `mw.pipeline_value_and_grad` is given, checked; an error for what is no pipeline."""

from typing import Any

from meshwise.errors import PipelineError, message
from meshwise.ir.numbers import whole_number
from meshwise.pipeline.schedules import SCHEDULES


def check_pipeline(
    loss: Any, microbatches: Any, schedule: Any, chunks: Any, stages: Any
) -> tuple[int, int, int | None]:
    """The numbers of microbatches, chunks and stages; an error for what is no pipeline."""
    count, each = whole_number(microbatches), whole_number(chunks)
    is_known = isinstance(schedule, str) and schedule in SCHEDULES
    is_several = each != 1 and schedule != "interleaved"
    if not is_known or each is None or each < 1 or is_several:
        raise PipelineError(
            message(
                "mw.pipeline_value_and_grad was asked for a schedule that there is not",
                [f"schedule={schedule!r}, chunks={chunks!r}"],
                f"Schedules are {', '.join(map(repr, SCHEDULES))}; only 'interleaved' has several "
                "chunks a device.",
                "Name one of them.",
            )
        )
    if not callable(loss):
        raise PipelineError(
            message(
                "mw.pipeline_value_and_grad was given what is no function",
                [f"{loss!r:.60}"],
                "A pipeline is of a function of (params, batch) that returns the loss.",
                "Pass the function itself.",
            )
        )
    if count is None or count < 1:
        raise PipelineError(
            message(
                "mw.pipeline_value_and_grad cannot cut a batch",
                [f"microbatches={microbatches!r}"],
                "The number of microbatches is an integer of at least 1.",
                "Use at least as many as there are stages, or most devices are idle.",
            )
        )
    return count, each, None if stages is None else _stages(stages, each)


def _stages(stages: Any, chunks: int) -> int:
    """How many stages there are to be; an error for what is no multiple of the chunks."""
    count = whole_number(stages)
    if count is None or count < 1 or count % chunks:
        raise PipelineError(
            message(
                "mw.pipeline_value_and_grad cannot cut a model",
                [f"stages={stages!r}, chunks={chunks}"],
                "Stages are as many as devices along the axis, times the chunks of each.",
                "Give a multiple of the chunks, or leave stages out and mark where to cut.",
            )
        )
    return count
