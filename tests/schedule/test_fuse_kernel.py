"""`fuse(kernel="pallas")`: what is fused as a TPU kernel, run in Pallas' interpreter."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.schedule import steps
from tests.schedule.steps import random


def devices(count):
    return jax.make_mesh((count,), ("x",), (AxisType.Auto,), devices=jax.devices()[:count])


def on_slices(step):
    s = mw.Schedule(step.program)
    scattered, gathered = s.split(s.find("all_reduce")[0])
    s.reorder(gathered, more_bytes=True)
    s.slice_state(["m", "v"])
    if small := s.find("all_reduce"):
        s.bucket(small)
    return s, scattered


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (steps.adam, 4),
        (steps.lamb, 2),
        pytest.param(steps.lamb, 8, marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_is_one_kernel(make, count):
    step = make(count * 1024, count)
    s, scattered = on_slices(step)
    kinds = [c.kind for c in s.program.collectives]
    s.fuse([scattered, s.find("all_gather")[0]], kernel="pallas")
    assert [c.kind for c in s.program.collectives] == kinds  # the kernel stands for them
    (kernel,) = [e for e in s.program.jaxpr.jaxpr.eqns if e.primitive.name == "mw_kernel"]
    assert kernel.params["name"] == "fused_all_reduce_pallas"
    assert "kernel='pallas'" in s.script()
    wanted = s.program.simulate(*step.args)
    program = s.program
    values = vars_with_mesh(program, devices(count))
    for got, want in zip(values(*step.args), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def small_mesh():
    """Four devices: the interpreter's devices are threads, of which eight can wait for ever."""
    return jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])


def vars_with_mesh(program, mesh):
    """The program on the devices of a mesh."""
    fields = steps.vars_of(program)
    placements = tuple(
        tuple(jax.sharding.NamedSharding(mesh, p.spec) for p in side)
        for side in fields["placements"]
    )
    return mw.SpmdProgram(**{**fields, "user_mesh": mesh, "placements": placements})


def test_a_product_is_computed_in_the_kernel():
    mesh = small_mesh()

    def step(x, w, bias):
        return lax.psum(x @ w, "y") + bias

    args = (random(32, 64), random(64, 40), random(40))
    specs = (P("x", "y"), P("y"), P())
    program = mw.SpmdProgram.from_shard_map(step, mesh, specs, P("x"), *args)
    s = mw.Schedule(program)
    product = s.find("dot_general")[0]
    scattered, gathered = s.split(s.find("all_reduce")[0], dim=0)
    (gathered,) = s.reorder(gathered)
    s.fuse([product, scattered, gathered], kernel="pallas")
    assert not s.find("dot_general")
    np.testing.assert_allclose(s.program(*args), args[0] @ args[1] + args[2], rtol=1e-4, atol=1e-3)


def test_what_no_kernel_can_do_is_refused():
    def step(g, w):
        return lax.psum(g[0], "x") * jax.lax.cumsum(w, 1), w

    args = (random(8, 64, 128), random(64, 128))
    program = mw.SpmdProgram.from_shard_map(
        step, steps.mesh_of(x=8), (P("x"), P()), (P(), P()), *args
    )
    s = mw.Schedule(program)
    scattered, gathered = s.split(s.find("all_reduce")[0], dim=0)
    s.reorder(gathered)
    before = s.script()
    with pytest.raises(mw.IllegalMove, match="no reduce_scatter among what is fused"):
        s.fuse([s.find("mul")[0], s.find("all_gather")[0]], kernel="pallas")
    with pytest.raises(mw.IllegalMove, match="kernel='triton'"):
        s.fuse([scattered, s.find("all_gather")[0]], kernel="triton")
    assert s.script() == before


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("gathered", ["rows", "inner"])
def test_a_gathered_product_is_one_kernel(gathered, is_turned):
    dim = 0 if gathered == "rows" else 1
    x, w = random(32, 16), random(16, 40)

    def step(x, w):
        whole = lax.all_gather(x, "y", axis=1 - dim if is_turned else dim, tiled=True)
        return lax.dot_general(whole, w, (((0 if is_turned else 1,), (0,)), ((), ())))

    given = x.T if is_turned else x
    spec = P("y", None) if (dim == 0) != is_turned else P(None, "y")
    program = mw.SpmdProgram.from_shard_map(step, small_mesh(), (spec, P()), P(), given, w)
    s = mw.Schedule(program)
    s.fuse([s.find("all_gather")[0], s.find("dot_general")[0]], kernel="pallas")
    assert "mw_kernel" in str(s.program)
    assert [c.kind.value for c in s.program.collectives] == ["all_gather"]
    np.testing.assert_allclose(s.program(given, w), x @ w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(s.program.simulate(given, w), x @ w, rtol=1e-4, atol=1e-4)
