"""What `mw.pipeline_value_and_grad` is given, checked; an error for what is no pipeline."""

from typing import Any

import jax
import jax.numpy as jnp

from meshwise import _jax
from meshwise.api.arguments import describe
from meshwise.errors import ArgumentError, PipelineError, message
from meshwise.ir.numbers import whole_number
from meshwise.pipeline.schedules import SCHEDULES


def check_pipeline(
    loss: Any, axis: Any, microbatches: Any, schedule: Any, chunks: Any, stages: Any
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
    if not isinstance(axis, str):
        raise PipelineError(
            message(
                "mw.pipeline_value_and_grad was given an axis that is no name",
                [f"axis={axis!r:.60}"],
                "The stages of a pipeline lie along one axis of the mesh.",
                "Give its name, as axis='stage'.",
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


def check_arrays(name: str, what: str, tree: Any, are_types: bool = False) -> None:
    """An error for leaves of parameters or a batch that are no arrays; types may do for these."""
    offenders = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_type = isinstance(leaf, jax.ShapeDtypeStruct)
        if _type_of(leaf) is None or (is_type and not are_types):
            found = f"the type {_said(leaf)}" if is_type else _said(leaf)
            offenders.append(f"{what}{jax.tree_util.keystr(path)} is {found}")
    if offenders:
        raise ArgumentError(
            message(
                f"{name} was given what is no array",
                offenders,
                "Parameters and batches are trees of arrays and numbers; of the batch of `pack` "
                "types will do.",
                "Pass arrays, of a Ref what it holds (ref[...]), and let the loss function close "
                "over the rest. Where only types are wanted, call it under jax.eval_shape.",
            )
        )


def check_loss(name: str, found: Any, has_aux: bool) -> None:
    """An error for what a loss function may not return."""
    is_pair = has_aux and isinstance(found, tuple) and len(found) == 2
    loss = _type_of(found[0] if is_pair else found)
    types = [_type_of(leaf) for leaf in jax.tree.leaves(found)]
    floats = [t is not None and jnp.issubdtype(t.dtype, jnp.floating) for t in types]
    if loss is None or loss.shape or not all(floats) or is_pair != has_aux:
        rule = "A loss is one floating-point scalar, the mean over a microbatch"
        alone = "Return the loss alone"
        alone += ", or say has_aux=True." if isinstance(found, tuple) else "."
        more = "; with has_aux, a pair of it and a tree of floating-point arrays."
        raise ArgumentError(
            message(
                f"{name} is no loss",
                [f"it returns {jax.tree.map(_said, found)}"],
                rule + (more if has_aux else "."),
                "Return these alone, counts as floats." if has_aux else alone,
            )
        )


def show_type(t: Any) -> str:
    """A type, as it is shown."""
    return f"{t.dtype}[{','.join(map(str, t.shape))}]"


def _said(leaf: Any) -> str:
    """A type, or what there is in the place of an array."""
    kind = _jax.array_type(leaf)
    if kind is None:
        return describe(leaf)
    return show_type(kind) if isinstance(kind, _jax.ShapedArray) else f"{kind}"


def _type_of(leaf: Any) -> Any:
    """The type of an array or a number; None of anything else, as of a reference."""
    kind = _jax.array_type(leaf)
    return kind if isinstance(kind, _jax.ShapedArray) else None
