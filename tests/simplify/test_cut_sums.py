"""What is cut of a sum of pads is the sum of what is cut of them: gradients of padded stencils."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

X, ROW = P("x"), 32 * 4  # bytes of a row of the field
RANDOM = np.random.default_rng(0)
ZERO = np.float32(0)


def laplacian(u):
    """Of a field with a border of zeros."""
    p = jnp.pad(u, 1)
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u


def squares(u):
    return (laplacian(u) ** 2).sum()


def through_steps(u):
    steps = lax.scan(lambda u, _: (u + 0.1 * laplacian(u), None), u, length=3)[0]
    return (steps**2).sum()


def of_fourth_order(u):
    p = jnp.pad(u, ((2, 2), (0, 0)))
    return ((16 * (p[3:-1] + p[1:-3]) - p[4:] - p[:-4] - 30 * u) ** 2).sum()


def weighted(u):
    """Each neighbour by its own weight."""
    p = jnp.pad(u, ((1, 1), (0, 0)), constant_values=0.5)
    return ((p[2:] * jnp.cos(u) + p[:-2] * jnp.sin(u)) ** 2).sum()


GRADIENTS = {  # of what, and rows that a device sends: to both sides there, and as many back
    "a Laplacian": (squares, 4),
    "steps of one": (through_steps, None),
    "of fourth order": (of_fourth_order, 10),  # on the way back those one and two rows off apart
    "each neighbour by its weight": (weighted, 4),
}
PLACES = {
    "rows": (mesh_of(x=8), (64, 32), X),
    "uneven rows": (mesh_of(x=8), (61, 32), X),
    "few rows": (mesh_of(x=8), (9, 32), X),
    "blocks": (mesh_of(x=2, y=4), (22, 32), P("x", "y")),
    "over three": (mesh_of(x=3), (16, 32), X),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_padded_stencils(name, place):
    function, rows = GRADIENTS[name]
    mesh, shape, spec = PLACES[place]
    gradient = jax.grad(function)
    u = RANDOM.normal(size=shape).astype(np.float32)
    step = mw.jit(gradient, mesh=mesh, in_shardings=spec, out_shardings=spec)
    program = step.partition(u)
    np.testing.assert_allclose(program.simulate(u), gradient(u), rtol=1e-4, atol=1e-4)
    if place == "rows" and rows is not None:
        assert program.wire_bytes == rows * ROW


def padded(x, low, high, fill=ZERO):
    return lax.pad(x, fill, ((low, high, 0), (0, 0, 0)))


def across(x):
    return lax.pad(x, ZERO, ((0, 0, 0), (1, 1, 0)))


def cut_total(a, b):
    return (padded(a, 1, 1) + padded(b, 2, 0))[1:-1]


def read_again(total):
    return total[1:-1] + total[0]


def in_halves(total):
    return total[:13] * total[13:]


CUTS = {  # of fields u and v of 24 rows
    "two pads": lambda u, v: (padded(u, 1, 2) + padded(v, 3, 0))[2:-1],
    "by a negative pad": lambda u, v: padded(padded(u, 1, 1) + padded(v, 2, 0), -1, -1),
    "with fills": lambda u, v: (padded(u, 2, 0, np.float32(3)) + padded(v, 0, 2, u[0, 0]))[1:-1],
    "nothing but a fill": lambda u, v: (padded(u, 5, 0) + padded(v, 5, 0, np.float32(2)))[:4],
    "pads that cut": lambda u, v: (padded(u, -2, 3) + padded(v, 3, -2))[1:-3],
    "one that is no pad": lambda u, v: (padded(u, 1, 1) + jnp.concatenate([v, v[:2]]) * 2)[1:-1],
    "three terms": lambda u, v: (padded(u, 1, 1) + (padded(v, 2, 0) + padded(u * v, 0, 2)))[1:-1],
    "of a sum of that": lambda u, v: (padded((padded(u, 1, 1) + padded(v, 0, 2))[1:-1], 0, 1))[1:],
    "one row of a batch": lambda u, v: jax.vmap(cut_total, (0, None))(u[:, :, None], v[0, :, None]),
    "a row added to each": lambda u, v: (across(u) + across(v[:1]))[:, 1:-1],
    "a mean added to each": lambda u, v: (across(u) + across(v.sum(0, keepdims=True)))[:, 1:-1],
    "a bias": lambda u, v: (padded(u, 1, 1) + v[0])[1:-1],
    "a number": lambda u, v: (padded(u, 1, 1) + 1)[1:-1],
    "a sum of all": lambda u, v: (padded(u, 1, 1) + (padded(v, 2, 0) + v[0, 0]))[1:-1],
    "read again": lambda u, v: read_again(padded(u, 1, 1) + padded(v, 0, 2)),
    "in two halves": lambda u, v: in_halves(padded(u, 1, 1) + padded(v, 0, 2)),
    "every other": lambda u, v: (padded(u, 1, 1) + padded(v, 0, 2))[::2],
    "between rows": lambda u, v: (
        lax.pad(u, ZERO, ((1, 0, 1), (0, 0, 0))) + lax.pad(v, ZERO, ((0, 1, 1), (0, 0, 0)))
    )[1:-1],
    "all of it": lambda u, v: lax.slice(padded(u, 1, 1) + padded(v, 0, 2), (0, 0), (26, 6)),
    "none of it": lambda u, v: lax.slice(padded(u, 1, 1) + padded(v, 0, 2), (3, 0), (3, 6)),
}


@pytest.mark.parametrize("devices", [8, 5])
@pytest.mark.parametrize("name", CUTS)
def test_parts_of_sums_of_pads(name, devices):
    u, v = RANDOM.normal(size=(2, 24, 6)).astype(np.float32)
    step = mw.jit(CUTS[name], mesh=mesh_of(x=devices), in_shardings=(X, X), out_shardings=X)
    got, wanted = step.partition(u, v).simulate(u, v), CUTS[name](u, v)
    np.testing.assert_array_equal(got, wanted)
    assert got.dtype == wanted.dtype


def test_many_terms():
    def function(u):
        total = padded(u, 1, 1)
        for k in range(120):
            total = total + padded(u * (k + 1), 2, 0)
        return total[1:-1]

    u = RANDOM.normal(size=(16, 2)).astype(np.float32)
    program = mw.jit(function, mesh=mesh_of(x=8), in_shardings=X, out_shardings=X).partition(u)
    np.testing.assert_allclose(program.simulate(u), jax.jit(function)(u), rtol=1e-5)
