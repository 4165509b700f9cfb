"""What a person is told of a model that cannot be cut into stages: every word of it."""

import jax.numpy as jnp
import pytest
from jax import lax

import meshwise as mw
from tests.messages.exactly import check, lines_of
from tests.messages.test_pipelines import BATCH, PARAMS, call

line_of = lines_of(__file__)


def two_stages(params, batch):
    x = batch["x"] @ params["w"]
    x = mw.stage_boundary(x)  # the cut
    return (x * params["n"][0]).mean()


def uncut(params, batch):
    return (batch["x"] @ params["w"] * params["n"][0]).mean()


def three_stages(params, batch):
    x = batch["x"] @ params["w"]
    x = mw.stage_boundary(mw.stage_boundary(x) * 2)  # two cuts
    return (x * params["n"][0]).mean()


def test_another_number_of_stages():
    check(
        mw.PipelineError,
        "three_stages has 3 stages, for 2 devices along 'data':"
        f" 2 boundaries at {line_of('two cuts')}\n"
        "A model with n stage boundaries has n + 1 stages, and there are to be as many as devices"
        " times chunks.\n"
        "Put mw.stage_boundary in 1 place, or say stages=2 without any.",
        lambda: call(three_stages, axis="data"),
    )
    check(
        mw.PipelineError,
        "two_stages has 2 stages, for 4 devices along 'stage':"
        f" a boundary at {line_of('the cut')}\n"
        "A model with n stage boundaries has n + 1 stages, and there are to be as many as devices"
        " times chunks.\n"
        "Put mw.stage_boundary in 3 places, or say stages=4 without any.",
        lambda: call(two_stages),
    )
    check(
        mw.PipelineError,
        "uncut has 1 stage, for 2 devices of 3 chunks each along 'data': no boundary at all\n"
        "A model with n stage boundaries has n + 1 stages, and there are to be as many as devices"
        " times chunks.\n"
        "Put mw.stage_boundary in 5 places, or say stages=6 without any.",
        lambda: call(uncut, axis="data", schedule="interleaved", chunks=3),
    )
    check(
        mw.PipelineError,
        "uncut has 1 stage, for devices of 2 chunks each along 'stage': no boundary at all\n"
        "A model with n stage boundaries has n + 1 stages, and there are to be as many as devices"
        " times chunks.\n"
        "Put mw.stage_boundary in other places, or choose other chunks.",
        lambda: mw.pipeline_value_and_grad(
            uncut, axis="stage", microbatches=2, schedule="interleaved", chunks=2
        )(PARAMS, BATCH),
    )


def test_marks_where_nothing_can_be_cut():
    def looped(params, batch):
        def body(x, _):
            return mw.stage_boundary(jnp.sin(x @ params["w"])), None

        x, _ = lax.scan(body, batch["x"], length=3)  # the loop
        return (x * params["n"][0]).mean()

    check(
        mw.PipelineError,
        "looped has a stage boundary inside of an operator that cannot be cut:"
        f" scan at {line_of('the loop')}\n"
        "A model is cut between operators, and a loop or a function with derivatives of its own is"
        " one operator.\n"
        "Write the loop over stages as a Python loop, with a scan over the layers of each stage"
        " where there are many, and mark between its steps.",
        lambda: call(looped),
    )


def test_a_mark_on_nothing():
    check(
        mw.ArgumentError,
        "mw.stage_boundary was given no array: x is {'a': None}\n"
        "A mark stands in the program where a value of the model passes.\n"
        "Mark the activation that goes from one layer to the next.",
        lambda: mw.stage_boundary({"a": None}),
    )


def test_stages_that_are_not_as_many_as_devices():
    check(
        mw.PipelineError,
        "uncut has 2 stages, for 4 devices along 'stage': stages=2\n"
        "A model with n stage boundaries has n + 1 stages, and there are to be as many as devices"
        " times chunks.\n"
        "Say stages=4.",
        lambda: call(uncut, stages=2),
    )


def test_marks_in_a_model_that_is_to_be_balanced():
    check(
        mw.PipelineError,
        "two_stages is cut in two ways: stages=4, and it has stage boundaries\n"
        "A model is cut at its marks, or into stages that take alike long.\n"
        "Leave out stages=, or mw.stage_boundary.",
        lambda: call(two_stages, stages=4),
    )


def test_what_cannot_be_balanced():
    def looped(params, batch):
        x, _ = lax.scan(  # the loop over layers
            lambda x, _: (jnp.sin(x @ params["w"]), None), batch["x"], length=99
        )
        return (x * params["n"][0]).mean()

    rule = (
        "A model is cut between operators, and a loop or a function with derivatives of its own is"
        " one operator.\n"
        "Write the loop over layers as a Python loop, or use mw.pipeline where they are alike."
    )
    check(
        mw.PipelineError,
        "looped cannot be cut into 4 stages that take alike long:"
        f" 100% is scan at {line_of('the loop over layers')}\n" + rule,
        lambda: call(looped, stages=4),
    )
    check(
        mw.PipelineError,
        "no_layers cannot be cut into 4 stages that take alike long:"
        f" 77% is reduce_sum at {line_of('nothing else')}\n" + rule,
        lambda: call(no_layers, stages=4),
    )


def no_layers(params, batch):
    return params["w"].sum() + 0 * params["n"][0]  # nothing else


@pytest.mark.parametrize("stages", [0, 2.5, "all", True])
def test_numbers_of_stages(stages):
    check(
        mw.PipelineError,
        f"mw.pipeline_value_and_grad cannot cut a model: stages={stages!r}, chunks=1\n"
        "Stages are as many as devices along the axis, times the chunks of each.\n"
        "Give a multiple of the chunks, or leave stages out and mark where to cut.",
        lambda: call(uncut, stages=stages),
    )


def test_stages_that_chunks_do_not_divide():
    check(
        mw.PipelineError,
        "mw.pipeline_value_and_grad cannot cut a model: stages=3, chunks=2\n"
        "Stages are as many as devices along the axis, times the chunks of each.\n"
        "Give a multiple of the chunks, or leave stages out and mark where to cut.",
        lambda: call(uncut, stages=3, chunks=2, schedule="interleaved"),
    )
