"""The same code under `jax.jit` and under `mw.jit`, inside and around every transformation.

Each row is a function of `jit`; shardings are spelled so that both take them.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.own_rules import (
    applied,
    batched_by_hand,
    clipped,
    counts_zeros,
    mapped_slope,
    newton,
    perturbed_only,
    saved_names,
    solved,
    with_slopes,
)
from tests.drop_in.same import assert_same

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8)).astype(np.float32)
W = RNG.normal(size=(8, 6)).astype(np.float32)
B = RNG.normal(size=(6,)).astype(np.float32)
XS = RNG.normal(size=(5, 4, 8)).astype(np.float32)
WS = RNG.normal(size=(5, 8, 6)).astype(np.float32)
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
ROWS_X = NamedSharding(MESH, P("x"))
ROWS_Y = NamedSharding(MESH, P("y"))
BOTH = NamedSharding(MESH, P("x", "y"))
WHOLE = NamedSharding(MESH, P())


def layer(x, w):
    return jnp.tanh(x @ w).sum(0)


def loss(x, w):
    return (layer(x, w) ** 2).sum()


def tree_loss(params, x):
    y = jnp.sin(x @ params["w"]) + params["b"]
    return (y**2).mean(), {"y": y, "n": (y > 0).sum()}


PARAMS = {"w": W, "b": B}


def hinted(jit, fn, **kwargs):
    return jit(fn, in_shardings=(ROWS_Y, None), **kwargs)


SQUARE = (X[:, :4] + 4 * np.eye(4)).astype(np.float32)


def scanned(x, ws):
    def step(c, w):
        return jnp.tanh(c @ w @ w.T), (c * 2).sum()

    return lax.scan(step, x, ws)


POLICIES = jax.checkpoint_policies
TURN = [(i, (i + 2) % 5) for i in range(5)]


def saving(policy):
    return lambda jit: jit(jax.grad(jax.checkpoint(saved_names, policy=policy), (0, 1)))(X, W)


ROWS = {
    "grad": lambda jit: jax.grad(hinted(jit, loss))(X, W),
    "grad argnums": lambda jit: jax.grad(hinted(jit, loss), argnums=(1, 0))(X, W),
    "grad of a tree": lambda jit: jax.grad(jit(tree_loss), has_aux=True)(PARAMS, X),
    "value_and_grad": lambda jit: jax.value_and_grad(
        jit(tree_loss, in_shardings=({"w": ROWS_X, "b": WHOLE}, ROWS_Y)),
        has_aux=True)(PARAMS, X),
    "value_and_grad inside": lambda jit: jit(
        jax.value_and_grad(tree_loss, argnums=(0, 1), has_aux=True),
        in_shardings=(WHOLE, ROWS_Y))(PARAMS, X),
    "grad of a complex function": lambda jit: jax.grad(
        jit(lambda z: (z * z).real.sum()), holomorphic=False)(X + 1j * X),
    "holomorphic": lambda jit: jax.grad(
        jit(lambda z: (z**3).sum(), in_shardings=ROWS_X), holomorphic=True)(X + 1j * X),
    "allow_int": lambda jit: jax.grad(
        jit(lambda i, x: (x * i).sum()), argnums=(0, 1), allow_int=True)(
            np.arange(8, dtype=np.int32), X),
    "grad with keywords": lambda jit: jax.grad(jit(lambda x, *, w: loss(x, w)))(X, w=W),
    "grad of static arguments": lambda jit: jax.grad(
        jit(lambda x, n: (x**n).sum(), static_argnums=1), 0)(X, 3),
    "jvp": lambda jit: jax.jvp(hinted(jit, layer), (X, W), (X, -W)),
    "jvp has_aux": lambda jit: jax.jvp(
        jit(lambda x: (jnp.sin(x), {"n": x.sum()})), (X,), (X,), has_aux=True),
    "jvp of integers": lambda jit: jax.jvp(
        jit(lambda i, x: (i + 1, x * i)), (np.int32(2), X),
        (np.zeros((), jax.dtypes.float0), X)),
    "vjp": lambda jit: jax.vjp(hinted(jit, layer), X, W)[1](B),
    "vjp has_aux": lambda jit: (lambda out: (out[0], out[1](B), out[2]))(
        jax.vjp(hinted(jit, lambda x, w: (layer(x, w), x.sum())), X, W, has_aux=True)),
    "vjp twice": lambda jit: (lambda back: (back(B), back(2 * B)))(
        jax.vjp(hinted(jit, layer), X, W)[1]),
    "jit of vjp": lambda jit: jit(lambda x, w, ct: jax.vjp(layer, x, w)[1](ct))(X, W, B),
    "vjp as a result": lambda jit: jit(
        lambda back, ct: back(ct))(jax.vjp(layer, X, W)[1], B),
    "linearize": lambda jit: (lambda y, push: (y, push(X, W), push(2 * X, W)))(
        *jax.linearize(hinted(jit, layer), X, W)),
    "linearize has_aux": lambda jit: (lambda y, push, aux: (y, push(X), aux))(
        *jax.linearize(jit(lambda x: (jnp.sin(x), x.sum())), X, has_aux=True)),
    "linear_transpose": lambda jit: jax.linear_transpose(
        jit(lambda x: x[::-1] @ W * 2, in_shardings=ROWS_X, out_shardings=ROWS_Y), X)(
            np.ones((4, 6), np.float32) * B),
    "linear_transpose inside": lambda jit: jit(
        jax.linear_transpose(lambda x: jnp.roll(x @ W, 1, 0), X))(
            np.ones((4, 6), np.float32) * B),
    "hessian": lambda jit: jax.hessian(jit(lambda b: (jnp.sin(b) * b[::-1]).sum()))(B),
    "hessian inside": lambda jit: jit(jax.hessian(lambda b: (jnp.sin(b) * b[::-1]).sum()))(B),
    "jacfwd": lambda jit: jax.jacfwd(hinted(jit, layer), argnums=(0, 1))(X, W),
    "jacrev": lambda jit: jax.jacrev(hinted(jit, layer), argnums=(0, 1))(X, W),
    "jacrev has_aux": lambda jit: jax.jacrev(
        jit(lambda x: (x.sum(0), x.sum())), has_aux=True)(X),
    "jacfwd of jacrev": lambda jit: jit(
        jax.jacfwd(jax.jacrev(lambda b: jnp.sin(b).sum() ** 2)), in_shardings=WHOLE)(B),
    "vmap": lambda jit: jax.vmap(hinted(jit, layer))(XS, WS),
    "vmap in_axes": lambda jit: jax.vmap(hinted(jit, layer), in_axes=(None, 2), out_axes=1)(
        X, WS.transpose(1, 2, 0)),
    "vmap negative axes": lambda jit: jax.vmap(
        hinted(jit, layer), in_axes=(-1, None), out_axes=-1)(XS.transpose(1, 2, 0), W),
    "vmap of a tree": lambda jit: jax.vmap(
        jit(lambda p, x: {"out": (x @ p["w"] + p["b"], p["b"])}),
        in_axes=({"w": 0, "b": None}, 0), out_axes={"out": (1, None)})({"w": WS, "b": B}, XS),
    "vmap axis_size": lambda jit: jax.vmap(
        jit(lambda: jnp.arange(3.0)), axis_size=4, in_axes=())(),
    "vmap of keywords": lambda jit: jax.vmap(jit(lambda x, *, w: x @ w))(XS, w=WS),
    "vmap axis_name": lambda jit: jax.vmap(
        jit(lambda x: (lax.psum(x, "i"), lax.axis_index("i"), lax.pmean(x.sum(), "i"))),
        axis_name="i")(XS),
    "vmap axis_name gathers": lambda jit: jax.vmap(
        jit(lambda x: (lax.all_gather(x, "i"), lax.ppermute(x, "i", TURN),
            lax.pmax(x, "i"), lax.all_to_all(x[:5], "i", 0, 0))),
        axis_name="i")(np.stack([XS[:, :, 0]] * 5).transpose(1, 0, 2)[:, :, :3]),
    "vmap axis_name inside": lambda jit: jit(
        jax.vmap(lambda x: x - lax.pmean(x, "i"), axis_name="i"), in_shardings=WHOLE)(XS),
    "vmap axis_name grad": lambda jit: jax.grad(lambda x: jax.vmap(
        jit(lambda x: (x * lax.psum(x, "i")).sum()), axis_name="i")(x).sum())(XS),
    "vmap of vmap": lambda jit: jax.vmap(
        jax.vmap(jit(lambda x, w: x @ w), (None, 1)), (0, None))(XS, W),
    "vmap of grad": lambda jit: jax.vmap(jax.grad(hinted(jit, loss)), (0, None))(XS, W),
    "grad of vmap": lambda jit: jax.grad(
        lambda xs, w: jax.vmap(hinted(jit, loss), (0, None))(xs, w).sum(), (0, 1))(XS, W),
    "vmap of grad of jit of vmap": lambda jit: jax.vmap(jax.grad(lambda x, w: jit(
        jax.vmap(jnp.dot, (0, None)))(x, w).sum() ** 2), (0, None))(XS, W),
    "vmap of a draw": lambda jit: jax.vmap(
        jit(lambda k: jax.random.normal(k, (3,))))(jax.random.split(jax.random.key(0), 4)),
    "vmap of cond": lambda jit: jax.vmap(jit(
        lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda x: x * 2, x)))(XS),
    "vmap of while": lambda jit: jax.vmap(jit(lambda x: lax.while_loop(
        lambda c: jnp.abs(c).sum() > 1, lambda c: c / 2, x)))(XS),
    "vmap of a place": lambda jit: jax.vmap(jit(lambda x, i: x[i]))(
        XS, np.array([0, 3, 1, 9, -1], np.int32)),
    "vmap of a sort": lambda jit: jax.vmap(jit(jnp.sort, in_shardings=ROWS_Y))(XS),
    "checkpoint": lambda jit: jax.grad(jax.checkpoint(hinted(jit, loss)))(X, W),
    "checkpoint inside": lambda jit: jit(jax.grad(jax.checkpoint(loss), (0, 1)))(X, W),
    **{f"checkpoint {name}": saving(policy) for name, policy in (
           ("everything", POLICIES.everything_saveable), ("nothing", POLICIES.nothing_saveable),
           ("dots", POLICIES.dots_saveable),
           ("dots without batch", POLICIES.dots_with_no_batch_dims_saveable),
           ("names", POLICIES.save_only_these_names("y")),
           ("all but names", POLICIES.save_anything_except_these_names("y")))},
    "checkpoint around a policy": lambda jit: jax.grad(jax.checkpoint(
        hinted(jit, saved_names), policy=POLICIES.save_only_these_names("y")), (0, 1))(X, W),
    "checkpoint of a scan": lambda jit: jit(jax.grad(jax.checkpoint(
        lambda x: scanned(x, WS)[1].sum())))(X),
    "static checkpoint": lambda jit: jit(jax.grad(jax.checkpoint(
        lambda x, n: (x**n).sum(), static_argnums=1)), static_argnums=1)(X, 3),
    "scan": lambda jit: lax.scan(
        lambda c, x: (c + hinted(jit, layer)(x, W), x.sum()), B, XS),
    "scan inside": lambda jit: jit(scanned, in_shardings=(ROWS_Y, None))(X, WS),
    "grad of scan": lambda jit: jax.grad(
        lambda x, ws: jit(scanned)(x, ws)[1].sum(), (0, 1))(X, WS),
    "scan of grad": lambda jit: lax.scan(
        lambda x, w: (x - 0.1 * jax.grad(hinted(jit, loss))(x, w), loss(x, w)), X, WS),
    "vmap of scan": lambda jit: jax.vmap(jit(scanned), (0, None))(XS, WS),
    "fori_loop": lambda jit: lax.fori_loop(
        0, 4, lambda i, x: jit(lambda x, i: jnp.roll(x, i, 0) + 1)(x, i), X),
    "while_loop": lambda jit: lax.while_loop(
        jit(lambda c: (c**2).sum() > 2), jit(lambda c: c * 0.7), X),
    "jvp of while": lambda jit: jax.jvp(jit(lambda x: lax.while_loop(
        lambda c: jnp.abs(c).sum() > 1, lambda c: c * 0.5, x)), (X,), (X,)),
    "cond": lambda jit: lax.cond(X.sum() > 0, hinted(jit, loss), lambda x, w: w.sum(), X, W),
    "grad of cond": lambda jit: jax.grad(jit(lambda x, p: lax.cond(
        p, lambda x: jnp.sin(x).sum(), lambda x: (x**2).sum(), x)))(X, True),
    "grad of switch": lambda jit: jax.grad(jit(lambda x, i: lax.switch(
        i, [jnp.sin, jnp.cos, lambda x: x * 3], x).sum()))(X, np.int32(1)),
    "associative_scan": lambda jit: jax.grad(jit(lambda x: (lax.associative_scan(
        jnp.multiply, x, axis=1) ** 2).sum(), in_shardings=BOTH))(X),
    "map": lambda jit: lax.map(lambda x: hinted(jit, layer)(x, W), XS, batch_size=2),
    "map inside": lambda jit: jit(lambda xs: lax.map(lambda x: layer(x, W), xs))(XS),
    "custom_vjp": lambda jit: jax.grad(
        jit(lambda x, y: clipped(x, y).sum(), in_shardings=ROWS_X), (0, 1))(X, X + 1),
    "custom_vjp inside": lambda jit: jit(
        jax.grad(lambda x: clipped(x, x * 2).sum()), in_shardings=BOTH)(X),
    "custom_vjp of a jit": lambda jit: jax.grad(lambda x: jit(clipped)(x, x).sum())(X),
    "custom_vjp mapped": lambda jit: jax.vmap(jax.grad(jit(
        lambda x: clipped(x, x + 1).sum())))(XS),
    "custom_vjp nondiff": lambda jit: jax.grad(jit(
        lambda x: applied(jnp.sin, x, 2).sum(), in_shardings=ROWS_Y))(X),
    "custom_vjp symbolic zeros": lambda jit: (
        jax.grad(jit(lambda x: perturbed_only(x, X).sum()))(X),
        jit(jax.grad(lambda x, y: perturbed_only(x, y).sum(), (0, 1)))(X, X)),
    "custom_jvp": lambda jit: jax.grad(jit(
        lambda x, y: with_slopes(x, y).sum(), in_shardings=BOTH), (0, 1))(X, X + 1),
    "custom_jvp jvp": lambda jit: jax.jvp(jit(with_slopes), (X, X), (X, X + 1)),
    "custom_jvp nondiff": lambda jit: jax.grad(jit(
        lambda x: mapped_slope(jnp.sin, x).sum()))(X),
    "custom_jvp symbolic zeros": lambda jit: (
        jit(lambda x: jax.jvp(lambda x: counts_zeros(x, X), (x,), (x,)))(X),
        jax.jvp(jit(lambda x: counts_zeros(x, X)), (X,), (X,))),
    "custom_jvp of custom_jvp": lambda jit: jit(jax.grad(jax.grad(
        lambda x: with_slopes(x, x))))(np.float32(2)),
    "custom_vmap": lambda jit: jax.vmap(jit(batched_by_hand), (0, None))(XS, W),
    "custom_vmap inside": lambda jit: jit(jax.vmap(batched_by_hand))(XS, WS),
    "sequential_vmap": lambda jit: jit(jax.vmap(jax.custom_batching.sequential_vmap(
        lambda x: jnp.sort(x, 0))))(XS),
    "custom_root": lambda jit: (
        jit(jax.grad(lambda x: newton(x).sum()))(np.abs(X) + 1),
        jax.grad(jit(lambda x: newton(x).sum(), in_shardings=ROWS_X))(np.abs(X) + 1)),
    "custom_linear_solve": lambda jit: jax.grad(
        jit(lambda a, b: (solved(a, b) ** 2).sum()), (0, 1))(SQUARE, X[:, 0]),
    "closure_convert": lambda jit: jit(lambda x, w: (lambda f, held: jax.grad(
        lambda w: f(x, *held).sum() + w.sum())(w))(
            *jax.closure_convert(lambda x: jnp.sin(x @ w), x)))(X, W),
    "custom_gradient": lambda jit: jax.grad(jit(lambda x: jax.custom_gradient(
        lambda x: (x**2, lambda g: (g * x * 5,)))(x).sum()))(X),
    "stop_gradient": lambda jit: jax.grad(jit(
        lambda x: (x * lax.stop_gradient(jnp.sin(x))).sum(), in_shardings=BOTH))(X),
    "closure over a tracer": lambda jit: jax.grad(
        lambda w: jit(lambda x: jnp.sin(x @ w).sum(), in_shardings=ROWS_Y)(X))(W),
    "closure over a mapped tracer": lambda jit: jax.vmap(
        lambda w: jit(lambda x: jnp.sin(x @ w).sum())(X))(WS),
    "closure over two levels": lambda jit: jax.vmap(lambda w: jax.grad(
        lambda x: jit(lambda y: (x * y @ w).sum())(X))(X))(WS),
    "jit of jit": lambda jit: jit(lambda x: jit(
        lambda y: y.sum(0), in_shardings=ROWS_X, out_shardings=ROWS_Y)(x * 2) + 1)(X),
    "jax.jit around": lambda jit: jax.jit(jax.grad(hinted(jit, loss)))(X, W),
    "jax.jit inside": lambda jit: jit(lambda x: jax.jit(jax.grad(loss))(x, W))(X),
    "make_jaxpr": lambda jit: jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(jax.grad(jit(loss)), X, W)),
    "eval_jaxpr": lambda jit: (lambda closed: jax.jit(
        jax.extend.core.jaxpr_as_fun(closed))(X, W))(
            jax.make_jaxpr(jax.grad(hinted(jit, loss)))(X, W)),
    "third derivative": lambda jit: jax.grad(jax.grad(jax.grad(
        jit(lambda x: jnp.sin(x) * x**3))))(np.float32(0.7)),
    "jet by jvps": lambda jit: jax.jvp(lambda x: jax.jvp(
        jit(lambda x: (x**3).sum(0), in_shardings=ROWS_X), (x,), (X,))[1], (X,), (X + 1,)),
    "grad of an update": lambda jit: jax.grad(jit(lambda x, u: (x.at[1:3].set(u) ** 2
        * x.at[np.array([0, 0, 2])].add(1.0)).sum(), in_shardings=(ROWS_Y, ROWS_X)), (0, 1))(
            X, X[:2]),
    "grad of a gather": lambda jit: jax.grad(jit(
        lambda x, i: (x[i] ** 2).sum(), in_shardings=(ROWS_Y, WHOLE)))(X, np.array([3, 0, 3, -1])),
    "grad of a sort": lambda jit: jax.grad(jit(
        lambda x: (jnp.sort(x, 0) * np.arange(4)[:, None]).sum(), in_shardings=ROWS_Y))(X),
    "grad of a draw": lambda jit: jax.grad(jit(lambda x, k: (
        x * jax.random.normal(k, x.shape)).sum()))(X, jax.random.key(3)),
    "grad through keys": lambda jit: jax.vjp(
        jit(lambda x, k: (x * 2, jax.random.split(k))), X, jax.random.key(3))[0][0],
    "grad of cumulative": lambda jit: jax.grad(jit(lambda x: (
        jnp.cumsum(x, 0) * jnp.cumprod(x, 1)).sum(), in_shardings=BOTH))(X),
    "grad of a norm": lambda jit: jax.grad(jit(
        lambda x: jnp.linalg.norm(x, axis=0).sum() + jax.nn.logsumexp(x), in_shardings=ROWS_X))(X),
    "grad of a fft": lambda jit: jax.grad(jit(
        lambda x: jnp.abs(jnp.fft.fft(x, axis=0) ** 2).sum(), in_shardings=ROWS_X))(X),
    "grad of a decomposition": lambda jit: jax.grad(jit(lambda a: (
        jnp.linalg.inv(a) + jnp.linalg.cholesky(a @ a.T)).sum(), in_shardings=ROWS_X))(SQUARE),
    "donated": lambda jit: jax.grad(jit(loss, donate_argnums=()))(X, W),
    "static names": lambda jit: jax.vmap(
        partial(jit(lambda x, *, n: x**n, static_argnames="n"), n=2))(XS),
    "ragged tree": lambda jit: jax.grad(jit(
        lambda t: sum(jnp.sum(v**2) for v in jax.tree.leaves(t))))((X, [B, None, {"a": W}])),
    "weak scalar": lambda jit: jax.value_and_grad(jit(lambda x: x * 3))(2.0),
    "weak scalar vmap": lambda jit: jax.vmap(jit(lambda x, y: x * y), (0, None))(XS, 2.0),
    "jvp of a constant": lambda jit: jax.jvp(jit(lambda x: (x, 3.0, B)), (X,), (X,)),
    "grad of a constant": lambda jit: jax.grad(jit(lambda x: 3.0))(X),
    "unused arguments": lambda jit: jax.grad(jit(lambda x, y: x.sum()), (0, 1))(X, W),
}  # fmt: skip


def ours(fn, **kwargs):
    return mw.jit(fn, mesh=MESH, **kwargs)


# Every fifth row in the default suite, all of them in the slow one.
QUICK = list(ROWS)[::5]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ROWS]
)
def test_same_as_jax(name):
    assert_same(ROWS[name](ours), ROWS[name](jax.jit), rounding=1000)


ROW, STACK = X.ravel()[:16], XS.ravel()[:48].reshape(3, 16)


@pytest.mark.parametrize(
    "around",
    [
        lambda g: jax.jit(g)(ROW),
        lambda g: jax.jit(lambda x: (g(x) * 2, x))(ROW),
        lambda g: lax.scan(lambda c, x: (c, g(x)), 0, STACK)[1],
        lambda g: lax.cond(ROW[0] > 9, lambda x: g(x) * 2, g, ROW),
        lambda g: jax.jit(jax.vmap(g))(STACK),
    ],
    ids=["jit", "jit of more", "scan", "cond", "jit of vmap"],
)
def test_results_in_parts_of_an_axis_leave_an_enclosing_jit(around):
    """JAX cannot say in axes of the mesh where such results lie."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("a",))

    def by_rows(x):
        return jnp.sin(x).reshape(2, 8)

    step = mw.jit(by_rows, mesh=mesh, in_shardings=P("a"))
    assert step(ROW).sharding.spec != P()
    called = around(step)
    assert_same(called, around(jax.jit(by_rows)), rounding=1000)


JOINS = {
    "sum": lambda a, b: a + b * 1,
    "largest, by calls": jax.jit(lambda a, b: jnp.where(a > b, a, b)),
    "largest, of a pair": lambda a, b: jnp.stack([a, b]).max(),
}
REDUCTIONS = {
    "reduce": lambda j: lax.reduce(X, np.float32(0), j, (0,)),
    "reduce_window": lambda j: lax.reduce_window(X, np.float32(-9), j, (3, 1), (1, 1), "VALID"),
    "reduce in jit": lambda j: jax.jit(lambda x: lax.reduce(x, np.float32(0), j, (0,)))(X),
    "reduce in ours": lambda j: ours(lambda x: lax.reduce(x, np.float32(0), j, (0,)))(X),
    "apply": lambda j: jnp.asarray(X).at[2:3].apply(lambda v: j(v, v)),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("join", JOINS)
def test_what_joins_numbers_of_a_reduction(join, reduction):
    """XLA takes no regions over devices there."""
    code, join = REDUCTIONS[reduction], JOINS[join]
    assert_same(code(ours(join)), code(join), rounding=1000)


def test_what_joins_numbers_where_a_mesh_is_set():
    """The function is tried over no mesh, calls in it included."""
    join = JOINS["largest, by calls"]
    with jax.set_mesh(MESH):
        for inner in (join, mw.jit(join)):
            step = mw.jit(lambda x, join=inner: lax.reduce(x, np.float32(0), join, (0,)))
            with warnings.catch_warnings():
                warnings.simplefilter("error", mw.FallbackWarning)
                assert_same(step(X), np.maximum(X.max(0), 0))
