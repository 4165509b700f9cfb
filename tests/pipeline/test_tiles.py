"""Arrays with the axes that cut them as leading dims, and rows of them: there and back."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from meshwise.ir.mesh import refine_mesh
from meshwise.pipeline.packing import Layout, longest
from meshwise.pipeline.parameters import Packing, Rows
from meshwise.pipeline.tiles import Tiling, tiling

SIZES = {"data": 2, "model": 3, "extra": 2}
AXES = st.lists(st.sampled_from(list(SIZES)), unique=True, max_size=3)


@st.composite
def tilings(draw):
    """A tiling over some of the axes, in any order, of up to three dims."""
    rank = draw(st.integers(1, 3))
    dims = [()] * rank
    for axis in draw(AXES):
        dim = draw(st.integers(0, rank - 1))
        dims[dim] = (*dims[dim], axis)
    shape = [draw(st.integers(1, 2)) * int(np.prod([SIZES[a] for a in own])) for own in dims]
    used = tuple((a, SIZES[a]) for own in dims for a in own)
    return Tiling(tuple(shape), np.dtype(np.float32), tuple(dims), used)


def numbered(shape, first=0):
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


def shard(array, tile, place):
    """The part of one device, cut as a sharding cuts: axes of a dim from major to minor."""
    box = []
    for n, axes in zip(tile.shape, tile.dims, strict=True):
        index = count = 0
        for axis in axes:
            index, count = index * SIZES[axis] + place[axis], max(count, 1) * SIZES[axis]
        size = n // max(count, 1)
        box.append(slice(index * size, (index + 1) * size))
    return array[tuple(box)]


@hypothesis.settings(max_examples=25)
@hypothesis.given(tilings(), st.tuples(*(st.integers(0, n - 1) for n in SIZES.values())))
def test_split_has_the_part_of_each_device(tile, where):
    place = dict(zip(SIZES, where, strict=True))
    x = numbered(tile.shape)

    @jax.jit
    def there_and_back(x):
        parts = tile.split(x)
        return parts, tile.join(parts)

    parts, joined = map(np.asarray, there_and_back(x))
    assert parts.shape == (*tile.lead, *tile.local.shape)
    own = parts[tuple(place[a] for a in tile.axes)]
    np.testing.assert_array_equal(own, shard(x, tile, place))
    np.testing.assert_array_equal(joined, x)


@hypothesis.settings(max_examples=12)
@hypothesis.given(st.lists(tilings(), min_size=1, max_size=4), st.integers(1, 2))
def test_rows_have_the_parts_of_each_device(tiles, devices):
    used = [a for a in SIZES if any(a in t.axes for t in tiles)]
    leaves = [numbered(t.shape, 100 * i) for i, t in enumerate(tiles)]
    order = tuple(range(len(tiles)))
    stages = (order,) if devices == 1 else (order[::2], order)
    rows = Rows(tuple(t.local for t in tiles), stages, devices)
    packing = Packing(rows, tuple(tiles), tuple((a, SIZES[a]) for a in used))
    place = {a: SIZES[a] - 1 for a in used}

    @jax.jit
    def there_and_back(leaves):
        buffers = packing.pack(leaves)
        own = {d: x[(devices - 1, 0, *(place[a] for a in used))] for d, x in buffers.items()}
        return buffers, packing.unpack(buffers), rows.layouts[-1].unpack(own)

    buffers, unpacked, parts = there_and_back(leaves)
    for dtype, x in buffers.items():
        assert x.shape == (devices, 1, *(SIZES[a] for a in used), rows.lengths[dtype])
    for found, leaf in zip(unpacked, leaves, strict=True):
        np.testing.assert_array_equal(found, leaf)
    for found, tile, leaf in zip(parts, tiles, leaves, strict=True):
        np.testing.assert_array_equal(found, shard(leaf, tile, dict.fromkeys(SIZES, 0) | place))


def test_what_does_not_divide_is_whole():
    mesh = refine_mesh(("data", "model"), (2, 4))
    aval = jax.ShapeDtypeStruct((6, 8, 8), jnp.float32)
    dims = (mesh.sub_axes["model"], mesh.sub_axes["data"], ("model.0",))
    found = tiling(aval, dims, mesh)
    assert found.dims == ((), ("data",), ())
    assert found.local.shape == (6, 4, 8)


def test_buffers_hold_arrays_of_each_dtype_and_keys():
    key = jax.random.key(3)
    arrays = [numbered((2, 3)), jnp.arange(4), key, numbered((), 9), jnp.ones(2, jnp.bfloat16)]
    layout = Layout(tuple(jax.typeof(jnp.asarray(x)) for x in arrays))
    lengths = longest([layout, Layout((jax.ShapeDtypeStruct((9,), jnp.float32),))])
    assert lengths == {"bfloat16": 2, "float32": 9, "int32": 4, "uint32": 2}
    buffers = layout.pack(arrays, lengths, {"bfloat16": "float32"})
    assert {d: str(x.dtype) for d, x in buffers.items()} == {d: d for d in lengths} | {
        "bfloat16": "float32"
    }
    buffers["bfloat16"] = buffers["bfloat16"].astype(jnp.bfloat16)
    for row in (None, np.int32(1)):
        given = buffers if row is None else {d: jnp.stack([x * 0, x]) for d, x in buffers.items()}
        for found, x in zip(layout.unpack(given, row), arrays, strict=True):
            raw = jax.random.key_data if x is key else np.asarray
            np.testing.assert_array_equal(raw(found), raw(x))


def test_rows_may_have_more_elements_than_positions_of_32_bits():
    types = [jax.ShapeDtypeStruct((2**31,), jnp.int8), jax.ShapeDtypeStruct((3,), jnp.int8)]
    rows = {"int8": jax.ShapeDtypeStruct((2, 2**31 + 3), jnp.int8)}
    unpack = Layout(tuple(types)).unpack
    found = jax.eval_shape(unpack, rows, jax.ShapeDtypeStruct((), jnp.int32))
    assert [x.shape for x in found] == [x.shape for x in types]
