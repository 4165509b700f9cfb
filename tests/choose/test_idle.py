"""Products lie over axes that no hint names, where that is worth what it sends."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.compute import program_work
from meshwise.cost.hardware import GENERIC

N24 = AbstractMesh((2, 4), ("x", "y"))
SLOW = replace(GENERIC, name="slow", flops_per_s=1e9)


def newton(a):
    """A step towards an inverse."""
    t = 3 * jnp.eye(a.shape[0]) - a
    return t @ (a @ t)


def partitioned(n, **options):
    step = mw.jit(newton, mesh=N24, in_shardings=P("x"), out_shardings=P("x"), **options)
    return step.partition(jax.ShapeDtypeStruct((n, n), jnp.float32))


def flops(program):
    return program_work(program.jaxpr, program.per_device.mesh.axis_size).flops


@pytest.mark.parametrize(
    ("n", "options", "devices"),
    [
        pytest.param(64, {}, 8, id="which sends less, too"),
        pytest.param(8192, {}, 8, id="much work"),
        pytest.param(64, {"hardware": SLOW}, 8, id="much for slow devices"),
    ],
)
def test_work_is_shared_over_an_axis_that_nothing_lies_over(n, options, devices):
    assert flops(partitioned(n, **options)) == pytest.approx(2 * 2 * n**3 / devices, rel=0.1)


def test_values():
    a = np.random.default_rng(0).normal(size=(60, 60)).astype(np.float32)
    found = partitioned(60, hardware=SLOW).simulate(a)
    np.testing.assert_allclose(found, newton(a), rtol=1e-4, atol=1e-3)


def test_no_axis_is_used_where_that_is_dearer_than_completion():
    """With its launches: rows over the axis send 63 bytes twice, and all of them once 70."""

    def picked(a, b, i):
        return jax.lax.dynamic_index_in_dim(jnp.einsum("abc,aec->a", a, b), i, 0)

    rows = jax.ShapeDtypeStruct((5, 2, 2), jnp.float32)
    on = {"mesh": AbstractMesh((8,), ("x",)), "in_shardings": (None, P(None, "x"), None)}
    step = mw.jit(picked, **on, out_shardings=None)
    plan = step.partition(rows, rows, jax.ShapeDtypeStruct((), jnp.int32)).plan
    assert plan.seconds <= plan.completion_seconds


def test_axes_left_idle_undo_no_choice_for_memory():
    """A switch layer: a tenth of the bytes is not worth masks of all experts on every device."""
    groups, tokens, width, experts, inner, capacity = 8, 96, 48, 16, 96, 12

    def routed(x, g):
        p = jax.nn.softmax(x @ g, -1)
        one_hot = jax.nn.one_hot(jnp.argmax(p, -1), experts)
        place = ((jnp.cumsum(one_hot, 0) - 1) * one_hot).sum(-1).astype(jnp.int32)
        sent = one_hot[:, :, None] * jax.nn.one_hot(place, capacity)[:, None]
        return sent, sent * p.max(-1)[:, None, None]

    def layer(x, g, up, down):
        sent, joined = jax.vmap(lambda t: routed(t, g))(x)
        inside = jnp.einsum("gsec,gsd->egcd", sent, x)
        hidden = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", inside, up))
        return jnp.einsum("gsec,egcd->gsd", joined, jnp.einsum("egcf,efd->egcd", hidden, down))

    sizes = (groups, tokens, width), (width, experts), (experts, width, inner)
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (*sizes, (experts, inner, width))]
    specs = (P("x"), P(), P("y"), P("y"))
    step = mw.jit(layer, mesh=N24, in_shardings=specs, out_shardings=P("x"))
    program = step.partition(*types)
    mask = 4 * groups // 2 * tokens * experts // 4 * capacity  # of a device's groups and experts
    assert program.wire_bytes == 112_896
    assert max(v.aval.size * 4 for e in program.jaxpr.eqns for v in e.outvars) == mask
