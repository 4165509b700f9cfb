"""What `partition` gives, with and without devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.hardware import CPU, GENERIC, H100
from meshwise.cost.links import Links
from meshwise.cost.timeline import timeline

X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
AUTO = (AxisType.Auto,) * 2


def layer(x, w, *, scale=1.0):
    return {"sum": jnp.tanh(x @ w).sum(0) * scale, "x": x}


def shape(*dims, dtype=jnp.float32, **options):
    return jax.ShapeDtypeStruct(dims, dtype, **options)


def check(got, **options):
    wanted = layer(X, W, **options)
    for name in ("sum", "x"):
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5)


@pytest.fixture(scope="module")
def step(mesh2x4):
    return mw.jit(layer, mesh=mesh2x4, in_shardings=(P("x"), P(None, "y")))


@pytest.fixture(scope="module")
def program(step):
    return step.partition(X, W)


def test_the_surface_of_a_program(program, mesh2x4):
    assert isinstance(program, mw.SpmdProgram)
    x, w = program.in_shardings
    assert (x, w) == (NamedSharding(mesh2x4, P("x")), NamedSharding(mesh2x4, P(None, "y")))
    assert program.out_shardings == {
        "sum": NamedSharding(mesh2x4, P("y")),
        "x": NamedSharding(mesh2x4, P("x")),
    }
    assert {a for c in program.collectives for a in c.axes} <= set(program.mesh.axis_names)
    assert program.mesh.devices.reshape(2, 4).tolist() == mesh2x4.devices.tolist()
    assert [a.shape for a in program.jaxpr.in_avals] == [(2, 8), (8, 1)]
    assert str(program) == str(program.jaxpr)
    assert "of layer for 8 devices, 1 collective, 0.0 KiB sent by each>" in repr(program)
    (reduction,) = program.collectives
    assert (reduction.kind, reduction.axes) == ("all_reduce", ("x",))
    assert (reduction.shape, reduction.dtype, reduction.count) == ((1,), np.float32, 1)
    assert reduction.wire_bytes == program.wire_bytes == 4
    assert reduction.source.startswith(__file__)
    assert "all_reduce" in program.explain()
    check(program.simulate(X, W))
    check(program(X, W))
    assert program.compile().cost_analysis()["flops"] > 0
    assert program.compile() is program.compile()


def test_a_timeline_goes_by_the_figures_of_the_plan(mesh2x4):
    """Unless others are given; overlap or not, for devices or without."""
    planned = mw.jit(layer, mesh=mesh2x4.abstract_mesh, hardware=H100).partition(X, W)
    region = mw.SpmdProgram.from_shard_map(jnp.sin, planned.user_mesh, P("x"), P("x"), X)
    assert [p.timeline().machine for p in (planned, region)] == [H100.name, GENERIC.name]
    for figures in (CPU, Links(CPU)):
        serial = planned.timeline(figures, overlaps=False)
        sizes = planned.per_device.mesh.axis_size
        assert serial == timeline(planned.jaxpr, sizes, CPU, overlaps=False)
    with pytest.raises(mw.ArgumentError, match=r"figures that are none: hardware='fast'\n"):
        planned.timeline("fast")


def test_types_stand_for_arguments(step, program, mesh2x4):
    of_types = step.partition(shape(4, 8), shape(8, 4))
    assert str(of_types) == str(program)
    placed = mw.jit(layer).partition(
        shape(4, 8, sharding=NamedSharding(mesh2x4, P("x"))),
        jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh2x4, P(None, "y"))),
    )
    assert str(placed) == str(program)
    check(of_types(X, W))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_devices(program, kind):
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    step = mw.jit(layer, mesh=mesh, in_shardings=(P("x"), P(None, "y")))
    planned = step.partition(shape(4, 8), shape(8, 4))
    assert str(planned) == str(program)
    assert planned.collectives == program.collectives
    assert planned.in_shardings[0] == NamedSharding(mesh, P("x"))
    assert planned.mesh.axis_names == program.mesh.axis_names
    assert planned.mesh.axis_sizes == program.mesh.axis_sizes
    assert isinstance(planned.mesh, AbstractMesh)
    check(planned.simulate(X, W))
    with jax.sharding.use_abstract_mesh(mesh):
        named = mw.jit(layer, in_shardings=(P("x"), P(None, "y")))
        x = shape(4, 8, sharding=NamedSharding(mesh, P("x", None)))
        w = shape(8, 4, sharding=NamedSharding(mesh, P(None, "y")))
        assert str(named.partition(x, w)) == str(program)
    assert jax.eval_shape(step, X, W)["sum"].shape == (4,)
    around = mw.jit(lambda x, w: step(x, w)["sum"] + 1, mesh=mesh)
    assert around.partition(X, W).in_shardings[1] == NamedSharding(mesh, P(None, "y"))
    differentiated = mw.jit(jax.grad(lambda x, w: step(x, w)["sum"].sum()), mesh=mesh)
    assert differentiated.partition(X, W).wire_bytes > 0


def test_keyword_arguments_in_a_program(mesh2x4):
    step = mw.jit(layer, mesh=mesh2x4, in_shardings=P("x"))
    program = step.partition(shape(4, 8), w=shape(8, 4), scale=shape())
    args, kwargs = program.in_shardings
    assert [s.spec for s in args] == [P("x")]
    assert sorted(kwargs) == ["scale", "w"]
    check(program(X, scale=np.float32(2), w=W), scale=2.0)
    check(program.simulate(X, w=W, scale=np.float32(2)), scale=2.0)


def test_programs_are_kept(mesh8):
    traced = []

    @mw.jit(mesh=mesh8)
    def fn(x):
        traced.append(x.shape)
        return x

    programs = [fn.partition(X), fn.partition(X + 1), fn.partition(X[:, :4]), fn.partition(X)]
    assert traced == [(4, 8), (4, 4)]
    assert programs[0] is programs[1] is programs[3]
    fn(X)
    assert len(traced) == 2


def test_a_program_outlives_its_function(mesh8):
    def fn(x):
        return x * factor

    factor = 2
    program = mw.jit(fn, mesh=mesh8).partition(X)
    factor = 3
    np.testing.assert_array_equal(program(X), X * 2)


def test_a_program_of_one_device_has_the_functions_primitives():
    mesh = jax.make_mesh((1, 1), ("x", "y"), AUTO, devices=jax.devices()[:1])

    def fn(x, w):
        return jax.nn.softmax(x @ w, axis=-1), jnp.sort(x, axis=0), x[:, ::2].T

    program = mw.jit(fn, mesh=mesh, in_shardings=P("x", "y")).partition(X, W)
    wanted = jax.make_jaxpr(fn)(X, W)
    assert primitives(program.jaxpr.jaxpr) == primitives(wanted.jaxpr)
    assert program.wire_bytes == 0


def primitives(jaxpr):
    names = []
    for eqn in jaxpr.eqns:
        body = next((v for k, v in eqn.params.items() if k in ("jaxpr", "call_jaxpr")), None)
        is_call = eqn.primitive.name in ("jit", "pjit", "custom_jvp_call")
        names += primitives(body.jaxpr) if is_call else [eqn.primitive.name]
    return names


def test_a_strict_program_has_no_operator_computed_whole(mesh8):
    step = mw.jit(lambda x: jnp.tanh(x).sum(), mesh=mesh8, strict=True, in_shardings=P(None, "x"))
    np.testing.assert_allclose(step(X), np.tanh(X).sum(), rtol=1e-5)


def test_completion_as_gspmd_leaves_it(mesh2x4):
    for completion in ("gspmd", "improved"):
        step = mw.jit(layer, mesh=mesh2x4, in_shardings=P("x"), completion=completion)
        check(step(X, W))
