"""Devices that take different branches, or trips, with collectives inside over other axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwise import _jax
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.sharding import Sharding
from meshwise.run.interpret import Interpreter
from meshwise.run.simulate import simulate
from meshwise.run.stacked import Stacked

CUBE = refine_mesh(("x", "y", "z"), (2, 2, 2))
ROWS = Sharding((("x", "y", "z"), ()))


def by_stage(x):
    """Each half along x does something else, together along y or z."""

    def first(v):
        return lax.psum(v, "y") * 2

    def second(v):
        return lax.all_gather(v, "z", axis=1, tiled=True)[:, :3] + lax.axis_index("x")

    return [lax.cond(lax.axis_index("x") < 1, first, second, x)]


def by_number(x):
    """A switch whose index is clamped, in a loop whose carried value it changes."""

    def step(carry, tick):
        index = lax.axis_index("x") * 3 + tick - 2
        branches = [lambda v: v, lambda v: lax.pmax(v, ("y", "z")), lambda v: -v]
        carry = lax.switch(index, branches, carry)
        return lax.ppermute(carry, "x", [(0, 1), (1, 0)]), carry

    carry, every = lax.scan(step, x, jnp.arange(3))
    return [carry + every.sum(0)]


def by_row(x):
    """The branch depends on data, which is the same along z: what it sums over."""
    chosen = lax.psum(x.sum(), "z") > 0
    return [lax.cond(chosen, lambda v: lax.psum(v, "z"), lambda v: v * lax.axis_index("y"), x)]


def by_trips(x):
    """Halves along x leave a loop after trips of their own; inside all of a half meet."""

    def step(i, v):
        half = lax.cond(lax.axis_index("z") < 1, lambda v: lax.psum(v, "y") / 2, jnp.sin, v)
        return half + lax.psum(v, ("y", "z")) / 4 + i

    return [lax.fori_loop(0, lax.axis_index("x") * 2 + 1, step, x)]


def by_data(x):
    """A test that sends itself, and pairs along x that leave one after another."""
    first = lax.pmax(jnp.abs(x), ("y", "z")) + 1
    return [
        lax.while_loop(lambda v: lax.pmin(v.min(), "z") < 90, lambda v: v + lax.psum(v, "y"), first)
    ]


def entered_by_some(x):
    """Loops that would not end for those who do not enter them; the inner one sends nothing."""

    def sending(v):
        grown = lax.while_loop(
            lambda v: lax.pmax(v.max(), "z") < 90, lambda v: v * (1 + lax.axis_index("x")), v
        )
        return lax.psum(grown, "y")

    def own(v):
        halved = lax.while_loop(lambda v: v.max() > 1, lambda v: v / (2 - lax.axis_index("x")), v)
        return halved + lax.psum(v, "z")

    first = lax.pmax(jnp.abs(x), ("y", "z")) + 1
    v = lax.cond(lax.axis_index("x") > 0, sending, lambda v: v, first)
    return [lax.cond(lax.axis_index("x") < 1, own, lambda v: v, v)]


FUNCTIONS = [by_stage, by_number, by_row, by_trips, by_data, entered_by_some]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_own_branches_are_those_of_real_devices(function, compiled):
    x = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    axes = list(zip(CUBE.names, CUBE.sizes, strict=True))
    local = [jax.ShapeDtypeStruct((2, 3), jnp.float32)]
    jaxpr = _jax.make_jaxpr_over_axes(function, axes, local)
    (got,) = simulate(jaxpr, CUBE, [ROWS], [ROWS], [(16, 3)], [x], compiled=compiled)
    mesh = jax.make_mesh(CUBE.sizes, CUBE.names, (jax.sharding.AxisType.Auto,) * 3)
    spec = P(CUBE.names)
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=[spec], check_vma=False)
    np.testing.assert_allclose(got, jax.jit(run)(x)[0], rtol=1e-6)


def test_keys_are_chosen_too():
    keys = jax.random.split(jax.random.key(0), 8)

    def function(k):
        return [
            lax.cond(lax.axis_index("x") < 1, lambda k: lax.all_gather(k, "y")[0], lambda k: k, k)
        ]

    axes = list(zip(CUBE.names, CUBE.sizes, strict=True))
    jaxpr = _jax.make_jaxpr_over_axes(function, axes, [jax.eval_shape(lambda: keys[:1])])
    for is_stepped in (False, True):
        values = [Stacked(keys[:, None], CUBE.names)]
        (got,) = Interpreter(CUBE, is_stepped).run(jaxpr, values)
        wanted = [0, 1, 0, 1, 4, 5, 6, 7]
        found = jax.random.key_data(got.array)[:, 0]
        assert (found == jax.random.key_data(keys)[np.array(wanted)]).all()
