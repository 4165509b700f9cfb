"""What is compiled as replicas of a program of local arrays, and what JAX compiles as its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters import mlir
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import lowering
from meshwise._jax.replicas import KEEPS_WHAT_REPLICAS_RETURN

as_replicas = pytest.mark.skipif(
    not KEEPS_WHAT_REPLICAS_RETURN, reason="JAX cuts up what replicas return since 0.12"
)
X = np.arange(128, dtype=np.float32).reshape(16, 8) / 100


def every_collective(x):
    """Shifts, exchanges, sums, gathers, places, in a loop too."""

    def step(i, x):
        return jnp.cumsum(x, 0) / 16 + jnp.roll(x, i + 3, 0).T.reshape(x.shape)

    y = lax.fori_loop(0, 2, step, x)
    return jnp.roll(y, 3, 0), y.T @ y, lax.dynamic_slice_in_dim(y, y[0, 0].astype(int), 4), y.sum()


def partitioned(mesh, fn=every_collective, args=(X,), **options):
    return mw.jit(fn, mesh=mesh, in_shardings=P("x"), **options).partition(*args)


def is_partitioned(program):
    """Whether XLA's partitioner saw it."""
    return "num_partitions=" in program.compile().as_text()


@as_replicas
@pytest.mark.parametrize("shape", [{"x": 8}, {"x": 2, "y": 4}])
def test_values(shape):
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape))
    program = partitioned(mesh)
    text = program.compile().as_text()
    assert "replica-id" in text
    assert "partition-id" not in text
    for found, wanted in zip(program(X), every_collective(X), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@as_replicas
def test_results_are_jaxs_arrays():
    mesh = jax.make_mesh((8,), ("x",))
    step = mw.jit(lambda x, unread: (x * 2, 3.0), mesh=mesh, in_shardings=(P("x"), P()))
    unread = jnp.ones(3)
    for _ in range(3):  # the second call on comes from C++
        doubled, three = step(X, unread)
        np.testing.assert_array_equal(doubled, X * 2)
        assert doubled.sharding.spec == P("x")
        assert three.weak_type
    assert not is_partitioned(step.partition(X, unread))
    np.testing.assert_array_equal(jax.jit(jnp.negative)(doubled), X * -2)


@as_replicas
def test_donated_arguments_are_reused():
    mesh = jax.make_mesh((8,), ("x",))
    step = mw.jit(
        lambda x: x + 1, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0
    )
    x = jax.device_put(X, jax.NamedSharding(mesh, P("x")))
    program = step.partition(x)
    assert not is_partitioned(program)
    assert program.compile().memory_analysis().alias_size_in_bytes == X.nbytes // 8
    np.testing.assert_array_equal(step(x), X + 1)
    assert x.is_deleted()


def drawn(key, keys, x):
    """A key by itself and keys in shards, read and made."""
    first, second = jax.random.split(key)
    noise = jax.vmap(lambda k, row: row + jax.random.normal(k, row.shape))(keys, x)
    return noise + jax.random.uniform(first, x.shape), second, keys[::-1]


@as_replicas
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_arguments_and_results(impl):
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    key = jax.random.key(3, impl=impl)
    keys = jax.random.split(key, 16)
    ins, outs = (P(), P("y"), P("x", "y")), (P("x", "y"), P(), P("y"))
    step = mw.jit(drawn, mesh=mesh, in_shardings=ins, out_shardings=outs, donate_argnums=1)
    assert not is_partitioned(step.partition(key, keys, X))
    wanted = drawn(key, keys, X)
    for _ in range(3):  # the second call on comes from C++
        found = step(key, jax.random.clone(keys), X)
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
        for one, other, spec in zip(found[1:], wanted[1:], outs[1:], strict=True):
            assert one.sharding.spec == spec
            np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(other))


def hosts(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_what_calls_the_host_is_compiled_by_jax():
    program = partitioned(jax.make_mesh((8,), ("x",)), hosts)
    assert is_partitioned(program)
    np.testing.assert_allclose(program(X), np.sin(X), rtol=1e-6)


def test_unusable_donations_are_told():
    mesh = jax.make_mesh((8,), ("x",))
    step = mw.jit(lambda x: x.sum(0), mesh=mesh, in_shardings=P("x"), donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable: float32"):
        step.partition(X).compile()


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX shares its contexts itself")
def test_programs_share_contexts(monkeypatch):
    made = []

    def make(make=mlir.make_ir_context):
        made.append(make())
        return made[-1]

    monkeypatch.setattr(lowering, "_idle", [])
    monkeypatch.setattr(mlir, "make_ir_context", make)
    mesh = jax.make_mesh((8,), ("x",))
    for k in range(12):
        program = partitioned(mesh, lambda x, k=k: x.sum(0) + k)
        np.testing.assert_allclose(program(X), X.sum(0) + k, rtol=1e-6)
    assert len(made) == 2  # one for ten
    with lowering.mlir_context():  # nobody else has it meanwhile
        for k in range(2):
            partitioned(mesh, lambda x, k=k: x.max(0) + k).compile()
    assert len(made) == 3
    assert [uses for _, uses in lowering._idle] == [2, 3]
    with pytest.raises(KeyError), lowering.mlir_context():
        raise KeyError
    assert [uses for _, uses in lowering._idle] == [2]
