"""Each verb: what devices hold afterwards, on even and uneven sizes, over one axis and several."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import meshwise as mw
from tests.meshes import mesh_of
from tests.schedule.language.plain import random

GRID = mesh_of(a=2, b=3)


def run(mesh: Any, fn: Any, *args: Any, **given: Any) -> Any:
    """Results of a program; `simulate` also checks that replicated ones are so."""
    return jax.tree.map(np.asarray, mw.program(mesh, **given)(fn).partition(*args).simulate(*args))


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).integers(-9, 9, shape).astype(np.int32)


JOINS = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}


@pytest.mark.parametrize("op", JOINS)
def test_all_reduce_joins_what_devices_hold(op):
    x = integers(6, 5)

    def whole(x: mw.Local):
        return mw.all_reduce(x, op)

    np.testing.assert_array_equal(run(GRID, whole, x, axes=("a", "b")), JOINS[op](x, axis=0))


@pytest.mark.parametrize("op", ["and", "or"])
def test_all_reduce_of_booleans(op):
    x = random(4, 50) > (0.9 if op == "or" else -0.9)
    got = run(mesh_of(d=4), lambda x: mw.all_reduce(x, op), x, layouts={"x": mw.Local})
    np.testing.assert_array_equal(got, x.any(0) if op == "or" else x.all(0))
    assert 0 < got.sum() < 50


@pytest.mark.parametrize("op", JOINS)
@pytest.mark.parametrize("size", [8, 3])
def test_reduce_scatter_makes_parts_of_the_sum(op, size):
    x = integers(4, 2, size)

    def parts(x: mw.Local):
        part = mw.reduce_scatter(x, 1, op)
        return part, mw.all_gather(part)

    for got in run(mesh_of(d=4), parts, x):
        np.testing.assert_array_equal(got, JOINS[op](x, axis=0))


@pytest.mark.parametrize("op", ["and", "or", "max", "min"])
@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_booleans_and_bits(op, dtype):
    x = (integers(4, 30) * (random(4, 30) > -0.8)).astype(dtype)

    def joined(x: mw.Local):
        part = mw.reduce_scatter(x, op=op)
        return mw.all_reduce(x, op), part, mw.broadcast(mw.reduce(x, 2, op), 2)

    joins = {"and": np.bitwise_and, "or": np.bitwise_or, "max": np.maximum, "min": np.minimum}
    for got in run(mesh_of(d=4), joined, x):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, joins[op].reduce(x, axis=0))


def test_a_reduce_over_one_axis_leaves_the_other():
    x = integers(2, 3, 4).reshape(6, 4)

    def sums(x: mw.Local(("a", "b"))):
        return mw.all_reduce(x, axes="a"), mw.all_reduce(x, axes="b")

    over_a, over_b = run(GRID, sums, x)
    np.testing.assert_array_equal(over_a, x.reshape(2, 3, 4).sum(0))
    np.testing.assert_array_equal(over_b, x.reshape(2, 3, 4).sum(1))


def test_axes_are_major_to_minor_as_they_are_named():
    x, y = integers(6, 2), integers(6, 2, seed=1)

    def both(x: mw.Local(("b", "a")), y: mw.Local("b") & mw.Local("a")):
        return mw.update(x, x + y), mw.all_reduce(x, axes="a")

    added, sums = run(GRID, both, x, y)
    np.testing.assert_array_equal(added, x + y)
    np.testing.assert_array_equal(sums, x.reshape(3, 2, 2).sum(1))


@pytest.mark.parametrize("shape", [(6, 9), (7, 4), (2, 3)])
def test_gathers_and_exchanges_of_slices(shape):
    x = random(*shape)

    def moved(x: mw.Sliced(0)):
        across = mw.all_to_all(x, 1)
        return x, across, mw.all_gather(x), mw.all_gather(across), mw.all_to_all(across, -2)

    for got in run(mesh_of(d=3), moved, x):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("shape", [(12, 6), (12, 5)])
def test_slices_over_two_axes(shape):
    x = random(*shape)

    def moved(x: mw.Sliced(0, ("a", "b"))):
        half = mw.all_gather(x, "b")
        return x, half, mw.all_gather(half, "a"), mw.all_to_all(x, 1, "b"), mw.all_gather(x)

    program = mw.program(GRID, axes=("a", "b"))(moved)
    layouts = [r.layout for r in program.layouts(x).rows if r.made_by == "result"]
    assert layouts == [
        "Sliced(0) over a, b",
        "Sliced(0) over a",
        "Replicated",
        "Sliced(0) over a, Sliced(1) over b",
        "Replicated",
    ]
    for got in program.partition(x).simulate(x):
        np.testing.assert_array_equal(got, x)


def test_one_gather_of_two_dims():
    x = random(5, 7)
    layouts = {"x": mw.Sliced(0, "b") & mw.Sliced(1, "a")}
    got = run(GRID, lambda x: mw.all_gather(x, ("a", "b")), x, layouts=layouts)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("root", [0, 1, 4, 5])
def test_broadcast_and_reduce(root):
    x = integers(6, 3)

    def trees(x: mw.Local(("a", "b"))):
        over = ("a", "b")
        sums = mw.reduce(x, root, axes=over)
        largest = mw.reduce(x, root, "max", over)
        return (
            mw.broadcast(x, root, over),
            sums,
            largest,
            mw.broadcast(sums, root, over),
            mw.broadcast(largest, root, over),
        )

    value, sums, largest, whole, top = run(GRID, trees, x)
    np.testing.assert_array_equal(value, x[root])
    np.testing.assert_array_equal(sums[root], x.sum(0))
    np.testing.assert_array_equal(largest[root], x.max(0))
    np.testing.assert_array_equal(whole, x.sum(0))
    np.testing.assert_array_equal(top, x.max(0))


@pytest.mark.parametrize("devices", [2, 5, 8])
def test_trees_over_any_number_of_devices(devices):
    x = integers(devices, 3)

    def trees(x: mw.Local):
        low = mw.reduce(x, devices - 1, "min")
        return mw.broadcast(low, devices - 1), mw.broadcast(mw.reduce(x, 1), 1)

    low, total = run(mesh_of(d=devices), trees, x)
    np.testing.assert_array_equal(low, x.min(0))
    np.testing.assert_array_equal(total, x.sum(0))


@pytest.mark.parametrize("shift", [1, -1, 2, 0, 4, -7])
def test_send_to_a_neighbour(shift):
    x = integers(4, 3) + 20
    got = run(mesh_of(stage=4), lambda x: mw.send(x, "stage", shift), x, layouts={"x": mw.Local})
    for device in range(4):
        source = device - shift
        wanted = x[source] if 0 <= source < 4 else np.zeros(3, np.int32)
        np.testing.assert_array_equal(got[device], wanted)


def test_a_replicated_value_that_is_sent_is_each_devices_own():
    x = random(3)
    got = run(mesh_of(stage=3), lambda x: mw.send(x, "stage"), x)
    np.testing.assert_array_equal(got, np.stack([np.zeros(3), x, x]))


def test_a_slice_that_is_sent_carries_a_part():
    x = random(2, 6, 4)

    def sent(x: mw.Local("stage") & mw.Sliced(0, "model")):
        return mw.all_gather(mw.send(x, "stage"), "model")

    program = mw.program(mesh_of(stage=2, model=3))(sent).partition(x)
    (permute,) = [c for c in program.collectives if c.kind.value == "ppermute"]
    assert permute.shape == (2, 4)
    np.testing.assert_array_equal(program.simulate(x)[1], x[0])


def test_verbs_go_over_trees():
    tree = {"w": integers(2, 5), "b": (integers(2, 3),)}

    def reduced(tree: mw.Local):
        return mw.all_gather(mw.reduce_scatter(tree))

    got = run(mesh_of(d=2), reduced, tree)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.sum(0)), got, tree)


def test_unreduced_arguments_and_results_are_terms():
    x = integers(3, 4)

    def both(x: mw.Unreduced("sum"), y: mw.Sliced(0)):
        return 2 * x, mw.all_reduce(x), jnp.sum(y, 0), jnp.max(y, 0)

    y = integers(5, 4, seed=1)
    twice, total, terms, tops = run(mesh_of(d=3), both, x, y)
    np.testing.assert_array_equal(twice, 2 * x)
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(terms.sum(0), y.sum(0))
    np.testing.assert_array_equal(tops.max(0), y.max(0))


def test_on_one_device_shapes_and_layouts_are_the_same():
    x, y = random(1, 4), random(5, 4)

    def both(x: mw.Local, y: mw.Sliced(0)):
        return x, mw.all_reduce(x), y.sum(0), mw.all_gather(y), mw.send(x, "d")

    program = mw.program(mesh_of(d=1))(both)
    assert program.partition(x, y).collectives == ()
    own, total, terms, whole, sent = program.partition(x, y).simulate(x, y)
    np.testing.assert_array_equal(own, x)
    np.testing.assert_array_equal(total, x[0])
    np.testing.assert_allclose(terms, y.sum(0, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(whole, y)
    np.testing.assert_array_equal(sent, np.zeros((1, 4)))
    results = [r.layout for r in program.layouts(x, y).rows if r.made_by == "result"]
    assert results == [
        "Local over d",
        "Replicated",
        'Unreduced("sum") over d',
        "Replicated",
        "Local over d",
    ]


def test_on_real_devices():
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    x, y = integers(4, 6), integers(6, seed=1)
    traces = []

    @mw.program(mesh)
    def step(x: mw.Local, y: mw.Sliced(0), scale=2):
        traces.append(0)
        part = mw.reduce_scatter(x) * scale + y
        return part, mw.all_gather(part), x

    for _ in range(2):
        part, whole, own = step(x, y)
        np.testing.assert_array_equal(np.asarray(part), 2 * x.sum(0) + y)
        np.testing.assert_array_equal(whole, 2 * x.sum(0) + y)
        np.testing.assert_array_equal(own, x)
    assert len(traces) == 1
    assert own.sharding.spec[0] == "d"
    np.testing.assert_array_equal(step(x, y=y, scale=3)[1], 3 * x.sum(0) + y)
    assert len(traces) == 2
