"""Programs on eight real devices: what goes in, what comes out, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwise import _jax
from meshwise.errors import MeshError
from meshwise.run.execute import Executable
from meshwise.run.uneven import UnevenArray
from tests.run.executables import (
    W,
    X,
    check_matmul,
    doubled,
    make_mesh,
    matmul,
    program,
    shape_of,
    sharding,
)


def test_arrays_from_the_host_come_back_on_the_users_mesh(mesh):
    run = matmul(mesh)
    outs = run([X, W])
    check_matmul(outs, mesh)
    placed = [
        jax.device_put(X, outs[1].sharding),
        jax.device_put(W, NamedSharding(mesh, P("model"))),
    ]
    check_matmul(run(placed), mesh)
    check_matmul(run([outs[1] - 1, W]), mesh)
    if AxisType.Explicit in mesh.axis_types:
        assert str(jax.typeof(outs[1])) == "float32[4@data,8@model]"


def test_the_mesh_in_context_changes_nothing(mesh, monkeypatch):
    compiled = []
    call_of = _jax.caller

    def counted(executable):
        compiled.append(1)
        return call_of(executable)

    monkeypatch.setattr(_jax, "caller", counted)
    run = matmul(mesh)
    others = [mesh, make_mesh(a=8), make_mesh(AxisType.Explicit, a=4, b=2)]
    for context in others:
        with jax.set_mesh(context):
            check_matmul(run([X, W]), mesh)
            check_matmul(run(list(map(jnp.asarray, (X, W)))), mesh)
    check_matmul(run([X, W]), mesh)
    assert len(compiled) == 1


def test_arrays_in_place_are_not_looked_at(mesh, monkeypatch):
    run = matmul(mesh)
    placed = [jax.device_put(a, s) for a, s in zip((X, W), run.in_shardings, strict=True)]
    for name in ("_placed", "_padded"):
        monkeypatch.setattr(Executable, name, None)
    check_matmul(run(placed), mesh)


def test_arrays_elsewhere_on_the_same_devices_are_moved(mesh):
    run = matmul(mesh)
    elsewhere = make_mesh(b=4, a=2)
    for spec in (P(), P("a"), P(None, ("a", "b")), P("b", "a")):
        moved = jax.device_put(X, NamedSharding(elsewhere, spec))
        check_matmul(run([moved, jnp.asarray(W)]), mesh)
        assert not moved.is_deleted()


def test_arrays_on_other_devices_are_refused():
    mesh = make_mesh(devices=jax.devices()[:4], data=1, model=4)
    ins = [(shape_of(4), sharding("model"))] * 3
    run = Executable(
        program(lambda a, b, c: [a + b + c], mesh, ins, ins[:1]),
        mesh,
        name="step",
        arg_names=["args[0]", "args[1]['w']", "kwargs['c']"],
    )
    x = np.ones(4, np.float32)
    args = [
        jax.device_put(x, jax.devices()[0]),
        jax.device_put(x, NamedSharding(mesh, P("model"))),
        jax.device_put(x, NamedSharding(make_mesh(), P("model"))),
    ]
    wanted = (
        "Arguments of step are on other devices than its mesh"
        " (cpu devices 0, 1, 2, 3):\n"
        "  - args[0] is on cpu device 0\n"
        "  - kwargs['c'] is on cpu devices 0, 1, 2, 3, 4, 5, 6, 7\n"
        "An array that was put on devices on purpose is not moved to others.\n"
        "Move it with jax.device_put(x, NamedSharding(mesh, spec)), or make the mesh of the"
        " devices it is on."
    )
    with pytest.raises(MeshError) as caught:
        run(args)
    assert str(caught.value) == wanted
    uneven = doubled(mesh, 3)
    with pytest.raises(MeshError, match="argument 0 is on"):
        uneven([jax.device_put(x[:3], jax.devices()[7])])


def test_uncommitted_arrays_go_to_a_mesh_of_any_devices():
    mesh = make_mesh(devices=jax.devices()[4:], data=2, model=2)
    ins = [(shape_of(4), sharding("data"))]
    run = Executable(program(lambda a: [a + 1], mesh, ins, ins), mesh)
    (out,) = run([jnp.ones(4)])
    assert out.sharding.device_set == set(jax.devices()[4:])
    np.testing.assert_array_equal(out, 2)
    (u, total) = doubled(mesh, 3, axes="data")([jnp.ones(3)])
    assert u.sharding.device_set == set(jax.devices()[4:])
    assert total == 3


def test_jax_refuses_the_rest():
    run = matmul(make_mesh())
    with pytest.raises(TypeError, match="called with float32"):
        run([X[:2], W])
    with pytest.raises(TypeError, match="not a valid JAX type"):
        run(["no array", W])


def test_a_part_of_an_axis(mesh):
    place = sharding("model.1", "model.0")
    run = Executable(
        program(lambda x: [x + 1], mesh, [(shape_of(4, 8), place)], [(shape_of(4, 8), place)]), mesh
    )
    (out,) = run([X])
    assert out.sharding.spec == P("model.1", "model.0")
    assert out.sharding.mesh.axis_names == ("data", "model.0", "model.1")
    assert out.sharding.shard_shape(out.shape) == (2, 4)
    np.testing.assert_array_equal(out, X + 1)
    np.testing.assert_array_equal(run([out])[0], X + 2)


@pytest.mark.parametrize("size", [1, 3, 7, 9])
def test_uneven_results_and_arguments(mesh, size):
    run = doubled(mesh, size)
    x = np.arange(size, dtype=np.float32)
    u, total = run([x])
    assert isinstance(u, UnevenArray)
    assert u.sharding == NamedSharding(mesh, P("model"))
    assert u.shape == (size,)
    np.testing.assert_array_equal(u, x * 2)
    assert total == x.sum()
    for arg in (u, u.value, jnp.asarray(x * 2), jax.device_put(u.value, NamedSharding(mesh, P()))):
        v, total = run([arg])
        np.testing.assert_array_equal(v, x * 4)
        assert total == 2 * x.sum()


def test_uneven_arrays_pass_through_untouched(mesh, monkeypatch):
    run = doubled(mesh, 7)
    u, _ = run([np.ones(7, np.float32)])
    monkeypatch.setattr("meshwise.run.execute.pad_array", None)
    monkeypatch.setattr(UnevenArray, "value", None)
    v, total = run([u])
    assert total == 14
    assert v.padded.sharding == u.padded.sharding


def test_uneven_arrays_of_another_layout(mesh):
    by_model, by_data = doubled(mesh, 7), doubled(mesh, 7, axes="data")
    u, _ = by_data([np.arange(7, dtype=np.float32)])
    assert u.padded.shape == (8,)
    v, total = by_model([u])
    assert total == 42
    assert v.sharding == NamedSharding(mesh, P("model"))
    even = Executable(
        program(
            lambda x: [x + 1], mesh, [(shape_of(7), sharding(""))], [(shape_of(7), sharding(""))]
        ),
        mesh,
    )
    np.testing.assert_array_equal(even([v])[0], np.arange(7) * 4 + 1)


def test_two_uneven_dims_beside_an_even_one(mesh):
    place = sharding("data", "", "model")
    types = [(shape_of(3, 2, 5, dtype=jnp.int32), place)]
    run = Executable(program(lambda x: [x * 2], mesh, types, types), mesh)
    x = np.arange(30, dtype=np.int32).reshape(3, 2, 5)
    (u,) = run([x])
    assert u.padded.shape == (4, 2, 8)
    np.testing.assert_array_equal(u, x * 2)
    np.testing.assert_array_equal(run([jnp.asarray(x)])[0], x * 2)


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.bfloat16, jnp.uint8, jnp.complex64, jnp.int8])
def test_uneven_arrays_of_other_types(dtype):
    mesh = make_mesh()
    types = [(shape_of(5, dtype=dtype), sharding("model"))]
    run = Executable(program(lambda x: [x], mesh, types, types), mesh)
    x = jnp.arange(5).astype(dtype)
    for arg in (x, np.asarray(x), *run([x])):
        (u,) = run([arg])
        assert u.dtype == dtype
        assert (np.asarray(u) == np.asarray(x)).all()


@pytest.mark.parametrize("count", [5, 8])
def test_typed_keys(mesh, count):
    keys = jax.random.split(jax.random.key(1), count)
    one = jax.random.key(7)
    types = [(shape_of(count, dtype=keys.dtype), sharding("model"))]
    scalar = [(shape_of(dtype=keys.dtype), sharding())]
    run = Executable(
        program(lambda k, o: [k, jax.random.split(o)[1]], mesh, types + scalar, types + scalar),
        mesh,
    )
    first, split = run([keys, one])
    second, _ = run([first, split])
    for out in (first, second):
        data = jax.random.key_data(out.value if isinstance(out, UnevenArray) else out)
        np.testing.assert_array_equal(data, jax.random.key_data(keys))
    assert split.dtype == one.dtype
    np.testing.assert_array_equal(
        jax.random.key_data(split), jax.random.key_data(jax.random.split(one)[1])
    )


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11, 2),
    reason="XLA of jaxlib 0.11.2 crashes on a shard_map of an empty array beside another",
)
def test_scalars_empty_arrays_and_float0(mesh):
    no_tangent = np.zeros((8,), jax.dtypes.float0)
    ins = [
        (shape_of(dtype=jnp.int32), sharding()),
        (shape_of(0, 3), sharding("model", "")),
        (shape_of(8, dtype=jax.dtypes.float0), sharding("model")),
    ]
    outs = [*ins[:2], (shape_of(), sharding())]
    run = Executable(program(lambda i, e, z: [i + 1, e * 2, e.sum()], mesh, ins, outs), mesh)
    for number in (3, np.int32(3), jnp.int32(3)):
        i, e, total = run([number, np.zeros((0, 3), np.float32), no_tangent])
        assert (i, total) == (4, 0)
        assert e.shape == (0, 3)
        assert isinstance(e, jax.Array)


def test_nothing_in_or_out(mesh):
    ones = [(shape_of(8), sharding("model"))]
    (out,) = Executable(program(lambda: [jnp.ones(2)], mesh, [], ones), mesh)([])
    np.testing.assert_array_equal(out, np.ones(8))
    assert Executable(program(lambda x: [], mesh, ones, []), mesh)([np.ones(8, np.float32)]) == []


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_device(kind):
    mesh = make_mesh(kind, devices=jax.devices()[2:3], data=1, model=1)
    types = [(shape_of(3), sharding(""))]
    run = Executable(program(lambda x: [x + 1], mesh, types, types), mesh)
    (out,) = run([np.zeros(3, np.float32)])
    assert out.sharding == NamedSharding(mesh, P())
    (again,) = run([out])
    np.testing.assert_array_equal(again, 2)
    with pytest.raises(MeshError, match="argument 0 is on"):
        run([jax.device_put(np.zeros(3, np.float32), jax.devices()[0])])
    np.testing.assert_array_equal(jax.jit(run.as_function())([np.ones(3, np.float32)])[0], 2)


def test_donation():
    mesh = make_mesh()
    types = [(shape_of(8), sharding("model"))] * 2
    run = Executable(program(lambda a, b: [a + b], mesh, types, types[:1]), mesh, donated=(0,))
    a, b = (jax.device_put(np.ones(8, np.float32), s) for s in run.in_shardings)
    run([a, b])
    assert a.is_deleted()
    assert not b.is_deleted()
    uneven = doubled(mesh, 7, donated=(0,))
    u, _ = uneven([np.ones(7, np.float32)])
    kept = jnp.ones(7)
    v, _ = uneven([u])
    uneven([kept])
    assert u.is_deleted()
    assert not v.is_deleted()
    assert not kept.is_deleted()


def test_what_jax_says_of_the_program(mesh):
    run = matmul(mesh, name="layer")
    text = run.lower().as_text()
    assert "module @jit_layer" in text
    assert text.count("stablehlo.all_reduce") == 1
    compiled = run.compile()
    assert compiled is run.compile()
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().argument_size_in_bytes == 4 * (2 * 2 + 2 * 4)
    run([X, W])
