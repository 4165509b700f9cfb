"""Of a field with borders in several dims all neighbours are read, and each row is sent once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

MODES = ("wrap", "reflect", "symmetric", "edge")
ROW = 64 * 4  # bytes
ROWS, GRID = mesh_of(x=8), mesh_of(x=2, y=4)
BLOCKS = P("x", "y")


def neighbours(u, mode, reach=1):
    """Each element with all around it, weighed by how they lie."""
    padded = jnp.pad(u, reach, mode=mode)
    sizes = [range(2 * reach + 1)] * u.ndim
    places = np.stack(np.meshgrid(*sizes, indexing="ij"), -1).reshape(-1, u.ndim)
    return sum(
        (k + 1.0) * padded[tuple(slice(i, i + n) for i, n in zip(place, u.shape, strict=True))]
        for k, place in enumerate(places)
    )


def checked(function, mesh, spec, shape):
    """The program, whose numbers are those of one device."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    program = mw.jit(function, mesh=mesh, in_shardings=spec, out_shardings=spec).partition(x)
    found, wanted = program.simulate(x), function(x)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    return program


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reach", [1, 2])
def test_rows_are_sent_once(mode, reach):
    """However many columns away they are read."""
    program = checked(lambda u: neighbours(u, mode, reach), ROWS, P("x"), (64, 64))
    assert {c.kind.value for c in program.collectives} == {"ppermute"}
    if reach == 1:
        assert program.wire_bytes == 2 * ROW


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh, spec, shape", [
    (ROWS, P("x"), (61, 24)),
    (ROWS, P(None, "x"), (24, 61)),
    (GRID, BLOCKS, (32, 64)),
    (GRID, BLOCKS, (31, 45)),
    (ROWS, P("x"), (24, 5)),
    (ROWS, P("x"), (5, 24)),
    (mesh_of(x=2, y=2), P("x", None, "y"), (12, 6, 10)),
])  # fmt: skip
def test_any_sizes_and_axes(mode, mesh, spec, shape):
    checked(lambda u: neighbours(u, mode), mesh, spec, shape)


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode):
    checked(jax.grad(lambda u: (neighbours(u, mode) ** 2).sum()), ROWS, P("x"), (24, 16))


def test_few_rows_of_a_corner_are_cut_where_they_are():
    """Of borders in both dims; nobody sends whole rows for it."""
    program = checked(lambda u: u * jnp.pad(u, 1, mode="wrap")[0, 0], ROWS, P("x"), (64, 64))
    assert program.wire_bytes < ROW / 8


def test_rows_that_are_read_whole_too():
    """A wrapped field that is returned as well."""

    def both(u):
        padded = jnp.pad(u, 1, mode="wrap")
        return padded[2:, 2:] + padded[:-2, 2:] - u, padded.max()

    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    specs = dict(in_shardings=P("x"), out_shardings=(P("x"), P()))
    program = mw.jit(both, mesh=ROWS, **specs).partition(x)
    for found, wanted in zip(program.simulate(x), both(x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_beside_what_has_no_borders():
    """Rows that are repeated lie beside a wrapped field, and parts of it are read."""

    def function(u):
        padded = jnp.pad(u, ((1, 1), (0, 0)), mode="wrap")
        rows, columns = u.shape
        wide = jnp.concatenate([padded, padded[:, :2], jnp.repeat(padded[:, 3:6], 2, axis=1)], 1)
        return wide[:rows, 3 : columns + 3] + wide[:rows, 1 : columns + 1]

    checked(function, ROWS, P("x"), (32, 32))
