"""What depends on nothing that is placed is made anew in each part that is wanted of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

N8, N24 = AbstractMesh((8,), ("x",)), AbstractMesh((2, 4), ("x", "y"))
ROWS, COLUMNS = P("x"), P(None, "x")


def both_ways(made):
    """By rows of one matrix and by columns of another, something that is made of a table."""

    def function(x, y, table):
        found = made(table)
        return x + found, y * found

    return function


def decay(t):
    return jnp.exp(-jnp.abs(t[:, None] - t[None, :]))


def nested(x, y, table):
    """What is made in a step of a loop, of the number of the step, is made there."""

    def step(carry, k):
        places = jnp.arange(x.shape[0])
        mask = places[:, None] + k >= places
        return (jnp.where(mask, carry[0], k), jnp.where(mask, k, carry[1])), None

    return lax.scan(step, (x, y + table[0, 0]), jnp.arange(3))[0]


# The function, shapes of all its arguments; the third is whole on every device.
CASES = {
    "a table": (both_ways(lambda t: t * 2 + 1), [(64, 64)] * 3, N8),
    "a table that does not divide": (both_ways(jnp.sin), [(61, 35)] * 3, N8),
    "a table the other way round": (both_ways(lambda t: t.T - 1), [(32, 48)] * 2 + [(48, 32)], N8),
    "all pairs of a vector": (both_ways(decay), [(64, 64), (64, 64), (64,)], N8),
    "over one axis of two": (both_ways(decay), [(64, 64), (64, 64), (64,)], N24),
    "masks in a loop": (nested, [(64, 64)] * 3, N8),
}


def partitioned(case):
    function, shapes, mesh = CASES[case]
    step = mw.jit(
        function, mesh=mesh, in_shardings=(ROWS, COLUMNS, P()), out_shardings=(ROWS, COLUMNS)
    )
    return step.partition(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_sent(case):
    assert not partitioned(case).collectives


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    function, shapes, _ = CASES[case]
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) for s in shapes]
    found = partitioned(case).simulate(*args)
    for one, wanted in zip(found, function(*args), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)


def test_no_device_makes_all_pairs_to_sum_them():
    """It would save gathering the sums, for as many times the work as there are devices."""

    def summed(t, x):
        return decay(t).sum(1) * x

    step = mw.jit(summed, mesh=N8, in_shardings=(P(), P("x")), out_shardings=P())
    shapes = jax.ShapeDtypeStruct((256,), jnp.float32)
    made = [v.aval.size for eqn in step.partition(shapes, shapes).jaxpr.eqns for v in eqn.outvars]
    assert max(made) == 256 * 256 // 8


def test_what_a_loop_reads_is_made_before_it():
    def weighted(x, table):
        weights = jnp.exp(table)
        return lax.fori_loop(0, 10, lambda _, x: x * weights, x)

    step = mw.jit(weighted, mesh=N8, in_shardings=(ROWS, P()), out_shardings=ROWS)
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    names = [eqn.primitive.name for eqn in step.partition(shapes, shapes).jaxpr.eqns]
    assert "exp" in names


def test_what_is_read_once_is_decided_with_its_reader():
    """As a moment times its decay, before a gradient is added: it needs no node of its own."""

    def updated(moment, gradient):
        return 0.9 * moment + gradient

    step = mw.jit(updated, mesh=N8, in_shardings=(P(), ROWS), out_shardings=ROWS)
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert [one.remade for one in step.partition(shapes, shapes).plan.equations] == [False, False]


def test_weights_of_positions_are_summed_where_they_are_wanted():
    """Of an image made larger only the image is sent: once along each dim."""

    def larger(image):
        return jax.image.resize(image, (64, 64), "linear")

    step = mw.jit(larger, mesh=N24, in_shardings=P("x", "y"), out_shardings=P("x", "y"))
    program = step.partition(jax.ShapeDtypeStruct((16, 16), jnp.float32))
    rows, columns = 1 / 2 * 16 * 4 * 4, 3 / 4 * 32 * 16 * 4
    assert program.wire_bytes == rows + columns
    image = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    np.testing.assert_allclose(program.simulate(image), larger(image), rtol=1e-5, atol=1e-6)
