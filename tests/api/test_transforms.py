"""A function under `mw.jit` inside JAX's transformations, and they inside of it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.jet import jet
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.api import transform
from tests.meshes import mesh_of

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4)
XS, WS = np.stack([X, X + 1, -X, X * 2]), np.stack([W, W, W + 1, -W])


def layer(x, w):
    return jnp.tanh(x @ w).sum(0)


def loss(x, w):
    return (layer(x, w) ** 2).sum()


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        largest = max(1.0, np.max(np.abs(b)))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * largest)


@pytest.fixture(scope="module")
def ours(mesh2x4):
    """`layer` and `loss` under mw.jit, with hints on both arguments."""
    hints = {"mesh": mesh2x4, "in_shardings": (P("x"), P(None, "y"))}
    return {"layer": mw.jit(layer, **hints), "loss": mw.jit(loss, **hints)}


THEIRS = {"layer": layer, "loss": loss}
CT = np.array([1, -1, 2, 0], np.float32)

TRANSFORMS = {
    "jit": lambda f: jax.jit(lambda x, w: f["layer"](x * 2, w) + w[0])(X, W),
    "grad": lambda f: jax.grad(f["loss"])(X, W),
    "grad of both": lambda f: jax.grad(f["loss"], (0, 1))(X, W),
    "value_and_grad": lambda f: jax.value_and_grad(f["loss"], 1)(X, W),
    "grad with auxiliary": lambda f: jax.grad(
        lambda x, w: (f["loss"](x, w), {"y": f["layer"](x, w)}), has_aux=True)(X, W),
    "jit of grad": lambda f: jax.jit(jax.grad(f["loss"], (0, 1)))(X, W),
    "jvp": lambda f: jax.jvp(f["layer"], (X, W), (X, -W)),
    "jvp of one": lambda f: jax.jvp(lambda x: f["layer"](x, W), (X,), (X,)),
    "vjp": lambda f: jax.vjp(f["layer"], X, W)[1](CT),
    "linearize": lambda f: jax.linearize(f["layer"], X, W)[1](X, W),
    "hessian": lambda f: jax.hessian(lambda w: f["loss"](X[:, :2], w))(W[:2]),
    "jacfwd": lambda f: jax.jacfwd(f["layer"], 1)(X, W),
    "jacrev": lambda f: jax.jacrev(f["layer"])(X, W),
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(f["loss"])(x, W).sum())(X),
    "jvp of grad": lambda f: jax.jvp(lambda x: jax.grad(f["loss"])(x, W), (X,), (X,)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f["loss"]))(X, W),
    "jit of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f["loss"])))(X, W),
    "vmap": lambda f: jax.vmap(f["layer"])(XS, WS),
    "vmap of one": lambda f: jax.vmap(f["layer"], (0, None), 1)(XS, W),
    "vmap at the end": lambda f: jax.vmap(f["layer"], (2, None))(XS.transpose(1, 2, 0), W),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f["layer"], (0, None)), (None, 0))(XS, WS),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f["layer"]))(XS, WS),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f["loss"]))(XS, WS),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f["loss"], (0, None))(x, W).sum())(XS),
    "scan": lambda f: lax.scan(lambda c, x: (c + f["layer"](x, W), f["loss"](x, W)), CT, XS),
    "grad of scan": lambda f: jax.grad(
        lambda x: lax.scan(lambda c, w: (c + 0 * w[0, 0], f["loss"](c, w)), x, WS)[1].sum())(X),
    "map": lambda f: lax.map(lambda x: f["layer"](x, W), XS),
    "cond": lambda f: lax.cond(X.sum() < 1, f["loss"], lambda x, w: 0.0, X, W),
    "while": lambda f: lax.while_loop(lambda c: c[0] < 3, lambda c: (
        c[0] + 1, c[1] + f["layer"](X, W)), (0, CT)),
    "in another jit": lambda f: jax.jit(lambda x: jax.jit(f["layer"])(x, W))(X),
    "jet": lambda f: jet(f["layer"], (X, W), ((X, 0 * X), (-W, W))),
    "jet of one": lambda f: jet(lambda x: f["loss"](x, W), (X,), ((X + 1, X, -X),)),
    "jit of jet": lambda f: jax.jit(lambda x: jet(f["loss"], (x, W), ((x,), (W,))))(X),
    "linear_transpose": lambda f: jax.linear_transpose(
        lambda t: jax.jvp(lambda x: f["layer"](x, W), (X,), (t,))[1], X)(CT),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_from_outside(ours, name):
    close(TRANSFORMS[name](ours), TRANSFORMS[name](THEIRS))


INSIDE = [
    "grad of both",
    "jvp",
    "hessian",
    "checkpoint",
    "vmap",
    "grad of scan",
    "linearize",
    "jet",
]


def test_jet_of_hints(mesh2x4):
    """A hint is linear."""
    step = mw.jit(lambda x: jnp.sin(mw.shard(x, P("x", "y")) * 2), mesh=mesh2x4)
    close(jet(step, (X,), ((X + 1, X),)), jet(lambda x: jnp.sin(x * 2), (X,), ((X + 1, X),)))


@pytest.mark.parametrize("name", INSIDE)
def test_from_inside(mesh2x4, ours, name):
    """Around functions that are under mw.jit themselves, whose shardings are hints then."""
    wanted = TRANSFORMS[name](THEIRS)
    close(mw.jit(lambda: TRANSFORMS[name](THEIRS), mesh=mesh2x4)(), wanted)
    close(mw.jit(lambda: TRANSFORMS[name](ours), mesh=mesh2x4)(), wanted)


def test_the_shapes_without_running(ours):
    assert jax.eval_shape(ours["layer"], X, W).shape == (4,)
    jaxpr = jax.make_jaxpr(jax.grad(ours["loss"]))(X, W)
    assert jaxpr.out_avals[0].shape == (4, 8)
    assert "mw_call" in str(jaxpr)
    assert "runner=<mw.jit of loss over {'x': 2, 'y': 4}>\n" in str(jaxpr)


def test_the_mapped_dim_is_sharded_over_the_axis_that_vmap_names(mesh2x4):
    step = mw.jit(lambda x: x * 2, mesh=mesh2x4, in_shardings=P(None, "y"), out_shardings=P())
    out = jax.vmap(step, spmd_axis_name="x")(XS)
    assert out.sharding.spec[0] == "x"
    close(out, XS * 2)
    inner = mw.jit(
        jax.vmap(lambda x: mw.shard(x * 2, P("y")), spmd_axis_name="x"), mesh=mesh2x4
    ).partition(XS)
    assert inner.out_shardings.spec == P("x", "y")
    with pytest.raises(mw.HintError, match="uses axis 'y' 2 times"):
        jax.vmap(step, spmd_axis_name="y")(XS)


def test_the_hints_of_a_call_hold_inside_another(mesh2x4):
    inner = mw.jit(
        lambda x: x * 2, mesh=mesh2x4, in_shardings=P("x", "y"), out_shardings=P("y", "x")
    )
    program = mw.jit(lambda x: inner(x) + 1, mesh=mesh2x4).partition(X)
    assert program.in_shardings[0].spec == P("x", "y")
    assert program.out_shardings.spec == P("y", "x")
    close(program(X), X * 2 + 1)


def test_results_keep_their_placement_in_a_trace(ours, mesh2x4):
    step = mw.jit(lambda x: x + 1, mesh=mesh2x4, in_shardings=P("x"), out_shardings=P("y", "x"))
    out = jax.jit(step)(X)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh2x4, P("y", "x")), 2)
    grads = jax.grad(ours["loss"], (0, 1))(X, W)
    assert [g.sharding.spec for g in grads] == [P("x"), P(None, "y")]


def test_functions_that_close_over_traced_values(mesh2x4):
    def outer(x, w):
        inner = mw.jit(lambda x: jnp.sin(x @ w), mesh=mesh2x4, in_shardings=P("x"))
        return inner(x).sum()

    def plain(x, w):
        return jnp.sin(x @ w).sum()

    close(jax.grad(outer, (0, 1))(X, W), jax.grad(plain, (0, 1))(X, W))
    close(jax.jit(outer)(X, W), plain(X, W))
    close(jax.vmap(outer, (0, None))(XS, W), jax.vmap(plain, (0, None))(XS, W))
    close(mw.jit(outer, mesh=mesh2x4)(X, W), plain(X, W))
    close(mw.jit(jax.grad(outer, 1), mesh=mesh2x4)(X, W), jax.grad(plain, 1)(X, W))


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct * jnp.cos(x), -0.5, 0.5),))


@jax.custom_jvp
def doubled_slope(x):
    return jnp.sin(x)


doubled_slope.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 2 * jnp.cos(xs[0]) * ts[0]))


@pytest.mark.parametrize("fn", [clipped, doubled_slope], ids=["custom_vjp", "custom_jvp"])
def test_custom_derivatives(mesh2x4, fn):
    step = mw.jit(lambda x: (fn(x) * 2).sum(), mesh=mesh2x4, in_shardings=P("x"))
    wanted = jax.grad(lambda x: (fn(x) * 2).sum())(X)
    close(jax.grad(step)(X), wanted)
    close(jax.jit(jax.grad(step))(X), wanted)
    close(mw.jit(jax.grad(step), mesh=mesh2x4)(X), wanted)


def test_integers_and_unused_arguments_beside_what_is_differentiated(mesh2x4):
    def fn(i, x, unused):
        return x[i] * 2, i + 1, x.sum()

    step = mw.jit(fn, mesh=mesh2x4)
    for f in (jax.jit, lambda f: f):
        got = f(jax.grad(lambda x: step(np.int32(1), x, W)[0].sum()))(X)
        close(got, jax.grad(lambda x: fn(1, x, W)[0].sum())(X))
    out, push = jax.linearize(lambda x: step(np.int32(1), x, W), X)
    assert push(X)[1].dtype == jax.dtypes.float0
    close(push(X)[0], X[1] * 2)
    assert out[1] == 2


CALLS = {
    "grad": lambda f: jax.grad(lambda x: f(x, W).sum())(X),
    "value_and_grad": lambda f: jax.value_and_grad(lambda w: f(X, w).sum())(W),
    "jvp": lambda f: jax.jvp(lambda w: f(X, w), (W,), (W,)),
    "linearize": lambda f: jax.linearize(lambda w: f(X, w), W)[1](W),
    "vmap": lambda f: jax.vmap(lambda w: f(X, w))(WS),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda w: f(X, w).sum()))(WS),
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x, W).sum())(x).sum())(X),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: f(x, W).sum()))(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_partitioned_again_when_a_call_is_repeated(mesh2x4, monkeypatch, name):
    made = []
    original = transform.partition_typed

    def counting(*args):
        made.append(args)
        return original(*args)

    monkeypatch.setattr(transform, "partition_typed", counting)
    step = mw.jit(layer, mesh=mesh2x4, in_shardings=(P("x"), P(None, "y")))
    first = CALLS[name](step)
    count = len(made)
    assert 0 < count <= 6
    for _ in range(3):
        close(CALLS[name](step), first)
    assert len(made) == count


def test_a_repeated_call_is_quick(ours):
    def step():
        return jax.block_until_ready(jax.grad(ours["loss"])(X, W))

    step()
    step()
    start = time.perf_counter()
    for _ in range(5):
        step()
    assert (time.perf_counter() - start) / 5 < 0.2


@pytest.mark.parametrize("transformed", ["vmap", "jvp"])
def test_programs_are_made_anew_under_other_settings(transformed, mesh8):
    def noisy(key, x):
        return x + jax.random.normal(key, x.shape)

    def run(fn, key):
        if transformed == "vmap":
            return jax.vmap(fn, (None, 0))(key, jnp.zeros((2, 16)))
        return jax.jvp(lambda x: fn(key, x), (jnp.zeros(16),), (jnp.ones(16),))[0]

    ours = mw.jit(noisy, mesh=mesh8, in_shardings=(None, P("x")))
    for partitionable in (True, False):
        with jax.threefry_partitionable(partitionable):
            close(run(ours, jax.random.key(0)), run(noisy, jax.random.key(0)))


COLLECTIVES = {
    "psum": lambda v: v * lax.psum(v, "i"),
    "pmax": lambda v: v - lax.pmax(lax.stop_gradient(v), "i"),
    "pmin": lambda v: (v - lax.pmin(lax.stop_gradient(v), "i")) ** 2,
    "pmean": lambda v: v / lax.pmean(jnp.exp(v), "i"),
    "psum of what is none": lambda v: v * lax.psum(2, "i"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("given", "sums"), [(P("x"), 1), (P(None, "y"), 0)])
def test_collectives_over_an_axis_of_vmap_go_along_a_dim(name, given, sums):
    """Over a sharded one they are sums of the whole: a row, and not all rows, is sent."""
    mesh = mesh_of(x=2, y=4)
    x = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    function = jax.vmap(COLLECTIVES[name], axis_name="i")

    def slope(x):
        return jax.grad(lambda x: (function(x) ** 2).sum())(x)

    for f in (function, slope):
        program = mw.jit(f, mesh=mesh, in_shardings=given, out_shardings=given).partition(x)
        np.testing.assert_allclose(program.simulate(x), f(x), rtol=1e-4, atol=1e-5)
        if f is function:
            is_known = name == "psum of what is none"
            assert program.wire_bytes == (0 if is_known else sums * x[0].nbytes)


def test_batches_of_grouped_convolutions(mesh8):
    """JAX knows their batches in no mesh alone, and so they are traced."""

    def jacobian(x, w):
        def of(w):
            return lax.conv_general_dilated(x, 2 * w, (1,), "SAME", feature_group_count=2)

        return jax.jacrev(of)(w)

    random = np.random.default_rng(0)
    x, w = (random.normal(size=s).astype(np.float32) for s in ((8, 4, 6), (4, 2, 3)))
    program = mw.jit(jacobian, mesh=mesh8, in_shardings=(P("x"), None)).partition(x, w)
    close(program.simulate(x, w), jax.jit(jacobian)(x, w))
