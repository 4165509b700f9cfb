"""`mw.plan`: its programs compute what one device does, and its shardings are what it says."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.hardware import CPU, GENERIC
from meshwise.cost.memory import peak_memory
from meshwise.cost.timeline import timeline
from tests.meshes import mesh_of
from tests.planner.test_search import f32, heat, mlp, score, train


def values(shapes, seed=0):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda s: draw.normal(size=s.shape).astype(s.dtype), shapes)


def step(params, state, x, y, *, optimiser):
    def loss(params):
        hidden = jnp.tanh(x @ params["up"] + params["bias"])
        return ((hidden @ params["down"] - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimiser.update(grads, state)
    return optax.apply_updates(params, updates), state, value


OPTIMISER = optax.adam(1e-3)
PARAMS = {"up": f32(24, 64), "bias": f32(64), "down": f32(64, 24)}
STATE = jax.eval_shape(OPTIMISER.init, PARAMS)
ADAM = functools.partial(step, optimiser=OPTIMISER)


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_planned_steps_are_those_of_one_device(shape):
    mesh = jax.make_mesh(
        shape, ("a", "b")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape)
    )
    found = mw.plan(ADAM, PARAMS, STATE, f32(16, 24), f32(16, 24), mesh=mesh, most_tried=60)
    params, x, y = values(PARAMS), *values((f32(16, 24), f32(16, 24)), 1)
    state = OPTIMISER.init(params)
    ours, ones = (params, state), (params, state)
    for _ in range(2):  # the second takes the first one's results where they lie
        *ours, value = found.function(*ours, x, y)
        *ones, expected = jax.jit(ADAM)(*ones, x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, ones)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    lie = jax.tree.map(lambda a: a.sharding, ours)
    wanted = list(found.in_shardings[:2])
    same = jax.tree.map(lambda a, s, x: a.is_equivalent_to(s, np.ndim(x)), lie, wanted, ours)
    assert all(jax.tree.leaves(same))
    # JAX takes the shardings as well.
    theirs = jax.jit(ADAM, in_shardings=found.in_shardings, out_shardings=found.out_shardings)
    np.testing.assert_allclose(
        theirs(params, state, x, y)[2], jax.jit(ADAM)(params, state, x, y)[2], rtol=1e-5
    )


def test_what_the_planner_says_is_what_the_program_does():
    args = [f32(2048, 2048)] * 2, f32(32, 2048), f32(32, 2048)
    found = mw.plan(train, *args, mesh=mesh_of(x=8))
    assert found.program.wire_bytes == found.best.wire_bytes < found.unplanned.wire_bytes
    assert found.best.peak_bytes < found.unplanned.peak_bytes / 4
    weights = found.program.in_shardings[0]
    assert all(s.spec in (P("x"), P(None, "x")) for s in weights)
    assert found.program.out_shardings[0] == weights
    assert found.out_shardings[1] is None
    assert found.tried <= 400


def power(v, a):
    w = a @ v
    return w / jnp.linalg.norm(w), w @ v


def distilled(teacher, student, x):
    def net(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    def loss(student):
        return ((net(student, x) - net(teacher, x)) ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, student, jax.grad(loss)(student))


NET = {"a": f32(24, 64), "b": f32(64, 24)}
STEPS = {  # the function, its arguments, which of them a step makes anew, and in which result
    "a vector beside a figure": (power, (f32(64), f32(64, 64)), 0, lambda out: out[0]),
    "one of two trees": (distilled, (NET, NET, f32(128, 24)), 1, lambda out: out),
    "momentum": (
        lambda p, m: (p - (m * 0.9 + p), m * 0.9 + p),
        (f32(64, 8),) * 2,
        0,
        lambda o: o[0],
    ),
    "what comes back first": (
        lambda x, s: (s * 0.5 + x.sum(), (x * 2).sum()),
        (f32(4, 4), f32(32)),
        1,
        lambda o: o[0],
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_comes_back_goes_in_again(case):
    fun, args, state, of = STEPS[case]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    found = mw.plan(fun, *args, mesh=mesh)
    ours = ones = list(values(args))
    for _ in range(2):
        ours = [of(found.function(*ours)) if i == state else a for i, a in enumerate(ours)]
        ones = [of(fun(*ones)) if i == state else a for i, a in enumerate(ones)]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        ours[state],
        ones[state],
    )


PRICED = {
    "a step": (ADAM, (PARAMS, STATE, f32(16, 24), f32(16, 24)), {}),
    "layers": (mlp, (f32(16, 1024), f32(1024, 2048), f32(2048, 1024)), {}),
    "donated": (ADAM, (PARAMS, STATE, f32(16, 24), f32(16, 24)), {"donate_argnums": (0, 1)}),
    "many groups": (
        lambda params, x: jax.tree.map(lambda p: p * x.sum(), params),
        ([f32(8 * (i + 1), 8) for i in range(10)], f32(8, 8)),
        {},
    ),
}


@pytest.mark.parametrize("case", PRICED)
def test_figures_are_those_of_the_program(case):
    fun, args, given = PRICED[case]
    found = mw.plan(mw.jit(fun, mesh=mesh_of(a=2, b=4), **given), *args, most_tried=40)
    program = found.program
    sizes = program.per_device.mesh.axis_size
    memory = peak_memory(program.jaxpr, sizes, donated=program.donated)
    seconds = timeline(program.jaxpr, sizes, GENERIC, overlaps=False).seconds
    assert found.best.wire_bytes == program.wire_bytes
    assert found.best.peak_bytes == memory.peak_bytes
    assert found.best.seconds == seconds


def test_the_unplanned_program_is_that_of_mw_jit():
    def fun(s, x):
        return mw.shard(s * 2, P("x")), x @ s

    mesh, args = mesh_of(x=8), (f32(64, 64), f32(64, 64))
    found = mw.plan(fun, *args, mesh=mesh)
    assert found.unplanned.wire_bytes == mw.jit(fun, mesh=mesh).partition(*args).wire_bytes


def test_axes_of_one_device_are_not_tried():
    args = f32(4096, 64), f32(64, 256), f32(256, 64)
    few = mw.plan(mlp, *args, mesh=mesh_of(x=8))
    assert mw.plan(mlp, *args, mesh=mesh_of(o=1, x=8, z=1)).tried == few.tried
    assert mw.plan(mlp, *args, mesh=mesh_of(x=1)).tried <= 2


def test_where_results_are_hinted_the_best_is_one_move_away():
    specs = P("x"), P(None, "x")
    given = {"mesh": mesh_of(x=8), "out_shardings": specs, "hardware": CPU}
    fun = mw.jit(lambda x, a, c: (x @ a, (x * 2).T @ c), **given)
    args = f32(256, 8), f32(8, 256), f32(256, 8)
    by_hand = mw.jit(fun.fn, in_shardings=(P(), P(), P(None, "x")), **given)
    best = mw.plan(by_hand, *args).best
    assert mw.plan(fun, *args).best.seconds <= best.seconds


def test_hints_hold_and_only_the_rest_is_planned():
    hinted = mw.jit(
        mlp, mesh=mesh_of(x=4), in_shardings=(P(None, "x"), None, None), out_shardings=P("x")
    )
    found = mw.plan(hinted, f32(4096, 64), f32(64, 256), f32(256, 64))
    assert found.in_shardings[0].spec == P(None, "x")
    assert found.out_shardings.spec == P("x")
    assert {i for group in found.groups for i in group.arguments} == {1, 2}


def test_static_and_donated_arguments_stay_so():
    power = mw.jit(
        lambda n, x, w: (x @ w) ** n, mesh=mesh_of(x=4), static_argnums=0, donate_argnums=1
    )
    found = mw.plan(power, 3, f32(4096, 64), f32(64, 64))
    assert found.program.donated == (0,)
    assert [s.spec for s in found.in_shardings] == [P("x"), P()]


def test_a_limit_moves_a_state_to_shards():
    args = [f32(512, 512)] * 4, f32(2**14, 512), f32(2**14, 512)
    free = mw.plan(train, *args, mesh=mesh_of(x=8), max_bytes=2**30)
    most = free.best.peak_bytes - 1
    bound = mw.plan(train, *args, mesh=mesh_of(x=8), max_bytes=most)
    assert bound.best.peak_bytes <= most
    assert bound.best.seconds >= free.best.seconds


def test_a_function_without_arguments_to_plan():
    found = mw.plan(lambda x: x + 1, f32(), mesh=mesh_of(x=4))
    assert found.groups == ()
    assert found.in_shardings[0].spec == P()


def test_arrays_that_lie_somewhere_stay_there():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(values(f32(64, 16)), NamedSharding(mesh, P(None, "x")))
    found = mw.plan(lambda x, w: x @ w, x, f32(16, 8), mesh=mesh)
    assert found.in_shardings[0].spec == P(None, "x")


def test_a_step_that_returns_its_state_alone():
    found = mw.plan(
        lambda u: u.at[1:-1].add(0.1 * (u[2:] - u[:-2])), f32(4096, 64), mesh=mesh_of(x=8)
    )
    assert found.in_shardings[0].spec == found.out_shardings.spec != P()


def parts(x, w):
    """What `x` is made of is hinted over a part of an axis."""
    y = mw.shard((x * 2).reshape(-1), P("a")).reshape(x.shape)
    return mw.shard(jnp.tanh(y @ w), P(None, None)) + 1


def laid_apart(a, b):
    """Two that meet are hinted otherwise, both."""
    return (mw.shard(a, P("a")) + mw.shard(b, P(None, "a")) * 2).sum()


COMPLETED = {
    "over parts of axes": (parts, (f32(2, 16), f32(16, 16))),
    "next value over parts of axes": (parts, (f32(4, 64), f32(64, 64))),
    "not alike": (laid_apart, (f32(64, 64),) * 2),
}


@pytest.mark.parametrize("most", [1, 2, 400])
@pytest.mark.parametrize("case", COMPLETED)
def test_what_no_hint_can_say_is_left_to_completion(case, most):
    fun, args = COMPLETED[case]
    found = mw.plan(fun, *args, mesh=mesh_of(a=8), most_tried=most)
    program = found.program
    memory = peak_memory(program.jaxpr, program.per_device.mesh.axis_size)
    figures = found.best.wire_bytes, found.best.peak_bytes
    assert figures == (program.wire_bytes, memory.peak_bytes)
    assert found.best.peak_bytes <= found.unplanned.peak_bytes
    assert score(found.best) <= score(found.unplanned) * (1 + 1e-9)
    again = mw.plan(fun, *args, mesh=mesh_of(a=8), max_bytes=found.best.peak_bytes)
    assert again.best.peak_bytes <= found.best.peak_bytes


def test_a_result_that_is_hinted_inside_is_no_next_value():
    def turned(x):
        return mw.shard(x + 1, P(None, "a"))

    fun = mw.jit(turned, mesh=mesh_of(a=8), in_shardings=P("a"))
    found = mw.plan(fun, f32(64, 64))
    assert found.out_shardings is None
    assert found.program.out_shardings.spec == P(None, "a")
    assert found.best == found.unplanned


def test_no_result_is_the_next_value_of_what_is_closed_over():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    (held,) = values([f32(512, 64)])
    held = jax.device_put(held, NamedSharding(mesh, P()))
    found = mw.plan(lambda x, w: jnp.tanh(x @ w) + held, f32(512, 32), f32(32, 64), mesh=mesh)
    assert found.program.out_shardings.spec == P("a")
    assert found.best.seconds < found.unplanned.seconds / 4


def test_the_search_ends_when_its_time_is_over():
    args = [f32(512, 512)] * 2, f32(2**12, 512), f32(2**12, 512)
    found = mw.plan(train, *args, mesh=mesh_of(x=8), budget_s=1e-9)
    assert found.tried == 1
    assert found.best == found.unplanned


def test_dims_that_no_axis_divides_are_cut_where_that_is_asked_for():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    args = f32(1001, 33)
    assert mw.plan(heat, args, mesh=mesh).in_shardings[0].spec == P()
    found = mw.plan(heat, args, mesh=mesh, uneven=True)
    assert found.in_shardings[0].spec == P("x")
    (u,) = values([args])
    ours = found.function(found.function(u))
    assert isinstance(ours, mw.UnevenArray)
    np.testing.assert_allclose(np.asarray(ours), heat(heat(jnp.asarray(u))), rtol=1e-5, atol=1e-6)


class State(NamedTuple):
    w: Any
    momentum: Any = None


def test_trees_may_have_fields_that_are_none():
    def step(state, x):
        return State(state.w - 0.1 * (x.T @ (x @ state.w))), None, x.sum()

    args = State(f32(512, 512)), f32(64, 512)
    found = mw.plan(step, *args, mesh=mesh_of(x=8))
    state, nothing, figure = found.out_shardings
    assert (state.momentum, nothing, figure) == (None, None, None)
    assert state == found.in_shardings[0]
    assert state.w.spec != P()


def test_what_it_says():
    args = [f32(2048, 2048)] * 2, f32(32, 2048), f32(32, 2048)
    found = mw.plan(train, *args, mesh=mesh_of(x=8))
    lines = str(found).splitlines()
    assert lines[0] == f"train, planned: the best of {found.tried} plans"
    assert lines[1].split() == ["on", "each", "device", "planned", "unplanned"]
    assert any("args[0][0]" in line and "[2048, 2048]" in line and "x" in line for line in lines)
    assert repr(found).startswith("<Planned of train: ") and "\n" not in repr(found)
