"""Meshes of every kind: where they are named, how their axes are typed, which devices they have."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.core import ShardingTypeError
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def layer(x, w):
    return jnp.tanh(x @ w).sum(0)


def make(kind, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes))


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return make(request.param, x=2, y=4)


@pytest.fixture(scope="module")
def explicit():
    return make(AxisType.Explicit, x=2, y=4)


def on(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def test_where_the_mesh_is_named(mesh):
    x_spec, w_spec, out_spec = P("x"), P(None, "y"), P("y")

    def named(spec):
        return NamedSharding(mesh, spec)

    by_argument = mw.jit(layer, mesh=mesh, in_shardings=(x_spec, w_spec))
    by_inputs = mw.jit(layer, in_shardings=(named(x_spec), named(w_spec)))
    by_output = mw.jit(layer, out_shardings=named(out_spec))
    by_both = mw.jit(layer, mesh=mesh, in_shardings=(named(x_spec), w_spec))
    outs = [step(X, W) for step in (by_argument, by_inputs, by_output, by_both)]
    in_context = mw.jit(layer, in_shardings=(x_spec, w_spec))
    with jax.set_mesh(mesh):
        outs += [in_context(X, W), in_context(X, W)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            outs.append(in_context(X, W))
    outs.append(mw.jit(layer)(on(mesh, X, "x"), on(mesh, W, None, "y")))
    for out in outs:
        close(out, layer(X, W))
        assert out.sharding == NamedSharding(mesh, out_spec)
    assert jax.typeof(outs[0]).sharding.mesh.axis_types == mesh.axis_types


def test_the_mesh_in_context_is_part_of_the_call():
    step = mw.jit(lambda x: x * 2, in_shardings=P("x"))
    meshes = [
        make(AxisType.Auto, x=2, y=4),
        make(AxisType.Explicit, x=2, y=4),
        Mesh(np.array(jax.devices()[4:]), ("x",)),
    ]
    for mesh in meshes * 3:  # by Python, then by C++
        with jax.set_mesh(mesh):
            # By its type an array of the host is replicated over Explicit axes, so is the result.
            assert step(X).sharding == jax.jit(lambda x: x * 2, in_shardings=P("x"))(X).sharding
    with pytest.raises(mw.MeshError, match="called without a mesh"):
        step(X)


def test_the_functions_own_mesh_wins_over_the_context(mesh2x4, mesh8):
    step = mw.jit(lambda x: x * 2, mesh=mesh2x4, in_shardings=P("x"))
    named = mw.jit(lambda x: x * 2, in_shardings=NamedSharding(mesh2x4, P("x")))
    for _ in range(2):
        with jax.set_mesh(mesh8):
            assert step(X).sharding == NamedSharding(mesh2x4, P("x"))
            assert named(X).sharding == NamedSharding(mesh2x4, P("x"))


def test_committed_arguments_keep_their_place(mesh):
    step = mw.jit(lambda x, w: (x * 2, w), mesh=mesh)
    for spec in (P("x"), P(None, "y"), P(("y", "x")), P()):
        program = step.partition(on(mesh, X[:, :8].repeat(2, 0), *spec), W)
        for placement in (program.in_shardings[0], program.out_shardings[0]):
            assert placement.is_equivalent_to(NamedSharding(mesh, spec), 2)


CLOSED_OVER = {
    "whole": P(),
    "by columns": P(None, "y"),
    "by rows": P("x"),
    "both": P(("x", "y")),
}


@pytest.mark.parametrize("spec", CLOSED_OVER.values(), ids=CLOSED_OVER)
def test_functions_that_close_over_arrays_on_a_mesh(mesh, spec):
    held = on(mesh, W, *spec)

    def fn(x):
        return layer(x, held) + held[0]

    wanted = layer(X, W) + W[0]
    step = mw.jit(fn, mesh=mesh, in_shardings=P("x"))
    for _ in range(2):
        close(step(X), wanted)
    program = step.partition(X)
    assert program.in_shardings[0].spec == P("x")
    close(program(X), wanted)
    close(program.simulate(X), wanted)
    # What is closed over is an argument; of rows that are cut there may be a table of positions.
    assert all(np.ndim(const) < 2 for const in program.jaxpr.consts)


def test_closed_over_arrays_in_calls_traces_and_on_other_meshes(mesh):
    held, other = on(mesh, W, None, "y"), on(make(AxisType.Explicit, z=8), W, "z")
    key = on(mesh, jax.random.key(1))
    wanted = layer(X, W) + W[0]

    def fn(x):
        return layer(x, held) + held[0]

    close(mw.jit(jax.jit(fn), mesh=mesh)(X), wanted)
    close(mw.jit(lambda x: layer(x, other) + W[0], mesh=mesh)(X), wanted)
    with jax.set_mesh(mesh):
        close(jax.jit(mw.jit(fn))(X), wanted)
        close(
            jax.grad(lambda x: mw.jit(fn, mesh=mesh)(x).sum())(X),
            jax.grad(lambda x: (layer(x, W) + W[0]).sum())(X),
        )
    drawn = mw.jit(lambda: jax.random.bits(key, (4,)), mesh=mesh)
    for _ in range(2):
        np.testing.assert_array_equal(drawn(), jax.random.bits(jax.random.key(1), (4,)))


def test_functions_in_the_words_of_explicit_meshes(explicit):
    def fn(x, w):
        y = jnp.einsum("ij,jk->ik", x, w, out_sharding=P("x", "y"))
        y = jax.sharding.reshard(y, P("y"))
        z = lax.dot_general(x, w, (((1,), (0,)), ((), ())), out_sharding=P(None, "y"))
        assert jax.typeof(y).sharding.spec[0] == "y"
        return y + 1, z

    arrays = on(explicit, X, "x"), on(explicit, W, None, "y")
    program = mw.jit(fn, mesh=explicit).partition(*arrays)
    assert [s.spec for s in program.in_shardings] == [P("x"), P(None, "y")]
    assert [s.spec for s in program.out_shardings] == [P("y", None), P(None, "y")]
    with jax.set_mesh(explicit):
        for got, wanted in zip(program(*arrays), (X @ W + 1, X @ W), strict=True):
            close(got, wanted)
        for got, wanted in zip(mw.jit(fn)(*arrays), jax.jit(fn)(*arrays), strict=True):
            close(got, wanted)
        loop = mw.jit(
            lambda x: lax.fori_loop(0, 3, lambda _, c: jax.sharding.reshard(c, P("x")), x)
        )
        close(loop(on(explicit, X, "x")), X)


def test_explicit_programs_that_jax_refuses(explicit):
    """A sum over a sharded dim is ambiguous to JAX, not to completion, which mesh= leaves it to."""
    x, w = on(explicit, X, None, "y"), on(explicit, W, "x")
    for step in (jax.jit(jnp.matmul), mw.jit(jnp.matmul)):
        # The words of jax 0.10, or those of 0.11.
        with pytest.raises(ShardingTypeError, match=r"consistent sharding|ambiguous"):
            step(x, w)
    close(mw.jit(jnp.matmul, mesh=explicit)(x, w), X @ W)


def test_results_in_a_trace_are_typed_by_where_they_lie(explicit):
    step = mw.jit(layer, mesh=explicit, in_shardings=(P("x"), P(None, "y")))
    x, w = on(explicit, X, "x"), on(explicit, W, None, "y")
    seen = []

    def outer(x, w):
        out = step(x * 2, w)
        seen.append(str(jax.typeof(out)))
        return out + w.sum(0)

    def loss(x, w):
        return step(x, w).sum()

    wanted = jax.grad(lambda x, w: layer(x, w).sum(), (0, 1))(X, W)
    close(jax.jit(outer)(x, w), layer(X * 2, W) + W.sum(0))
    with jax.set_mesh(explicit):
        close(jax.jit(outer)(x, w), layer(X * 2, W) + W.sum(0))
        for grad in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
            got = grad(x, w)
            assert [str(jax.typeof(g)) for g in got] == ["float32[4@x,8]", "float32[8,4@y]"]
            for a, b in zip(got, wanted, strict=True):
                close(a, b)
        stacked = jax.sharding.reshard(jnp.stack([x] * 4), P("y"))
        mapped = jax.vmap(lambda x: x * 2 + mw.jit(lambda y: y * 3, mesh=explicit)(x))(stacked)
        close(mapped, np.stack([X * 5] * 4))
    assert seen == ["float32[4@y]", "float32[4@y]"]


def test_axes_of_size_one():
    mesh = make(AxisType.Auto, a=1, x=8, b=1)
    step = mw.jit(layer, mesh=mesh, in_shardings=(P("a"), P(("b", "x"))), out_shardings=P("a"))
    out = step(X, W)
    close(out, layer(X, W))
    assert out.sharding.spec == P("a")
    assert step.partition(X, W).in_shardings[1].spec == P(("b", "x"))
    placed = on(mesh, X, "a", "b")
    same = mw.jit(lambda x: x * 2, mesh=mesh, in_shardings=P("a", "b"), out_shardings=P("a", "b"))
    for _ in range(3):
        placed = same(placed)
        assert placed.sharding == NamedSharding(mesh, P("a", "b"))
    assert mw.jit(lambda x: x, mesh=mesh, in_shardings=P())(placed).sharding.num_devices == 8


def test_one_device(mesh8):
    device = jax.devices()[3]
    mesh = Mesh(np.array([device]), ("x",))
    step = mw.jit(layer, mesh=mesh, in_shardings=(P("x"), None))
    for args in ((X, W), (X, W), jax.device_put((X, W), device)):
        out = step(*args)
        close(out, layer(X, W))
        assert out.devices() == {device}
    assert not step.partition(X, W).collectives


def test_a_part_of_the_devices():
    devices = jax.devices()[2:6]
    mesh = Mesh(np.array(devices).reshape(2, 2), ("x", "y"))
    step = mw.jit(layer, mesh=mesh, in_shardings=(P("x"), P(None, "y")))
    other = mw.jit(layer, mesh=Mesh(np.array(jax.devices()[:2]), ("x",)), in_shardings=P("x"))
    for _ in range(2):
        out = step(X, W)
        close(out, layer(X, W))
        assert out.devices() == set(devices)
        assert other(X, W).devices() == set(jax.devices()[:2])


def test_devices_in_another_order(mesh2x4):
    mesh = Mesh(np.array(jax.devices())[[3, 1, 0, 2, 7, 6, 5, 4]].reshape(2, 4), ("x", "y"))
    step = mw.jit(
        lambda x: (x * 2, x[::-1]),
        mesh=mesh,
        in_shardings=P("x", "y"),
        out_shardings=(P("y", "x"), P("x")),
    )
    placed = on(mesh, X, "x", "y")
    for arg in (X, placed, placed):
        twice, turned = step(arg)
        np.testing.assert_array_equal(twice, X * 2)
        np.testing.assert_array_equal(turned, X[::-1])
        assert twice.sharding == NamedSharding(mesh, P("y", "x"))
    loose = mw.jit(lambda x: x + 1, mesh=mesh)
    np.testing.assert_array_equal(loose(on(mesh2x4, X, "y")), X + 1)


def test_arguments_on_two_meshes_of_the_same_devices(mesh2x4, mesh8):
    step = mw.jit(layer, mesh=mesh2x4, in_shardings=(None, P(None, "y")))
    for _ in range(2):
        close(step(on(mesh8, X, None, "x"), on(mesh2x4, W, None, "y")), layer(X, W))


def test_an_axis_may_be_called_what_a_part_of_another_would_be():
    mesh = make(AxisType.Auto, **{"m": 4, "m.0": 2})
    shardings = P("m"), P("m.0")
    close(mw.jit(layer, mesh=mesh, in_shardings=shardings)(X, W), layer(X, W))


def test_axes_that_the_function_names_are_of_the_mesh_in_context():
    """As under `jax.jit`, which leaves it in context, wherever the arguments lie."""

    def fn(x):
        seen.append(jax.sharding.get_abstract_mesh().axis_names)
        return x + lax.with_sharding_constraint(jnp.ones((8, 8)), P("s"))

    here, around = make(AxisType.Auto, x=8), make(AxisType.Auto, s=8)
    seen = []
    with jax.set_mesh(around):
        found = mw.jit(fn, in_shardings=NamedSharding(here, P("x")))(np.ones((8, 8)))
    close(found, np.full((8, 8), 2))
    assert {*seen} == {("s",)}


POD = AbstractMesh((64, 8), ("data", "model"))
LARGE = jax.ShapeDtypeStruct((4096, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")


def half(*axes):
    return Mesh(np.array(jax.devices()[4:]).reshape([4] + [1] * (len(axes) - 1)), axes)


def grouped(x):
    """A gradient that JAX knows over no mesh alone."""
    kernel = jnp.ones((2, 1, 3))
    return jax.grad(
        lambda x: lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=2).sum()
    )(x)


def product(x, w):
    return lax.with_sharding_constraint(x, P("data")) @ w


def pod(fn, *args, dim=0):
    specs = P(*[None] * dim, "data"), *[None] * (len(args) - 1)
    return mw.jit(fn, mesh=POD, in_shardings=specs).partition(*args)


FOR_OTHER_MESHES = {
    "partitioned": lambda: pod(product, *LARGE).wire_bytes,
    "over no mesh": lambda: pod(grouped, jax.ShapeDtypeStruct((64, 2, 8), "float32")).wire_bytes,
    "by hand": lambda: (
        pod(
            jax.shard_map(
                lambda x: lax.psum(x, "data"), mesh=POD, in_specs=P("data"), out_specs=P()
            ),
            LARGE[0],
        ).wire_bytes
    ),
    "summed": lambda: pod(jnp.matmul, *LARGE, dim=1).explain(),
    "lowered": lambda: (
        mw.jit(product, mesh=POD, in_shardings=(P("data"), None))
        .trace(*LARGE)
        .lower(lowering_platforms=("tpu",))
        .as_text()
    ),
    "planned": lambda: mw.plan(product, *LARGE, mesh=POD).best.seconds,
    "called": lambda: mw.jit(layer, mesh=half("x"), in_shardings=(P("x"), None))(X, W),
    "differentiated": lambda: jax.jvp(
        mw.jit(layer, mesh=half("x"), in_shardings=(P("x"), None)), (X, W), (X, W)
    )[1],
    "gradients": lambda: jax.vjp(mw.jit(layer, mesh=half("x")), on(half("x"), X, "x"), W)[1](
        on(half("x"), W[0])
    )[0],
    "arguments there": lambda: mw.jit(layer, mesh=half("x"))(on(half("x"), X, "x"), W),
    "packed": lambda: (
        mw.pipeline_value_and_grad(
            lambda p, b: (mw.stage_boundary(mw.stage_boundary(mw.stage_boundary(b @ p)))).mean(),
            axis="x",
            microbatches=2,
        )
        .pack(W, X, half("x"))
        .buffers["float32"]
    ),
}


@pytest.mark.parametrize("run", FOR_OTHER_MESHES.values(), ids=FOR_OTHER_MESHES)
def test_what_is_for_a_mesh_of_another_size_than_the_one_in_context(run, mesh):
    wanted = run()
    jax.clear_caches()
    with jax.set_mesh(mesh):
        found = run()
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            again = run()
    for each in (found, again):
        np.testing.assert_array_equal(each, wanted)
        assert getattr(each, "sharding", None) == getattr(wanted, "sharding", None)
