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


def of_sum(before, compute, after, **options):
    """A step that scatters a sum, computes with the part, and gathers it."""

    def step(g, w):
        part = lax.psum_scatter(before(g[0]), "x", scatter_dimension=0, tiled=True, **options)
        return after(lax.all_gather(compute(part, w), "x", axis=0, tiled=True, **options))

    return step


def of_product(left, also):
    """A step that scatters the sum of a product."""

    def step(a, b, w):
        product = left(a) @ b
        part = lax.psum_scatter(product, "x", scatter_dimension=0, tiled=True)
        return lax.all_gather(w - part * also(product), "x", axis=0, tiled=True), product

    return step


def untiled(g, w):
    part = lax.psum_scatter(g[0], "x", scatter_dimension=0, tiled=False)
    return lax.all_gather(w - part, "x", axis=0, tiled=False)


def two_dims(g, w):
    rows = lax.psum_scatter(g[0], "x", scatter_dimension=0, tiled=True)
    columns = lax.psum_scatter(g[0], "x", scatter_dimension=1, tiled=True)
    return lax.all_gather(w - rows * columns.T, "x", axis=0, tiled=True)


def gathered_product(also, **options):
    def step(a, b):
        whole = lax.all_gather(a, "x", axis=0, tiled=True, **options)
        return whole @ b, also(whole)

    return step


def same(x):
    return x


def less(part, w):
    return w - part


TURNED = {"axis_index_groups": [[2, 0, 3, 1]]}
ONE, TWO = P("x"), (P("x"), P("x"))
NO_KERNELS = {
    "computed before the sum": (
        of_sum(lambda g: g * 2, less, same), TWO, ONE, ((4, 32, 8), (32, 8)), "before the sum"),
    "groups": (of_sum(same, less, same, **TURNED), TWO, ONE, ((4, 32, 8), (32, 8)), "groups"),
    "untiled": (untiled, (P("x"), P()), ONE, ((4, 4, 8), (8,)), "is not tiled"),
    "no elements": (of_sum(same, less, same), TWO, ONE, ((4, 32, 0), (32, 0)), "has no elements"),
    "scattered along two dims": (two_dims, (P("x"), P()), ONE, ((4, 8, 8), (2, 8)), "along dim 1"),
    "a product of what is computed": (
        of_product(lambda a: a * 2, lambda _: 1), (P(None, "x"), *TWO), TWO,
        ((32, 64), (64, 8), (32, 8)), "before the sum"),
    "a product that is read again": (
        of_product(same, lambda p: p[:8]), (P(None, "x"), *TWO), TWO,
        ((32, 64), (64, 8), (32, 8)), "before the sum"),
    "a gathered value that is returned": (
        gathered_product(same), (P("x"), P()), TWO, ((32, 64), (64, 32)), "read by others too"),
    "a product of what is gathered in groups": (
        gathered_product(same, **TURNED), (P("x"), P()), TWO, ((32, 64), (64, 32)), "groups"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("case", NO_KERNELS.values(), ids=NO_KERNELS)
def test_what_kernels_do_not_do_is_refused_at_once(case, dtype):
    step, specs, outs, shapes, said = case
    args = [random(*shape, seed=i).astype(dtype) for i, shape in enumerate(shapes)]
    mesh = steps.mesh_of(x=4)
    program = mw.SpmdProgram.from_shard_map(step, mesh, specs, outs, *args, check_vma=False)
    s = mw.Schedule(program)
    names = ("mul", "slice", "transpose", "dot_general", "reduce_scatter", "sub", "all_gather")
    values = [h for name in names for h in s.find(name)]
    said = said if dtype == np.float32 else f"is complex|{said}"
    with pytest.raises(mw.IllegalMove, match=said):
        s.fuse(values, kernel="pallas")
