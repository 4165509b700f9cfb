"""A transformer layer under Megatron's hints: numbers, and at most two all-reduces each way."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.end_to_end import models
from tests.end_to_end.test_mlp import MESHES, abstract, assert_same

KEY = jax.random.key(3)
OPTIMISER = optax.sgd(0.1, momentum=0.9)
PARAMS = models.init_layer(KEY)
STATE = models.start(PARAMS, OPTIMISER)
BATCH = 16


def stream(seed: int, batch: int = BATCH) -> np.ndarray:
    """Values of the residual stream."""
    shape = (batch, models.SEQUENCE, models.WIDTH)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def split_axes(mesh: AbstractMesh) -> tuple[Any, Any]:
    """The axes of the batch and of the model; all of them the model's where there is only one."""
    names = tuple(mesh.axis_names)
    return (names[0] if len(names) > 1 else None), (names[1:] if len(names) > 1 else names)


def megatron(mesh: AbstractMesh) -> tuple[models.Mark, dict[str, P]]:
    """Hints on values, and shardings of weights."""
    data, model = split_axes(mesh)
    mark = models.marked(
        {
            "stream": P(data, None, None),
            "hidden": P(data, None, model),
            "heads": P(data, None, model, None),
        }
    )
    columns, rows = P(None, model), P(model, None)
    weights = {n: columns for n in ("q", "k", "v", "up")} | {n: rows for n in ("out", "down")}
    return mark, {n: weights.get(n, P()) for n in PARAMS}


def all_reduces_of_the_stream(program: Any, mesh: AbstractMesh) -> float:
    """Wire bytes over the model's axes in units of one all-reduce of the local stream."""
    data, model = split_axes(mesh)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    n = int(np.prod([sizes[a] for a in model]))
    local = stream(0).nbytes // sizes.get(data, 1)
    over_model = [c for c in program.collectives if any(a.split(".")[0] in model for a in c.axes)]
    # The gradient of a norm's scale is tiny, and no part of the stream.
    large = [c for c in over_model if np.prod(c.shape) > models.WIDTH]
    return sum(c.wire_bytes for c in large) / (2 * (n - 1) / n * local)


@pytest.mark.parametrize("name", MESHES)
def test_two_all_reduces_forward(name: str):
    mesh = abstract(name)
    mark, weights = megatron(mesh)
    rows = P(split_axes(mesh)[0])
    step = mw.jit(
        lambda p, x: models.layer(p, x, mark),
        mesh=mesh,
        in_shardings=(weights, rows),
        out_shardings=rows,
    )
    program = step.partition(PARAMS, stream(0))
    assert all_reduces_of_the_stream(program, mesh) <= 2


@pytest.mark.parametrize("name", MESHES)
def test_two_more_backward(name: str):
    """The gradient by the layer's input too, as in a layer in the middle."""
    mesh = abstract(name)
    mark, weights = megatron(mesh)
    rows = P(split_axes(mesh)[0])

    def both(params: models.Params, x: jax.Array, cotangent: jax.Array) -> Any:
        y, back = jax.vjp(lambda p, x: models.layer(p, mark("stream", x), mark), params, x)
        return y, back(cotangent)

    step = mw.jit(
        both, mesh=mesh, in_shardings=(weights, rows, rows), out_shardings=(rows, (weights, rows))
    )
    program = step.partition(PARAMS, stream(0), stream(1))
    assert all_reduces_of_the_stream(program, mesh) <= 4
    wanted = jax.jit(both)(PARAMS, stream(0), stream(1))
    assert_same(program.simulate(PARAMS, stream(0), stream(1)), wanted, rtol=2e-5)


@pytest.mark.parametrize("completion", ["gspmd", "improved"])
@pytest.mark.parametrize("batch", [BATCH, 13])
def test_a_step_equals_one_device(completion: str, batch: int):
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    mark, weights = megatron(mesh)
    state = models.State(weights, None)
    step = mw.jit(
        models.train_step(models.layer_loss, OPTIMISER, mark),
        mesh=mesh,
        completion=completion,
        in_shardings=(state, P("x"), P()),
        out_shardings=(state, P(), None),
    )
    arguments = STATE, (stream(0, batch), stream(1, batch)), KEY
    wanted = jax.jit(models.train_step(models.layer_loss, OPTIMISER))(*arguments)
    assert_same(step.partition(*arguments).simulate(*arguments), wanted, rtol=2e-5)
