"""Stencils that leave the border as it is: what they send, and the numbers."""

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


def five(u: Any) -> Any:
    return (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4


def nine(u: Any) -> Any:
    return five(u) + (u[:-2, :-2] - u[2:, 2:]) / 8


def life(u: Any) -> Any:
    """Neighbours among the rows inside, as integers."""
    alive = (u > 0).astype(jnp.int32)
    count = alive[:-2] + alive[1:-1] + alive[2:]
    return u.at[1:-1].set(jnp.where(count == 2, u[1:-1], -1.0))


def upwind(u: Any) -> Any:
    """Two rows before and one after."""
    return u.at[2:-1].set(u[2:-1] - 0.1 * (2 * u[3:] + 3 * u[2:-1] - 6 * u[1:-2] + u[:-3]))


def residual(u: Any) -> Any:
    """What is written is read elsewhere too."""
    inside = five(u)
    return u.at[1:-1, 1:-1].set(inside), jnp.abs(inside - u[1:-1, 1:-1]).max()


def relaxed(u: Any, v: Any) -> Any:
    """Rows of an array as large as the inside."""
    return u.at[1:-1].set(u[1:-1] * v)


ROW = 67 * 4  # bytes
# Functions of `u[61, 67]`; the mesh, how `u` lies, and the bytes that are sent (None: any number).
STENCILS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], P, int | None]] = {
    "rows": (lambda u: u.at[1:-1].set((u[:-2] + u[2:]) / 2), (8,), P("x"), 2 * ROW),
    "columns": (lambda u: u.at[:, 1:-1].set(u[:, :-2] - u[:, 2:]), (8,), P(None, "x"), 2 * 61 * 4),
    "five points": (lambda u: u.at[1:-1, 1:-1].set(five(u)), (8,), P("x"), 2 * ROW),
    "five points, tiles": (
        lambda u: u.at[1:-1, 1:-1].set(five(u)), (2, 4), P("x", "y"), (17 + 2 * 30) * 4),
    "nine points, tiles": (
        lambda u: u.at[1:-1, 1:-1].set(nine(u)), (2, 4), P("x", "y"), None),
    "nine points": (lambda u: u.at[1:-1, 1:-1].set(nine(u)), (8,), P("x"), 2 * ROW),
    "added": (lambda u: u.at[1:-1].add(u[:-2] - u[2:]), (8,), P("x"), 2 * ROW),
    "multiplied": (lambda u: u.at[1:-1].multiply(u[:-2] - u[2:]), (8,), P("x"), 2 * ROW),
    "other fill": (
        lambda u: jnp.pad(u[:-2] - u[2:], ((1, 1), (2, 3)), constant_values=7.0), (8,), P("x"),
        2 * ROW),
    "fill that is data": (
        lambda u: lax.pad(u[:-2] - u[2:], u[3, 3], ((1, 1, 0), (0, 0, 0))), (8,), P(None, "x"),
        None),
    "one side": (lambda u: u.at[1:].set(u[1:] - u[:-1]), (8,), P("x"), ROW),
    "two rows before, one after": (upwind, (8,), P("x"), 3 * ROW),
    "numbers of other types": (life, (8,), P("x"), None),
    "a number that is data": (
        lambda u: u.at[1:-1].set(u[:-2] * u[0, 0] + 2 * u[2:]), (8,), P("x"), None),
    "read elsewhere": (residual, (8,), P("x"), None),
    "in a loop": (
        lambda u: lax.fori_loop(0, 5, lambda i, u: u.at[1:-1, 1:-1].set(five(u)), u), (8,),
        P("x"), 5 * 2 * ROW),
    "while it moves": (
        lambda u: lax.while_loop(
            lambda s: (s[1] > 0.1) & (s[2] < 9),
            lambda s: (s[0].at[1:-1, 1:-1].set(five(s[0])), jnp.abs(five(s[0])).max(), s[2] + 1),
            (u, jnp.float32(9), 0))[0],
        (8,), P("x"), None),
    "gradient": (jax.grad(lambda u: (u.at[1:-1, 1:-1].set(five(u)) ** 2).sum()), (2, 4),
                 P("x", "y"), None),
    "many more rows": (lambda u: jnp.pad(u[:40] + u[20:60], ((11, 10), (0, 0))), (8,), P("x"),
                       None),
    "infinite outside": (lambda u: u.at[1:-1].set(1 / (u[2:] * 0)), (8,), P("x"), None),
}  # fmt: skip


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", STENCILS)
def test_stencils(name: str):
    function, mesh, spec, sent = STENCILS[name]
    u = numbers(61, 67)
    step = mw.jit(function, mesh=mesh_of_sizes(*mesh), in_shardings=(spec,))
    program = step.partition(u)
    if sent is not None:
        assert program.wire_bytes == sent
    for found, wanted in zip(
        jax.tree.leaves(program.simulate(u)), jax.tree.leaves(jax.jit(function)(u)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-6)


def test_rows_of_an_array_as_large_as_the_inside():
    u, v = numbers(64, 32), numbers(62, 32)
    step = mw.jit(relaxed, mesh=mesh_of_sizes(8), in_shardings=(P("x"), P("x")))
    found = step.partition(u, v).simulate(u, v)
    np.testing.assert_allclose(np.asarray(found), np.asarray(relaxed(jnp.asarray(u), v)), rtol=1e-6)


def test_no_row_more_is_computed():
    """The work of each device is that of its rows, whether they are written or not."""
    step = mw.jit(STENCILS["rows"][0], mesh=mesh_of_sizes(8), in_shardings=(P("x"),))
    text = str(step.partition(numbers(64, 16)))
    assert "f32[8,16] = add" in text
    assert "f32[9,16]" not in text
