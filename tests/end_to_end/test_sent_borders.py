"""Windows, slices, pads, joins, rolls, reshapes of sharded dims: what they send, and the numbers.

What is sent is read from the program that is emitted, before anything is compiled; a collective is
written as its kind and the shape of the local operand. The numbers are those of simulated devices
beside one device; a few programs run on eight.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

Sent = list[tuple[str, tuple[int, ...]]]


EIGHT, GRID = mesh_of(x=8), mesh_of(x=2, y=4)
X, NONE, IMAGE, TILES = P("x"), P(), P(None, "x"), P(None, "x", "y")


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def hop(*shape: int) -> tuple[str, tuple[int, ...]]:
    return "ppermute", shape


def joined(*shape: int) -> tuple[str, tuple[int, ...]]:
    return "all_reduce", shape


def exchange(*shape: int) -> tuple[str, tuple[int, ...]]:
    return "all_to_all", shape


def around(x: Any) -> Any:
    """Second differences on a circle, whose ends are joined on by hand."""
    p = jnp.concatenate([x[-1:], x, x[:1]])
    return p[2:] - 2 * p[1:-1] + p[:-2]


def causal(x: Any) -> Any:
    """A filter over four rows, zeros before the first."""
    p = jnp.concatenate([jnp.zeros((3, x.shape[1])), x])
    return sum((k + 1) * p[k : k + x.shape[0]] for k in range(4))


class Row(NamedTuple):
    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    ins: tuple[P, ...]
    outs: Any
    sent: Sent
    mesh: AbstractMesh = EIGHT


def conv(**options: Any) -> Callable[..., Any]:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


SAME = conv(window_strides=(1, 1), padding="SAME")
STRIDED = conv(window_strides=(2, 2), padding=((3, 3), (3, 3)))
DILATED = conv(window_strides=(1, 1), padding=((1, 2), (1, 1)), lhs_dilation=(2, 1))
GROUPED = conv(window_strides=(1, 1), padding="SAME", feature_group_count=2)


def gradients(function: Callable[..., Any], which: int) -> Callable[..., Any]:
    return lambda *args: jax.vjp(function, *args[:-1])[1](args[-1])[which]


def max_pool(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def average_pool(x: jax.Array) -> jax.Array:
    return nn.avg_pool(x, (2, 2), (2, 2))


def heat(u: jax.Array) -> jax.Array:
    """A step of a stencil that leaves its boundary as it is."""
    return u.at[1:-1].add(0.1 * (u[:-2] - 2 * u[1:-1] + u[2:]))


def jacobi(u: jax.Array) -> jax.Array:
    inner = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
    return u.at[1:-1, 1:-1].set(inner)


def periodic(u: jax.Array) -> jax.Array:
    return sum((jnp.roll(u, s, a) for s in (1, -1) for a in (0, 1)), -4 * u)


PICTURE, KERNEL = (2, 64, 16, 4), (3, 3, 4, 5)
ROWS = (64, 32)

WINDOWS = [
    Row("conv", SAME, (PICTURE, KERNEL), (IMAGE, NONE), IMAGE,
        [hop(2, 1, 16, 4), hop(2, 1, 16, 4)]),
    Row("conv, by height and width", SAME, (PICTURE, KERNEL), (TILES, NONE), TILES,
        [hop(2, 1, 4, 4), hop(2, 34, 1, 4), hop(2, 34, 1, 4)], GRID),
    Row("conv of 61 rows with strides", STRIDED, ((2, 61, 16, 4), (7, 7, 4, 5)), (IMAGE, NONE),
        IMAGE, [hop(2, 3, 16, 4), hop(2, 2, 16, 4)]),
    Row("conv, kernel wider than two shards", SAME, ((2, 64, 16, 4), (19, 3, 4, 5)),
        (IMAGE, NONE), IMAGE,
        [hop(2, 1, 16, 4), hop(2, 8, 16, 4), hop(2, 8, 16, 4), hop(2, 1, 16, 4)]),
    Row("conv of a dilated input", DILATED, (PICTURE, KERNEL), (IMAGE, NONE), IMAGE,
        [hop(2, 1, 16, 4)]),
    Row("gradient of a conv's input", gradients(SAME, 0), (PICTURE, KERNEL, (2, 64, 16, 5)),
        (IMAGE, NONE, IMAGE), IMAGE, [hop(2, 1, 16, 5), hop(2, 1, 16, 5)]),
    Row("gradient of a conv's kernel", gradients(SAME, 1), (PICTURE, KERNEL, (2, 64, 16, 5)),
        (IMAGE, NONE, IMAGE), NONE, [hop(2, 1, 16, 4), hop(2, 1, 16, 4), joined(3, 3, 4, 5)]),
    Row("grouped conv, by batch", GROUPED, ((16, 9, 7, 4), (3, 3, 2, 6)), (X, NONE), X, []),
    Row("max pooling", max_pool, (PICTURE,), (IMAGE,), IMAGE, [hop(2, 1, 16, 4)]),
    Row("max pooling of whole windows", lambda x: nn.max_pool(x, (2, 2), (2, 2)), (PICTURE,),
        (IMAGE,), IMAGE, []),
    Row("gradient of max pooling", gradients(max_pool, 0), (PICTURE, (2, 32, 8, 4)),
        (IMAGE, IMAGE), IMAGE, [hop(2, 1, 8, 4), hop(2, 2, 16, 4), hop(2, 1, 16, 4)]),
    Row("gradient of average pooling", gradients(average_pool, 0), (PICTURE, (2, 32, 8, 4)),
        (IMAGE, IMAGE), IMAGE, []),
    Row("gradient of average pooling that overlaps",
        gradients(lambda x: nn.avg_pool(x, (3, 3), (2, 2), "SAME"), 0), (PICTURE, (2, 32, 8, 4)),
        (IMAGE, IMAGE), IMAGE, [hop(2, 1, 8, 4)]),
    Row("conv of a pad", lambda x, w: SAME(jnp.pad(x, ((0, 0), (2, 1), (0, 0), (0, 0))), w),
        (PICTURE, KERNEL), (IMAGE, NONE), IMAGE,
        [hop(2, 1, 16, 4), hop(2, 1, 16, 4), hop(2, 5, 16, 4)]),
]  # fmt: skip

BORDERS = [
    Row("a slice from the second row on", lambda x: x[1:], (ROWS,), (X,), X, [hop(1, 32)]),
    Row("every other row", lambda x: x[::2], (ROWS,), (X,), X, []),
    Row("rows in reverse", lambda x: x[::-1], (ROWS,), (X,), X, [hop(8, 32)]),
    Row("one row", lambda x: x[3], (ROWS,), (X,), NONE, [joined(32)]),
    Row("three rows", lambda x: x[7:10], (ROWS,), (X,), NONE, [joined(3, 32)]),
    Row("roll by one", lambda x: jnp.roll(x, 1, 0), (ROWS,), (X,), X, [hop(1, 32)]),
    Row("roll back by three", lambda x: jnp.roll(x, -3, 0), (ROWS,), (X,), X, [hop(3, 32)]),
    Row("roll by two shards and a half", lambda x: jnp.roll(x, 20, 0), (ROWS,), (X,), X,
        [hop(4, 32), hop(4, 32)]),
    Row("roll of every second row", lambda x: jnp.roll(x[::2], -1, 0), (ROWS,), (X,), X,
        [hop(1, 32)]),
    Row("roll of rows that follow a border", lambda x: jnp.roll(x[1::2] - x[::2], 1, 0), (ROWS,),
        (X,), X, [hop(1, 32)]),
    Row("halves laid side by side the other way round",
        lambda x, y: jnp.roll(jnp.concatenate([x, y], 1), 32, 1), (ROWS, ROWS), (X, X), X, []),
    Row("roll of 13 rows", lambda x: jnp.roll(x, 1, 0), ((13, 8),), (X,), X,
        [hop(1, 8)]),
    Row("shift, with a zero", lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1], (ROWS,), (X,), X,
        [hop(1, 32)]),
    Row("shift of a slice", lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0))), (ROWS,), (X,), X,
        [hop(1, 32)]),
    Row("differences", lambda x: jnp.diff(x, axis=0), (ROWS,), (X,), X, [hop(1, 32)]),
    Row("pad", lambda x: jnp.pad(x, ((2, 3), (0, 0))), (ROWS,), (X,), X, [hop(5, 32)]),
    Row("a row is joined", lambda x, y: jnp.concatenate([x[1:], y]), (ROWS, (1, 32)), (X, NONE), X,
        [hop(1, 32)]),
    Row("two halves are joined", lambda x, y: jnp.concatenate([x, y]), (ROWS, ROWS), (X, X), X,
        [exchange(8, 8, 4), exchange(8, 8, 4), exchange(128, 4)]),
    Row("differences of neighbours", lambda x: jnp.diff(x, axis=0, prepend=0), (ROWS,), (X,), X,
        [hop(1, 32)]),
    Row("moved on behind a row", lambda x, y: jnp.concatenate([y, x])[:-1], (ROWS, (1, 32)),
        (X, NONE), X, [hop(1, 32)]),
    Row("rows around by joining", around, (ROWS,), (X,), X, [hop(1, 32), hop(1, 32)]),
    Row("causal shifts by joining", causal, (ROWS,), (X,), X, [hop(3, 32)]),
    Row("heat", heat, (ROWS,), (X,), X, [hop(1, 32), hop(1, 32)]),
    Row("periodic stencil", periodic, (ROWS,), (P("x", "y"),), P("x", "y"),
        [hop(1, 8), hop(32, 1), hop(1, 8), hop(32, 1)], GRID),
]  # fmt: skip

RESHAPES = [
    Row("12 heads over 8 devices", lambda x: x.reshape(2, 12, 128), ((2, 1536),), (IMAGE,), IMAGE,
        [hop(2, 192), hop(2, 192)]),
    Row("and back", lambda x: x.reshape(2, 1536), ((2, 12, 128),), (IMAGE,), IMAGE,
        [hop(2, 192), hop(2, 192)]),
    Row("6 rows of 40 are 240", lambda x: x.reshape(240), ((6, 40),), (X,), X,
        [hop(30), hop(30)]),
    Row("240 are 3 rows of 80", lambda x: x.reshape(3, 80), ((240,),), (X,), X,
        [hop(10), hop(20), hop(30), hop(30)]),
    Row("what divides", lambda x: x.reshape(16, 4, 32), (ROWS,), (X,), X, []),
    Row("what divides, and is uneven", lambda x: x.reshape(-1, 5), ((15, 7, 5),),
        (P("x"),), P(("x", "y")), [], GRID),
]  # fmt: skip

TABLE = [*WINDOWS, *BORDERS, *RESHAPES]
NAMED = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


def program_of(row: Row) -> mw.SpmdProgram:
    step = mw.jit(row.function, mesh=row.mesh, in_shardings=row.ins, out_shardings=row.outs)
    return step.partition(*map(jax.ShapeDtypeStruct, row.shapes, [np.float32] * len(row.shapes)))


@NAMED
def test_sent(row: Row):
    sent = [(c.kind.value, c.shape) for c in program_of(row).collectives]
    assert sorted(sent) == sorted(row.sent)


@NAMED
def test_numbers(row: Row):
    args = [values(*shape) for shape in row.shapes]
    found, wanted = program_of(row).simulate(*args), jax.jit(row.function)(*args)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [5, 13, 31])
@pytest.mark.parametrize("function", [jacobi, heat, periodic], ids=lambda f: f.__name__)
def test_uneven_stencils_on_devices(function: Callable[..., Any], size: int):
    """And their gradients, on a grid of devices whose last ones have little or nothing."""
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    spec, u = P("x", "y"), values(size, size + 4)

    def both(u: jax.Array) -> Any:
        return function(u), jax.grad(lambda u: (function(u) ** 2).sum())(u)

    step = mw.jit(both, mesh=mesh, in_shardings=spec, out_shardings=(spec, spec))
    for found, wanted in zip(step(u), jax.jit(both)(u), strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-4, atol=1e-4)


def test_size_does_not_depend_on_devices():
    """As many equations and collectives on 8 devices as on 4,096, and as many rows sent."""
    sizes = set()
    for devices in (8, 512, 4096):
        mesh = mesh_of(x=devices)
        step = mw.jit(lambda u, w: heat(SAME(u, w)).sum(3), mesh=mesh, in_shardings=(IMAGE, NONE))
        shapes = ((2, 8 * devices, 16, 4), KERNEL)
        program = step.partition(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes))
        sent = [c.shape for c in program.collectives]
        sizes.add((len(program.per_device.jaxpr.jaxpr.eqns), str(sent)))
    assert len(sizes) == 1, sizes
