"""UnevenArray stands for its logical value, on Auto and Explicit meshes."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.errors import DeletedArrayError
from meshwise.run.uneven import UnevenArray

LOGICAL = np.arange(34, dtype=np.float32).reshape(17, 2) - 5


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((4, 2), ("x", "y"), (request.param,) * 2)


def uneven(logical, mesh, spec):
    """Padding filled with garbage."""
    logical = np.asarray(logical)
    sharding = NamedSharding(mesh, spec)
    shards = [
        np.prod([mesh.shape[a] for a in ((e,) if isinstance(e, str) else e or ())], dtype=int)
        for e in (*spec, *[None] * (logical.ndim - len(spec)))
    ]
    widths = [(0, -n % k) for n, k in zip(logical.shape, shards, strict=True)]
    fill = np.asarray(99).astype(logical.dtype)
    padded = np.pad(logical, widths, constant_values=fill)
    return UnevenArray(jax.device_put(padded, sharding), logical.shape)


@pytest.fixture
def array(mesh):
    """Sharded over both axes."""
    return uneven(LOGICAL, mesh, P("x", "y"))


def test_what_it_says_of_itself(array, mesh):
    assert array.shape == (17, 2)
    assert array.padded.shape == (20, 2)
    assert (array.dtype, array.ndim, array.size, array.nbytes) == (np.float32, 2, 34, 136)
    assert array.sharding == NamedSharding(mesh, P("x", "y"))
    assert array.is_fully_addressable
    assert not array.is_fully_replicated
    assert not array.weak_type
    assert array.aval.shape == (17, 2)
    assert jax.typeof(array).shape == (17, 2)
    assert len(array) == 17
    assert array.block_until_ready() is array
    assert jax.block_until_ready({"a": array})["a"] is array


def test_it_is_a_leaf(array):
    leaves, tree = jax.tree.flatten({"w": array})
    assert leaves == [array] or leaves[0] is array
    assert tree == jax.tree.structure({"w": 0})
    assert jax.tree.map(lambda a: a, {"w": array})["w"] is array
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)


def test_value_is_whole_only_where_it_must_be(array):
    value = array.value
    assert isinstance(value, jax.Array)
    np.testing.assert_array_equal(value, LOGICAL)
    assert value.sharding.spec in {P(None, "y"), P(None, ("y",))}
    assert value.sharding.device_set == array.padded.sharding.device_set


def test_numpy_takes_it(array):
    np.testing.assert_array_equal(np.asarray(array), LOGICAL)
    np.testing.assert_array_equal(array, LOGICAL)
    np.testing.assert_allclose(array, LOGICAL)
    assert np.asarray(array, np.float64).dtype == np.float64
    assert array.__array__(np.int32).dtype == np.int32
    copied = array.__array__(copy=True)
    copied[:] = 0
    np.testing.assert_array_equal(array, LOGICAL)
    with pytest.raises(ValueError, match="must copy"):
        array.__array__(np.int32, copy=False)
    assert np.sum(array) == LOGICAL.sum()
    np.testing.assert_array_equal(LOGICAL + array, LOGICAL * 2)
    np.testing.assert_array_equal(np.float32(3) * array, LOGICAL * 3)


FUNCTIONS = {
    "sum": jnp.sum,
    "sort": lambda a: jnp.sort(a, axis=0),
    "where": lambda a: jnp.where(a > 3, a, 0),
    "stack": lambda a: jnp.stack([a, a]),
    "reverse in jit": jax.jit(lambda a: a[::-1]),
    "cumsum in jit": jax.jit(lambda a: jnp.cumsum(a, axis=0)),
    "vmap": jax.vmap(lambda row: row @ row),
    "norm of a tree": lambda a: jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves({"a": a}))),
    "concatenate": lambda a: jnp.concatenate([a, a]),
    "lax": lambda a: jax.lax.reduce_max(a, (0,)),
    "asarray": jnp.asarray,
    "array": jnp.array,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax_takes_it(array, name):
    wanted = FUNCTIONS[name](jnp.asarray(LOGICAL))
    np.testing.assert_allclose(FUNCTIONS[name](array), wanted, rtol=1e-6)


def test_transformations_take_it(array, mesh):
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.grad(lambda a: (a**2).sum())(array), LOGICAL * 2)
        closed_over = jax.jit(lambda b: jnp.sin(array) + b)(array)
    np.testing.assert_allclose(closed_over, np.sin(LOGICAL) + LOGICAL, rtol=1e-6)
    assert jax.eval_shape(lambda a: a.T, array).shape == (2, 17)
    assert jax.make_jaxpr(lambda a: a + 1)(array).in_avals[0].shape == (17, 2)


def test_moving_it(array, mesh):
    np.testing.assert_array_equal(jax.device_get({"a": array})["a"], LOGICAL)
    on_one = jax.device_put(array, jax.devices()[3])
    assert on_one.sharding.device_set == {jax.devices()[3]}
    np.testing.assert_array_equal(on_one, LOGICAL)
    whole = jax.device_put(array, NamedSharding(mesh, P()))
    np.testing.assert_array_equal(whole, LOGICAL)


OPERATORS = {
    "unary": lambda a: [-a, +a, abs(a)],
    "with numbers": lambda a: [a + 1, 1 - a, a * 2, 2 / (a + 7), a // 2, a % 3, a**2, 2**a],
    "with itself": lambda a: [a + a, a - a, a * a, a / (a + 7.5), a @ a.T, divmod(a, a + 7.5)],
    "with arrays": lambda a: [a + LOGICAL, LOGICAL - a, jnp.asarray(LOGICAL) * a, LOGICAL.T @ a],
    "comparisons": lambda a: [a < 3, a <= 3, a == 3, a != 2, a > LOGICAL, a >= 3, 3 < a],
    "indexing": lambda a: [a[3], a[-1], a[2:5, 0], a[::-1], a[a[:, 0] > 3], a[np.array([16, 0])]],
    "methods": lambda a: [
        a.sum(),
        a.mean(0),
        a.max(),
        a.argmax(),
        a.astype(np.int32),
        a.T,
        a.std(),
    ],
    "shapes": lambda a: [a.reshape(2, 17), a.ravel(), a.flatten(), a.transpose(), a.squeeze()],
    "rows": lambda a: [list(a), a.tolist(), [row.sum() for row in a]],
    "bits": lambda a: [i & 3 for i in [a.astype(np.int32)]] + [~(a > 0), (a > 0) ^ (a > 3)],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_methods(mesh, name):
    # Along an Explicit axis JAX refuses some of these on its own arrays too.
    array = uneven(LOGICAL, mesh, P("x"))
    wanted = OPERATORS[name](LOGICAL)
    got = OPERATORS[name](array)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


def test_integer_operators(mesh):
    bits = np.arange(7) % 5
    array = uneven(bits, mesh, P(("x", "y")))
    np.testing.assert_array_equal(array & 3, bits & 3)
    np.testing.assert_array_equal(1 | array, 1 | bits)
    np.testing.assert_array_equal(array << 1, bits << 1)
    np.testing.assert_array_equal(16 >> array, 16 >> bits)
    np.testing.assert_array_equal(~array, ~bits)


def test_scalars_of_one_element(mesh):
    one = uneven(np.float32([2.5]), mesh, P("x"))
    assert one.item() == 2.5
    assert float(one[0]) == 2.5
    assert bool(one)
    assert f"{one[0]:.1f}" == "2.5"
    with pytest.raises((TypeError, ValueError)):
        bool(uneven(np.arange(3), mesh, P("x")))
    flag = uneven(np.array([True]), mesh, P("x"))
    assert flag


def test_updates_by_index(mesh):
    array = uneven(LOGICAL, mesh, P("x"))
    with jax.set_mesh(mesh):
        changed = array.at[16, 1].set(0)
    wanted = LOGICAL.copy()
    wanted[16, 1] = 0
    np.testing.assert_array_equal(changed, wanted)


def test_shards_have_only_their_rows(array):
    shards = {s.device: s for s in array.addressable_shards}
    assert len(shards) == 8
    assert sorted(s.data.shape for s in shards.values()) == [(2, 1)] * 2 + [(5, 1)] * 6
    for shard in shards.values():
        np.testing.assert_array_equal(shard.data, LOGICAL[shard.index])
        assert shard.data.devices() == {shard.device}
        assert shard.replica_id == 0


def test_shards_without_rows(mesh):
    array = uneven(np.arange(9), mesh, P(("x", "y")))  # two a device: three devices have none
    sizes = [s.data.shape[0] for s in array.addressable_shards]
    assert sizes == [2, 2, 2, 2, 1, 0, 0, 0]
    assert [s.index[0] for s in array.addressable_shards][-3:] == [slice(9, 9)] * 3


def test_copies_and_deletion(array):
    for other in (array.copy(), copy.copy(array), copy.deepcopy(array)):
        assert isinstance(other, UnevenArray)
        assert other.sharding == array.sharding
        other.delete()
        assert other.is_deleted()
        assert repr(other).startswith("UnevenArray(<deleted>, shape=(17, 2), dtype=float32")
        for read in (np.asarray, jnp.sin, jax.device_get, jax.block_until_ready, list, str):
            with pytest.raises(DeletedArrayError, match=r"gone was read: .*=float32\[17,2\]\.\n"):
                read(other)
    assert not array.is_deleted()
    unpickled = pickle.loads(pickle.dumps(array))
    assert isinstance(unpickled, jax.Array)
    np.testing.assert_array_equal(unpickled, LOGICAL)


def test_text(mesh):
    array = uneven(np.arange(3, dtype=np.float32), mesh, P("x"))
    note = "padded to (4,) on 8 devices"
    assert repr(array) == f"UnevenArray([0., 1., 2.], dtype=float32, {note})"
    assert str(array) == "[0. 1. 2.]"
    assert f"{array}" == "[0. 1. 2.]"


def test_keys(mesh):
    keys = jax.random.split(jax.random.key(0), 8)
    array = UnevenArray(jax.device_put(keys, NamedSharding(mesh, P(("x", "y")))), (5,))
    assert (array.value == keys[:5]).all()
    assert array.aval.dtype == keys.dtype
    assert repr(array) == "UnevenArray(shape=(5,), dtype=key<fry>, padded to (8,) on 8 devices)"
    np.testing.assert_array_equal(jax.random.key_data(array.value), jax.random.key_data(keys)[:5])


def test_dlpack_is_that_of_an_array_on_several_devices(array):
    for call in (np.from_dlpack, lambda a: a.__dlpack_device__()):
        for several in (array, array.padded):
            with pytest.raises(BufferError, match=r"unsharded arrays|singular device"):
                call(several)


def test_unknown_attributes(array):
    assert "mean" in dir(array)
    for name in ("no_such_thing", "_private", "__cuda_array_interface__"):
        with pytest.raises(AttributeError, match=f"UnevenArray has no attribute '{name}'"):
            getattr(array, name)


def test_wrong_padding_is_refused(mesh):
    rows = NamedSharding(mesh, P("x"))
    zeros = jax.device_put(np.zeros((20, 2), np.float32), rows)
    with pytest.raises(mw.ArgumentError) as caught:
        UnevenArray(zeros, (13, 2))
    assert isinstance(caught.value, ValueError)
    assert str(caught.value) == (
        "mw.UnevenArray was given no padded array of that shape: dim 0 of size 13 over 4 devices is"
        " padded to 16, but the padded array (20, 2) has 20 there\n"
        "It wraps what devices hold where a dim does not divide: the dim rounded up to a multiple"
        " of its shards.\n"
        "Have one made of an ordinary array: mw.reshard(x, sharding), or a step's argument."
        " What was written on another mesh is read as mw.padded says of the types on this one."
    )
    with pytest.raises(ValueError, match=r"dim 1 of size 1 over 1 devices is padded to 1"):
        UnevenArray(zeros, (17, 1))
    with pytest.raises(ValueError, match=r"an array of shape \(20, 2\) is not \(17,\) with padd"):
        UnevenArray(zeros, (17,))
    with pytest.raises(ValueError, match=r"is not \(20, 2\) with padding"):
        UnevenArray(zeros, (20, 2))
    with pytest.raises(ValueError, match=r"\(17.0, 2\) is no shape: its sizes are whole numbers"):
        UnevenArray(zeros, (17.0, 2))  # pyright: ignore
    assert repr(UnevenArray(zeros, np.array([17, 2])).shape) == "(17, 2)"
    with pytest.raises(ValueError, match="sharded by a NamedSharding, not by SingleDevice"):
        UnevenArray(jax.device_put(np.zeros(4), jax.devices()[0]), (3,))
    with pytest.raises(ValueError, match="sharded by a NamedSharding, not by None"):
        UnevenArray(np.zeros(4), (3,))  # pyright: ignore
