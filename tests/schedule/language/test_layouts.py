"""The layouts that follow from arguments', as a table, and the values they stand for."""

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of
from tests.schedule.language.one_device import on_one_device
from tests.schedule.language.plain import positive, random

MESH = mesh_of(a=2, b=3)
S0, S1, S2 = (mw.Sliced(d) for d in range(3))
R = mw.Replicated
T = mw.Unreduced("sum")

# A function, shapes and layouts of its arguments, the layouts of its results over axis b.
TABLE: dict[str, tuple[Any, list[tuple[int, ...]], list[Any], str | list[str]]] = {
    "replicated": (lambda x, y: x * y, [(4, 5), (5,)], [R, R], "Replicated"),
    "both sliced": (lambda x, y: x * y, [(4, 5), (4, 5)], [S0, S0], "Sliced(0) over b"),
    "replicated is cut": (lambda x, y: x * y, [(4, 5), (4, 5)], [S1, R], "Sliced(1) over b"),
    "a row is cut": (lambda x, y: x * y, [(4, 5), (5,)], [S1, R], "Sliced(1) over b"),
    "a row is not cut": (lambda x, y: x * y, [(4, 5), (5,)], [S0, R], "Sliced(0) over b"),
    "a slice meets a scalar": (lambda x, y: x * y, [(4,), ()], [S0, R], "Sliced(0) over b"),
    "a slice of rows meets rows": (
        lambda x, y: x * y,
        [(4, 5), (5,)],
        [R, S0],
        "Sliced(1) over b",
    ),
    "nonlinear": (lambda x: jnp.tanh(x) + 1, [(7,)], [S0], "Sliced(0) over b"),
    "transposed": (lambda x: x.T, [(4, 5)], [S0], "Sliced(1) over b"),
    "rows of a product": (lambda x, y: x @ y, [(4, 5), (5, 6)], [S0, R], "Sliced(0) over b"),
    "columns of a product": (lambda x, y: x @ y, [(4, 5), (5, 7)], [R, S1], "Sliced(1) over b"),
    "terms of a product": (
        lambda x, y: x @ y,
        [(4, 5), (5, 7)],
        [S1, S0],
        'Unreduced("sum") over b',
    ),
    "a product with one factor cut": (
        lambda x, y: x @ y,
        [(4, 5), (5, 7)],
        [S1, R],
        'Unreduced("sum") over b',
    ),
    "batches of products": (
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
        [(4, 2, 3), (4, 3, 2)],
        [S0, S0],
        "Sliced(0) over b",
    ),
    "a sum over the slices": (lambda x: x.sum(0), [(4, 5)], [S0], 'Unreduced("sum") over b'),
    "a sum beside them": (lambda x: x.sum(0), [(4, 5)], [S1], "Sliced(0) over b"),
    "a maximum": (lambda x: x.max(), [(4, 5)], [S1], 'Unreduced("max") over b'),
    "a product over the slices": (
        lambda x: x.prod(0),
        [(4, 5)],
        [S0],
        'Unreduced("prod") over b',
    ),
    "any of booleans": (lambda x: (x > 1).any(0), [(4, 5)], [S0], 'Unreduced("or") over b'),
    "terms scaled": (lambda x, y: x * y / 3, [(4,), (4,)], [T, R], 'Unreduced("sum") over b'),
    "terms added": (lambda x, y: x + y - x, [(4,), (4,)], [T, T], 'Unreduced("sum") over b'),
    "terms multiplied by a matrix": (
        lambda x, y: (x @ y).T.reshape(-1),
        [(4, 5), (5, 2)],
        [T, R],
        'Unreduced("sum") over b',
    ),
    "terms summed": (lambda x: x.sum(), [(4, 5)], [T], 'Unreduced("sum") over b'),
    "a mean over slices": (lambda x: x.mean(1), [(4, 7)], [S1], 'Unreduced("sum") over b'),
    "a norm": (
        lambda x: jnp.sqrt(mw.all_reduce(jnp.sum(x * x))),
        [(7,)],
        [S0],
        "Replicated",
    ),
    "a layer norm over rows in slices": (
        lambda x: x - jnp.mean(x, -1, keepdims=True),
        [(4, 5)],
        [S0],
        "Sliced(0) over b",
    ),
    "a softmax beside the slices": (
        lambda x: jax.nn.softmax(x, -1),
        [(4, 5)],
        [S0],
        "Sliced(0) over b",
    ),
    "split in heads": (
        lambda x: x.reshape(2, 6, 4).transpose(1, 0, 2),
        [(2, 24)],
        [S1],
        "Sliced(0) over b",
    ),
    "rows laid end to end": (lambda x: x.reshape(-1), [(6, 4)], [S0], "Sliced(0) over b"),
    "beside what is laid together": (
        lambda x, y: jnp.concatenate([x, y], 1),
        [(4, 5), (4, 2)],
        [S0, R],
        "Sliced(0) over b",
    ),
    "rows of a table": (lambda x: x[jnp.array([1, 3])], [(4, 5)], [S1], "Sliced(1) over b"),
    "a sort beside the slices": (lambda x: jnp.sort(x, 1), [(4, 5)], [S0], "Sliced(0) over b"),
    "a sum that runs": (lambda x: jnp.cumsum(x, 1), [(4, 5)], [S0], "Sliced(0) over b"),
    "a convolution's images": (
        lambda x, k: lax.conv(x, k, (1, 1), "SAME"),
        [(4, 2, 5, 5), (3, 2, 3, 3)],
        [S0, R],
        "Sliced(0) over b",
    ),
    "a convolution's features": (
        lambda x, k: lax.conv(x, k, (1, 1), "SAME"),
        [(2, 2, 5, 5), (4, 2, 3, 3)],
        [R, S0],
        "Sliced(1) over b",
    ),
    "a convolution's channels": (
        lambda x, k: lax.conv(x, k, (1, 1), "SAME"),
        [(2, 4, 5, 5), (3, 4, 3, 3)],
        [S1, S1],
        'Unreduced("sum") over b',
    ),
    "several results": (
        lambda x, y: (x + y, x.sum(1), mw.all_gather(x), y),
        [(4, 5), (4, 5)],
        [S1, R],
        ["Sliced(1) over b", 'Unreduced("sum") over b', "Replicated", "Replicated"],
    ),
    "a loop over whole values": (
        lambda x, y: lax.fori_loop(0, 3, lambda i, v: v * 0.5 + y, x),
        [(4,), (4,)],
        [R, R],
        "Replicated",
    ),
}


def joined(held: Any, layout: str) -> np.ndarray:
    """The value of a result of which devices may hold terms."""
    if not layout.startswith("Unreduced"):
        return np.asarray(held)
    op = layout.split('"')[1]
    return getattr(np, {"or": "any", "and": "all"}.get(op, op))(np.asarray(held), axis=0)


@pytest.mark.parametrize("name", TABLE)
def test_layouts_and_values(name):
    fn, shapes, layouts, expected = TABLE[name]
    args = [
        positive(*((3, *shape) if layout is T else shape), seed=i)
        for i, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
    ]
    names = fn.__code__.co_varnames[: len(args)]
    given = dict(zip(names, layouts, strict=True))
    program = mw.program(MESH, axes="b", layouts=given)(fn)
    found = [r.layout for r in program.layouts(*args).rows if r.made_by == "result"]
    assert found == ([expected] if isinstance(expected, str) else expected)
    whole = [a.sum(0) if layout is T else a for a, layout in zip(args, layouts, strict=True)]
    wanted = jax.tree.leaves(on_one_device(fn)(*whole))
    got = jax.tree.leaves(program.partition(*args).simulate(*args))
    for held, b, layout in zip(got, wanted, found, strict=True):
        a = joined(held, layout)
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_two_axes_each_have_their_own():
    def fn(x: mw.Sliced(0, "a") & mw.Sliced(1, "b"), w: mw.Sliced(0, "b"), g: mw.Local("a")):
        terms = x @ w
        return terms, mw.all_reduce(terms, axes="b"), g @ w

    x, w, g = random(5, 4), random(4, 3), random(2, 2, 4)
    program = mw.program(MESH)(fn)
    rows = program.layouts(x, w, g).rows
    assert [r.layout for r in rows if r.made_by == "result"] == [
        'Sliced(0) over a, Unreduced("sum") over b',
        "Sliced(0) over a",
        'Unreduced("sum") over b, Local over a',
    ]
    terms, product, own = program.partition(x, w, g).simulate(x, w, g)
    np.testing.assert_allclose(np.asarray(terms).sum(0), x @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(product, x @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.asarray(own).reshape(2, 3, 2, 3).sum(1), g @ w, rtol=1e-5, atol=1e-5
    )


def test_local_values_are_each_devices_whatever_it_computes():
    def fn(x: mw.Local, y):
        ranks = jnp.argsort(x)
        return jnp.cumsum(x)[ranks] + y, lax.fori_loop(0, 3, lambda i, v: v / 2 + x, y)

    x, y = random(3, 7), random(7, seed=1)
    sums, looped = mw.program(mesh_of(d=3))(fn).partition(x, y).simulate(x, y)
    for device in range(3):
        want = on_one_device(fn)(x[device], y)
        np.testing.assert_allclose(sums[device], want[0], rtol=1e-5)
        np.testing.assert_allclose(looped[device], want[1], rtol=1e-5)


@pytest.mark.parametrize("layout", [R, S0, S1])
@pytest.mark.parametrize("shape", [(6, 8), (5, 7)])
def test_dropout_masks_are_those_of_one_device(layout, shape):
    key, x = jax.random.key(3), positive(*shape)

    def fn(key, x):
        return mw.dropout(key, x, 0.4)

    program = mw.program(mesh_of(d=4), layouts={"x": layout})(fn).partition(key, x)
    (got,) = jax.tree.leaves(program.simulate(key, x))
    kept = np.asarray(jax.random.bernoulli(key, 0.6, shape))
    np.testing.assert_array_equal(got != 0, kept)
    np.testing.assert_allclose(got, np.where(kept, x / np.float32(0.6), 0), rtol=1e-6)
    values = [v.aval for e in program.jaxpr.eqns for v in e.outvars]
    bits = [math.prod(v.shape) for v in values if v.dtype == np.uint32]
    # Of a sliced value the random numbers are made for a part alone.
    assert max(bits) == math.prod(shape) if layout is R else max(bits) < math.prod(shape)


def test_a_mask_of_raw_keys():
    key, x = jax.random.PRNGKey(3), positive(6)
    args = key, x, np.float32(0.5)
    got = mw.program(mesh_of(d=3), layouts={"x": S0})(mw.dropout).partition(*args)
    kept = np.asarray(jax.random.bernoulli(key, 0.5, (6,)))
    np.testing.assert_array_equal(np.asarray(got.simulate(*args)) != 0, kept)


def test_the_listing_names_every_line():
    def fn(x: mw.Sliced(0), y):
        z = x * y  # here
        return mw.all_gather(z)

    listing = mw.program(mesh_of(d=4))(fn).layouts(random(5), random(5))
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# here"))
    where = [f"tests/schedule/language/test_layouts.py:{n}" for n in (line, line + 1)]
    pad = len(where[0])
    assert str(listing).splitlines() == [
        f"{'x':{pad}}  argument       f32[5]  Sliced(0) over d",
        f"{'y':{pad}}  argument       f32[5]  Replicated",
        f"{where[0]}  mul            f32[5]  Sliced(0) over d",
        f"{where[1]}  mw.all_gather  f32[5]  Replicated",
        f"{'result':{pad}}  result         f32[5]  Replicated",
    ]


def test_dropout_over_explicit_axes():
    """The mask is sharded as the type says, and the result is."""
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    key, x = jax.random.key(3), jnp.ones((8, 6))
    placed = jax.device_put(x, NamedSharding(mesh, P("d")))
    for run in (mw.dropout, jax.jit(mw.dropout), mw.jit(mw.dropout)):
        got = run(key, placed, 0.4)
        assert got.sharding.spec == P("d", None)
        np.testing.assert_array_equal(got, mw.dropout(key, x, 0.4))
