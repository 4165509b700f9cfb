"""What a person is told of a pipeline that cannot be made: every word of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of
from tests.messages.exactly import check, lines_of

line_of = lines_of(__file__)

MESH = AbstractMesh((4, 2), ("stage", "data"))
F32 = jax.ShapeDtypeStruct((), np.float32)
PARAMS = {"w": np.ones((3, 3), np.float32), "n": [np.float32(2)]}
BATCH = {"x": np.ones((8, 3), np.float32)}


def call(loss, params=PARAMS, batch=BATCH, mesh=MESH, axis="stage", microbatches=4, **more):
    step = mw.pipeline_value_and_grad(loss, axis=axis, microbatches=microbatches, **more)
    return mw.jit(step, mesh=mesh).partition(params, batch)


def two_stages(params, batch):
    x = batch["x"] @ params["w"]
    x = mw.stage_boundary(x)  # the cut
    return (x * params["n"][0]).mean()


def uncut(params, batch):
    return (batch["x"] @ params["w"] * params["n"][0]).mean()


def test_an_axis_that_the_mesh_has_not():
    check(
        mw.MeshError,
        "two_stages is to be pipelined along an axis that the mesh has not:"
        " axis 'pipe'; the mesh has 'stage', 'data'\n"
        "The stages of a pipeline lie along one axis of the mesh.\n"
        "Name one of its axes.",
        lambda: call(two_stages, axis="pipe"),
    )


def test_batches_that_cannot_be_cut():
    rule = (
        "Every array of the batch has the same number of rows as its first dim, a multiple of the"
        " number of microbatches.\n"
        "Choose another number of microbatches or batch size, and let the loss function close over"
        " what has no rows."
    )
    batch = {"x": np.ones((8, 3), np.float32), "y": np.ones(7), "z": np.float32(1)}
    check(
        mw.PipelineError,
        "The batch of two_stages cannot be cut into 8 microbatches:\n"
        "  - batch['y'] has shape (7,)\n"
        f"  - batch['z'] has shape ()\n{rule}",
        lambda: call(two_stages, batch=batch, microbatches=8),
    )
    check(
        mw.PipelineError,
        f"The batch of two_stages cannot be cut into 3 microbatches:"
        f" batch['x'] has shape (8, 3)\n{rule}",
        lambda: call(two_stages, microbatches=3),
    )
    check(
        mw.PipelineError,
        f"The batch of two_stages cannot be cut into 4 microbatches: it has no arrays\n{rule}",
        lambda: call(two_stages, batch={}),
    )


def test_parameters_without_gradients():
    check(
        mw.ArgumentError,
        "two_stages has parameters that have no gradients: params['n'][0] is int32[2]\n"
        "Gradients are taken of floating-point arrays.\n"
        "Let the loss function close over the others, or put them into the batch.",
        lambda: call(two_stages, params=PARAMS | {"n": [np.ones(2, np.int32)]}),
    )


def test_what_is_no_loss():
    rule = "A loss is one floating-point scalar, the mean over a microbatch.\nReturn the loss alone"
    check(
        mw.ArgumentError,
        f"of_rows is no loss: it returns float32[2]\n{rule}.",
        lambda: call(of_rows),
    )
    check(
        mw.ArgumentError,
        f"with_more is no loss: it returns ('float32[]', 'float32[2,3]')\n"
        f"{rule}, or say has_aux=True.",
        lambda: call(with_more),
    )


def test_what_is_no_loss_with_more():
    rule = (
        "A loss is one floating-point scalar, the mean over a microbatch; with has_aux, a pair of"
        " it and a tree of floating-point arrays.\nReturn these alone, counts as floats."
    )
    check(
        mw.ArgumentError,
        f"two_stages is no loss: it returns float32[]\n{rule}",
        lambda: call(two_stages, has_aux=True),
    )


def of_rows(params, batch):
    return batch["x"].sum(1) * params["n"][0]


def with_more(params, batch):
    return of_rows(params, batch).sum(), batch["x"]


@pytest.mark.parametrize(
    "asked",
    [
        {"schedule": "zigzag"},
        {"schedule": ["1f1b"]},
        {"chunks": 2},
        {"schedule": "interleaved", "chunks": 0},
        {"schedule": "interleaved", "chunks": 1.5},
        {"schedule": "interleaved", "chunks": "2"},
    ],
)
def test_schedules_that_there_are_not(asked):
    said = {"schedule": "1f1b", "chunks": 1} | asked
    check(
        mw.PipelineError,
        "mw.pipeline_value_and_grad was asked for a schedule that there is not:"
        f" schedule={said['schedule']!r}, chunks={said['chunks']!r}\n"
        "Schedules are '1f1b', 'eager', 'gpipe', 'interleaved'; only 'interleaved' has several"
        " chunks a device.\n"
        "Name one of them.",
        lambda: mw.pipeline_value_and_grad(uncut, axis="stage", microbatches=2, **asked),
    )


@pytest.mark.parametrize("count", [0, 2.0, True])
def test_numbers_of_microbatches(count):
    check(
        mw.PipelineError,
        f"mw.pipeline_value_and_grad cannot cut a batch: microbatches={count!r}\n"
        "The number of microbatches is an integer of at least 1.\n"
        "Use at least as many as there are stages, or most devices are idle.",
        lambda: mw.pipeline_value_and_grad(uncut, axis="stage", microbatches=count),
    )


PAIR = AbstractMesh((2, 2), ("stage", "data"))


def test_whole_numbers_of_numpy():
    kind = {"schedule": "interleaved", "chunks": np.int64(1)}
    assert call(two_stages, mesh=PAIR, microbatches=np.int64(4), **kind).wire_bytes > 0


def test_shardings_that_do_not_divide():
    check(
        mw.PipelineError,
        "two_stages has shardings that do not divide:\n"
        "  - params['w'] of shape (3, 3) is to be P(None, 'data')\n"
        "  - batch['x'] of shape (1, 3) is to be P('data',)\n"
        "What is sharded over other axes than the pipeline's has dims that their sizes divide; rows"
        " of the batch count by microbatch.\n"
        "Choose other sizes, or leave the dim whole.",
        lambda: call(
            two_stages,
            mesh=PAIR,
            microbatches=8,
            in_shardings=({"w": P(None, "data"), "n": None}, P("data")),
        ),
    )


def test_hints_along_the_pipeline_and_of_another_tree():
    def hinted(params, batch):
        x = mw.shard(batch["x"], P(None, "stage"))  # along the stages
        return two_stages(params, {"x": x})

    for mesh in (PAIR, AbstractMesh((2,), ("stage",))):
        check(
            mw.HintError,
            "hinted has hints along 'stage', the axis of its stages:\n"
            "  - params['w']: P('stage',)\n"
            f"  - the value at {line_of('along the stages')}: P(None, 'stage')\n"
            "Stages lie along 'stage', each on its own device; hints are over the other axes of"
            " the mesh.\n"
            "Leave it out. For each device to have only its stage's parameters, pass what the"
            " step's `pack` makes of them.",
            lambda mesh=mesh: call(
                hinted, mesh=mesh, in_shardings=({"w": P("stage"), "n": None}, None)
            ),
        )
    with pytest.raises(mw.TreeError, match="in_shardings of two_stages does not match the tree"):
        call(two_stages, mesh=PAIR, in_shardings=({"v": P("data")}, None))


def test_rows_that_were_packed_for_something_else():
    specs = ({"w": P(None, "data"), "n": None}, None)
    params = PARAMS | {"w": np.ones((3, 4), np.float32)}
    step = mw.pipeline_value_and_grad(two_stages, axis="stage", microbatches=4, in_shardings=specs)
    rows = step.pack(params, BATCH)
    check(
        mw.PipelineError,
        "two_stages was given parameters that are packed for something else:"
        " the rows were made for other stages, shapes, or shardings\n"
        "Rows are made for one model, cut in one way, over one mesh.\n"
        "Pack them with this step's own `pack`, and its mesh.",
        lambda: mw.jit(step, mesh=PAIR).partition(rows, BATCH),
    )
    assert mw.jit(step, mesh=PAIR).partition(step.pack(params, BATCH, PAIR), BATCH)


STACK_RULE = (
    "Leaves of params are [S, ...], those of inputs [M, ...]. A 'circular' pipeline of repeat=R has"
    " params [S, R, ...] and M of at least S; a 'gpipe' is not repeated.\n"
    "Stack parameters with mw.stack_stages, and the microbatches along a first dim."
)


@pytest.mark.parametrize(
    ("offenders", "params", "inputs", "more"),
    [
        (" schedule='zigzag', repeat=1", 4, 3, {"schedule": "zigzag"}),
        (" schedule='gpipe', repeat=2", (4, 2), 4, {"repeat": 2}),
        (
            " 3 microbatches, 4 stages at a time, repeat=2",
            (4, 2),
            3,
            {"schedule": "circular", "repeat": 2},
        ),
        (
            " params['w'] has shape (4, 3)",
            (4, 3),
            4,
            {"schedule": "circular", "repeat": 2},
        ),
        (" inputs has shape ()", 4, (), {}),
    ],
)
def test_what_is_no_pipeline(offenders, params, inputs, more):
    check(
        mw.PipelineError,
        f"mw.pipeline was given what is no pipeline:{offenders}\n{STACK_RULE}",
        lambda: mw.pipeline(lambda p, x: x, {"w": np.ones(params)}, np.ones(inputs), **more),
    )


def test_layers_that_are_not_stacked():
    layers = [{"w": np.ones((8, 8)), "b": np.ones(4)} for _ in range(6)]
    check(
        mw.PipelineError,
        "mw.pipeline was given what is no pipeline:\n"
        "  - params[0]['b'] has shape (4,)\n"
        + "".join(f"  - params[{i}]['w'] has shape (8, 8)\n" for i in range(4))
        + f"  - and 2 more whose first dims differ from that\n{STACK_RULE}",
        lambda: mw.pipeline(lambda p, x: x, layers, np.ones((4, 8))),
    )


@pytest.mark.parametrize(("stacked", "passed"), [(1, 2), (2, 1), (2, 4)])
def test_layers_stacked_for_another_pipeline(stacked, passed):
    layers = mw.stack_stages([np.ones((5, 5), np.float32)] * 8, stages=4, repeat=stacked)
    more = {"schedule": "circular" if passed > 1 else "gpipe", "repeat": passed}
    check(
        mw.PipelineError,
        "mw.pipeline was given what is no pipeline:"
        f" layers stacked with repeat={stacked}, and repeat={passed}\n{STACK_RULE}",
        lambda: mw.pipeline(lambda own, x: own.apply(jnp.add, x), layers, np.ones((8, 5)), **more),
    )


def test_stages_that_change_what_they_take():
    rule = (
        "What a stage returns goes into the next, which is the same function.\n"
        "Return activations like those that came in; what changes shape belongs before or after the"
        " pipeline, or into mw.pipeline_value_and_grad."
    )
    x = {"x": np.ones((3, 4), np.float32)}

    def widened(w, state):
        return {"x": jnp.concatenate([state["x"] * w] * 2)}

    check(
        mw.PipelineError,
        "widened is no stage of mw.pipeline:"
        f" inputs['x'] is float32[4], the result float32[8]\n{rule}",
        lambda: mw.pipeline(widened, np.ones(2, np.float32), x),
    )
    with pytest.raises(mw.PipelineError, match=r"it takes PyTreeDef.* and returns PyTreeDef"):
        mw.pipeline(lambda w, state: state["x"], np.ones(2, np.float32), x)


def test_layers_that_cannot_be_stacked():
    check(
        mw.PipelineError,
        "mw.stack_stages was given layers that cannot be stacked:\n"
        "  - layer 0 is {'w': 'float32[2]'}\n"
        "  - layer 1 is {'w': 'float32[3]'}\n"
        "Layers that are computed by one function have parameters of the same structure, shapes and"
        " types.\n"
        "Apply others before or after the pipeline, or cut the model with mw.stage_boundary.",
        lambda: mw.stack_stages(
            [{"w": np.ones(2, np.float32)}, {"w": np.ones(3, np.float32)}], stages=2
        ),
    )
    check(
        mw.PipelineError,
        "mw.stack_stages was asked for 2 stages, repeat=1:"
        " first dims of the layers' arrays: [3, 4]\n"
        "Layers are a list with a tree for each, or one tree whose arrays have all layers along"
        " their first dim.\n"
        "Stack layers of the same shapes alone.",
        lambda: mw.stack_stages({"a": np.ones(3), "b": np.ones((4, 2))}, stages=2),
    )
    for stages, repeat in (("stage", 1.5), (0, -1)):
        check(
            mw.PipelineError,
            "mw.stack_stages was asked for stages that are no number:\n"
            f"  - stages={stages!r}\n"
            f"  - repeat={repeat!r}\n"
            "Layers are dealt out to one stage or more, each passed `repeat` times.\n"
            "Pass the size of the pipeline's axis, as in mw.stack_stages(layers, stages=4).",
            lambda s=stages, r=repeat: mw.stack_stages({"a": np.ones(3)}, s, repeat=r),
        )


def test_what_stages_may_not_hold():
    def asks(params, batch):
        x = mw.stage_boundary(batch["x"] @ params["w"])
        drawn = io_callback(np.random.rand, F32, ordered=True)  # asked here
        return (x * drawn).mean() * params["n"][0]

    def by_hand(params, batch):
        x = mw.stage_boundary(batch["x"] @ params["w"])
        mapped = jax.shard_map(jnp.tanh, in_specs=P("data"), out_specs=P("data"))
        return mapped(x).mean() * params["n"][0]  # its region

    def in_order(params, batch):
        x = mw.stage_boundary(batch["x"] @ params["w"])
        jax.debug.print("{x}", x=x[0, 0], ordered=True)
        return x.mean() * params["n"][0]

    mesh = AbstractMesh((2, 2), ("stage", "data"))
    check(
        mw.PipelineError,
        f"asks does something on the host in its stages: io_callback at {line_of('asked here')}\n"
        "The backward of a stage computes its forward again: what the host does would be done"
        " twice, and might be answered otherwise.\n"
        "Ask the host outside of the loss function, and pass what it answers with the batch."
        " jax.debug.print may stand inside, and prints both times.",
        lambda: call(asks, mesh=mesh),
    )
    check(
        mw.PipelineError,
        f"by_hand has a jax.shard_map in its stages: that at {line_of('its region')}\n"
        "Devices of one stage take a branch that others do not, and a region by hand may be over"
        " all of them.\n"
        "Write the function for whole arrays, and say how they lie with mw.shard or in_shardings:"
        " what is sent over the other axes comes of it.",
        lambda: call(by_hand, mesh=mesh),
    )
    with pytest.raises(mw.MeshError, match="in_order prints or calls back in order"):
        call(in_order, mesh=mesh)


def test_an_axis_that_the_mesh_does_not_have():
    def scaled(own, x):
        return own * x

    def fn(w, x):
        return mw.pipeline(scaled, w, x, axis="st")

    check(
        mw.MeshError,
        "scaled is to be pipelined along an axis that the mesh has not: axis 'st'; the mesh has"
        " 'stage'\n"
        "The stages of a pipeline lie along one axis of the mesh.\n"
        "Name one of its axes.",
        lambda: mw.jit(fn, mesh=mesh_of(stage=4)).partition(np.ones(4), np.ones((8, 2))),
    )
