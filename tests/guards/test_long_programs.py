"""Programs of a thousand equations one after another are planned: no pass recurses along them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw

MESH = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
STEPS = 500  # a call in Python for each would pass its limit


def repeated(step, times=STEPS):
    def function(x):
        for _ in range(times):
            x = step(x)
        return x

    return function


def of_positions(x):
    return x[repeated(lambda i: i * 3 + 1)(jnp.arange(64))]


def of_what_every_device_makes(x):
    positions, made = jnp.arange(64) * 1.0, []
    for _ in range(STEPS):
        positions = jnp.sin(positions)
        made.append(positions)
    for one in reversed(made):
        x = x * one
    return x


def inside_of_a_pad(x):
    return jnp.pad(repeated(jnp.sin)(x[1:-1]), ((1, 1), (0, 0)))


LONG = {
    "shifts": (repeated(lambda x: jnp.concatenate([x[1:], x[:1]])), P("x")),
    "upwind": (repeated(lambda x: x - 0.1 * (x - jnp.roll(x, 1, axis=0)), 400), P("x")),
    "positions": (of_positions, P("x")),
    "what every device makes": (of_what_every_device_makes, P(None, "x")),
    "inside of a pad": (inside_of_a_pad, P("x")),
}


@pytest.mark.parametrize("name", LONG)
def test_planned(name):
    function, spec = LONG[name]
    array = jax.ShapeDtypeStruct((64, 64), "float32")
    assert len(jax.make_jaxpr(function)(array).eqns) > 400
    assert not mw.jit(function, mesh=MESH, in_shardings=spec).partition(array).per_device.whole


def test_a_constant_that_each_step_reads_and_changes_is_not_copied_for_each():
    def function(x):
        mask = jnp.arange(64) * 1.0
        for _ in range(200):
            mask = jnp.sin(mask)
            x = x * mask
        return x

    fn = mw.jit(function, mesh=MESH, in_shardings=P(None, "x"))
    plan = fn.partition(jax.ShapeDtypeStruct((64, 64), "float32")).plan
    assert plan is not None
    # Of each step a copy of 64 equations at most would be 12,800; all of them were 21,500.
    assert len(plan.program.equations) < 4_000
