"""What is only read in parts is only made in parts (`schedule/tidy.py`)."""

import jax.numpy as jnp
import numpy as np

import meshwise as mw
from meshwise.schedule.tidy import tidy
from meshwise.schedule.view import View
from tests.meshes import mesh_of
from tests.schedule.steps import random


def test_a_value_cut_along_two_dims():
    layouts = {"z": mw.Sliced(0, "a") & mw.Sliced(1, "b")}
    program = mw.program(mesh_of(a=2, b=3), layouts=layouts)(lambda x, z: jnp.tanh(x) * z)
    args = random(4, 9), random(4, 9, seed=1)
    made = program.partition(*args)
    (tanh,) = [e for e in made.jaxpr.jaxpr.eqns if e.primitive.name == "tanh"]
    assert tanh.outvars[0].aval.shape == (2, 3)
    np.testing.assert_allclose(made.simulate(*args), np.tanh(args[0]) * args[1], rtol=1e-6)
    again = tidy(View(made.per_device))
    assert str(again.program.jaxpr) == str(made.jaxpr)
