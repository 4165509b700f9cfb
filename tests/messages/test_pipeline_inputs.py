"""What a person is told of what a pipeline was given and cannot take: every word of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import meshwise as mw
from tests.messages.exactly import check
from tests.messages.test_pipelines import BATCH, PAIR, PARAMS, call, two_stages, uncut

TWO = mw.pipeline_value_and_grad(two_stages, axis="stage", microbatches=2)


@pytest.mark.parametrize("axis", [["stage"], ("stage",), {"stage"}, None, 5])
def test_axes_that_are_no_names(axis):
    check(
        mw.PipelineError,
        f"mw.pipeline_value_and_grad was given an axis that is no name: axis={axis!r}\n"
        "The stages of a pipeline lie along one axis of the mesh.\n"
        "Give its name, as axis='stage'.",
        lambda: mw.pipeline_value_and_grad(uncut, axis=axis, microbatches=2),
    )


@pytest.mark.parametrize("mesh", ["x", 5, {"stage": 2}, [AbstractMesh((2,), ("stage",))]])
def test_meshes_of_pack_that_are_none(mesh):
    check(
        mw.ArgumentError,
        f"pack of two_stages was given a mesh that is none: mesh={mesh!r:.60}\n"
        "A mesh is a jax.sharding.Mesh or, to plan without devices, an AbstractMesh.\n"
        "Make one with jax.make_mesh(sizes, names).",
        lambda: TWO.pack(PARAMS, BATCH, mesh),
    )


TYPES = jax.ShapeDtypeStruct((3, 3), np.float32)
GIVEN = {
    "words in parameters": (
        lambda: TWO(PARAMS | {"s": "abc"}, BATCH),
        "params['s'] is a str: 'abc'",
    ),
    "words in a batch": (lambda: TWO(PARAMS, {"s": "abc"}), "batch['s'] is a str: 'abc'"),
    "types to pack": (
        lambda: TWO.pack(PARAMS | {"w": TYPES}, BATCH),
        "params['w'] is the type float32[3,3]",
    ),
    "types to a call": (
        lambda: TWO(PARAMS, {"x": TYPES}),
        "batch['x'] is the type float32[3,3]",
    ),
    "references": (
        lambda: TWO(PARAMS | {"w": jax.new_ref(jnp.ones((3, 3)))}, BATCH),
        "params['w'] is Ref{float32[3,3]}",
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_what_is_no_array(case):
    ask, offender = GIVEN[case]
    check(
        mw.ArgumentError,
        f"two_stages was given what is no array: {offender}\n"
        "Parameters and batches are trees of arrays and numbers; of the batch of `pack` types will"
        " do.\n"
        "Pass arrays, of a Ref what it holds (ref[...]), and let the loss function close over the"
        " rest. Where only types are wanted, call it under jax.eval_shape.",
        ask,
    )


def test_types_of_rows_are_had_under_eval_shape():
    params = PARAMS | {"w": TYPES}
    rows = jax.eval_shape(lambda p: TWO.pack(p, {"x": BATCH["x"]}), params)
    assert rows.buffers["float32"].shape == (2, 1, 9)


def test_words_are_no_loss_and_no_aux():
    def a_word(params, batch):
        return "x"

    def with_a_word(params, batch):
        return uncut(params, batch), {"a": "x"}

    rule = "A loss is one floating-point scalar, the mean over a microbatch"
    check(
        mw.ArgumentError,
        f"a_word is no loss: it returns a str: 'x'\n{rule}.\nReturn the loss alone.",
        lambda: call(a_word),
    )
    check(
        mw.ArgumentError,
        """with_a_word is no loss: it returns ('float32[]', {'a': "a str: 'x'"})\n"""
        f"{rule}; with has_aux, a pair of it and a tree of floating-point arrays.\n"
        "Return these alone, counts as floats.",
        lambda: call(with_a_word, has_aux=True),
    )


def test_references_that_a_loss_closes_over():
    ref = jax.new_ref(jnp.ones(3))

    def loss(params, batch):
        return (two_stages(params, batch) * ref[...]).sum()

    for mesh in (PAIR, AbstractMesh((1,), ("other",))):
        check(
            mw.PipelineError,
            "loss closes over a reference: Ref{float32[3]}\n"
            "The stages lie on several devices, and each forward is computed again: none sees what"
            " another writes.\n"
            "Close over what it holds, as ref[...], and return with has_aux what is to be written.",
            lambda mesh=mesh: call(loss, mesh=mesh),
        )


def test_the_axis_is_looked_at_before_a_model_is_cut():
    check(
        mw.MeshError,
        "uncut is to be pipelined along an axis that the mesh has not:"
        " axis 'pipe'; the mesh has 'stage', 'data'\n"
        "The stages of a pipeline lie along one axis of the mesh.\n"
        "Name one of its axes.",
        lambda: call(uncut, axis="pipe", stages=99),
    )
