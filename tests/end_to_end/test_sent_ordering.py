"""Running sums, sorts and the largest k along sharded dims: what they send, and the numbers.

A table of programs with exact collectives, written out before anything is compiled; the same
programs run on eight devices, and are simulated, beside one device.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of_sizes

F32, I32, BF16 = np.float32, np.int32, jnp.bfloat16
Sent = dict[str, tuple[int, int]]  # of each kind of collective: how many, and their wire bytes


def mesh_of(*sizes: int, real: bool = False) -> Any:
    names = ("x", "y", "z")[: len(sizes)]
    if real:
        return jax.make_mesh(sizes, names)
    return mesh_of_sizes(*sizes)


def values(shape: tuple[int, ...], dtype: Any, ties: bool = False) -> np.ndarray:
    """Numbers, one in nine of them special; or few different ones."""
    rng = np.random.default_rng(sum(shape))
    if ties or not jnp.issubdtype(dtype, np.floating):
        return rng.integers(-3, 4, shape).astype(dtype)
    special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape)
    return np.where(rng.random(shape) < 1 / 9, special, rng.normal(size=shape)).astype(dtype)


class Row(NamedTuple):
    name: str
    function: Callable[..., Any]
    shape: tuple[int, ...]
    dtype: Any
    mesh: tuple[int, ...]
    spec: P
    out: P
    sent: Sent


def sorts(shards: int, block: int, width: int, digits: int) -> Sent:
    """What a sort by splitters sends: two shards and a little, and counts."""
    others = shards - 1
    room = block // shards + others
    share = -(-block // shards)
    counts = round(2 * others / shards * 15 * others * 4) * digits
    return {
        "all_reduce": (digits, counts),
        "all_gather": (1, others * others * 8),
        "all_to_all": (2, others * (room + share) * width),
    }


def along(name: str, axis: int = 0, **options: Any) -> Callable[..., Any]:
    return partial(getattr(lax, name), axis=axis, **options)


def argsort(x: jax.Array) -> jax.Array:
    return jnp.argsort(x)


def with_payload(x: jax.Array) -> Any:
    return lax.sort((x % 5, x // 7, lax.iota(I32, x.size)), num_keys=2)


X, Y, NONE = P("x"), P(None, "x"), P()
ALL = P(("y", "x"))

ROWS = [
    # An element a shard: 7 of 4 bytes.
    Row("cumsum", along("cumsum"), (1000,), F32, (8,), X, X, {"all_gather": (1, 28)}),
    Row("cumsum in reverse", along("cumsum", reverse=True), (13,), I32, (8,), X, X,
        {"all_gather": (1, 28)}),
    Row("cumsum in bf16", along("cumsum"), (64,), BF16, (8,), X, X, {"all_gather": (1, 14)}),
    # An element a row there and one back, whatever the number of devices.
    Row("cumsum of rows", along("cumsum"), (64, 800), F32, (8,), X, X,
        {"all_to_all": (2, 2 * 7 * 100 * 4)}),
    Row("cumsum of uneven rows", along("cumsum", 1), (77, 13), F32, (4,), Y, Y,
        {"all_to_all": (2, 2 * 3 * 20 * 4)}),
    Row("cumprod", along("cumprod"), (24, 3), F32, (8,), X, X, {"all_gather": (1, 84)}),
    Row("cummax on a grid", along("cummax"), (40,), F32, (2, 4), ALL, ALL,
        {"all_gather": (1, 28)}),
    Row("cummin on a part of a cube", along("cummin", 1), (8, 16), I32, (2, 2, 2),
        P("x", ("y", "z")), P("x", ("y", "z")), {"all_gather": (1, 3 * 4 * 4)}),
    Row("cumlogsumexp", along("cumlogsumexp"), (37,), F32, (8,), X, X, {"all_gather": (1, 28)}),
    Row("cumsum of one a shard", along("cumsum"), (5,), I32, (8,), X, X, {"all_gather": (1, 28)}),
    # k candidates a shard: values and places.
    Row("top_k", lambda x: lax.top_k(x, 5), (1003,), F32, (8,), X, NONE,
        {"all_gather": (1, 7 * 5 * 8)}),
    Row("top_k, only values", lambda x: lax.top_k(x, 5)[0], (1003,), F32, (8,), X, NONE,
        {"all_gather": (1, 7 * 5 * 4)}),
    Row("top_k of more than a shard has", lambda x: lax.top_k(x, 9), (13,), F32, (4,), X, NONE,
        {"all_gather": (1, 3 * 4 * 4)}),
    Row("top_k of rows", lambda x: lax.top_k(x, 40), (16, 5025), F32, (8,), Y, NONE,
        {"all_to_all": (1, 7 * 2 * 40 * 8), "all_gather": (1, 7 * 2 * 40 * 8)}),
    Row("top_k on a grid", lambda x: lax.top_k(x, 2), (64,), I32, (2, 4), ALL, NONE,
        {"all_gather": (1, 7 * 2 * 8)}),
    Row("argmax", jnp.argmax, (4099,), F32, (8,), X, NONE, {"all_gather": (1, 56)}),
    Row("argmin of rows", lambda x: jnp.argmin(x, 1), (16, 501), F32, (8,), Y, NONE,
        {"all_to_all": (1, 7 * 2 * 8), "all_gather": (1, 7 * 2 * 4)}),
    # Rows are dealt out to the devices and come back.
    Row("sort of rows", lambda x: jnp.sort(x, 1), (64, 64), F32, (8,), Y, Y,
        {"all_to_all": (2, 2 * 7 * 8 * 8 * 4)}),
    Row("sort of uneven rows", lambda x: jnp.sort(x, 0), (203, 37), F32, (8,), X, X,
        {"all_to_all": (2, 2 * 7 * 5 * 26 * 4)}),
    Row("argsort of rows", lambda x: jnp.argsort(x, 1), (8, 64), F32, (8,), Y, Y,
        {"all_to_all": (2, 2 * 7 * 8 * 4)}),
    Row("sort of rows on a grid", lambda x: jnp.sort(x, 1), (8, 64), F32, (2, 4), P("x", "y"),
        P("x", "y"), {"all_to_all": (2, 2 * 3 * 16 * 4)}),
    # One row only: each device gets its share. A short one is gathered.
    Row("sort", jnp.sort, (1 << 14,), F32, (8,), X, X, sorts(8, 2048, 4, 8)),
    Row("sort of uneven", jnp.sort, (20003,), F32, (8,), X, X, sorts(8, 2501, 4, 8)),
    Row("sort in bf16", jnp.sort, (1 << 14,), BF16, (8,), X, X, sorts(8, 2048, 2, 4)),
    Row("sort on a grid", jnp.sort, (9001,), F32, (2, 4), ALL, ALL, sorts(8, 1126, 4, 8)),
    Row("sort over an axis of two", jnp.sort, (9001,), F32, (4, 2), P("y"), P("y"),
        {"all_gather": (1, 4501 * 4)}),
    Row("argsort", argsort, (20003,), F32, (8,), X, X, sorts(8, 2501, 8, 8)),
    Row("sort by two keys", with_payload, (9001,), I32, (8,), X, X, sorts(8, 1126, 12, 16)),
    Row("sort of few", jnp.sort, (13,), F32, (4,), X, X, {"all_gather": (1, 48)}),
]  # fmt: skip

TABLE = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def jitted(row: Row, real: bool = False) -> Any:
    mesh = mesh_of(*row.mesh, real=real)
    return mw.jit(row.function, mesh=mesh, in_shardings=row.spec, out_shardings=row.out)


def sent_by(program: mw.SpmdProgram) -> Sent:
    count: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for collective in program.collectives:
        count[collective.kind] += collective.count
        sent[collective.kind] += collective.wire_bytes
    return {str(kind): (count[kind], sent[kind]) for kind in count}


@TABLE
def test_sends_exactly(row: Row):
    program = jitted(row).partition(jax.ShapeDtypeStruct(row.shape, row.dtype))
    assert sent_by(program) == row.sent


def plain(value: Any) -> np.ndarray:
    """An array of numpy's own dtypes, which know of NaN."""
    found = np.asarray(value)
    return found.astype(F32) if found.dtype == BF16 else found


def assert_same(row: Row, found: Any, x: Any) -> None:
    """To the bit, but for sums in another order."""
    wanted = jax.tree.leaves(row.function(x))
    for value, want in zip(jax.tree.leaves(found), wanted, strict=True):
        if row.name.startswith("cum") and row.dtype != I32:
            close = 0.1 if row.dtype == BF16 else 1e-5
            np.testing.assert_allclose(plain(value), plain(want), close, close * 10)
        else:
            np.testing.assert_array_equal(plain(value), plain(want))


@TABLE
@pytest.mark.parametrize("ties", [False, True], ids=["special", "ties"])
def test_equal_to_one_device(row: Row, ties: bool):
    x = values(row.shape, row.dtype, ties)
    run = jitted(row, real=True) if np.prod(row.mesh) == 8 else jitted(row).partition(x).simulate
    assert_same(row, run(x), x)


@pytest.mark.parametrize("name", ["cummax on a grid", "top_k of rows", "sort of uneven"])
def test_simulated(name: str):
    (row,) = [row for row in ROWS if row.name == name]
    x = values(row.shape, row.dtype)
    assert_same(row, jitted(row).partition(x).simulate(x), x)


@pytest.mark.parametrize("size", [0, 1, 2, 5, 9])
@pytest.mark.parametrize(
    "function",
    [lax.cumsum, jnp.sort, jnp.argsort, lambda x: lax.top_k(x, min(2, x.size))],
    ids=["cumsum", "sort", "argsort", "top_k"],
)
def test_few(function: Callable[..., Any], size: int):
    x = values((size,), F32)
    run = mw.jit(function, mesh=mesh_of(8), in_shardings=X, out_shardings=NONE)
    found = jax.tree.leaves(run.partition(x).simulate(x))
    for value, want in zip(found, jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_allclose(np.asarray(value), np.asarray(want), 1e-6)


def test_infinities_and_nan_pass_as_on_one_device():
    """What comes before a shard is never multiplied by zero to leave it out."""
    x = np.ones((16, 6), F32)
    x[5, 0], x[5, 1], x[9, 1], x[7, 2], x[3, 3] = np.inf, np.inf, -np.inf, np.nan, 0
    x[12, 3], x[:, 4], x[:, 5] = np.inf, -np.inf, -0.0
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        for reverse in (False, True):
            function = along(name, reverse=reverse)
            run = mw.jit(function, mesh=mesh_of(8, real=True), in_shardings=X, out_shardings=X)
            found, wanted = np.asarray(run(x)), np.asarray(function(x))
            np.testing.assert_allclose(found, wanted, 1e-6, err_msg=name)
            np.testing.assert_array_equal(np.signbit(found[:, 5]), np.signbit(wanted[:, 5]))


def test_integers_wrap_around():
    x = np.full(40, 100, np.int8)
    run = mw.jit(lax.cumsum, mesh=mesh_of(8, real=True), in_shardings=X, out_shardings=X)
    np.testing.assert_array_equal(np.asarray(run(x)), np.asarray(lax.cumsum(x)))


@pytest.mark.parametrize("dtype", [F32, BF16, I32, np.uint8])
def test_padding_never_wins(dtype: Any):
    """Where all there is is the lowest of its dtype, the places are those of real elements."""
    lowest = -np.inf if jnp.issubdtype(dtype, np.floating) else jnp.iinfo(dtype).min
    x = np.full(13, lowest).astype(dtype)
    for function in (lambda x: lax.top_k(x, 11), jnp.argmax, jnp.argsort):
        run = mw.jit(function, mesh=mesh_of(4), in_shardings=X, out_shardings=NONE).partition(x)
        for found, want in zip(
            jax.tree.leaves(run.simulate(x)), jax.tree.leaves(function(x)), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


@pytest.mark.parametrize(
    ("function", "sent"),
    [
        (lambda x: (lax.cumsum(x) ** 2).sum(), {"all_gather": (2, 56)}),
        (lambda x: lax.top_k(x, 5)[0].sum(), {"all_gather": (1, 280)}),
        (lambda x: x[jnp.argmax(x)], {"all_gather": (1, 56)}),
    ],
    ids=["cumsum", "top_k", "argmax"],
)
def test_gradients(function: Callable[..., Any], sent: Sent):
    gradient = jax.grad(function)
    x = np.random.default_rng(0).normal(size=1000).astype(F32)
    run = mw.jit(gradient, mesh=mesh_of(8, real=True), in_shardings=X, out_shardings=X)
    assert sent_by(run.partition(x)) == sent
    np.testing.assert_allclose(np.asarray(run(x)), gradient(x), 1e-4, 1e-3)


def test_gradient_of_a_sort():
    def function(x: jax.Array) -> jax.Array:
        return (lax.sort(x) * jnp.arange(x.size)).sum()

    x = np.random.default_rng(0).normal(size=10007).astype(F32)
    run = mw.jit(jax.grad(function), mesh=mesh_of(8, real=True), in_shardings=X, out_shardings=X)
    np.testing.assert_array_equal(np.asarray(run(x)), jax.grad(function)(x))


def test_gradient_of_a_sort_of_blocks():
    """Every device sorts all, so it scatters all of the gradient, too: no sum is made of parts."""

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: (lax.sort(x.ravel()) * jnp.arange(x.size)).sum())(x)

    x, spec = np.random.default_rng(0).normal(size=(32, 64)).astype(F32), P("x", "y")
    run = mw.jit(gradient, mesh=mesh_of(2, 4), in_shardings=spec, out_shardings=spec)
    sent = run.partition(x)
    assert [(str(c.kind), c.wire_bytes) for c in sent.collectives] == [("all_gather", 7 * 32 * 32)]
    np.testing.assert_array_equal(np.asarray(sent.simulate(x)), gradient(x))


@pytest.mark.parametrize(
    "function",
    [lax.cumsum, lambda x: lax.cumsum(x.reshape(-1, 512), 0), lambda x: lax.top_k(x, 7), jnp.sort],
    ids=["cumsum", "cumsum of rows", "top_k", "sort"],
)
def test_size_does_not_depend_on_devices(function: Callable[..., Any]):
    counts = set()
    for devices in (8, 64, 512):
        run = mw.jit(function, mesh=mesh_of(devices), in_shardings=X)
        counts.add(len(run.partition(jax.ShapeDtypeStruct((1 << 26,), F32)).jaxpr.eqns))
    assert len(counts) == 1


def test_few_elements_on_many_devices_pass_through_a_network():
    """78 rounds of a shard (k (k + 1) / 2 with k = 12), where gathering would send 4095."""
    run = mw.jit(jnp.sort, mesh=mesh_of(4096), in_shardings=X, out_shardings=X)
    program = run.partition(jax.ShapeDtypeStruct((1 << 20,), F32))
    assert sent_by(program) == {"ppermute": (78, 78 * 256 * 8)}
