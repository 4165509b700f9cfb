"""Rows with ghosts beside them are computed where the rows of the grid are."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.partition import ways
from meshwise.propagate.complete import in_parts
from tests.meshes import mesh_of, mesh_of_sizes


def cut(x, dim, start, stop):
    """Rows of a dim; those at the end are counted from there."""
    return lax.slice_in_dim(x, start, x.shape[dim] + stop, axis=dim)


def minmod(a, b):
    return jnp.where(a * b > 0, jnp.where(jnp.abs(a) < jnp.abs(b), a, b), 0)


def fluxes(ghosts, dim=0):
    """Differences of a scheme of second order (MUSCL) of rows with two ghosts on either side."""
    inside = cut(ghosts, dim, 1, -1)
    slope = minmod(inside - cut(ghosts, dim, 0, -2), cut(ghosts, dim, 2, 0) - inside) / 2
    left, right = cut(inside + slope, dim, 0, -1), cut(inside - slope, dim, 1, 0)
    speed = jnp.maximum(jnp.abs(left), jnp.abs(right))
    flux = (left**2 + right**2) / 4 - speed * (right - left) / 2
    return cut(flux, dim, 1, 0) - cut(flux, dim, 0, -1)


def circle(u):
    return u - 0.1 * fluxes(jnp.concatenate([u[-2:], u, u[:2]]))


def ends_of(function):
    """Other rows beside the grid than go round it."""

    def step(u):
        low, high = function(u)
        return u - 0.1 * fluxes(jnp.concatenate([low, u, high]))

    return step


def plate(mode):
    def step(u):
        ghosts = jnp.pad(u, 2, mode=mode)
        return u - 0.1 * (fluxes(ghosts[:, 2:-2], 0) + fluxes(ghosts[2:-2], 1))

    return step


def central(u):
    """Of components that are stacked, and with one ghost on either side."""
    ghosts = jnp.pad(u, ((0, 0), (1, 1), (0, 0)), mode="wrap")
    first, second = ghosts
    moved = jnp.stack([jnp.tanh(first * second), jnp.sin(second)])
    between = moved[:, 1:] * moved[:, :-1]
    return u - (between[:, 1:] - between[:, :-1])


def of_components(ghosts):
    """Few of them made otherwise than most: of components at known places, written among these."""
    x = jnp.tanh(ghosts) * ghosts
    return jnp.concatenate([x[..., :1] + 1, x[..., 1:-1], 2 * x[..., -1:]], -1)


def of_fields(ghosts):
    """Each of them by itself, and stacked again."""
    fields = [ghosts[..., k] for k in range(2)]
    return jnp.stack([fields[0] * fields[1], *fields], -1).sum(-1, keepdims=True) * ghosts


def walled(ghosts):
    """Components at the walls of another dim, one of them but for two rows."""
    mirrored = ghosts.at[..., 0].set(ghosts[..., 1]).at[..., -2:].set(ghosts[..., -4:-2][..., ::-1])
    return mirrored.at[1:-1, 1].set(2 * mirrored[1:-1, 2] - mirrored[1:-1, 3])


def differences(make):
    """Of neighbours, of what is made of rows with one ghost on either side."""

    def step(u):
        made = make(jnp.concatenate([u[-1:], u, u[:1]]))
        between = made[1:] * made[:-1]
        return u - (between[1:] - between[:-1])

    return step


def also_whole(u):
    """All rows are read together as well."""
    ghosts = jnp.tanh(jnp.concatenate([u[-1:], u, u[:1]]))
    return (ghosts[1:] * ghosts[:-1])[1:], jnp.sort(ghosts, 0)


def read_after_a_loop(u):
    ghosts = jnp.tanh(jnp.concatenate([u[-1:], u, u[:1]]))

    def step(u, _):
        return u * (ghosts[1:] - ghosts[:-1])[1:], (u[1:] * ghosts[:-3]).sum()

    return lax.scan(step, u, None, length=3)


def conducted(k, u):
    """Six steps of heat in what conducts otherwise in each row; faces are made before the loop."""
    edges = [(1, 1), (0, 0)]
    faces = jnp.pad(k, edges, mode="edge")

    def step(u, _):
        rows = jnp.pad(u, edges, mode="edge")
        flux = (faces[1:] + faces[:-1]) * (rows[1:] - rows[:-1])
        return u + 0.1 * (flux[1:] - flux[:-1]), None

    return lax.scan(step, u, None, length=6)[0]


def slope_of(step):
    return jax.grad(lambda u: (step(u) ** 2).sum())


CASES = {
    "a circle": (circle, (64, 16), P("x"), (8,)),
    "uneven": (circle, (61, 16), P("x"), (8,)),
    "a circle in columns": (lambda u: circle(u.T).T, (16, 64), P(None, "x"), (8,)),
    "its gradient": (slope_of(circle), (64, 16), P("x"), (8,)),
    "a plate": (plate("wrap"), (32, 32), P("x", "y"), (2, 4)),
    "a plate with edges": (plate("edge"), (32, 32), P("x", "y"), (2, 4)),
    "a plate in nothing": (plate("constant"), (32, 32), P("x", "y"), (2, 4)),
    "a mirrored plate": (plate("reflect"), (24, 32), P("y", "x"), (2, 4)),
    "gradient of a plate": (slope_of(plate("constant")), (32, 32), P("x", "y"), (2, 4)),
    "components": (central, (2, 32, 8), P(None, ("x", "y")), (2, 4)),
    "components side by side": (differences(of_components), (64, 3, 5), P("x"), (8,)),
    "components at walls": (differences(walled), (64, 5, 16), P("x", None, "y"), (4, 2)),
    "their gradient": (slope_of(differences(walled)), (64, 16), P("x"), (8,)),
    "fields stacked": (differences(of_fields), (64, 16), P("x"), (8,)),
    "ends that change places": (ends_of(lambda u: (u[:2], u[-2:])), (64, 16), P("x"), (8,)),
    "ends of another": (ends_of(lambda u: (-u[-2:], -u[:2])), (64, 16), P("x"), (8,)),
    "one end of another": (ends_of(lambda u: (u[-2:], u[1:3])), (64, 16), P("x"), (8,)),
    "round, of a part": (lambda u: jnp.pad(circle(u[1:-1]), 1), (66, 16), P("x"), (8,)),
    "also whole": (also_whole, (32, 8), P("x"), (8,)),
    "read after a loop": (read_after_a_loop, (32, 8), P("x"), (8,)),
    "in a loop": (
        lambda u: lax.scan(lambda u, _: (circle(u), u[0]), u, None, length=3),
        (64, 256), P("x"), (8,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    function, shape, spec, mesh = CASES[name]
    u = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    program = mw.jit(function, mesh=mesh_of_sizes(*mesh), in_shardings=spec).partition(u)
    got, want = program.simulate(u), function(u)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def one_row(u):
    ghosts = jnp.concatenate([u[-1:], u])
    return jnp.sin(ghosts[1:]) * ghosts[:-1]


def several(u):
    ghosts = jnp.concatenate([u[-2:], u, u[:2]])
    inside = jnp.tanh(ghosts[1:-1])
    return inside[2:] - inside[:-2] + ghosts[4:] - ghosts[:-4]


# Rows that a device sends.
SENT = {
    "a row of ghosts": (one_row, 1),
    "a circle": (circle, 6),
    "several cuts": (several, 6),
    "components side by side": (differences(of_components), 2),
    "components at walls": (differences(walled), 5.5),
    "components stacked": (differences(of_fields), 2),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name):
    """Only rows at the ends of shards: not those that lie elsewhere as there are more of them."""
    function, rows = SENT[name]
    u = np.random.default_rng(0).normal(size=(512, 128)).astype(np.float32)
    options = {"mesh": mesh_of(x=8), "in_shardings": P("x"), "out_shardings": P("x")}
    program = mw.jit(function, **options).partition(u)
    assert program.wire_bytes == rows * u[0].nbytes
    np.testing.assert_allclose(program.simulate(u), function(u), rtol=1e-4, atol=1e-5)


def weights(p, u):
    """A large array from outside, of one row more."""
    w = jnp.tanh(jnp.pad(p, (0, 1)))
    return (w[:, None] * u).sum(1)[:-1]


def weights_in_a_loop(p, u):
    return lax.scan(lambda p, _: (weights(p, u), None), p, None, length=10)[0]


def box(rows, mode="wrap"):
    """Read along all dims with as many rows on either side."""

    def step(u):
        ghosts = jnp.pad(u, rows, mode=mode)
        x = jnp.tanh(ghosts) * ghosts
        for dim in range(u.ndim):
            x = cut(x, dim, 2 * rows, 0) - cut(x, dim, 0, -2 * rows)
        return x

    return step


def chain(u):
    for _ in range(30):
        ghosts = jnp.concatenate([u[-1:], u])
        u = jnp.tanh(ghosts)[1:] * jnp.sin(ghosts)[:-1]
    return u


X, SPACE = P("x"), P("x", "y", "z")
TABLE = ((256,), X), ((257, 64), X)
# What a device sends, and in how many ways with rows in parts the program was planned as well.
LEFT = {
    "a large array beside": (weights, TABLE, (8,), 56, 1),
    "in a loop": (weights_in_a_loop, TABLE, (8,), 560, 1),
    "as many rows as a shard has": (box(4), [((64, 64), X)], (8,), 8384, 0),
    "nine parts": (box(4, "constant"), [((256, 64), X)], (8,), 2304, 0),
    "along three dims": (box(2), [((16, 16, 16), SPACE)], (2, 2, 2), 5856, 1),
    "once is enough": (chain, [((64, 8), X)], (8,), 448, 1),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name):
    """Where plans are no better; and none is made where parts are many."""
    function, given, mesh, sent, count = LEFT[name]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape, _ in given]
    specs = tuple(spec for _, spec in given)
    step = mw.jit(function, mesh=mesh_of_sizes(*mesh), in_shardings=specs, out_shardings=specs[0])
    program = step.partition(*arrays)
    assert round(program.wire_bytes) == sent
    plan = program.plan
    others = list(in_parts((plan.program, plan.rules, plan.completion)))
    assert len(others) == count
    assert all(len(o.equations) <= 5 * len(plan.program.equations) for o, _, _ in others)
    np.testing.assert_allclose(program.simulate(*arrays), function(*arrays), rtol=1e-4, atol=1e-5)


def test_a_grid_is_in_parts_beside_one_that_is_left():
    def both(u, p, w):
        return circle(u), weights(p, w)

    shapes = (64, 64), (256,), (257, 64)
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    step = mw.jit(both, mesh=mesh_of(x=8), in_shardings=X, out_shardings=X)
    assert step.partition(*arrays).wire_bytes == 6 * 64 * 4 + 56


def test_a_way_is_planned_once(monkeypatch):
    """Where only what is laid along the second dim shifts much, the first is not done again."""
    planned = []

    def noting(completed):
        for way in in_parts(completed):
            planned.append(str(way[0].jaxpr))
            yield way

    def step(u, p):
        ghosts = jnp.tanh(jnp.pad(u, ((1, 0), (0, 1))))
        rows = ghosts[1:] * ghosts[:-1]
        return (rows[:, None, :] * jnp.tanh(p)).sum(1)[:, :-1]

    monkeypatch.setattr(ways, "in_parts", noting)
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((64, 32), (64, 16, 33))]
    specs = P("x", "y"), P("x", None, "y")
    mw.jit(step, mesh=mesh_of_sizes(2, 4), in_shardings=specs).partition(*arrays)
    assert len(planned) == len(set(planned)) == 2


ONE = (jnp.sin, lambda x: -x, lambda x: jnp.where(x > 0, x, x / 2), lambda x: jnp.maximum(x, 0.1))
TWO = (lambda a, b: a - b, lambda a, b: a * b, lambda a, b: jnp.where(a > b, a, 2 * b))
MODES = ("wrap", "edge", "reflect", "constant")


@pytest.mark.parametrize(("rows", "sent"), [(64, 792), (61, 624)])
def test_what_is_made_before_a_loop_is_read_in_parts_within(rows, sent):
    """In each step a row of 48 bytes each way, and few more; all rows were 6,300 bytes and more."""
    step = mw.jit(conducted, mesh=mesh_of(x=8), in_shardings=P("x"), out_shardings=P("x"))
    rng = np.random.default_rng(0)
    k, u = (rng.normal(size=(rows, 12)).astype(np.float32) for _ in range(2))
    program = step.partition(k, u)
    np.testing.assert_allclose(program.simulate(k, u), conducted(k, u), rtol=1e-4, atol=1e-4)
    assert program.wire_bytes == sent


def by_chance(seed, shape):
    """Rows laid beside others, cut, and computed with, along any dims; all as many in the end."""

    def function(u):
        draw = random.Random(seed)
        values = [u]
        for _ in range(draw.randint(3, 9)):
            x, dim = draw.choice(values[-3:]), draw.randrange(u.ndim)
            more, kind = x.shape[dim] - shape[dim], draw.random()
            if kind < 0.3 and more < 4:
                pads = [(0, 0)] * u.ndim
                pads[dim] = draw.choice([(1, 1), (2, 2), (0, 1), (2, 1)])
                x = jnp.pad(x, pads, mode=draw.choice(MODES))
            elif kind < 0.5:
                start = draw.randint(0, max(more, 0))
                x = cut(x, dim, start, -draw.randint(0, max(more - start, 0)))
            elif kind < 0.7:
                x = draw.choice(ONE)(x)
            else:
                alike = [y for y in values if y.shape == x.shape]
                x = draw.choice(TWO)(x, draw.choice(alike))
            values.append(x)
        results = []
        for x in values[-3:]:
            starts = [draw.randint(0, n - m) for n, m in zip(x.shape, shape, strict=True)]
            ends = [start + m for start, m in zip(starts, shape, strict=True)]
            results.append(lax.slice(x, starts, ends))
        return results

    return function


@pytest.mark.parametrize("seed", range(40))
def test_values_by_chance(seed):
    draw = random.Random(seed)
    shape = [draw.choice([16, 17, 24, 32]) for _ in range(draw.choice([1, 2, 2, 3]))]
    function, mesh = by_chance(seed, shape), draw.choice([(8,), (2, 4), (2, 2, 2)])
    lie = [()] * len(shape)
    for axis in "xyz"[: len(mesh)]:
        lie[draw.randrange(len(shape))] += (axis,)
    if draw.random() < 0.4:
        values = function
        function = jax.grad(lambda u: sum((x * jnp.cos(x)).sum() for x in values(u)))
    u = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    program = mw.jit(function, mesh=mesh_of_sizes(*mesh), in_shardings=P(*lie)).partition(u)
    for got, want in zip(
        jax.tree.leaves(program.simulate(u)), jax.tree.leaves(function(u)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
