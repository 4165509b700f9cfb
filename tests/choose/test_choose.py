"""Strategies chosen: exact collectives of small programs, and laws of the search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.choose.losers import losers
from meshwise.ir.factors import fits
from tests.choose.cases import CASES, LONG_W, LONG_X, N8, X, f32
from tests.meshes import mesh_of


def kinds(program):
    """Collectives of more than a few numbers, in order: kind, user axes, local shape."""
    refined = program.per_device.mesh
    return [
        (str(c.kind), refined.show(c.axes), c.shape)
        for c in program.collectives
        if c.wire_bytes > 64
    ]


@pytest.mark.parametrize("name", CASES)
def test_collectives(name):
    fn, args, in_specs, out_spec, on, expected = CASES[name]
    program = mw.jit(fn, mesh=on, in_shardings=in_specs, out_shardings=out_spec).partition(*args)
    assert kinds(program) == expected


def train(params, x, y):
    """One step of a two-layer perceptron with gradient clipping and momentum."""

    def loss(p):
        h = jnp.maximum(x @ p["w"] + p["b"], 0)
        return jnp.mean((h @ p["v"] - y) ** 2)

    grads = jax.grad(loss)(params["p"])
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, params["m"], grads)
    return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, params["p"], m), "m": m}


WEIGHTS = {"w": f32(32, 128), "b": f32(128), "v": f32(128, 32)}
STATE = {"p": WEIGHTS, "m": WEIGHTS}
BATCH = (f32(1024, 32), f32(1024, 32))
SIZE = {k: 4 * jnp.prod(jnp.array(v.shape)).item() for k, v in WEIGHTS.items()}


def test_data_parallel_reduces_each_gradient_once():
    step = mw.jit(train, mesh=N8, in_shardings=(P(), P("d"), P("d")), out_shardings=P())
    program = step.partition(STATE, *BATCH)
    assert {str(c.kind) for c in program.collectives} == {"all_reduce"}
    assert program.wire_bytes == pytest.approx(2 * 7 / 8 * sum(SIZE.values()), abs=64)


def test_zero_scatters_gradients_and_gathers_weights_once():
    shardings = {"w": P("d"), "b": P("d"), "v": P("d")}
    state = {"p": shardings, "m": shardings}
    step = mw.jit(train, mesh=N8, in_shardings=(state, P("d"), P("d")), out_shardings=state)
    program = step.partition(STATE, *BATCH)
    assert not [k for k in kinds(program) if k[0] == "all_reduce"]
    assert program.wire_bytes <= 2 * 7 / 8 * sum(SIZE.values()) + 64


def test_tensor_parallel_reduces_one_activation_each_way():
    shardings = {"w": P(None, "d"), "b": P("d"), "v": P("d")}
    state = {"p": shardings, "m": shardings}
    step = mw.jit(train, mesh=N8, in_shardings=(state, P(), P()), out_shardings=state)
    small = (f32(64, 32), f32(64, 32))
    program = step.partition(STATE, *small)
    assert kinds(program) == [("all_reduce", "d", (64, 32))]  # the input needs no cotangent


@pytest.mark.parametrize("name", CASES)
def test_descent_never_ends_dearer_than_completion(name):
    fn, args, in_specs, out_spec, on, _ = CASES[name]
    step = mw.jit(fn, mesh=on, in_shardings=in_specs, out_shardings=out_spec)
    plan = step.partition(*args).plan
    assert plan.seconds <= plan.completion_seconds


@pytest.mark.parametrize("name", CASES)
def test_every_strategy_is_allowed(name):
    fn, args, in_specs, out_spec, on, _ = CASES[name]
    plan = mw.jit(fn, mesh=on, in_shardings=in_specs, out_shardings=out_spec).partition(*args).plan
    for rule, equation in zip(plan.rules, plan.equations, strict=True):
        assert fits(rule.factors, equation.strategy, plan.program.mesh)


def test_of_plans_found_the_one_of_least_bytes_is_taken():
    """A vector gathered once a step, and a norm reduced, for a step more of gathers alone."""

    def power(a, v):
        def step(v, _):
            v = a @ v
            return v / jnp.linalg.norm(v), None

        return jax.lax.scan(step, v, None, length=10)[0]

    step = mw.jit(power, mesh=N8, in_shardings=(P("d"), P("d")), out_shardings=P("d"))
    assert step.partition(f32(64, 64), f32(64)).wire_bytes == 10 * (7 / 8 * 256 + 7)


def test_what_lost_is_found_with_its_price():
    step = mw.jit(jnp.matmul, mesh=N8, in_shardings=(P(None, "d"), P("d")), out_shardings=P())
    plan = step.partition(LONG_X, LONG_W).plan
    (equation,), (lost,) = plan.equations, losers(plan).values()
    assert lost
    assert all(r.dearer_by_seconds >= 0 for r in lost)
    assert all(r.strategy != equation.strategy for r in lost)


def test_recomputation_gathers_again_and_nothing_else_does():
    def fn(w, x):
        layer = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w)))
        return jax.grad(lambda w: layer(w, x).sum())(w)

    step = mw.jit(fn, mesh=N8, in_shardings=(P("d"), P("d")), out_shardings=P("d"))
    program = step.partition(f32(32, 32), f32(4096, 32))
    gathers = [k for k in kinds(program) if k[0] == "all_gather"]
    assert gathers == [("all_gather", "d", (4, 32))]  # only the recomputed product is left


def test_hidden_hint_costs_what_it_says():
    """A hint in the middle is where the value lies, even where it costs."""

    def fn(x):
        return mw.shard(x * 2, P(None, "d")) + 1

    program = mw.jit(fn, mesh=N8, in_shardings=P("d"), out_shardings=P("d")).partition(X)
    assert [k[0] for k in kinds(program)] == ["all_to_all", "all_to_all"]


def test_what_makes_a_sum_goes_with_what_divides_it():
    """The gradient of the pairs' own logits is a matrix made of nothing: no device makes all."""

    def loss(q, k):
        return -jnp.diagonal(jax.nn.log_softmax(q @ k.T, 0)).mean()

    step = mw.jit(jax.grad(loss, (0, 1)), mesh=N8, in_shardings=P("d"), out_shardings=P("d"))
    made = [
        v.aval for eqn in step.partition(f32(256, 64), f32(256, 64)).jaxpr.eqns for v in eqn.outvars
    ]
    assert max(aval.size for aval in made) == 256 * 64


def test_stack_of_elements_of_what_is_carried_is_planned():
    """A part of the stack's equation has no dim of steps, as all of them are summed later."""

    def function(x):
        return lax.scan(lambda carry, row: (carry + row, carry[3]), x[0], x)[1].sum()

    sent = mw.jit(function, mesh=mesh_of(x=8), in_shardings=P("x")).partition(f32(32, 16))
    assert sent.wire_bytes < 32 * 16 * 4 * 7 / 8
    x = jnp.sin(jnp.arange(32.0 * 16)).reshape(32, 16)
    assert jnp.allclose(sent.simulate(x), function(x), rtol=1e-5)


def test_stack_that_is_wanted_in_shards_of_its_rows_is_planned():
    """No strategy that its users suggest is within what a loop may hold; completion's are."""

    def rows(start, row, one):
        step = lambda carry, _: (carry, (row, one))  # noqa: E731
        made = lax.scan(step, start, length=2, reverse=True)[1][0].T
        return jnp.tanh(made).sum(), made

    function = jax.grad(rows, (0, 1, 2), has_aux=True)
    jitted = mw.jit(function, mesh=mesh_of(y=3), out_shardings=(None, P(None, "y")))
    args = (jnp.float32(0.5), jnp.asarray([1.5, -2.0]), jnp.float32(2))
    found = jitted.partition(*args).simulate(*args)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(function(*args)), strict=True):
        assert jnp.allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("mode", ["wrap", "edge", "reflect", "symmetric"])
@pytest.mark.parametrize("spec", [P("x"), P("x", "y")], ids=str)
def test_gradient_of_a_pad_gathers_no_shard(mode, spec):
    """The parts of the split in it are a few rows, and all others."""

    def function(x):
        return jax.grad(lambda x: (jnp.pad(x, 2, mode=mode) ** 2).sum())(x)

    step = mw.jit(function, mesh=mesh_of(x=2, y=4), in_shardings=spec, out_shardings=spec)
    sent = step.partition(f32(64, 96))
    assert sent.wire_bytes < 64 * 96 * 4 / 5
    x = jnp.sin(jnp.arange(64.0 * 96)).reshape(64, 96)
    assert jnp.allclose(sent.simulate(x), function(x), atol=1e-5)


@pytest.mark.parametrize("spec", [P(None, "x"), P("x", "y")], ids=str)
def test_argument_moves_before_what_is_computed_of_it(spec):
    """Seven shifted slices of columns, wanted by rows: one move of the argument, no borders."""

    def function(x):
        return jnp.stack([x[:, i : i + 90] for i in range(7)], -1).mean(-1)

    rows = P(("x", "y"))
    step = mw.jit(function, mesh=mesh_of(x=2, y=4), in_shardings=spec, out_shardings=rows)
    sent = step.partition(f32(64, 96))
    assert [c.kind.value for c in sent.collectives] == ["all_to_all"] * len(sent.collectives)
    assert sent.wire_bytes <= 64 * 96 * 4 / 2
    x = jnp.sin(jnp.arange(64.0 * 96)).reshape(64, 96)
    assert jnp.allclose(sent.simulate(x), function(x), atol=1e-5)


@pytest.mark.parametrize("spec", [P(), P(None, "d"), P(None, None, "d")])
def test_gradients_of_short_floats_are_summed_as_such_in_a_loop(spec):
    """Also where they are stacked as longer ones: each step's is reduced anyway."""

    def loss(weights, x):
        def layer(x, weight):
            return jnp.tanh(x @ weight.astype(jnp.bfloat16)), None

        return (lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

    step = mw.jit(jax.grad(loss), mesh=N8, in_shardings=(spec, P("d")), out_shardings=spec)
    x = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
    program = step.partition(f32(4, 64, 64), x)
    sums = [c for c in program.collectives if str(c.kind) in ("all_reduce", "reduce_scatter")]
    assert {str(c.dtype) for c in sums} == {"bfloat16"}
    matrix = 2 * 64 * 64 * 7 / 8  # a gather of one, or a scatter
    assert program.wire_bytes == 4 * (2 if spec == P() else 3) * matrix


def test_pairs_of_what_is_computed_of_sums_are_not_made_whole():
    """Its vector is gathered for the pairs of columns; those of rows need only a shard of it."""

    def forces(x, mass):
        apart = x[:, None] - x[None]
        near = (apart**2).sum(-1)
        density = (mass * near).sum(1) * 2 + 1
        pressure = (density - 1) / density**2
        by_row = (mass[None, :, None] * pressure[:, None, None] * apart).sum(1)
        by_column = (mass[None, :, None] * pressure[None, :, None] * apart).sum(1)
        return by_row + by_column + ((mass * near / density)[..., None] * apart).sum(1)

    step = mw.jit(forces, mesh=N8, in_shardings=P("d"), out_shardings=P("d"))
    program = step.partition(f32(256, 2), f32(256))
    made = [v.aval.size for eqn in program.jaxpr.eqns for v in eqn.outvars]
    assert max(made) == 32 * 256 * 2
    assert sum(size > 256 * 8 for size in made) < 14


@pytest.mark.parametrize("out", [None, P(), P("x"), P(None, "x")])
def test_parts_of_a_sum_meet_in_a_product(out):
    """One of them goes on as terms, and the other is reduced before."""

    def function(w, x):
        left, right = jnp.split(x @ w, 2, axis=1)
        return left * right

    draw = np.random.default_rng(0)
    args = draw.normal(size=(8, 16)).astype("f"), draw.normal(size=(4, 8)).astype("f")
    shardings = P("x"), P(None, "x")
    mesh = AbstractMesh((2,), ("x",))
    step = mw.jit(function, mesh=mesh, in_shardings=shardings, out_shardings=out)
    found = step.partition(*args).simulate(*args)
    np.testing.assert_allclose(found, function(*args), rtol=1e-5, atol=1e-5)


READS = {
    "one by one": lambda w, x: jnp.tanh(x @ w[0]) @ w[1],
    "rolled": lambda w, x: x @ jnp.roll(w[0], 1, 0),
    "halves": lambda w, x: jnp.tanh(x @ w[0, :4].T) @ w[0, 4:],
}


@pytest.mark.parametrize("name", READS)
def test_gradients_that_are_laid_side_by_side_are_added_up(name):
    """Zero is added to what is joined, which stops no sum that is reduced once for all steps."""

    def accumulated(w, batches):
        def add(total, x):
            return total + jax.grad(lambda w: (READS[name](w, x) ** 2).sum())(w), None

        return lax.scan(add, jnp.zeros_like(w), batches)[0]

    draw = np.random.default_rng(0)
    args = draw.normal(size=(2, 8, 8)).astype("f"), draw.normal(size=(6, 16, 8)).astype("f")
    mesh = AbstractMesh((4,), ("x",))
    step = mw.jit(accumulated, mesh=mesh, in_shardings=(P(), P(None, "x")), out_shardings=P())
    program = step.partition(*args)
    assert sum(c.count for c in program.collectives) == 1
    wanted = jax.jit(accumulated)(*args)
    limit = 1e-5 * float(jnp.abs(wanted).max())
    np.testing.assert_allclose(program.simulate(*args), wanted, atol=limit)
