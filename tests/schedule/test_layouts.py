"""What layouts say of collectives that are less plain, and moves that would believe it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import new_eqn
from meshwise.ir import collectives
from meshwise.schedule import layouts
from meshwise.schedule.view import View
from tests.meshes import mesh_of
from tests.schedule.soundness import misstated
from tests.schedule.steps import random


def program_of(fn, args, specs, outs, **axes):
    return mw.SpmdProgram.from_shard_map(fn, mesh_of(**axes), specs, outs, *args, check_vma=False)


def varying(program, name):
    """The axes along which the result of an equation may differ, as its layout says."""
    view = View(program.per_device)
    (eqn,) = [e for e in view.eqns if e.primitive.name == name]
    return view.layout(eqn.outvars[0]).varying


def unpaired(x, y):
    """A scattered dim that other devices have other rows of: these are no less apart after it."""
    part = lax.psum_scatter(x, "x", scatter_dimension=0, tiled=False)
    return lax.psum(lax.all_gather(y, "y", axis=0, tiled=True) * part, "x")[None]


def test_an_axis_along_a_dim_that_goes_is_not_lost():
    args = random(8, 16), random(16, seed=1)
    program = program_of(unpaired, args, (P("y"), P("y")), P("y"), x=2, y=4)
    assert varying(program, "reduce_scatter") == {"x", "y"}
    assert not misstated(program.per_device, args)
    s = mw.Schedule(program)
    with pytest.raises(mw.IllegalMove, match="nothing that reads"):  # y has other rows of it
        s.reorder(s.find("all_gather")[0], more_bytes=True)


def test_an_exchange_that_takes_a_dim_away_says_no_dim():
    def step(x):
        return lax.all_to_all(x, "x", 0, 1, tiled=False) * lax.psum(x, "x")

    args = (random(8, 4, 4),)
    program = program_of(step, args, P("y"), P("y"), x=4, y=2)
    view = View(program.per_device)
    (eqn,) = [e for e in view.eqns if e.primitive.name == "all_to_all"]
    layout = view.layout(eqn.outvars[0])
    assert not any(layout.dims) and layout.varying == {"x", "y"}


def test_what_the_host_and_each_device_draw_by_themselves_is_no_copy():
    def step(x):
        drawn = io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32))
        return x * drawn + lax.rng_uniform(jnp.float32(0), jnp.float32(1), shape=(4,))

    program = program_of(step, (random(4),), P(), P("x"), x=4)
    assert varying(program, "io_callback") == varying(program, "rng_uniform") == {"x"}


@pytest.mark.parametrize("name", collectives._KIND_OF_PRIMITIVE)
def test_no_kind_of_collective_is_taken_for_none(name):
    """A collective that layouts do not know leaves what differs, at the least along its axes."""
    if name in layouts._COLLECTIVES:
        return
    like = jax.make_jaxpr(jnp.sin)(jnp.ones(8)).eqns[0]
    primitive = jax.extend.core.Primitive(name)
    eqn = new_eqn(primitive, like.invars, like.outvars, {"axis_name": ("x",)}, like)
    sizes = {"x": 2, "y": 2}
    given = layouts.local_over(1, ("y",))
    (found,) = layouts._of_equation(eqn, [given], sizes, layouts.Positions(sizes))
    assert found.varying == {"x", "y"}
