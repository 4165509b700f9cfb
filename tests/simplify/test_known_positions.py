"""Rows at known positions are cut, and sums into them put back; the rest stays a gather."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.flatten import flatten
from tests.fuzz.evaluate.run import evaluate

N = 24
PLACES = np.arange(16).reshape(4, 4) % 3
Positions = Callable[[], Any]

# Positions in a dim of 24 rows.
CUT: dict[str, Positions] = {
    "every other": lambda: jnp.arange(0, N, 2),
    "backwards": lambda: jnp.arange(N)[::-1],
    "backwards by twos": lambda: N - 1 - 2 * jnp.arange(9),
    "one": lambda: jnp.array([5]),
    "one again and again": lambda: jnp.full(6, 5),
    "two, one behind the other": lambda: jnp.array([5, 6]),
    "each twice": lambda: jnp.arange(2 * N) // 2,
    "each three times, backwards": lambda: 7 - jnp.arange(24) // 3,
    "twice over": lambda: jnp.arange(2 * N) % N,
    "each twice, twice over": lambda: jnp.arange(4 * N) // 2 % N,
    "neighbours": lambda: (jnp.arange(N) + 1) % N,
    "neighbours, border repeated": lambda: jnp.clip(jnp.arange(N) - 1, 0, N - 1),
    "borders mirrored": lambda: np.pad(np.arange(N), 2, mode="reflect"),
    "frames": lambda: jnp.arange(5)[:, None] * 4 + jnp.arange(8),
    "frames whose ends are left out": lambda: jnp.arange(3)[:, None] * 5 + jnp.arange(8) + 1,
    "frames apart": lambda: jnp.arange(4)[:, None] * 6 + jnp.arange(4),
    "frames in columns": lambda: jnp.arange(5) * 4 + jnp.arange(8)[:, None],
    "windows": lambda: jnp.arange(N - 2)[:, None] + jnp.arange(3),
    "a table": lambda: np.repeat(np.arange(4), 3).reshape(4, 3),
}
KEPT: dict[str, Positions] = {
    "any two": lambda: jnp.array([5, 21]),
    "a few": lambda: jnp.array([3, 5, 21, 14]),
    "rows anywhere": lambda: np.random.default_rng(0).permutation(N),
    "of a matrix": lambda: np.random.default_rng(0).integers(0, N, (4, 5)),
    "diagonals": lambda: jnp.arange(4)[:, None] * 2 + 3 * jnp.arange(5),
    "outside": lambda: jnp.arange(N) + 1,
}


def names_of(function: Callable[..., Any], *args: Any) -> set[str]:
    """The operators that are left, after what is left has been found to compute the same."""
    traced = jax.make_jaxpr(function)(*args)
    closed = flatten(traced)
    ((found,), (wanted,)) = (evaluate(jaxpr, args) for jaxpr in (closed, traced))
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    return {eqn.primitive.name for eqn in closed.jaxpr.eqns}


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", CUT)
def test_cut(name: str, dim: int) -> None:
    x = drawn(N, 7) if dim == 0 else drawn(7, N)

    def read(x: Any) -> Any:
        at = CUT[name]()
        return x[at] if dim == 0 else x[:, at]

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: (jnp.sin(read(x)) * read(x)).sum())(x)

    assert "gather" not in names_of(read, x)
    assert {"gather", "scatter-add"}.isdisjoint(names_of(gradient, x)) or is_single(CUT[name]())


def is_single(at: Any) -> bool:
    """Whether they are so few rows of the dim that a sum into them stays one."""
    return np.size(at) <= 2


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    assert "gather" in names_of(lambda x: x.at[KEPT[name]()].get(mode="fill"), drawn(N, 7))


def test_positions_of_two_dims() -> None:
    def blocks(x: Any) -> Any:
        return x[jnp.arange(2 * N)[:, None] // 2, jnp.arange(14)[None] // 2]

    def turned(x: Any) -> Any:
        return x[jnp.arange(7)[::-1][None], jnp.arange(0, N, 3)[:, None]]

    def diagonal(x: Any) -> Any:
        return x[jnp.arange(7) * 2, jnp.arange(7)]

    assert "gather" not in names_of(blocks, drawn(N, 7))
    assert "gather" not in names_of(turned, drawn(7, N))
    assert "gather" in names_of(diagonal, drawn(N, 7))


def test_clipped_and_filled() -> None:
    at = np.arange(N) + 1
    assert "gather" not in names_of(lambda x: jnp.take(x, at, 0, mode="clip"), drawn(N, 3))
    assert "gather" not in names_of(lambda x: jnp.take(x, at, 0, mode="wrap"), drawn(N, 3))
    assert "gather" in names_of(lambda x: jnp.take(x, at, 0, mode="fill"), drawn(N, 3))


def test_zeros_keep_their_sign_where_nothing_is_added() -> None:
    x = np.full(8, -0.0, np.float32)
    closed = flatten(jax.make_jaxpr(lambda x: x.at[jnp.arange(6) // 2].add(1.0))(x))
    assert "scatter-add" not in {eqn.primitive.name for eqn in closed.jaxpr.eqns}
    ((found,),) = (evaluate(closed, (x,)),)
    np.testing.assert_array_equal(found, [2, 2, 2, 0, 0, 0, 0, 0])
    assert np.signbit(found).tolist() == [False] * 3 + [True] * 5


def test_positions_in_another_order() -> None:
    def places() -> Any:
        return jax.lax.broadcasted_iota(np.int32, (4, 4), 0)

    def turned(x: Any) -> Any:
        return x[jax.lax.reshape(places(), (4, 4), (1, 0)), jax.lax.reshape(places(), (4, 4))]

    def by_columns(x: Any) -> Any:
        return x[jnp.ravel(places() + 2 * jnp.arange(4), order="F")]

    names_of(turned, drawn(4, 4))
    names_of(by_columns, drawn(12, 3))
    names_of(lambda x, i: x[jax.lax.reshape(places(), (4, 4), (1, 0)), i], drawn(4, 4), PLACES)


@pytest.mark.parametrize("seed", range(40))
def test_random_positions(seed: int) -> None:
    """Of any pieces, in any dim, in vectors and matrices, and what is summed into them."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(4, 20))
    at = draw.integers(0, n, int(draw.integers(1, 4)))
    for _ in range(draw.integers(1, 4)):
        first, step = int(draw.integers(0, n)), int(draw.integers(-2, 3))
        run = first + step * np.arange(draw.integers(1, 9))
        choices = [np.repeat(at, 2), np.tile(at, 2), np.concatenate([at, run]), run, at[::-1]]
        at = np.clip(choices[draw.integers(len(choices))], 0, n - 1)
    if at.size % 2 == 0 and draw.integers(2):
        at = at.reshape(2, -1)
    rank, dim = 3, int(draw.integers(3))
    x = drawn(*[n if d == dim else 2 + d for d in range(rank)])
    index = tuple([slice(None)] * dim + [at])
    names_of(lambda x: x[index], x)
    names_of(jax.grad(lambda x: jnp.sin(x[index] * 2).sum()), x)
    names_of(lambda x: x.at[index].add(jnp.cos(x[index])), x)


def red_and_black(u: Any) -> Any:
    mean = (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0)) / 2
    return u.at[::2, 1::2].set(mean[::2, 1::2])


def spread_out(u: Any) -> Any:
    return jnp.zeros((2 * u.shape[0], 2 * u.shape[1])).at[1::2, ::2].set(u)


# Functions of rows [32, 16] over eight devices, and the rows of 64 bytes that each of them sends.
SENT: dict[str, tuple[Callable[[Any], Any], int]] = {
    "neighbours": (lambda u: u[(jnp.arange(32) + 1) % 32] - u[(jnp.arange(32) - 1) % 32], 2),
    "border repeated": (lambda u: u[jnp.clip(jnp.arange(32) + 1, 0, 31)] - u, 1),
    "padded by the border": (lambda u: jnp.pad(u, ((1, 1), (0, 0)), mode="edge")[2:] - u, 1),
    "every other": (lambda u: u[jnp.arange(0, 32, 2)], 0),
    "made larger": (lambda u: jax.image.resize(u, (64, 32), "nearest"), 0),
    "made larger, gradient": (
        jax.grad(lambda u: (jax.image.resize(u, (64, 32), "nearest") ** 3).sum()), 0),
    "every other of two dims": (spread_out, 0),
    "red and black": (red_and_black, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_sent(name: str) -> None:
    function, rows = SENT[name]
    mesh = jax.make_mesh((8,), ("x",))
    u = jnp.asarray(drawn(32, 16))
    program = mw.jit(function, mesh=mesh, in_shardings=P("x"), out_shardings=P("x")).partition(u)
    assert program.wire_bytes == rows * 64
    np.testing.assert_allclose(program.simulate(u), function(u), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, far: jnp.take(x, jnp.array([far, 1, 2], jnp.uint64), mode="clip"),
        lambda x, far: jax.lax.dynamic_update_slice(x, -x[:12], (np.uint64(far),)),
        lambda x, far: jax.lax.dynamic_slice(x, (np.uint64(far),), (4,)),
    ],
)
@pytest.mark.parametrize("far", [2**63 + 5, 2**64 - 1, 2**63 - 1])
def test_positions_beyond_all_signed_ones_are_at_the_end(function, far) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.enable_x64(True):
        x = np.arange(16.0, dtype=np.float32)
        ours = mw.jit(lambda x: function(x, far), mesh=mesh, in_shardings=P("x"))
        np.testing.assert_array_equal(ours(x), function(x, far))
