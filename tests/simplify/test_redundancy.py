"""Equal equations are one, and only these."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax
from meshwise.flatten import as_written, flatten
from meshwise.ir.bodies import scopes
from meshwise.simplify.redundancy import hoist_loop_invariants

MESH = AbstractMesh((2,), ("x",))


def chosen(x):
    return jnp.where(x > 0, 0.0, -0.0)


def divided(x):
    return 1 / chosen(x)


def joined(x):
    return jnp.concatenate([jnp.full((4, 3), 0.0), jnp.full((4, 3), -0.0), x * 0.0, x * -0.0])


def of_both(x):
    return jnp.stack([x.astype(int) * 1, x.astype(bool) * True, x * 1.0])


@pytest.mark.parametrize("function", [chosen, divided, joined, of_both], ids=lambda f: f.__name__)
def test_numbers_that_are_equal_are_not_always_the_same(function):
    """Zeros of both signs are equal, and so is one in all types."""
    x = np.asarray([[1, -2, 3], [-4, 5, -6], [0, 7, 8], [-0.0, -1, 1]], np.float32)
    found = mw.jit(function, mesh=MESH, in_shardings=P("x")).partition(x).simulate(x)
    wanted = jax.jit(function)(x)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_parameters_that_are_equal_are_not_always_the_same():
    """Rows at a place past the end, which are filled with zeros of both signs.

    What JAX compiles of both in one program fills with one of them.
    """

    def filled(x, fill):
        return x.at[np.array([7])].get(mode="fill", fill_value=fill)

    x = np.ones((4, 3), np.float32)
    program = mw.jit(lambda x: (filled(x, 0.0), filled(x, -0.0)), mesh=MESH).partition(x)
    fills = [e.params["fill_value"] for e in program.jaxpr.eqns if e.primitive is lax.gather_p]
    assert list(map(str, fills)) == ["0.0", "-0.0"]
    keys = [_jax.structure_key(jax.make_jaxpr(lambda x, f=f: filled(x, f))(x)) for f in (0.0, -0.0)]
    assert keys[0] != keys[1]


def test_equal_equations_are_one():
    def twice(x):
        return jnp.sin(x) * 2.0, jnp.cos(x) + jnp.sin(x) * 2.0

    program = mw.jit(twice, mesh=MESH, in_shardings=P("x")).partition(np.zeros((4, 3), np.float32))
    names = [eqn.primitive.name for eqn in program.jaxpr.jaxpr.eqns]
    assert names.count("sin") == names.count("mul") == 1


def of_places(places, x):
    """What a step computes of places alone, and what it writes into large zeros."""

    def step(carry, row):
        order = jnp.sort(jnp.cos(places)).sum()
        large = jnp.zeros((4096,)).at[:2].set(x[:2])
        return carry + order + large.sum() * row.sum(), None

    return jax.lax.scan(step, 0.0, jnp.stack([x, 2 * x]))[0]


@pytest.mark.parametrize("given", [False, True])
def test_what_is_the_same_in_every_step_leaves_a_loop_unless_it_is_held_for_that(given):
    x = np.linspace(0, 1, 8, dtype=np.float32)

    def function(places, x):
        return of_places(places if given else lax.iota(jnp.float32, 16), x)

    args = np.arange(16, dtype=np.float32), x
    program = mw.jit(function, mesh=MESH, in_shardings=P()).partition(*args)
    np.testing.assert_allclose(program.simulate(*args), function(*args), rtol=1e-5)
    (scan,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive is lax.scan_p]
    inside = {eqn.primitive.name for eqn in scan.params["jaxpr"].jaxpr.eqns}
    assert not inside & {"sort", "cos"}
    assert all(v.aval.size < 4096 for v in scan.invars)


def neighbours(count):
    """Of rows an outer product each, in each step, and of these each with the next one.

    The first is read by what is carried, so it stays; for that the second does, and so on.
    """

    def function(x, rows):
        def step(carry, _):
            outer = [row[:, None] * row for row in rows]
            pairs = itertools.pairwise(outer)
            return jnp.sin(carry + outer[0]) + sum((a * b).sum() for a, b in pairs), None

        return lax.scan(step, x, None, length=3)[0]

    rows = [jax.ShapeDtypeStruct((16,), jnp.float32)] * count
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((16, 16), jnp.float32), rows)
    return as_written(closed, _jax.has_bodies).jaxpr.eqns


def test_what_stays_for_what_stays_takes_no_square_of_the_chain():
    def calls(count):
        """How many functions Python calls for so many rows; nothing leaves the loop."""
        eqns, seen = neighbours(count), []
        before = sys.getprofile()
        sys.setprofile(lambda _, event, __: seen.append(1) if event == "call" else None)
        try:
            hoisted = hoist_loop_invariants(eqns)
        finally:
            sys.setprofile(before)
        assert [*map(id, hoisted)] == [*map(id, eqns)]
        return len(seen)

    small, middle, large = map(calls, (20, 40, 80))
    assert large - middle < 2.15 * (middle - small)


def next_rows(x):
    """What is a gather as it is written, and needs its positions."""
    x = jnp.asarray(x)
    return lax.fori_loop(0, 4, lambda _, y: jnp.sin(y) + x[(jnp.arange(8) + 1) % 8], x)


def gradient_of_rolled(x):
    """In each step the same is rolled back, which is two pads as it is written."""

    def rolled(x):
        return lax.scan(lambda y, _: (y + jnp.roll(x, 1, 0), None), x, None, length=4)[0]

    return jax.grad(lambda x: (rolled(x) ** 2).sum())(x)


def gradient_of_an_edge(x):
    """What is rolled back has a row more for a while."""

    def shifted(x):
        return jnp.pad(x, ((1, 0), (0, 0)), mode="edge")[:-1]

    def summed(x):
        return lax.scan(lambda y, _: (y + shifted(x), None), x, None, length=4)[0]

    return jax.grad(lambda x: (summed(x) ** 2).sum())(x)


@pytest.mark.parametrize("function", [next_rows, gradient_of_rolled, gradient_of_an_edge])
def test_moves_that_are_the_same_in_every_step_are_made_once(function):
    x = np.arange(8 * 3, dtype=np.float32).reshape(8, 3) / 8
    program = mw.jit(function, mesh=MESH, in_shardings=P("x")).partition(x)
    assert program.collectives and all(c.count == 1 for c in program.collectives)
    eqns = program.plan.program.equations
    bodies = [e for e, scope in zip(eqns, scopes(eqns), strict=True) if scope]
    names = {e.primitive.name for e in bodies}
    assert not names & {"concatenate", "gather", "pad", "roll", "slice"}
    np.testing.assert_allclose(program.simulate(x), function(x), rtol=1e-5)


def first_of_places(x):
    """Places are sorted along; of equal keys they are not told apart."""
    return lax.sort((x, jnp.sin(x), jnp.roll(x, 1, 0)), dimension=0)[0]


def last_behind_two_keys(x):
    parts = (x // 2, jnp.roll(x, 1, 0), -x, x * 3)
    return lax.sort(parts, dimension=1, num_keys=2, is_stable=False)[3]


def carried_round(x):
    """What is sorted along in one step is read in the next one."""

    def step(_, c):
        return tuple(lax.sort((c[1], c[0], jnp.sin(c[0])), dimension=1)[:2])

    return lax.fori_loop(0, 3, step, (x, -x))[0]


@pytest.mark.parametrize(
    ("function", "operands"), [(first_of_places, 1), (last_behind_two_keys, 3), (carried_round, 2)]
)
def test_what_nobody_reads_is_not_sorted_along(function, operands):
    x = np.asarray([[5, -2, 3], [-4, 5, -6], [0, 7, 8], [2, -1, 1]], np.float32)
    entered = flatten(jax.make_jaxpr(function)(x), _jax.has_bodies)
    (sort,) = [e for e in entered.jaxpr.eqns if e.primitive is lax.sort_p]
    assert len(sort.invars) == len(sort.outvars) == operands
    assert "sin" not in {e.primitive.name for e in entered.jaxpr.eqns}
    found = mw.jit(function, mesh=MESH, in_shardings=P("x")).partition(x).simulate(x)
    np.testing.assert_array_equal(found, jax.jit(function)(x))
