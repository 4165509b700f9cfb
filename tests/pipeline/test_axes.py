"""Pipelines over one axis of a mesh, data and tensor parallelism within the stages over others."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.pipeline.models import Model, chain, language_model, mlp, normal, rows
from tests.pipeline.test_values import assert_same, mesh_of, pipelined

WIDE = 16


def feedforward(stages, hint=lambda x, spec: x):
    """Residual layers as Megatron splits them; `hint` may say so inside."""
    rng = np.random.default_rng(5)
    params = [{"up": normal(rng, 8, WIDE), "down": normal(rng, WIDE, 8)} for _ in range(stages)]

    def loss(params, batch):
        x = hint(batch["x"], P("data"))
        for i, p in enumerate(params):
            x = mw.stage_boundary(x) if i else x
            hidden = jax.nn.relu(x @ hint(p["up"], P(None, "model")))
            x = x + hidden @ hint(p["down"], P("model"))
        return ((x - batch["y"]) ** 2).mean()

    return Model(f"feedforward of {stages}", stages, loss, params, rows)


MEGATRON = {"up": P(None, "model"), "down": P("model")}
DATA = (None, P("data"))
CASES = {
    "data": (mlp(4), {"stage": 4, "data": 2}, DATA, {}, False),
    "data first, in rows": (mlp(4), {"data": 2, "stage": 4}, DATA, {}, True),
    "model": (feedforward(4), {"stage": 4, "model": 2}, ([MEGATRON] * 4, None), {}, True),
    "data and model": (
        feedforward(2),
        {"stage": 2, "data": 2, "model": 2},
        ([MEGATRON] * 2, P("data")),
        {},
        False,
    ),
    "hints inside": (
        feedforward(2, mw.shard),
        {"stage": 2, "data": 2, "model": 2},
        None,
        {},
        True,
    ),
    "interleaved": (
        mlp(4),
        {"stage": 2, "data": 2},
        DATA,
        {"schedule": "interleaved", "chunks": 2},
        True,
    ),
    "one device a stage": (mlp(1), {"stage": 1, "data": 2}, DATA, {}, False),
}
MORE = {
    "sharded parameters": (mlp(2), {"stage": 2, "data": 4}, (P("data"), P("data")), {}, True),
    "language model": (
        language_model(4, tied=True),
        {"stage": 4, "data": 2},
        DATA,
        {"schedule": "eager"},
        True,
    ),
    "JAX's own hints": (
        feedforward(2, lax.with_sharding_constraint),
        {"stage": 2, "data": 2, "model": 2},
        None,
        {},
        False,
    ),
}


def program_of(model, axes, specs, asked, in_rows, batch):
    mesh, count = mesh_of(**axes), len(batch["x" if "x" in batch else "words"]) // 4
    step = mw.pipeline_value_and_grad(
        model.loss, axis="stage", microbatches=count, in_shardings=specs, **asked
    )
    params = step.pack(model.params, batch, mesh) if in_rows else model.params
    return mw.jit(step, mesh=mesh).partition(params, batch), params


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_loss_and_gradients(name):
    model, *rest = (CASES | MORE)[name]
    batch = model.batch(12)
    program, params = program_of(model, *rest, batch)
    plain = feedforward(2) if "hints" in name else model
    want = jax.value_and_grad(plain.loss)(model.params, batch)
    calls = [program] if name in CASES else [program, program.simulate]
    for call in calls:
        loss, gradients = call(params, batch)
        assert_same((loss, gradients.unpack() if rest[-1] else gradients), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_lie_on_the_mesh_that_pack_is_given(kind):
    """And so does what is made of them; the step takes them outside of `mw.jit` too."""
    model = mlp(2)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data"), (kind, kind))
    step, batch = pipelined(model, 2), model.batch(4)
    split = dataclasses.replace(step, in_shardings=(P("data"), None))
    with jax.set_mesh(mesh):
        found = step.pack(model.params, batch), split.pack(model.params, batch, mesh)
    for packed, spec in zip(found, (P("stage"), P("stage", None, "data")), strict=True):
        for x in jax.tree.leaves(jax.tree.map(jnp.zeros_like, packed)):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    assert_same(step(found[0], batch)[0], step(model.params, batch)[0])
    for nowhere in (None, mesh.abstract_mesh):
        (x,) = jax.tree.leaves(step.pack(model.params, batch, nowhere))
        assert isinstance(x.sharding, jax.sharding.SingleDeviceSharding)


def found_in(program):
    found = Counter()
    for c in program.collectives:
        found[str(c.kind), c.axes, c.shape] += c.count
    return found


def test_simulated_with_collectives_in_branches():
    case = CASES["data and model"]
    batch = case[0].batch(8)
    program, params = program_of(*case, batch)
    want = jax.value_and_grad(case[0].loss)(params, batch)
    assert_same(program.simulate(params, batch), want)


def test_exactly_these_collectives_with_data():
    """Of half a microbatch each tick; gradients are summed over the data once."""
    batch, ticks = rows(12), 2 * (3 + 3)
    program, _ = program_of(mlp(4), {"stage": 4, "data": 2}, DATA, {}, True, batch)
    length = 8 * 8 + 8
    assert found_in(program) == {
        ("ppermute", ("stage",), (2 * 8,)): 2 * ticks,
        ("all_reduce", ("stage",), ()): 1,
        ("all_reduce", ("data",), ()): 1,
        ("all_reduce", ("data",), (1, 1, length)): 1,
    }
    program, _ = program_of(mlp(4), {"stage": 4, "data": 2}, DATA, {}, False, batch)
    assert found_in(program) == {
        ("ppermute", ("stage",), (2 * 8,)): 2 * ticks,
        ("all_reduce", ("stage", "data"), ()): 1,
        ("all_reduce", ("data",), (1, length)): 1,
        ("all_gather", ("stage",), (1, length)): 1,
    }


def test_exactly_these_collectives_with_data_and_model():
    """Megatron's: a sum of the activations each way, and one more as the last stage's loss.

    Between two stages activations and their gradients are one exchange.
    """
    batch, ticks = rows(12), 2 * (3 + 1)
    program, _ = program_of(*CASES["hints inside"], batch)
    found = found_in(program)
    assert found.pop(("all_reduce", ("model",), (2, 8))) <= 3 * ticks
    assert found == {
        ("ppermute", ("stage",), (2 * 8,)): ticks,
        ("all_reduce", ("stage",), ()): 1,
        ("all_reduce", ("data",), ()): 1,
        ("all_reduce", ("data",), (1, 1, 1, 8 * WIDE)): 1,
    }


def test_gradients_of_rows_may_stay_sharded_over_the_data():
    """An optimizer whose state is sharded over the data gets a reduce_scatter (ZeRO)."""
    batch, mesh = rows(12), mesh_of(stage=2, data=4)
    model = mlp(2)
    step = mw.pipeline_value_and_grad(model.loss, axis="stage", microbatches=3, in_shardings=DATA)

    def train(params, state, batch):
        _, gradients = step(params, batch)
        return jax.tree.map(lambda s, g: s + g, state, gradients)

    params = step.pack(model.params, batch)
    sharded = P("stage", None, "data")
    program = mw.jit(
        train, mesh=mesh, in_shardings=(P("stage"), sharded, None), out_shardings=sharded
    ).partition(params, jax.tree.map(jnp.zeros_like, params), batch)
    kinds = Counter((str(c.kind), c.axes) for c in program.collectives)
    assert kinds["reduce_scatter", ("data",)] == 1
    assert ("all_reduce", ("data",)) not in kinds
    want = jax.grad(model.loss)(model.params, batch)
    got = program(params, jax.tree.map(jnp.zeros_like, params), batch)
    assert_same(got.unpack(), want)


READS = {
    "in short floats": lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
    "columns": lambda x, w: jnp.tile(x @ w[:, :4], 2),
    "a row": lambda x, w: x * w[0],
    "padded": lambda x, w: (jnp.pad(x, ((0, 0), (1, 1))) @ jnp.pad(w, 1))[:, 1:-1],
    "a triangle": lambda x, w: x @ jnp.tril(w),
    "in several places": lambda x, w: jnp.tanh(x @ w) @ w.T * w[0],
}


@pytest.mark.parametrize("name", READS)
def test_gradients_are_summed_over_the_data_once(name):
    """However a stage reads its parameters, if that makes more of them, or reads them twice."""
    loss = chain(READS[name])
    rng = np.random.default_rng(2)
    params, batch = [normal(rng, 8, 8) for _ in range(2)], rows(16)
    case = Model(name, 2, loss, params, rows), {"stage": 2, "data": 2}, DATA, {}, True
    program, packed = program_of(*case, batch)
    assert {c.count for c in program.collectives if "data" in c.axes} == {1}
    tolerance = 0.05 if "short" in name else 1e-5
    _, gradients = program.simulate(packed, batch)
    assert_same(gradients.unpack(), jax.grad(loss)(params, batch), tolerance)


def test_an_axis_that_the_program_takes_apart():
    """Eight stages along an axis of which something else in the program uses a part alone."""
    model, mesh, batch = mlp(8), mesh_of(stage=8), rows(8)
    step = mw.pipeline_value_and_grad(model.loss, axis="stage", microbatches=4)

    def function(params, batch, y):
        parts = mw.shard(y, P("stage")).reshape(4, 6) * 2
        return step(params, batch), (parts @ jnp.ones((6, 5))).sum(0)

    y = np.arange(24, dtype=np.float32)
    program = mw.jit(function, mesh=mesh).partition(model.params, batch, y)
    assert program.per_device.mesh.names == ("stage.0", "stage.1")
    found, sums = program(model.params, batch, y)
    assert_same(found, jax.value_and_grad(model.loss)(model.params, batch))
    np.testing.assert_allclose(sums, 2 * y.sum(), rtol=1e-6)


def test_explained_by_lines():
    model = feedforward(2, mw.shard)

    def train(params, batch):
        return mw.pipeline_value_and_grad(model.loss, axis="stage", microbatches=2)(params, batch)

    mesh = mesh_of(stage=2, data=2, model=2)
    text = mw.jit(train, mesh=mesh).partition(model.params, rows(8)).explain()
    assert "test_axes.py" in text
    assert "exchange of mw_pipeline itself" in text
    assert not [line for line in text.splitlines() if "ppermute" in line and "unknown" in line]
