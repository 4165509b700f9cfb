"""Following a completed sharding back to the hint that it comes from."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.report.origins import find_origin

MESH = AbstractMesh((2, 4), ("x", "y"))


def plan_of(function, *shapes, **options):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return mw.jit(function, mesh=MESH, **options).partition(*arguments).plan


def names(plan, origin):
    return [plan.program.equations[e].primitive.name for e in origin.equations]


def test_a_hint_is_its_own_origin():
    plan = plan_of(jnp.sin, (8, 4), in_shardings=P("x"))
    origin = find_origin(plan, plan.program.inputs[0], 0)
    assert (origin.var, origin.dim) == (plan.program.inputs[0], 0)
    assert origin.hint.endswith("in_shardings") and origin.equations == ()


def test_a_chain_ends_at_the_hint_and_lists_the_nearest_equation_first():
    plan = plan_of(lambda x: jnp.sin(x.T) * 2, (8, 4), in_shardings=P("x"))
    origin = find_origin(plan, plan.program.outputs[0], 1)
    assert (origin.var, origin.dim) == (plan.program.inputs[0], 0)
    assert names(plan, origin) == ["mul", "sin", "transpose"]


def test_a_chain_goes_through_the_contracted_dim_to_the_other_operand():
    plan = plan_of(lambda x, w: (2.0 * x) @ w, (8, 4), (4, 6), in_shardings=(P(None, "y"), None))
    origin = find_origin(plan, plan.program.inputs[1], 0)
    assert (origin.var, origin.dim) == (plan.program.inputs[0], 1)
    assert names(plan, origin) == ["dot_general", "mul"]


def test_a_chain_goes_backward_from_a_result():
    plan = plan_of(jnp.sin, (8, 4), out_shardings=P(None, "y"))
    origin = find_origin(plan, plan.program.inputs[0], 1)
    assert origin.var is plan.program.outputs[0] and origin.hint.endswith("out_shardings")


def test_a_dim_that_nothing_shards_has_no_origin():
    plan = plan_of(jnp.sin, (8, 4))
    assert find_origin(plan, plan.program.inputs[0], 0) is None


def test_every_completed_dim_of_a_gradient_leads_to_a_hint():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    plan = plan_of(jax.grad(loss), (8, 16), (32, 8), in_shardings=(None, P("x", "y")))
    for (var, dim), cause in plan.completion.causes.items():
        origin = find_origin(plan, var, dim)
        assert origin.hint, (var, dim, cause)
