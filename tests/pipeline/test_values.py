"""Loss and gradients of pipelines are those of one device, for every schedule and sort of model."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.pipeline.schedules import one_f_one_b
from meshwise.rules.registry import LocalContext
from tests.pipeline.models import language_model, layer, mixed, mlp, rows, skips


def mesh_of(**axes):
    auto = (AxisType.Auto,) * len(axes)
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto, devices=jax.devices()[:count])


def pipelined(model, microbatches, schedule="1f1b", chunks=1):
    return mw.pipeline_value_and_grad(
        model.loss, axis="stage", microbatches=microbatches, schedule=schedule, chunks=chunks
    )


def assert_same(got, want, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (found.shape, found.dtype) == (np.shape(wanted), wanted.dtype)
        a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        np.testing.assert_allclose(a, b, atol=tolerance * max(np.abs(b).max(initial=0), 1e-2))


@pytest.mark.parametrize("shardings", [None, (P(None, "data"), None)])
def test_stages_that_differ_in_their_gradients_alone(shardings):
    def scaled(factor):
        same = jax.custom_vjp(lambda x: x)
        same.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * factor,))
        return same

    def loss(weights, x):
        for k, w in enumerate(weights):
            x = mw.stage_boundary(x) if k else x
            x = scaled(10.0**k)(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    random = np.random.default_rng(0)
    weights = [jnp.asarray(random.normal(size=(8, 8)) * 0.3, jnp.float32) for _ in range(4)]
    x = jnp.asarray(random.normal(size=(16, 8)), jnp.float32)
    step = mw.pipeline_value_and_grad(loss, axis="stage", microbatches=4, in_shardings=shardings)
    got = mw.jit(step, mesh=mesh_of(stage=4, data=2))(weights, x)
    assert_same(got, jax.value_and_grad(loss)(weights, x))


@pytest.mark.parametrize("shardings", [None, (P(None, "data"), None)])
def test_stages_of_one_code_that_read_other_inputs(shardings):
    def loss(weights, batch):
        x = batch["x"]
        for k, w in enumerate(weights):
            x = mw.stage_boundary(x) if k else x
            x = jnp.tanh(x @ w) + batch["added"][k]
        return jnp.mean(x**2)

    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    weights = [draw(8, 8) * 0.3 for _ in range(4)]
    batch = {"x": draw(16, 8), "added": [draw(16, 8) for _ in range(4)]}
    step = mw.pipeline_value_and_grad(loss, axis="stage", microbatches=4, in_shardings=shardings)
    got = mw.jit(step, mesh=mesh_of(stage=4, data=2))(weights, batch)
    assert_same(got, jax.value_and_grad(loss)(weights, batch))


CASES = [  # model, devices, microbatches, schedule, chunks; then whether parameters are in rows
    (mlp(4), 4, 8, "1f1b", 1, False),
    (mlp(3), 3, 1, "1f1b", 1, True),
    (mlp(3), 1, 2, "interleaved", 3, True),
    (mlp(1), 1, 2, "eager", 1, False),
    (skips(4), 4, 4, "gpipe", 1, True),
    (language_model(3, tied=True), 3, 4, "1f1b", 1, True),
    (language_model(4, tied=True), 2, 3, "interleaved", 2, False),
]
MORE = [
    (language_model(3, tied=False), 3, 2, "eager", 1, False),
    (language_model(4, tied=True), 4, 6, "1f1b", 1, True),
    (mlp(8), 8, 16, "1f1b", 1, False),
    (mlp(8), 4, 6, "interleaved", 2, True),
    (skips(8), 8, 4, "eager", 1, False),
    (skips(8), 2, 4, "interleaved", 4, True),
    (language_model(8, tied=True), 8, 8, "gpipe", 1, False),
    (language_model(4, tied=True), 2, 4, "interleaved", 2, True),
]


def run(model, devices, microbatches, schedule, chunks, in_rows, simulated=False):
    """Loss and gradients of a pipeline, and the batch."""
    batch = model.batch(2 * microbatches)
    step = pipelined(model, microbatches, schedule, chunks)
    params = step.pack(model.params, batch) if in_rows else model.params
    program = mw.jit(step, mesh=mesh_of(stage=devices)).partition(params, batch)
    call = program.simulate if simulated else program
    loss, gradients = call(params, batch)
    return (loss, gradients.unpack() if in_rows else gradients), batch


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=f"{c[0].name}, {c[3]}, {c[5]}") for c in CASES]
    + [pytest.param(c, id=f"{c[0].name}, {c[3]}, {c[5]}", marks=pytest.mark.slow) for c in MORE],
)
def test_loss_and_gradients(case):
    model = case[0]
    got, batch = run(*case)
    assert_same(got, jax.value_and_grad(model.loss)(model.params, batch))


@pytest.mark.parametrize("in_rows", [pytest.param(True, marks=pytest.mark.slow), False])
def test_simulated(in_rows):
    model = language_model(2, tied=True) if in_rows else mlp(4)
    got, batch = run(model, 2, 3, *(("1f1b", 1) if in_rows else ("interleaved", 2)), in_rows, True)
    assert_same(got, jax.value_and_grad(model.loss)(model.params, batch))


def test_parameters_of_two_dtypes_are_added_up_in_32_bits():
    model, batch = mixed(2), rows(16)
    step = pipelined(model, 8)
    got = mw.jit(step, mesh=mesh_of(stage=2))(model.params, batch)
    assert_same(got, jax.jit(step)(model.params, batch))
    wide = jax.tree.map(lambda p: np.asarray(p, np.float32), model.params)
    want = jax.value_and_grad(model.loss)(wide, batch)
    assert_same(jax.tree.map(lambda x: np.asarray(x, np.float32), got), want, 0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("in_rows", [True, False])
def test_short_gradients_are_cast_once_they_are_added_up(dtype, in_rows):
    """Half of the rows undo the other half, which other devices have, but for a little."""

    def loss(w, batch):
        x = mw.stage_boundary(batch)
        return jnp.sum(x @ w.astype(jnp.float32))

    rows = np.asarray([[257.0]] * 4 + [[-256.0]] * 4, np.float32)
    w = jnp.ones((1, 1), dtype)
    shardings = P(), P("data")
    step = mw.pipeline_value_and_grad(loss, axis="stage", microbatches=4, in_shardings=shardings)
    mesh = mesh_of(stage=2, data=2)
    given = step.pack(w, rows, mesh) if in_rows else w
    program = mw.jit(step, mesh=mesh).partition(given, rows)
    assert [c.count for c in program.collectives if "data" in c.axes] == [1, 1]
    _, gradient = program.simulate(given, rows)
    gradient = gradient.unpack() if in_rows else gradient
    assert np.asarray(gradient, np.float32) == 0.25 * (4 * 257 - 4 * 256)
    assert np.asarray(jax.jit(step)(w, rows)[1], np.float32) == 1.0


@pytest.mark.parametrize("in_rows", [True, False])
def test_short_gradients_of_what_several_stages_read(in_rows):
    """In rows they are cast after the sum over the stages, else before it, too."""

    def loss(w, batch):
        x = mw.stage_boundary((batch[:, :1] @ w.astype(jnp.float32)).sum())
        return x + (batch[:, 1:] @ w.astype(jnp.float32)).sum()

    rows, w = np.asarray([[257.0, -256.0]] * 4, np.float32), jnp.ones((1, 1), "bfloat16")
    step, mesh = mw.pipeline_value_and_grad(loss, axis="stage", microbatches=4), mesh_of(stage=2)
    _, gradient = mw.jit(step, mesh=mesh)(step.pack(w, rows, mesh) if in_rows else w, rows)
    gradient = gradient.unpack() if in_rows else gradient
    assert np.asarray(gradient, np.float32) == (1.0 if in_rows else 0.0)


def test_references_and_axes_of_one_device():
    def loss(weights, x):
        for k, w in enumerate(weights):
            x = mw.stage_boundary(x) if k else x
            row = jax.new_ref(jnp.zeros_like(x))
            row[...] += jnp.tanh(x @ w)
            x = row[...]
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    weights = [np.asarray(rng.normal(size=(8, 8)) * 0.3, np.float32) for _ in range(2)]
    x = np.asarray(rng.normal(size=(16, 8)), np.float32)
    shardings = None, P("data")  # an axis of one device names nothing
    step = mw.pipeline_value_and_grad(loss, axis="stage", microbatches=4, in_shardings=shardings)
    program = mw.jit(step, mesh=mesh_of(stage=2, data=1)).partition(weights, x)
    assert_same(program.simulate(weights, x), jax.jit(jax.value_and_grad(loss))(weights, x))


@pytest.mark.parametrize("in_rows", [True, False])
def test_more_results_than_the_loss(in_rows):
    """Means over the microbatches, from any stage, of any shape; also of a part of the batch."""

    def with_aux(params, batch):
        x = layer(params[0], batch["x"])
        first = jnp.square(x).mean(0)
        x = layer(params[1], mw.stage_boundary(x))
        error = ((x - batch["y"]) ** 2).mean()
        return error, {"first": first, "error": (error, jnp.bfloat16(2))}

    model, batch = mlp(2), rows(12)
    step = mw.pipeline_value_and_grad(
        with_aux, axis="stage", microbatches=3, has_aux=True, in_shardings=(None, P("data"))
    )
    want = jax.value_and_grad(with_aux, has_aux=True)(model.params, batch)
    assert_same(jax.jit(step)(model.params, batch), want)
    params = step.pack(model.params, batch) if in_rows else model.params
    program = mw.jit(step, mesh=mesh_of(stage=2, data=2)).partition(params, batch)
    value, gradients = program(params, batch)
    assert_same((value, gradients.unpack() if in_rows else gradients), want)
    inside = {c.shape for c in program.collectives if c.count > 1 and str(c.kind) != "ppermute"}
    assert inside == {(8,)}, "what a stage sends on is whole; means are taken after the loop"


@pytest.mark.parametrize("error", [None, 1.0])
def test_results_that_are_numbers_of_python(error):
    def with_numbers(params, batch):
        x = layer(params[1], mw.stage_boundary(layer(params[0], batch["x"])))
        return (jnp.square(x).mean() if error is None else error), {"rate": 0.1, "steps": 3.0}

    model, batch = mlp(2), rows(12)
    options = {"axis": "stage", "microbatches": 3, "has_aux": True}
    step = mw.pipeline_value_and_grad(with_numbers, **options)
    want = jax.jit(jax.value_and_grad(with_numbers, has_aux=True))(model.params, batch)
    assert_same(jax.jit(step)(model.params, batch), want)
    program = mw.jit(step, mesh=mesh_of(stage=2)).partition(model.params, batch)
    assert_same(program.simulate(model.params, batch), want)


def test_it_is_the_same_without_a_mesh():
    model = language_model(2, tied=True)
    batch = model.batch(8)
    want = jax.value_and_grad(model.loss)(model.params, batch)
    step = pipelined(model, 4)
    assert_same(step(model.params, batch), want)
    packed = step.pack(model.params, batch)
    loss, gradients = jax.jit(step)(packed, batch)
    assert_same((loss, gradients.unpack()), want)
    assert_same(packed.unpack(), model.params, 0)


def test_rows_of_tied_leaves_stay_equal():
    """Both stages that read the embedding get the gradient of the whole model."""
    model = language_model(2, tied=True)
    batch, step = model.batch(4), pipelined(model, 2)
    packed = step.pack(model.params, batch)
    _, found = mw.jit(step, mesh=mesh_of(stage=2))(packed, batch)
    changed = jax.tree.map(lambda p, g: p - 0.1 * g, packed, found)
    tied = packed.packing.rows.tied
    assert [packed.packing.rows.types[i].shape for i in tied] == [model.params["embedding"].shape]
    for device in range(2):
        (own,) = packed.packing.rows.tied_parts(
            {d: x[device] for d, x in changed.buffers.items()}, device
        )
        want = changed.unpack()["embedding"]
        np.testing.assert_array_equal(own, want)


def test_inside_a_training_step():
    """Closed-over traced values, an optimizer on rows, derivatives and batches of all of it."""
    model = mlp(2)
    batch, rate = rows(8), np.float32(0.1)

    def scaled(weight):
        return mw.pipeline_value_and_grad(
            lambda p, b: weight * model.loss(p, b), axis="stage", microbatches=4
        )

    def train(params, batch, weight):
        loss, gradients = scaled(weight)(params, batch)
        return loss, jax.tree.map(lambda p, g: p - rate * g, params, gradients)

    params = scaled(1.0).pack(model.params, batch)
    step = mw.jit(train, mesh=mesh_of(stage=2))
    loss, changed = step(params, batch, np.float32(3))
    want, gradients = jax.value_and_grad(model.loss)(model.params, batch)
    np.testing.assert_allclose(loss, 3 * want, rtol=1e-6)
    wanted = jax.tree.map(lambda p, g: p - 3 * rate * g, model.params, gradients)
    assert_same(changed.unpack(), wanted)
    (lies,) = jax.tree.leaves(step.partition(params, batch, rate).out_shardings[1])
    assert lies.spec == P("stage")
    by_weight = jax.jit(jax.grad(lambda w: train(model.params, batch, w)[0]))(np.float32(3))
    np.testing.assert_allclose(by_weight, want, rtol=1e-6)
    losses = jax.jit(jax.vmap(lambda w: train(model.params, batch, w)[0]))(jnp.arange(3.0))
    np.testing.assert_allclose(losses, want * np.arange(3), rtol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "eager", "gpipe"])
def test_exactly_these_collectives(schedule):
    """A ppermute each way and tick, of one microbatch; the loss; and once, the gradients' rows."""
    model, microbatches, size = mlp(4), 6, 3
    step, batch = pipelined(model, microbatches, schedule), rows(microbatches * size)
    mesh, width = mesh_of(stage=4), model.params[0]["b"].size
    ticks = microbatches + 6 if schedule == "eager" else 2 * (microbatches + 3)
    expected = Counter({("ppermute", (size * width,)): 2 * ticks, ("all_reduce", ()): 1})
    for params in (step.pack(model.params, batch), model.params):
        program = mw.jit(step, mesh=mesh).partition(params, batch)
        found = Counter()
        for c in program.collectives:
            assert c.axes == ("stage",)
            found[str(c.kind), c.shape] += c.count
        assert found == expected
        expected["all_gather", (1, width * (width + 1))] = 1  # a tree, the second time


PRICED = {
    "tied": (language_model(4, tied=True), {"stage": 4}, None),
    "two dtypes": (mixed(4), {"stage": 4}, None),
    "two dtypes and the data": (mixed(4), {"stage": 4, "data": 2}, (P(), P("data"))),
}


@pytest.mark.parametrize("in_rows", [True, False])
@pytest.mark.parametrize("case", PRICED.values(), ids=PRICED)
def test_what_is_sent_is_what_was_priced(case, in_rows):
    model, axes, shardings = case
    batch = model.batch(6)
    step = mw.pipeline_value_and_grad(
        model.loss, axis="stage", microbatches=3, in_shardings=shardings
    )
    mesh = mesh_of(**axes)
    params = step.pack(model.params, batch, mesh) if in_rows else model.params
    program = mw.jit(step, mesh=mesh).partition(params, batch)
    plan = program.plan
    names = [eqn.primitive.name for eqn in plan.program.equations]
    index = names.index("mw_pipeline")
    rule, eqn = plan.rules[index], plan.program.equations[index]
    strategy = plan.equations[index].strategy
    context = LocalContext(eqn, rule.factors, strategy, plan.program.mesh)
    priced, sent = Counter(), Counter()
    for exchange in rule.exchanges(context):
        priced[str(exchange.kind)] += exchange.wire_bytes
    for c in program.collectives:
        sent[str(c.kind)] += c.wire_bytes
    assert priced.keys() == sent.keys()
    assert all(abs(priced[kind] - sent[kind]) <= 2 for kind in sent)


def test_memory_does_not_grow_with_microbatches():
    """Beside the batch itself: the slots of 1F1B are as many for 4 microbatches as for 64."""
    model, mesh = mlp(4), mesh_of(stage=4)
    held = []
    for microbatches in (4, 64):
        step, batch = pipelined(model, microbatches), rows(microbatches * 64)
        program = mw.jit(step, mesh=mesh).partition(step.pack(model.params, batch), batch)
        held.append(program.compile().memory_analysis().temp_size_in_bytes)
    table = 11 * 4 * 2 * 64 * 4  # numbers of all devices, for each tick
    assert held[1] < held[0] + 2 * table


@pytest.mark.parametrize("schedule", ["1f1b", "eager"])
def test_program_and_saved_inputs_do_not_grow_with_microbatches(schedule):
    model, mesh = mlp(4), mesh_of(stage=4)
    sizes, slots = set(), set()
    for microbatches in (8, 64):
        batch = rows(microbatches)
        program = mw.jit(pipelined(model, microbatches, schedule), mesh=mesh)
        jaxpr = program.partition(model.params, batch).jaxpr.jaxpr
        sizes.add(len(list(every_equation(jaxpr))))
        (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
        carried = [v.aval.shape for v in loop.outvars]
        slots.add(max(shape[0] for shape in carried if shape[1:] == (batch["x"].shape[1],)))
    assert len(sizes) == 1
    assert slots == {5 if schedule == "eager" else 3}
    assert max(one_f_one_b(4, 64).peak_activations) <= 4


def test_equal_stages_are_written_once():
    """A program for eight equal layers is as long as one for four: first, middle, last."""
    sizes = set()
    for stages in (4, 8):
        model = mlp(stages)
        program = mw.jit(pipelined(model, 8), mesh=mesh_of(stage=stages))
        jaxpr = program.partition(step_packed(model), rows(8)).jaxpr
        sizes.add(sum(e.primitive.name == "tanh" for e in every_equation(jaxpr.jaxpr)))
    assert len(sizes) == 1


def step_packed(model):
    return pipelined(model, 8).pack(model.params, rows(8))


def every_equation(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "eqns"):
                yield from every_equation(getattr(inner, "jaxpr", inner))
