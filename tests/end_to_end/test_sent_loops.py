"""Loops whose steps do not depend on each other: what they send, and the numbers of one device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.compute import program_work
from meshwise.cost.hardware import GENERIC
from tests.meshes import mesh_of

WEIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
SUM = 4 * 3 * 4  # bytes of a gradient of it


EIGHT = mesh_of(x=8)
GRID = mesh_of(x=2, y=4)
CUBE = mesh_of(x=2, y=2, z=2)
SUB_AXES = {"x.0": 2, "x.1": 2, "x.2": 2}


def layer(row: Any, weight: Any = WEIGHT) -> Any:
    return jax.nn.softmax(jnp.tanh(row) @ weight)


def mapped(x: Any) -> Any:
    return lax.map(layer, x)


def scanned_backwards(x: Any) -> Any:
    return lax.scan(lambda c, row: (c, layer(row, c)), WEIGHT, x, reverse=True)[1]


def roots(x: Any) -> Any:
    """Each step ends when its own data says so, which NaN never does."""

    def root(row: Any) -> Any:
        x = 1 + row * row
        start = 1 + x
        return lax.while_loop(
            lambda r: ~(jnp.abs(r * r - x) <= 1e-3 * x).all(), lambda r: (r + x / r) / 2, start
        )

    return lax.map(root, x)


def hinted(x: Any) -> Any:
    return lax.map(lambda row: mw.shard(layer(row), P("x")), x)


def solved(x: Any) -> Any:
    return lax.map(lambda row: jnp.linalg.solve(jnp.outer(row, row) + jnp.eye(4), row), x)


def noisy(x: Any) -> Any:
    keys = jax.random.split(jax.random.key(3), x.shape[0])
    return lax.map(lambda pair: pair[0] + jax.random.normal(pair[1], (4,)), (x, keys))


def checkpointed(x: Any) -> Any:
    return jax.grad(lambda x: lax.map(jax.checkpoint(layer), x)[:, 0].sum())(x)


def weights_gradient(x: Any) -> Any:
    return jax.grad(lambda w: (lax.map(lambda row: layer(row, w), x) ** 2).sum())(WEIGHT)


def total(x: Any) -> Any:
    return lax.scan(lambda c, row: (c + layer(row)[:, None] * row, None), WEIGHT.T * 0 + 1, x)[0]


class Row(NamedTuple):
    function: Callable[..., Any]
    mesh: AbstractMesh
    spec: P
    sends: tuple[tuple[str, int], ...] = ()
    rows: int = 16
    result: P | None = None


def all_reduce(devices: int) -> tuple[tuple[str, int], ...]:
    return (("all_reduce", 2 * (devices - 1) * SUM // devices),)


ROWS = {
    "map": Row(mapped, EIGHT, P("x")),
    "map over two axes": Row(mapped, GRID, P(("y", "x"))),
    "map over three axes": Row(mapped, CUBE, P(("y", "x", "z"))),
    "map, uneven": Row(mapped, EIGHT, P("x"), rows=13),
    "map of fewer than devices": Row(mapped, EIGHT, P("x"), rows=5),
    "in reverse, with a constant carried along": Row(scanned_backwards, EIGHT, P("x"), rows=13),
    "steps that end when their data says so": Row(roots, EIGHT, P("x")),
    "such steps, uneven": Row(roots, EIGHT, P("x"), rows=5),
    "solves": Row(solved, EIGHT, P("x"), rows=13),
    "hints inside, which are left out": Row(hinted, EIGHT, P("x")),
    "keys": Row(noisy, EIGHT, P("x"), rows=13),
    "batches": Row(lambda x: lax.map(layer, x, batch_size=2), EIGHT, P("x")),
    "gradient": Row(jax.grad(lambda x: (mapped(x) ** 2).sum()), EIGHT, P("x"), rows=13),
    "gradient, recomputed": Row(checkpointed, EIGHT, P("x")),
    "gradient of a constant": Row(weights_gradient, EIGHT, P("x"), all_reduce(8)),
    "gradient of a constant, uneven": Row(weights_gradient, EIGHT, P("x"), all_reduce(8), 13),
    "gradient of a constant, two axes": Row(weights_gradient, GRID, P("y"), all_reduce(4)),
    "a sum": Row(total, EIGHT, P("x"), all_reduce(8), 5),
    "a sum, scattered": Row(
        total, GRID, P("y"), (("reduce_scatter", 3 * SUM // 4),), 5, P(None, "y")
    ),
}


def partitioned(row: Row) -> Any:
    shardings = {"in_shardings": row.spec, "out_shardings": row.result}
    function = mw.jit(row.function, mesh=row.mesh, **shardings)
    return function.partition(jax.ShapeDtypeStruct((row.rows, 4), np.float32))


@pytest.mark.parametrize("name", ROWS)
def test_sends_no_more_than_sums(name: str):
    row = ROWS[name]
    program = partitioned(row)
    assert not program.per_device.whole
    assert tuple((c.kind.value, c.wire_bytes) for c in program.collectives) == row.sends


@pytest.mark.parametrize("name", ROWS)
def test_numbers_of_one_device(name: str):
    row = ROWS[name]
    x = np.random.default_rng(0).normal(size=(row.rows, 4)).astype(np.float32)
    found = np.asarray(partitioned(row).simulate(x))
    np.testing.assert_allclose(found, jax.jit(row.function)(x), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["map, uneven", "such steps, uneven", "a sum"])
def test_on_devices(name: str):
    row = ROWS[name]
    x = np.random.default_rng(0).normal(size=(row.rows, 4)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    found = mw.jit(row.function, mesh=mesh, in_shardings=row.spec)(x)
    np.testing.assert_allclose(np.asarray(found), row.function(x), rtol=2e-5, atol=2e-6)


DEPENDENT = {
    "the result before": lambda c, row: (c * 0.5 + row, c),
    "a running sum": lambda c, row: (c + row, c),
    "a sum that steps read": lambda c, row: (c + row * c, None),
    "a sum returned twice": lambda c, row: ((d := c + row), d),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_steps_are_taken_by_all(name: str):
    """A shard of steps becomes a shard of each step's row, or all rows are gathered at once."""
    step = DEPENDENT[name]
    function = mw.jit(lambda x: lax.scan(step, x[0], x), mesh=EIGHT, in_shardings=P("x"))
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    program = function.partition(x)
    assert not program.per_device.whole
    assert all(c.count == 1 for c in program.collectives)
    assert program.wire_bytes <= 224  # an all_gather of all
    wanted = lax.scan(step, x[0], x)
    jax.tree.map(
        lambda f, w: np.testing.assert_allclose(f, w, rtol=1e-5), program.simulate(x), wanted
    )


def test_work_is_not_repeated():
    """Steps of its own, with the weight gathered, would be four times the work of a device."""

    def accumulated(w: Any, batches: Any) -> Any:
        grad = jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum())
        return lax.scan(lambda t, x: (t + grad(w, x), None), jnp.zeros_like(w), batches)[0]

    spec = P(None, "y")
    function = mw.jit(accumulated, mesh=GRID, in_shardings=(spec, P("x")), out_shardings=spec)
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) for s in ((16, 32), (8, 64, 16))]
    program = function.partition(*args)
    flops = 2 * 2 * 8 * 64 * 16 * 32  # of a product forward and one backward
    assert program.plan.work_seconds * GENERIC.flops_per_s < 1.2 * flops / 8
    np.testing.assert_allclose(program.simulate(*args), accumulated(*args), rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("times", [4, 8])
def test_loops_in_steps_are_work_as_well(times):
    """A device has its rows of each microbatch, where it would have all of fewer of these."""

    def loss(weights: Any, x: Any) -> Any:
        return (lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0] ** 2).mean()

    def accumulated(weights: Any, x: Any) -> Any:
        parts = x.reshape(times, -1, 16)
        grad = jax.grad(loss)
        start = jnp.zeros_like(weights)
        return lax.scan(lambda t, x: (t + grad(weights, x), None), start, parts)[0]

    function = mw.jit(accumulated, mesh=EIGHT, in_shardings=(P(), P("x")), out_shardings=P())
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) for s in ((3, 16, 16), (4096, 16))]
    program = function.partition(*args)
    flops = 3 * 3 * 2 * 4096 * 16 * 16  # three layers, each with a product forward, two backward
    done = program_work(program.jaxpr, {**dict(EIGHT.shape), **SUB_AXES}).flops
    assert done < 1.2 * flops / 8
    np.testing.assert_allclose(program.simulate(*args), accumulated(*args), rtol=2e-4, atol=1e-4)


def test_size_does_not_depend_on_devices():
    few, many = (
        mw.jit(weights_gradient, mesh=mesh_of(x=n), in_shardings=P("x")).partition(
            jax.ShapeDtypeStruct((8192, 4), np.float32)
        )
        for n in (8, 4096)
    )
    assert len(few.jaxpr.eqns) == len(many.jaxpr.eqns)
