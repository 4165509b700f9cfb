"""Programs of which the library of kernels that XLA on CPU calls makes something wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import LIBRARY_ERRS_OVER
from meshwise.cost.cpu.mistaken import may_err
from meshwise.cost.steps import steps_of

BEFORE_11 = jax.__version_info__ < (0, 11)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def spread(x, *shape):
    return jnp.broadcast_to(x, shape)


def gradient_norm(x, w):
    """Of a mean, features leading: the gradient is their product with one number, spread."""
    gradient = jax.grad(lambda w: (x.T @ w).mean())(w)
    return (gradient**2).sum()


def in_a_loop(x, c):
    return lax.fori_loop(0, 3, lambda _, c: ((x @ spread(c, 64, 64)) ** 2).mean(), c)


X = f32(64, 64)
# What it is of, and whether it may go wrong.
CASES = {
    "a spread number": (lambda x, c: ((x @ spread(c, 64, 64)) ** 2).sum(), (X, f32()), True),
    "a spread column": (lambda x, c: (x @ spread(c, 64, 64)).max(1), (X, f32(64, 1)), True),
    "ones": (lambda x: ((x @ jnp.ones((64, 64))) * x).sum(), (X,), True),
    "an array that is known": (lambda x: (x @ np.ones((64, 64), np.float32)).sum(), (X,), True),
    "chosen of spread ones": (
        lambda x, c: (x @ jnp.where(spread(c, 64, 64) > 0, c, 1.0)).sum(), (X, f32()), True,
    ),
    "a part of it": (lambda x, c: (x @ spread(c, 80, 64)[:64]).sum(), (X, f32()), True),
    "sums of it": (lambda x, c: (x @ spread(c, 64, 64, 3).sum(2)).sum(), (X, f32()), True),
    "norm of a gradient of means": (gradient_norm, (f32(64, 64), f32(64, 64)), True),
    "in a loop": (in_a_loop, (X, f32()), True),
    "behind a call": (
        lambda x, c: jax.jit(lambda y: (x @ y).sum())(spread(c, 64, 64)), (X, f32()), True,
    ),
    "a product alone": (lambda x, c: jnp.exp(x @ spread(c, 64, 64)), (X, f32()), False),
    "few elements": (lambda x, c: (x[:8, :8] @ spread(c, 8, 8)).sum(), (X, f32()), False),
    "a number times an argument": (lambda x, c: (x @ (x * c)).sum(), (X, f32()), False),
    "arguments": (lambda x, y: ((x @ y) ** 2).sum(), (X, X), False),
    "a softmax, and a product": (lambda x, y: jax.nn.softmax(x @ y) @ y, (X, X), False),
    "seven dims": (lambda a, b: (a * b).sum(3), (f32(3, 1, 2, 2, 8, 8, 8),) * 2, BEFORE_11),
    "six dims": (
        lambda a, b: (a * b).sum(3), (f32(3, 2, 2, 8, 8, 8), f32(3, 2, 2, 8, 8, 8)), False,
    ),
    "many rows": (lambda a, b: ((a @ b.T) ** 2).sum(0), (f32(3, 3), f32(32769, 3)), BEFORE_11),
    "fewer rows": (lambda a, b: ((a @ b.T) ** 2).sum(0), (f32(3, 3), f32(32768, 3)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_may_go_wrong_is_told(name):
    function, args, wanted = CASES[name]
    assert may_err(steps_of(jax.make_jaxpr(function)(*args), {})) == wanted


def test_limits_are_of_the_version():
    assert (LIBRARY_ERRS_OVER[0] < 7) == BEFORE_11


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1, 8), ("y", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def drawn(*shape):
    return np.random.default_rng(sum(shape)).uniform(0.5, 1.5, shape).astype(np.float32)


RUN = {
    "norm of a gradient of means": (
        gradient_norm, (drawn(512, 64), drawn(512, 64)), (P("x"), P("x")),
        lambda x, w: ((x.sum(1) / (64 * 64)) ** 2).sum() * 64,
    ),
    "seven dims": (
        lambda a, b: (a * b).sum(3), (drawn(8, 3, 2, 2, 8, 8, 8), drawn(8, 3, 2, 2, 8, 8, 8)),
        (P("x"), P("x")), lambda a, b: (a * b).sum(3),
    ),
    "many rows": (
        lambda a, b: ((a @ b.T) ** 2).sum(0), (drawn(3, 3), drawn(8 * 32769, 3)), (P(), P("x")),
        lambda a, b: ((a @ b.T) ** 2).sum(0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_it_is_right(name, mesh):
    function, args, shardings, expected = RUN[name]
    found = mw.jit(function, mesh=mesh, in_shardings=shardings)(*args)
    wanted = expected(*(x.astype(np.float64) for x in args))
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-4)


def test_what_the_user_says_goes_before_it(mesh):
    name = "xla_cpu_experimental_ynn_fusion_type"
    function, args, shardings, _ = RUN["norm of a gradient of means"]
    step = mw.jit(
        function, mesh=mesh, in_shardings=shardings,
        compiler_options={name: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"},
    )  # fmt: skip
    said = step.partition(*args).compile().as_text()
    ours = mw.jit(function, mesh=mesh, in_shardings=shardings).partition(*args).compile().as_text()
    assert said != ours
