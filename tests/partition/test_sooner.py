"""Scatters before what is linear: sizes that a device computes with, bytes, and numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

NARROW = jnp.bfloat16


def draw(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def step(p, x, y):
    return p - 0.1 * jax.grad(lambda p: ((x @ p - y) ** 2).mean())(p)


SUM = (P(None, "x"), P("x"))
SHAPES = ((64, 320), (320, 24))
N8, N24 = mesh_of(x=8), mesh_of(x=2, y=4)
# The function, shapes, shardings, the mesh, and of the largest array that is scaled the size.
CASES = {
    "scaled": (lambda a, b: 0.5 * (a @ b), SHAPES, SUM, P("x"), N8, 8 * 24),
    "several, one after the other": (
        lambda a, b: -(0.5 * (a @ b)) / 3.0, SHAPES, SUM, P("x"), N8, 8 * 24,
    ),
    "turned between": (lambda a, b: 0.5 * (2.0 * (a @ b)).T, SHAPES, SUM, P("x"), N8, 64 * 3),
    "by a row": (lambda a, b: (a @ b) * b[0], SHAPES, SUM, P("x"), N8, 8 * 24),
    "by what lies whole": (
        lambda a, b, c: (a @ b) * c, (*SHAPES, (64, 24)), (*SUM, P()), P("x"), N8, 8 * 24,
    ),
    "by what lies so": (
        lambda a, b, c: (a @ b) * c, (*SHAPES, (64, 24)), (*SUM, P("x")), P("x"), N8, 8 * 24,
    ),
    "rows that 8 do not divide": (
        lambda a, b: 0.5 * (a @ b), ((61, 320), (320, 24)), SUM, P("x"), N8, 8 * 24,
    ),
    "over one axis of two": (
        lambda a, b: 0.5 * (a @ b), SHAPES, (P("y", "x"), P("x")), P(("y", "x")), N24, 8 * 24,
    ),
    "scattered over one, reduced over the other": (
        lambda a, b: 0.5 * (a @ b), SHAPES, (P(None, ("x", "y")), P(("x", "y"))), P("y"), N24,
        16 * 24,
    ),
    "a gradient in shards": (
        step, ((64, 24), (128, 64), (128, 24)), (P("x"), P("x"), P("x")), P("x"), N8, 16 * 24,
    ),
    "in a loop": (
        lambda a, b: lax.fori_loop(0, 3, lambda _, c: 0.1 * (a @ c), b),
        ((320, 320), (320, 24)), SUM, P("x"), N8, 40 * 24,
    ),
    "in a branch": (
        lambda a, b: lax.cond(a.sum() > 0, lambda: 0.5 * (a @ b), lambda: -(a @ b) / 3.0),
        SHAPES, SUM, P("x"), N8, 8 * 24,
    ),
}  # fmt: skip
SCALES = {"mul", "div", "neg"}


def _scaled(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in SCALES:
            yield eqn.outvars[0].aval.size
        for inner in jaxprs_in_params(eqn.params):
            yield from _scaled(inner)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_scattered_before_they_are_scaled(name):
    function, shapes, in_specs, out_spec, on, most = CASES[name]
    args = draw(*shapes)
    jitted = mw.jit(function, mesh=on, in_shardings=in_specs, out_shardings=out_spec)
    program = jitted.partition(*args)
    assert max(_scaled(program.jaxpr.jaxpr)) <= most
    np.testing.assert_allclose(program.simulate(*args), function(*args), rtol=2e-4, atol=2e-4)


def hinted(w, x):
    return (jnp.tanh(x @ mw.shard(w, P())) ** 2).mean()


def hinted_layers(w, x):
    return (lax.scan(lambda h, w: (jnp.tanh(h @ mw.shard(w, P())), None), x, w)[0] ** 2).mean()


def summed(a, b):
    return mw.shard(a @ b, P())


def paired(z):
    """All features, which a hint gathers, against those of a device: as of a contrastive loss."""
    return jnp.tanh(z @ mw.shard(z, P()).T).sum()


# Hints that what is summed is whole, where part of it is read: shapes, specs, and bytes sent.
HINTED = {
    "a sum": (summed, SHAPES, SUM, P("x"), 7 / 8 * 64 * 24 * 4),
    "a sum that is read whole, too": (
        lambda a, b: (summed(a, b), jnp.sin(summed(a, b))), SHAPES, SUM, (P("x"), P()),
        2 * 7 / 8 * 64 * 24 * 4,
    ),
    "two parts": (
        lambda a, b: (summed(a, b), -summed(a, b).T), SHAPES, SUM, (P("x"), P("x")),
        2 * 7 / 8 * 64 * 24 * 4,
    ),
    "the gradient of a weight": (
        jax.grad(hinted), ((64, 64), (256, 64)), (P("x"), P("x")), P("x"), 2 * 7 / 8 * 64 * 64 * 4,
    ),
    "the gradient of features": (
        jax.grad(paired), ((128, 32),), (P("x"),), P("x"), 7 / 8 * 128 * (32 + 128 / 8) * 4,
    ),
    "gradients of weights of a loop": (
        jax.grad(hinted_layers), ((3, 64, 64), (256, 64)), (P(None, "x"), P("x")), P(None, "x"),
        3 * 2 * 7 / 8 * 64 * 64 * 4,
    ),
    "of a loop, by columns that 8 do not divide": (
        jax.grad(hinted_layers), ((3, 61, 61), (256, 61)), (P(None, None, "x"), P("x")),
        P(None, None, "x"), 3 * 2 * 7 * 61 * 8 * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTED)
def test_sums_are_scattered_past_hints(name):
    """A weight is gathered for a hint, which its gradient has, too."""
    function, shapes, in_specs, out_specs, sent = HINTED[name]
    args = draw(*shapes)
    step = mw.jit(function, mesh=N8, in_shardings=in_specs, out_shardings=out_specs)
    program = step.partition(*args)
    assert program.wire_bytes == sent
    for found, wanted in zip(
        jax.tree.leaves(program.simulate(*args)), jax.tree.leaves(function(*args)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


LEFT = {
    "narrower than the sum": lambda a, b: (a @ b).astype(jnp.bfloat16),
    "read twice": lambda a, b: (a @ b) * 0.5 + jnp.sin(a @ b),
    "reduced further": lambda a, b: (0.5 * (a @ b)).sum(1, keepdims=True) * b[:1],
    "a hint between": lambda a, b: 0.5 * mw.shard(a @ b, P()),
    "made before a loop": lambda a, b: lax.fori_loop(
        0, 3, lambda _, c: jnp.sin(c) + 1.0, 0.5 * (a @ b)
    ),
    "added up in a loop": lambda a, b: lax.fori_loop(
        0, 3, lambda _, c: c + 0.5 * (a @ b), jnp.zeros((64, 24))
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_numbers_are_right_where_something_else_reads_a_sum(name):
    function = LEFT[name]
    args = draw(*SHAPES)
    program = mw.jit(function, mesh=N8, in_shardings=SUM, out_shardings=P("x")).partition(*args)
    found = np.asarray(program.simulate(*args), np.float32)
    wanted = np.asarray(function(*args), np.float32)
    rough = "narrower" in name
    np.testing.assert_allclose(
        found, wanted, rtol=2e-2 if rough else 2e-4, atol=0.2 if rough else 2e-3
    )


def test_a_stack_of_rows_of_one_element():
    """Its parts are all of it on one device; the rows themselves have no other part."""

    def picked(x, i):
        def step(total, _):
            row = lax.dynamic_index_in_dim(x, i, 0)
            return total + jnp.tanh(row).sum(), row

        return lax.scan(step, 0.5, None, length=3)

    (x,) = draw((16,))
    step = mw.jit(picked, mesh=N8, in_shardings=(P("x"), P()), out_shardings=(P(), P(None, "x")))
    found = step.partition(x, np.int32(5)).simulate(x, np.int32(5))
    for got, wanted in zip(found, picked(x, np.int32(5)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
