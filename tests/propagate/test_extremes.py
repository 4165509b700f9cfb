"""The largest of each row and where it is: one exchange for both, the same numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of_sizes

F32, BF16, I32 = np.float32, jnp.bfloat16, np.int32
Sent = list[tuple[str, int]]  # kinds of collectives, and the bytes of each


def largest(x: Any) -> Any:
    return x.max(1), jnp.argmax(x, 1)


def smallest(x: Any) -> Any:
    """Where it is comes first."""
    return jnp.argmin(x, 0), x.min(0)


def first_true(x: Any) -> Any:
    """Whether there is one, and the first."""
    return (x > 1).any(1), jnp.argmax(x > 1, 1)


def first_false(x: Any) -> Any:
    return (x > -1).all(1), jnp.argmin(x > -1, 1)


def extremes(x: Any) -> Any:
    return x.max(0), x.min(0), jnp.argmax(x, 0), jnp.argmin(x, 0)


def likeliest(x: Any) -> Any:
    """Logarithms of probabilities subtract the largest."""
    return jax.nn.log_softmax(x, 1), jnp.argmax(x, 1)


def gradient(x: Any) -> Any:
    """That of the largest compares with it."""
    return jax.grad(lambda x: (x.max(1) ** 2).sum())(x), jnp.argmax(x, 1)


def best_paths(moves: Any) -> Any:
    def step(score: Any, _: Any) -> Any:
        paths = score[:, None] + moves
        return paths.max(0), jnp.argmax(paths, 0)

    return lax.scan(step, jnp.zeros(moves.shape[0]), length=3)


def both_in_a_branch(x: Any) -> Any:
    return lax.cond(x.sum() > 0, largest, lambda x: (x.min(1), jnp.argmin(x, 1)), x)


def apart(x: Any) -> Any:
    """One of the two only in every step of a loop, of what it makes."""
    loop = lax.fori_loop(0, 2, lambda _, c: c + (x * (1 + c[:, None])).max(1), x[:, 0] * 0)
    return loop, jnp.argmax(x, 1)


def other_dims(x: Any) -> Any:
    return x.max((0, 1)), jnp.argmax(x, 1)


def others(x: Any) -> Any:
    return x.min(0), jnp.argmax(x, 0)


def bits(x: Any) -> Any:
    """No extreme, though a reduction of that name."""
    return lax.reduce_or(x, (1,)), jnp.argmax(x, 1)


SECOND, FIRST = P(None, "x"), P("x")


def dealt(rows: int, shards: int, *widths: int) -> Sent:
    """Values and places to whom a row belongs, and back: bytes of each collective."""
    share = -(-rows // shards) * (shards - 1)
    kinds = ("all_to_all", "all_gather")
    return [(kind, share * width) for kind in kinds for width in widths]


# A function of one array; its shape, dtype, mesh and how it lies; and what is sent.
ROWS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any, tuple[int, ...], P, Sent]] = {
    "largest": (largest, (64, 505), F32, (8,), SECOND, dealt(64, 8, 8)),
    "largest, uneven rows": (largest, (61, 505), F32, (8,), SECOND, dealt(61, 8, 8)),
    "largest of few": (largest, (3, 505), F32, (8,), SECOND, [("all_gather", 7 * 3 * 8)]),
    "smallest": (smallest, (505, 64), F32, (8,), FIRST, dealt(64, 8, 8)),
    "of two widths": (largest, (64, 505), BF16, (8,), SECOND, dealt(64, 8, 2, 4)),
    "integers": (largest, (64, 505), I32, (8,), SECOND, dealt(64, 8, 8)),
    "some shards empty": (largest, (64, 9), F32, (8,), SECOND, dealt(64, 8, 8)),
    "over two": (largest, (64, 505), F32, (4, 2), P(None, "y"), [("all_gather", 64 * 8)]),
    "rows sharded too": (largest, (64, 505), F32, (2, 4), P("x", "y"),
                         [*dealt(32, 4, 8), ("all_gather", 32 * 4), ("all_gather", 32 * 4)]),
    "first of booleans": (first_true, (64, 505), F32, (8,), SECOND, dealt(64, 8, 1, 4)),
    "last of booleans": (first_false, (64, 505), F32, (8,), SECOND, dealt(64, 8, 1, 4)),
    "both extremes": (extremes, (505, 64), F32, (8,), FIRST, dealt(64, 8, 8) * 2),
    "in a loop": (best_paths, (64, 64), F32, (8,), FIRST, dealt(64, 8, 8)),
    "not the same dims": (other_dims, (64, 505), F32, (8,), SECOND,
                          [*dealt(64, 8, 8)[:1], *dealt(64, 8, 4)[1:], ("all_reduce", 7)]),
    "not the same end": (others, (505, 64), F32, (8,), FIRST,
                         [*dealt(64, 8, 8)[:1], *dealt(64, 8, 4)[1:], ("all_reduce", 448)]),
}  # fmt: skip


def random(shape: tuple[int, ...], dtype: Any, ties: bool) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    if ties or dtype == I32:
        return rng.integers(-2, 3, shape).astype(dtype)
    special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape)
    return np.where(rng.random(shape) < 1 / 99, special, rng.normal(size=shape)).astype(dtype)


def assert_same(found: Any, wanted: Any) -> None:
    """Equal to the bit; NaNs are alike."""
    for pair in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        value, want = (np.asarray(v.astype(F32) if v.dtype == BF16 else v) for v in pair)
        np.testing.assert_array_equal(value, want)
        if np.issubdtype(want.dtype, np.floating):
            known = ~np.isnan(want)
            np.testing.assert_array_equal(np.signbit(value)[known], np.signbit(want)[known])


@pytest.mark.parametrize("name", ROWS)
def test_one_exchange(name: str):
    function, shape, dtype, mesh, spec, sent = ROWS[name]
    run = mw.jit(function, mesh=mesh_of_sizes(*mesh), in_shardings=spec, out_shardings=P())
    program = run.partition(jax.ShapeDtypeStruct(shape, dtype))
    found = [(str(c.kind), c.wire_bytes / c.count) for c in program.collectives]
    assert sorted(found) == sorted(sent)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ties", [False, True], ids=["special", "ties"])
def test_equal_to_one_device(name: str, ties: bool):
    function, shape, dtype, mesh, spec, _ = ROWS[name]
    x = random(shape, dtype, ties)
    real = jax.make_mesh(mesh, ("x", "y")[: len(mesh)])
    run = mw.jit(function, mesh=real, in_shardings=spec, out_shardings=P())
    assert_same(run(x), jax.jit(function)(x))


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
@pytest.mark.parametrize(
    "function", [likeliest, gradient, both_in_a_branch, apart], ids=lambda f: f.__name__
)
def test_what_reads_them(function: Callable[..., Any], mesh: tuple[int, ...]):
    x = np.random.default_rng(0).integers(-9, 10, (30, 101)).astype(F32)
    spec = SECOND if len(mesh) == 1 else P("x", "y")
    real = jax.make_mesh(mesh, ("x", "y")[: len(mesh)])
    found = mw.jit(function, mesh=real, in_shardings=spec, out_shardings=P())(x)
    for value, want in zip(jax.tree.leaves(found), jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_allclose(np.asarray(value), np.asarray(want), 1e-5)


def test_bits_are_no_extremes():
    x = np.random.default_rng(0).integers(0, 1 << 20, (8, 40)).astype(I32)
    run = mw.jit(bits, mesh=mesh_of_sizes(8), in_shardings=SECOND, out_shardings=P())
    assert_same(run.partition(x).simulate(x), bits(x))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("end", ["max", "min"])
def test_nan_wins(end: str, dtype: Any):
    """With its place, the first one; numpy says so too, XLA's own reductions may lose it."""
    x = np.random.default_rng(0).normal(size=(64, 505)).astype(dtype).astype(F32)
    x[3, [7, 100, 101]], x[4, 504], x[5, 0], x[:, 250] = np.nan, np.nan, np.nan, -np.inf

    def both(x: Any) -> Any:
        return getattr(jnp, end)(x, 1), getattr(jnp, f"arg{end}")(x, 1)

    mesh = jax.make_mesh((8,), ("x",))
    value, where = mw.jit(both, mesh=mesh, in_shardings=SECOND, out_shardings=P())(x.astype(dtype))
    np.testing.assert_array_equal(np.asarray(value.astype(F32)), getattr(x, end)(1))
    np.testing.assert_array_equal(np.asarray(where), getattr(x, f"arg{end}")(1))


def test_zeros_of_both_signs():
    """The largest is the positive zero, wherever it is; the first is a zero of either sign."""
    x = np.full((3, 16), -1, F32)
    x[0, 3], x[0, 12], x[1, 3], x[1, 12], x[2, 5] = -0.0, 0.0, 0.0, -0.0, -0.0
    run = mw.jit(largest, mesh=mesh_of_sizes(8), in_shardings=SECOND, out_shardings=P())
    assert_same(run.partition(x).simulate(x), jax.jit(largest)(x))


@pytest.mark.parametrize("dtype", [F32, BF16, I32, np.uint8])
def test_padding_never_wins(dtype: Any):
    lowest = -np.inf if jnp.issubdtype(dtype, np.floating) else jnp.iinfo(dtype).min
    x = np.full((5, 9), lowest).astype(dtype)
    run = mw.jit(largest, mesh=mesh_of_sizes(8), in_shardings=SECOND, out_shardings=P())
    assert_same(run.partition(x).simulate(x), largest(x))


def test_rows_that_are_whole_are_searched_as_they_were():
    run = mw.jit(largest, mesh=mesh_of_sizes(8), in_shardings=FIRST, out_shardings=FIRST)
    program = run.partition(jax.ShapeDtypeStruct((64, 505), F32))
    names = [e.primitive.name for e in program.plan.program.equations]
    assert names == ["reduce_max", "argmax"] and not program.collectives
