"""Few rows made of few rows, as walls of a simulation: what they send, and the numbers.

Who has the row that is written mostly has those that it is made of. XLA's partitioners gather the
whole array for most of these, and write a wrong row on seven of eight devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.end_to_end.sent import NOTHING, Row, Sent, check_numbers, names, reals, sent_by

EIGHT, X, GRID = (8,), P("x"), P("x", "y")
ROW = 4 * 40  # bytes of a row of 40 numbers


def hops(*rows: float) -> Sent:
    """Permutes of so many rows each."""
    return {"ppermute": (len(rows), round(sum(rows) * ROW))}


def heat(u):
    return u.at[1:-1].set(u[1:-1] + 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2]))


def insulated(u):
    """A step whose walls have the temperature of what is beside them."""
    u = heat(u)
    return u.at[0].set(u[1]).at[-1].set(u[-2])


def on_a_circle(u):
    u = heat(u)
    return u.at[0].set(u[-2]).at[-1].set(u[1])


def reflected(u, v):
    return u.at[0].set(-v[1]).at[-1].set(-v[-2])


def extrapolated(u):
    return u.at[0].set(2 * u[1] - u[2]).at[-1].set(2 * u[-2] - u[-3])


def absorbed(u, old):
    """Waves that leave (Mur)."""
    u = u.at[0].set(old[1] + 0.3 * (u[1] - old[0]))
    return u.at[-1].set(old[-2] + 0.3 * (u[-2] - old[-1]))


def with_flux(u, flux):
    return u.at[0].set(u[1] - 0.5 * flux).at[-1].add(0.5 * flux - u[-2]).at[1].multiply(u[2])


def ghosts(u):
    return u.at[:2].set(u[-4:-2]).at[-2:].set(u[2:4])


def mirrored(u):
    return u.at[:2].set(u[2:4][::-1]).at[-2:].set(-u[-4:-2][::-1])


def sides(u):
    """Columns without their corners."""
    u = u.at[1:-1, 0].set(2 * u[1:-1, 1] - u[1:-1, 2])
    return u.at[1:-1, -1].set(u[1:-1, -2]).at[1:-1, 1].add(u[1:-1, 2])


def walls(u):
    u = u.at[0].set(u[1]).at[-1].set(u[-2])
    return u.at[:, 0].set(u[:, 1]).at[:, -1].set(u[:, -2])


def corners(u):
    """Two dims at once, and fields in a leading dim, of which one turns round."""
    u = u.at[0, 0, 0].set(u[0, 1, 1]).at[:, -1, -1].set(u[:, -2, -2])
    return u.at[1, 0].set(-u[1, 1]).at[2, :, 0].set(u[0, :, 0]).at[1, :2, :2].add(u[0, 2:4, 2:4])


def stages(state, made):
    """What each stage made goes to the next, the last one's to the end of the queue."""
    return jnp.roll(state, -1, 0).at[-1].set(made[-1])


def dynamic(u):
    last = lax.dynamic_index_in_dim(u, u.shape[0] - 1, 0)
    return lax.dynamic_update_slice_in_dim(u, jnp.tanh(last), 0, 0)


def chosen(u, keep):
    return u.at[0].set(jnp.where(keep > 0, u[1], u[0])).at[-1].set(jnp.where(u[-2] > 0, 1.0, keep))


def inlet(u, source):
    """In each step a row that does not depend on it: fetched once."""
    return lax.fori_loop(0, 5, lambda _, u: jnp.sin(u).at[0].set(source[-1] * 2), u)


def gradient(function):
    return jax.grad(lambda *args: (jnp.sin(function(*args)) ** 2).sum())


def steps(function, n=3):
    return lambda u, *others: lax.fori_loop(0, n, lambda _, u: jnp.sin(function(u, *others)), u)


U, V, ODD, FLUX = reals(48, 40), reals(48, 40) / 2, reals(45, 40), reals(40)
WHOLE = U.astype(np.int32)
ROWS = [
    Row("walls with nothing else", walls, (U,), EIGHT, (X,), X),
    Row("insulated", insulated, (U,), EIGHT, (X,), X, hops(1, 1), 1e-6),
    Row("insulated, rows that do not divide", insulated, (ODD,), EIGHT, (X,), X, hops(1, 1), 1e-6),
    Row("insulated, three steps", steps(insulated), (U,), EIGHT, (X,), X, hops(*[1] * 6), 1e-6),
    Row("insulated, columns in shards", insulated, (U,), EIGHT, (P(None, "x"),), P(None, "x"),
        NOTHING, 1e-6),
    Row("on a circle", on_a_circle, (U,), EIGHT, (X,), X, hops(1, 1, 1, 1), 1e-6),
    Row("reflected", reflected, (U, V), EIGHT, (X, X), X),
    Row("reflected, integers", reflected, (WHOLE, WHOLE + 3), EIGHT, (X, X), X),
    Row("reflected, a grid", reflected, (U, V), (2, 4), (GRID, GRID), GRID),
    Row("extrapolated", extrapolated, (U,), EIGHT, (X,), X, NOTHING, 1e-6),
    Row("extrapolated across shards", extrapolated, (reals(9, 40),), EIGHT, (X,), X,
        hops(1, 2), 1e-6),
    Row("absorbed", absorbed, (U, V), EIGHT, (X, X), X, NOTHING, 1e-6),
    Row("a flux, added and multiplied", with_flux, (U, FLUX), EIGHT, (X, P()), X, NOTHING, 1e-6),
    Row("ghosts of two rows", ghosts, (U,), EIGHT, (X,), X, hops(2, 2)),
    Row("ghosts across shards", ghosts, (reals(21, 40),), EIGHT, (X,), X, hops(1, 1, 1, 1)),
    Row("mirrored", mirrored, (U,), EIGHT, (X,), X),
    Row("mirrored across shards", mirrored, (reals(21, 40),), EIGHT, (X,), X, hops(1, 1)),
    Row("sides, rows in shards", sides, (U,), EIGHT, (X,), X, NOTHING, 1e-6),
    Row("sides, a grid", sides, (ODD,), (2, 4), (GRID,), GRID, NOTHING, 1e-6),
    Row("walls, a grid", walls, (U,), (4, 2), (GRID,), GRID),
    Row("corners, rows in shards", corners, (reals(3, 48, 40),), EIGHT, (P(None, "x"),),
        P(None, "x")),
    Row("corners, a grid", corners, (reals(3, 45, 40),), (2, 4), (P(None, "x", "y"),),
        P(None, "x", "y")),
    Row("a corner of another", lambda u: u.at[0, 0].set(u[-1, -1]), (U,), (2, 4), (GRID,), GRID,
        {"ppermute": (2, 8)}),
    Row("every eighth row", lambda u, v: u.at[::8].set(v), (reals(512, 5), reals(64, 5)), EIGHT,
        (X, X), X),
    Row("gradient of every eighth row", gradient(lambda u: u[::8]), (reals(512, 5),), EIGHT, (X,),
        X, NOTHING, 1e-5),
    Row("stages", stages, (reals(8, 40), reals(8, 40) + 1), EIGHT, (X, X), X, hops(1)),
    Row("stages, a longer queue", stages, (reals(16, 40), reals(8, 40)), EIGHT, (X, X), X, hops(1)),
    Row("joined to what moved up", lambda u, v: jnp.concatenate([u[1:], v[-1:]]), (U, V), EIGHT,
        (X, X), X, hops(1)),
    Row("joined before what moved down", lambda u, v: jnp.concatenate([-v[:2], u[:-2]]), (U, V),
        EIGHT, (X, X), X, hops(2)),
    Row("dynamic places that are known", dynamic, (U,), EIGHT, (X,), X, hops(1), 1e-6),
    Row("a row of around a loop", inlet, (U, V), EIGHT, (X, X), X,
        {"all_reduce": (1, round(1.75 * ROW))}, 1e-6),
    Row("a choice", chosen, (U, FLUX), EIGHT, (X, P()), X),
    Row("gradient of walls", gradient(walls), (U,), EIGHT, (X,), X, NOTHING, 1e-5),
    Row("gradient of what is reflected", gradient(reflected), (U, V), EIGHT, (X, X), X,
        NOTHING, 1e-5),
    Row("gradient of corners", gradient(corners), (reals(3, 45, 40),), (2, 4),
        (P(None, "x", "y"),), P(None, "x", "y"), NOTHING, 1e-5),
    Row("gradient of a flux", gradient(with_flux), (U, FLUX), EIGHT, (X, P()), X, NOTHING, 1e-5),
    Row("gradient of sides, a grid", gradient(sides), (ODD,), (2, 4), (GRID,), GRID,
        NOTHING, 1e-5),
    Row("gradient of what is mirrored", gradient(mirrored), (U,), EIGHT, (X,), X, NOTHING, 1e-5),
    Row("gradient of ghosts", gradient(ghosts), (U,), EIGHT, (X,), X, hops(2, 2, 2), 1e-5),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_sent(row: Row):
    assert sent_by(row) == row.sent


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_numbers(row: Row):
    check_numbers(row, real=False)


REAL = (
    "insulated, rows that do not divide",
    "ghosts across shards",
    "gradient of ghosts",
    "gradient of sides, a grid",
)


@pytest.mark.parametrize("name", REAL)
def test_numbers_on_devices(name: str):
    (row,) = (row for row in ROWS if row.name == name)
    check_numbers(row, real=True)
