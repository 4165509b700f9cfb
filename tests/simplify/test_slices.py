"""What several readers move of one slice: it is cut once, along the dims that they do not move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

MESH = AbstractMesh((8,), ("x",))
COLUMNS = P(None, "x")


def taps(u, count):
    """Rows weighed with those after them, as a filter does."""
    rows = u.shape[0] - count + 1
    return sum(u[i : i + rows] * (i + 1.0) for i in range(count))


def filtered(u, count=4):
    """As many rows as there are, each of itself and those before it."""
    return taps(jnp.pad(u, ((count - 1, 0), (0, 0))), count)


def with_row_before(u):
    """Each row and the one before it."""
    return u + jnp.pad(u, ((1, 0), (0, 0)))[:-1]


def filled_where_cut(x):
    """Rows where a slice left one out are fill, and two more readers of the slice follow."""
    u = x[1:, 16:]
    return jnp.pad(u, ((1, 0), (0, 0)))[2:] + u[1:] * u[:-1]


def moved(rows):
    """Columns from 16 on of 80: a device has eight of ten others, of at most two devices."""
    return rows * (8 + 4) * 4


def between_walls(h, u):
    """Two fields between edges, of which one is still in the row of a wall."""
    padded = jnp.pad(u, 1, mode="edge").at[0].set(0.0)
    return (jnp.pad(h, 1, mode="edge") + padded)[2:, 1:-1]


CASES = {  # a function of so many rows and columns, how its result lies, and bytes that are sent
    "filter of columns": (lambda x: filtered(x[:, 16:]), (16, 80), COLUMNS, moved(16)),
    "columns of rows, filtered": (lambda x: taps(x[:, 16:], 5), (16, 80), COLUMNS, moved(16)),
    "read as it is as well": (
        lambda x: with_row_before(x[:, 16:]),
        (16, 80),
        COLUMNS,
        moved(16),
    ),
    "cut in both": (lambda x: filtered(x[4:, 16:]), (20, 80), COLUMNS, moved(20)),
    "cut in both, along both": (lambda x: taps(x[4:, 16:], 5), (20, 80), COLUMNS, moved(20)),
    "gradient": (
        jax.grad(lambda x: (filtered(x[:, 16:]) ** 2).sum()),
        (16, 80),
        COLUMNS,
        2 * moved(16),
    ),
    "fill where a row was cut": (filled_where_cut, (16, 80), COLUMNS, 1280),
    "of columns that are padded": (
        lambda x: taps(jnp.pad(x, ((0, 0), (3, 5))), 5).sum(1),
        (16, 56),
        P(),
        16 * 4 * 4 + 2 * 7 / 8 * 12 * 4,  # shards of eight columns for seven, and the sums
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sent_once(case):
    function, shape, result, sent = CASES[case]
    step = mw.jit(function, mesh=MESH, in_shardings=COLUMNS, out_shardings=result)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    program = step.partition(x)
    np.testing.assert_allclose(program.simulate(x), function(x), rtol=1e-4, atol=1e-4)
    assert program.wire_bytes == sent


def test_a_wall_beside_edges_sends_borders_alone():
    """The row of the wall is cut where it is, and not of a field that is padded along columns."""
    mesh, blocks = AbstractMesh((2, 4), ("x", "y")), P("x", "y")
    step = mw.jit(between_walls, mesh=mesh, in_shardings=(blocks, blocks), out_shardings=blocks)
    random = np.random.default_rng(0)
    fields = [random.normal(size=(64, 64)).astype(np.float32) for _ in range(2)]
    program = step.partition(*fields)
    np.testing.assert_allclose(program.simulate(*fields), between_walls(*fields), rtol=1e-5)
    block = fields[0].nbytes // 8
    assert program.wire_bytes < block


def test_rows_picked_and_used_in_part_are_summed_once():
    """Of four rows all columns are used, and two once more: summed, each has its part of them."""

    def used(x, w):
        rows = x[-4:]
        return (w[:, :3] * rows).sum(-1), (w[:, :2] * rows[:, :2]).sum(1)

    random = np.random.default_rng(0)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in ((64, 3, 8), (4, 5, 8)))
    step = mw.jit(used, mesh=MESH, in_shardings=(P("x"), None), out_shardings=P())
    program = step.partition(x, w)
    for ours, plain in zip(program.simulate(x, w), used(x, w), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
    picked = [c for c in program.collectives if c.shape == (4, 3, 8)]
    assert [c.kind.value for c in picked] == ["reduce_scatter"]
    assert program.wire_bytes == 7 / 8 * (4 * 3 * 8 + 4 * 8 + 2 * 4 * 3) * 4
