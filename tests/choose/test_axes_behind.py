"""Axes of a dim that is exchanged along go behind those of another one, where less is sent so."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

N24 = AbstractMesh((2, 4), ("x", "y"))
N42 = AbstractMesh((4, 2), ("x", "y"))


def fourth_of_each_column(x: Any) -> Any:
    return jnp.sort(x, 0)[3]


def medians(x: Any) -> Any:
    return jnp.median(x, 0)


def poisson(x: Any) -> Any:
    """By transforms along both dims, each of which is sharded."""
    waves = jnp.fft.fftfreq(x.shape[0])[:, None] ** 2 + jnp.fft.fftfreq(x.shape[1]) ** 2
    return jnp.fft.ifft2(jnp.fft.fft2(x) / (1 + waves)).real


def pencils(x: Any) -> Any:
    return jnp.fft.ifftn(jnp.fft.fftn(x) * 0.5).real


def mirrored(x: Any) -> Any:
    return jnp.concatenate([x, x[::-1]], 0)


def ranks(x: Any) -> Any:
    return jnp.argsort(jnp.argsort(x, 0), 0) + lax.cumsum(x, 0)


COLUMNS = P("y")
GRID = P("x", "y")
CASES: list[tuple[Callable[..., Any], P]] = [
    (fourth_of_each_column, COLUMNS),
    (medians, COLUMNS),
    (poisson, GRID),
    (mirrored, GRID),
    (ranks, GRID),
]


@pytest.mark.parametrize(("function", "result"), CASES)
@pytest.mark.parametrize("mesh", [N24, N42], ids=["2x4", "4x2"])
@pytest.mark.parametrize("shape", [(32, 16), (30, 13)], ids=["even", "uneven"])
def test_as_one_device(
    function: Callable[..., Any], result: P, mesh: AbstractMesh, shape: tuple[int, int]
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    step = mw.jit(function, mesh=mesh, in_shardings=GRID, out_shardings=result)
    found = step.partition(x).simulate(x)
    np.testing.assert_allclose(found, function(x), rtol=1e-4, atol=1e-4)


def sent(function: Callable[..., Any], shape: tuple[int, ...], given: P, result: P) -> float:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    step = mw.jit(function, mesh=N24, in_shardings=given, out_shardings=result)
    return step.partition(x).wire_bytes


def test_columns_are_shared_out_behind_those_that_lie_so() -> None:
    """An exchange of half a block of 2 KiB, and a gather of four of the eight columns' numbers."""
    assert sent(fourth_of_each_column, (128, 32), GRID, COLUMNS) == 1024 + 16


def test_not_where_all_axes_are_better_moved_at_once() -> None:
    """Of pencils 8 KiB: seven eighths twice, where each axis by itself sends more."""
    given = P("x", "y")
    assert sent(pencils, (16, 16, 16), given, given) <= 2 * 7 / 8 * 2048 * 2


def test_two_readers_share_the_exchange() -> None:
    both = lambda x: (jnp.sort(x, 0)[3], jnp.sort(x * 2, 0)[3])  # noqa: E731
    assert sent(both, (128, 32), GRID, COLUMNS) == 1024 + 2 * 16
