"""`mw.reshard` of one array: every device ends with its part of it, bit for bit.

Over a table of meshes and shardings, even and uneven, of one mesh and of others; of every type;
from wherever the array lies. The index and the data of every shard are compared with NumPy.
"""

import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.api.resharding import ORDER, XY, bits, check, lay, mesh, numbers, on, pointers

CASES = {  # shape, before, after
    # On one mesh.
    "gather": ((8, 4), on((8,), "x"), on((8,))),
    "slice": ((8, 4), on((8,)), on((8,), None, None)),
    "slice rows": ((16, 4), on((2, 4)), on((2, 4), XY)),
    "other dim": ((8, 16), on((8,), "x"), on((8,), None, "x")),
    "both dims": ((8, 12), on((2, 4), "x", "y"), on((2, 4), "y", "x")),
    "minor axis first": ((8, 12), on((2, 4), XY), on((2, 4), ("y", "x"))),
    "slices come first": ((8, 8), on((2, 4), "x"), on((2, 4), None, "y")),
    "three axes": ((4, 4, 4), on((2, 2, 2), "x", "y", "z"), on((2, 2, 2), "z", ("x", "y"))),
    "axes of one device": ((8, 4), on((1, 8), "x", "y"), on((1, 8), "y", "x")),
    "one device": ((3, 4), on((1,), "x"), on((1,), None, "x")),
    # On one mesh, uneven.
    "uneven rows": ((7, 4), on((8,), "x"), on((8,), None, None)),
    "to uneven rows": ((7, 4), on((8,)), on((8,), "x")),
    "uneven to uneven": ((5, 9), on((2, 4), "x", "y"), on((2, 4), "y", "x")),
    "few elements": ((4,), on((2, 3), XY), on((2, 3), ("y",))),
    "less than one each": ((3,), on((8,), "x"), on((8,))),
    # Meshes that refine to one.
    "other sizes": ((8, 8), on((8,), "x"), on((2, 4), "y", "x")),
    "both refined": ((8, 8), on((2, 4), "x", "y"), on((4, 2), "x", "y")),
    "both refined, uneven": ((7, 5), on((2, 4), "y", "x"), on((4, 2), "y", "x")),
    # Between meshes.
    "another order": ((8, 4), on((8,), "x"), on((8,), "x", order=ORDER)),
    "another order, replicated": ((8, 4), on((2, 4), "x"), on((2, 4), "y", order=ORDER)),
    "two by three, three by two": ((6, 12), on((2, 3), "x", "y"), on((3, 2), "x", "y")),
    "fewer": ((8, 6), on((8,), "x"), on((3,), None, "x")),
    "more": ((6, 8), on((3,), "x"), on((2, 4), "y", "x")),
    "others": ((4, 6), on((4,), "x"), on((4,), "x", order=[4, 5, 6, 7])),
    "some in common": ((12,), on((4,), "x", order=[0, 1, 2, 3]), on((4,), "x", order=[5, 2, 7, 1])),
    "to one": ((8, 3), on((8,), "x"), on((1,), order=[5])),
    "from one": ((8, 3), on((1,), order=[5]), on((8,), "x")),
    "one to all": ((8, 3), on((1,), order=[2]), on((8,))),
    "replicas to others": ((4, 4), on((4,)), on((2, 3), None, "y", order=[6, 2, 5, 1, 7, 3])),
    # Between meshes, uneven.
    "fewer, uneven": ((7, 5), on((8,), "x"), on((3,), "x", order=[7, 0, 4])),
    "more, uneven": ((7, 5), on((3,), "x", order=[7, 0, 4]), on((2, 4), "y", "x")),
    "another order, uneven": ((5, 3), on((2, 4), "x", "y"), on((2, 4), "y", "x", order=ORDER)),
    # No dims, no elements.
    "a scalar": ((), on((8,)), on((2, 4))),
    "a scalar to more": ((), on((2,), order=[6, 1]), on((6,), order=[4, 7, 2, 0, 1, 3])),
    "a scalar to fewer": ((), on((8,)), on((3,), order=[5, 0, 2])),
    "no elements": ((0, 8), on((8,), "x"), on((8,), None, "x")),
    "no elements, uneven": ((5, 0), on((8,)), on((4,), "x")),
    # Axes whose shardings are part of the types of arrays.
    "to Explicit": ((8, 8), on((2, 4), "x", "y"), on((2, 4), "y", "x", kind="Explicit")),
    "to Explicit, others": ((8, 8), on((8,), "x"), on((2, 3), "y", kind="Explicit")),
    "from Explicit, others": ((6, 8), on((2, 3), "x", kind="Explicit"), on((8,), "x")),
}
EXPLICIT = {
    "from Explicit": ((8, 8), on((2, 4), "x", "y", kind="Explicit"), on((2, 4), "y", "x")),
    "Explicit": ((8, 8), on((8,), "x", kind="Explicit"), on((8,), None, "x", kind="Explicit")),
    "Explicit, uneven": ((7, 8), on((8,), "x", kind="Explicit"), on((8,), kind="Explicit")),
}


@pytest.mark.parametrize("case", CASES)
def test_every_device_holds_its_part(case):
    shape, source, target = CASES[case]
    value = numbers(shape)
    x = lay(value, source())
    found = mw.reshard(x, target())
    check(found, value, target())
    check(x, value, source())  # is as it was


@pytest.mark.parametrize("case", EXPLICIT)
def test_every_device_holds_its_part_of_explicit_arrays(case):
    shape, source, target = EXPLICIT[case]
    value = numbers(shape)
    check(mw.reshard(lay(value, source()), target()), value, target())


def every_pattern(dtype):
    """Each pattern of bits of a type of one or two bytes, NaNs with their payloads included."""
    width = {1: np.uint8, 2: np.uint16}[np.dtype(dtype).itemsize]
    return np.arange(np.iinfo(width).max + 1, dtype=width).view(dtype).reshape(-1, 8)


def every_bfloat16():
    """Each pattern; NaNs without payloads where the emitters of tests/conftest.py drop those."""
    found = every_pattern(ml_dtypes.bfloat16)
    if "--xla_cpu_use_fusion_emitters=false" not in os.environ["XLA_FLAGS"]:
        return found
    words = found.view(np.uint16)
    is_nan = (words & 0x7FFF) > 0x7F80
    return np.where(is_nan, words & 0x8000 | 0x7FC0, words).view(found.dtype)


def patterned(shape, dtype):
    """Random bits of a longer type, NaNs among them."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.random.default_rng(5).integers(0, 256, (*shape, itemsize), np.uint8)
    raw[0] |= 0x7F
    return raw.view(dtype).reshape(shape)


VALUES = {
    "bool": lambda: numbers((16, 8)) % 3 == 0,
    "int4": lambda: (numbers((16, 8)) % 16 - 8).astype(ml_dtypes.int4),
    "uint4": lambda: (numbers((16, 8)) % 16).astype(ml_dtypes.uint4),
    "uint8": lambda: every_pattern(np.uint8),
    "bfloat16": every_bfloat16,
    "float16": lambda: every_pattern(np.float16),
    "float8_e4m3fn": lambda: every_pattern(ml_dtypes.float8_e4m3fn),
    "float32": lambda: patterned((16, 8), np.float32),
    "complex64": lambda: patterned((16, 8), np.complex64),
    "key": lambda: jax.random.split(jax.random.key(3), (16, 8)),
    "key of four words": lambda: jax.random.split(jax.random.key(3, impl="rbg"), (16, 8)),
}
WAYS = {  # before and after
    "within": (on((8,), "x"), on((8,), None, "x")),
    "between": (on((8,), "x"), on((4,), None, "x", order=[5, 2, 7, 1])),
    "between uneven": (on((8,), "x"), on((3,), None, "x", order=[5, 2, 7])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", VALUES)
def test_every_bit_of_every_type_stays(dtype, way):
    value = VALUES[dtype]()
    source, target = WAYS[way]
    check(mw.reshard(lay(value, source()), target()), value, target())


@pytest.mark.parametrize("dtype", ["bool", "int4", "bfloat16", "key"])
def test_uneven_arrays_of_every_type_can_be_read(dtype):
    value = VALUES[dtype]()[:7, :3]
    source, target = on((8,), "x")(), on((2, 4), "y", "x")()
    found = mw.reshard(lay(value, source), target)
    check(found, value, target)
    assert repr(found).startswith("UnevenArray(")


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "key", "int4"])
def test_uneven_arrays_have_a_value_of_every_type(dtype):
    value = VALUES[dtype]()[:7, :3]
    uneven = lay(value, on((2, 4), "y", "x")())
    np.testing.assert_array_equal(bits(uneven.value), bits(value))


def test_uneven_keys_are_printed():
    keys = mw.reshard(jax.random.split(jax.random.key(0), 7), on((8,), "x")())
    assert str(keys) == repr(keys)


def test_no_elements_are_read_as_none():
    found = mw.reshard(np.zeros((5, 0), np.float32), on((4,), "x")())
    assert found.padded.shape == (8, 0)
    assert np.asarray(found).shape == found.value.shape == (5, 0)


def test_no_elements_in_shards_of_two_dims_move():
    found = mw.reshard(np.zeros((4, 0, 1), np.float32), on((2, 3), "x", None, "y")())
    assert type(found) is mw.UnevenArray
    assert mw.reshard(found, on((2, 3), "y")()).shape == (4, 0, 1)
    assert mw.reshard(found, on((6,), "x")()).shape == (4, 0, 1)


ELSEWHERE = {
    "numpy": lambda value: value,
    "a number of NumPy": lambda value: value.flat[3],
    "uncommitted": jnp.asarray,
    "on one device": lambda value: jax.device_put(value, jax.devices()[6]),
    "a scalar on one device": lambda value: jax.device_put(value.flat[3], jax.devices()[6]),
}


@pytest.mark.parametrize(
    "target", [on((8,)), on((2, 3), order=[6, 2, 5, 1, 7, 3])], ids=["in order", "in another"]
)
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_from_where_there_is_no_mesh(kind, target):
    x = ELSEWHERE[kind](numbers((6, 4)))
    check(mw.reshard(x, target()), np.asarray(x), target())
    if x.shape:
        rows = NamedSharding(target().mesh, P("x"))
        check(mw.reshard(x, rows), np.asarray(x), rows)


@pytest.mark.parametrize("value", [3, 2.5, True, 1j], ids=str)
def test_python_scalars(value):
    target = on((8,))()
    found = mw.reshard(value, target)
    check(found, np.asarray(jnp.asarray(value)), target)
    assert found.weak_type == jnp.asarray(value).weak_type


@pytest.mark.parametrize("size", [8, 16, 5])
def test_types_that_give_way_still_do(size):
    value = jnp.broadcast_to(2.5, size)
    assert value.weak_type
    rows = on((8,), "x")()
    for x in (value, jax.device_put(value, on((8,))())):
        found = mw.reshard(x, rows)
        check(found, np.full(size, 2.5, np.float32), rows)
        assert found.weak_type
        back = mw.reshard([found, np.ones(8)], on((8,))())
        assert [x.weak_type for x in back] == [True, False]


def test_a_spec_is_on_the_mesh_where_the_array_lies():
    value = numbers((8, 12))
    source = on((2, 4), "x", "y", order=ORDER)()
    found = mw.reshard(lay(value, source), P(None, XY))
    check(found, value, NamedSharding(source.mesh, P(None, XY)))
    uneven = mw.reshard(found, P(XY))
    assert isinstance(uneven, jax.Array)
    with jax.set_mesh(mesh((8,))):
        check(mw.reshard(value, P("x")), value, on((8,), "x")())


@pytest.mark.parametrize("shape", [(8, 8), (7, 8), ()], ids=str)
def test_what_is_there_already_stays_where_it_is(shape):
    source = on((2, 4), *[XY][: len(shape)])()
    x = lay(numbers(shape), source)
    for donate in (False, True):
        assert mw.reshard(x, source, donate=donate) is x
        assert mw.reshard({"a": x, "b": None}, source, donate=donate)["a"] is x
        assert mw.reshard(x, None, donate=donate) is x
        assert mw.reshard(x, source, max_bytes=1 << 20, donate=donate) is x
        assert not x.is_deleted()


OTHER_WORDS = {
    "another mesh": ((8, 8), on((2, 4), XY), on((8,), "x")),
    "a trailing None": ((8, 8), on((8,), "x"), on((8,), "x", None)),
    "Explicit": ((8, 8), on((8,), "x"), on((8,), "x", kind="Explicit")),
    "uneven": ((7, 8), on((2, 4), XY), on((8,), "x")),
}


@pytest.mark.parametrize("case", OTHER_WORDS)
def test_another_name_for_the_same_place_moves_nothing(case):
    shape, source, target = OTHER_WORDS[case]
    value = numbers(shape)
    x = lay(value, source())
    found = mw.reshard(x, target(), donate=True)
    check(found, value, target())
    assert pointers(found) == pointers(x)
    assert not x.is_deleted()  # the result is in its buffers


LIMITS = {  # shape of float32, before, after: the least bytes
    "a gather": ((8, 4), on((8,), "x"), on((8,)), 128),
    "other dim": ((8, 16), on((8,), "x"), on((8,), None, "x"), 64),
    "uneven": ((4,), on((2, 3), XY), on((2, 3)), 16),
    "uneven rows": ((7, 4), on((8,), "x"), on((8,), None, "x"), 28),
    "fewer": ((8, 6), on((8,), "x"), on((3,), None, "x"), 64),
    "more": ((8, 6), on((3,), None, "x"), on((8,), "x"), 64),
    "another order": ((8, 4), on((8,), "x"), on((8,), "x", order=ORDER), 16),
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_least_memory_is_enough_and_less_is_refused(case):
    shape, source, target, least = LIMITS[case]
    value = numbers(shape)
    x = lay(value, source())
    with pytest.raises(mw.MemoryLimitError) as caught:
        mw.reshard(x, target(), max_bytes=least - 1)
    assert f"the least possible is {least}\n" in str(caught.value)
    check(mw.reshard(x, target(), max_bytes=least), value, target())
    assert mw.reshard_plan(shape, "float32", None, source(), target(), least).peak_bytes == least


def test_terms_of_a_sum_stay_on_their_mesh():
    """On another one they would be taken for the sum."""
    mesh = jax.make_mesh((2,), ("k",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    a, b = (np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) for i in (0, 1))
    with jax.set_mesh(mesh):
        rows, columns = jax.device_put(a, P(None, "k")), jax.device_put(b, P("k"))
        terms = jnp.einsum("ij,jk->ik", rows, columns, out_sharding=P(unreduced={"k"}))
    there = NamedSharding(jax.make_mesh((8,), ("q",), axis_types=(AxisType.Auto,)), P("q"))
    with pytest.raises(mw.HintError, match="terms of a sum"):
        mw.reshard(terms, there)
    summed = mw.reshard(terms, NamedSharding(mesh, P("k")))
    np.testing.assert_allclose(mw.reshard(summed, there), a @ b, rtol=1e-5, atol=1e-5)


def test_an_axis_named_as_a_part_of_another():
    devices = np.array(jax.devices())
    ours = jax.sharding.Mesh(devices.reshape(4, 2), ("x", "x.0"))
    theirs = jax.sharding.Mesh(devices.reshape(2, 4), ("a", "b"))
    x = jax.device_put(np.arange(256.0).reshape(16, 16), NamedSharding(ours, P("x", "x.0")))
    moved = mw.reshard(x, NamedSharding(theirs, P("a", "b")))
    np.testing.assert_array_equal(moved, np.asarray(x))


def test_what_has_no_bits_stays_as_it_is():
    mesh = jax.make_mesh((8,), ("q",), axis_types=(AxisType.Auto,))
    tangent = np.zeros((8,), jax.dtypes.float0)
    assert mw.reshard({"t": tangent}, NamedSharding(mesh, P("q")))["t"] is tangent
