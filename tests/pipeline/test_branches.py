"""What stages send while others are in other branches: nothing for which all devices meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax.branches import without_permutes
from meshwise._jax.jaxprs import bodies_of, opened
from meshwise._jax.tracing import make_jaxpr_over_axes
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.sharding import Sharding
from meshwise.run.simulate import simulate
from tests.pipeline.models import chain, normal
from tests.pipeline.test_values import assert_same, mesh_of

WIDTH = 16


def rolled(x, w):
    return jnp.tanh(x + jnp.roll(x, 1, 1) * w[0] + jnp.roll(x, -2, 1) * w[1])


def convolved(x, w):
    return lax.conv_general_dilated(x[:, None], w[:1, None, :3], (1,), "SAME")[:, 0] + x


def stepped(x, w):
    return lax.scan(lambda x, row: (rolled(x, w) + row, None), x, w[:3])[0]


def halves(x, w):
    a, b = jnp.split(x @ w, 2, axis=1)
    return x + jnp.concatenate([a * b, b], 1)


STAGES = {
    "rolled": (rolled, None),
    "convolved": (convolved, None),
    "in a loop": (stepped, None),
    "halves of columns": (halves, P(None, "data")),
}


def permutes(jaxpr, is_in_branch=False):
    """How many permutes are in branches, and how many are not."""
    found = np.zeros(2, int)
    for eqn in opened(jaxpr).eqns:
        found[int(is_in_branch)] += eqn.primitive is lax.ppermute_p
        for body in bodies_of(eqn):
            found += permutes(body, is_in_branch or eqn.primitive is lax.cond_p)
    return found


@pytest.mark.parametrize("name", STAGES)
def test_no_branch_has_a_permute(name):
    stage, weights = STAGES[name]
    loss = chain(stage)
    rng = np.random.default_rng(3)
    params = [normal(rng, WIDTH, WIDTH) for _ in range(2)]
    batch = {"x": normal(rng, 8, WIDTH), "y": normal(rng, 8, WIDTH)}
    shardings = [weights] * 2, P(None, "data")
    step = mw.pipeline_value_and_grad(loss, axis="stage", microbatches=4, in_shardings=shardings)
    program = mw.jit(step, mesh=mesh_of(stage=2, data=4)).partition(params, batch)
    outside, inside = permutes(program.jaxpr)
    assert outside == 1
    assert inside == 0
    want = jax.value_and_grad(loss)(params, batch)
    assert_same(program.simulate(params, batch), want)
    if name == "rolled":  # nor do they meet where they should not
        assert_same(program(params, batch), want)


PAIRS = {
    "a circle": [(i, (i + 1) % 4) for i in range(4)],
    "a row": [(i, i + 1) for i in range(3)],
    "backwards by two": [(2, 0), (3, 1)],
    "any": [(0, 2), (2, 1), (1, 1)],
    "one": [(3, 0)],
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), ("c.0", "c.1")])
def test_gathers_do_what_permutes_do(pairs, axes):
    mesh = refine_mesh(("a", "b", "c"), (2, 2, 4))
    x = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    struct = jax.ShapeDtypeStruct((1, 3), np.float32)
    sizes = mesh.axis_size

    def sent(x):
        return lax.ppermute(x, axes, pairs)

    jaxpr = make_jaxpr_over_axes(sent, [*sizes.items()], [struct])
    lies = Sharding((mesh.names, ()))
    got, want = [
        simulate(each, mesh, [lies], [lies], [x.shape], [x], compiled=False)[0]
        for each in (without_permutes(jaxpr, sizes), jaxpr)
    ]
    np.testing.assert_array_equal(got, want)
