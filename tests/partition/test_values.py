"""Whole small programs on pretended devices, equal to one device, uneven dims included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


N8, N24, N23 = mesh_of(d=8), mesh_of(x=2, y=4), mesh_of(x=2, y=3)


def mlp(w, v, x):
    return (jax.nn.gelu(x @ w) @ v).sum()


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / (1 + x.std(-1, keepdims=True))


def masked(key, x):
    return x * jax.random.bernoulli(key, 0.7, x.shape)


def moments(a):
    sums = [a.sum(), (a * a).sum(), (a**4).sum()]
    return [jnp.tanh(s / 100) for s in sums], a.max()


def quotient_set(x):
    total = x.sum(0)
    return total.at[0].set(lax.div(total[1] + total[2], jnp.asarray(3, total.dtype)))


WHOLE_NUMBERS = np.random.default_rng(0).integers(0, 50, (16, 24, 8))
KEY = jax.random.key(3)
CASES = {
    "17 rows over 8": (lambda x: jnp.log(x * x).sum(0), (draw(17, 5),), P("d"), P(), N8),
    "17 rows over 8, gradient": (
        jax.grad(lambda x: jnp.log(x * x).max(0).sum()),
        (draw(17, 5),),
        P("d"),
        P("d"),
        N8,
    ),
    "5 rows over 8": (lambda x: x - x.max(0), (draw(5, 3),), P("d"), P("d"), N8),
    "uneven contraction": (jnp.matmul, (draw(6, 13), draw(13, 7)), (P(None, "d"), P("d")), P(), N8),
    "uneven everywhere": (
        lambda a, b: jnp.tanh(a @ b),
        (draw(7, 9), draw(9, 11)),
        (P("x", "y"), P("y", "x")),
        P("y", "x"),
        N24,
    ),
    "uneven gradient": (
        jax.grad(mlp, argnums=(0, 1)),
        (draw(9, 13), draw(13, 5), draw(17, 9)),
        (P(None, "y"), P("y"), P("x")),
        (P(None, "y"), P("y")),
        N24,
    ),
    "norm over an uneven dim": (norm, (draw(6, 13),), P(None, "d"), P(None, "d"), N8),
    "softmax over an uneven dim": (jax.nn.softmax, (draw(6, 13),), P(None, "y"), P("y"), N23),
    "bits of each device's part": (
        masked,
        (KEY, draw(13, 6)),
        (P(), P("x", "y")),
        P("x", "y"),
        N24,
    ),
    "two sums from different axes": (
        lambda a, b: (a.sum(0) + b.sum(0), a.sum(0) * 2),
        (draw(8, 6), draw(12, 6)),
        (P("x"), P("y")),
        P(),
        N24,
    ),
    "many small reductions": (moments, (draw(64, 64),), P("x", "y"), P(), N24),
    "recomputed": (
        jax.grad(lambda w, x: jax.checkpoint(mlp, static_argnums=())(w, w.T, x)),
        (draw(8, 16), draw(12, 8)),
        (P("x", "y"), P("x")),
        P("x", "y"),
        N24,
    ),
    "transposed and itself": (lambda a: a + a.T, (draw(8, 8),), P("x", "y"), P("y"), N24),
    "an input returned": (lambda a, b: (a, b, a), (draw(8, 4), draw(3)), (P("x"), P()), None, N24),
    "a loop over a sharded dim": (
        lambda a: lax.fori_loop(0, 3, lambda i, c: c + a[i], jnp.zeros(4)),
        (draw(8, 4),),
        P("x"),
        P(),
        N24,
    ),
    "running sums of complex exponentials, from the end": (  # of which infinities have no number
        lambda re, im: lax.cumlogsumexp(lax.complex(re, im), reverse=True),
        (draw(10), draw(3, 10)[1]),
        P("d"),
        P("d"),
        N8,
    ),
    "a quotient of sums as a row": (  # of integers terms by themselves would each be rounded
        quotient_set,
        (WHOLE_NUMBERS.astype(np.int32),),
        P("d"),
        P(),
        N8,
    ),
    "an unsigned quotient of sums as a row": (
        quotient_set,
        (WHOLE_NUMBERS.astype(np.uint32),),
        P("x"),
        P("y"),
        N24,
    ),
    "a literal result": (lambda a: (a.sum(), 3.0), (draw(8),), P("x"), P(), N24),
    "an empty array": (lambda a: (a.sum(), a * 2), (draw(0, 4),), P("x"), (P(), P("x")), N24),
    "rows picked by sharded indices": (
        lambda t, i: t[i],
        (draw(13, 6), np.array([0, 12, 3, 3, 7, 12, 1])),
        (P("y"), P("x")),
        P("x"),
        N24,
    ),
    "gradient of picking rows": (
        jax.grad(lambda t, i: (t[i] ** 2).sum()),
        (draw(13, 6), np.array([0, 12, 3, 3, 7, 12, 1])),
        (P("y"), P("x")),
        P("y"),
        N24,
    ),
}


@pytest.mark.parametrize("completion", ["improved", "gspmd"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(name, completion):
    fn, args, in_specs, out_specs, on = CASES[name]
    step = mw.jit(
        fn, mesh=on, in_shardings=in_specs, out_shardings=out_specs, completion=completion
    )
    found = step.partition(*args).simulate(*args)
    expected = jax.jit(fn)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (f.shape, f.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(f, e, rtol=2e-5, atol=2e-5)


def test_random_bits_are_those_of_one_device():
    step = mw.jit(masked, mesh=N24, in_shardings=(P(), P("x", "y")), out_shardings=P("y"))
    x = np.ones((13, 6), np.float32)
    np.testing.assert_array_equal(step.partition(KEY, x).simulate(KEY, x), masked(KEY, x))


def test_tiny_reductions_share_a_collective():
    fn, args, in_specs, out_specs, on = CASES["many small reductions"]
    step = mw.jit(fn, mesh=on, in_shardings=in_specs, out_shardings=out_specs)
    sums = [c for c in step.partition(*args).collectives if c.kind == "all_reduce"]
    assert sorted(c.shape for c in sums) == [(), (3,)]  # the maximum, and three sums


def test_what_is_computed_whole_is_recorded():
    smooth_p = Primitive("smooth")
    smooth_p.def_abstract_eval(lambda x: x)
    smooth_p.def_impl(np.asarray)
    step = mw.jit(lambda a: smooth_p.bind(a) * 2, mesh=N24, in_shardings=P("x"))
    program = step.partition(draw(8, 4))
    assert [w.split(" at ")[0] for w in program.per_device.whole] == ["smooth"]
    assert "smooth" in program.explain()


def test_hints_inside_loops():
    def fn(a):
        return lax.fori_loop(0, 3, lambda i, c: mw.shard(c * 2, P("x")), a)

    step = mw.jit(fn, mesh=N24, in_shardings=P("x"), out_shardings=P("x"))
    np.testing.assert_allclose(step.partition(draw(8)).simulate(draw(8)), draw(8) * 8)
