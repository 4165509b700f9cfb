"""What completion gives each value, and why."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw

MESH = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
S = P.UNCONSTRAINED


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def completed(fn, args, in_specs, out_specs=None, mesh=MESH):
    """Specs that completion (and nothing after it) gives the results."""
    step = mw.jit(fn, mesh=mesh, in_shardings=in_specs, out_shardings=out_specs, completion="gspmd")
    program = step.partition(*args)
    ins = jax.tree.map(lambda s: s.spec, program.in_shardings)
    outs = jax.tree.map(lambda s: s.spec, program.out_shardings)
    return ins, outs


A, B, C = f32(8, 16), f32(16, 32), f32(4, 8, 16)
FORWARD = {
    "elementwise": (lambda a: jnp.tanh(a) * 2, (A,), (P("x", "y"),), P("x", "y")),
    "two operands merge": (lambda a, b: a + b, (A, A), (P("x"), P(None, "y")), P("x", "y")),
    "longer prefix wins": (lambda a, b: a + b, (A, A), (P(("x", "y")), P("x")), P(("x", "y"))),
    "transpose": (lambda a: a.T, (A,), (P("x", "y"),), P("y", "x")),
    "matmul takes both free dims": (jnp.matmul, (A, B), (P("x"), P(None, "y")), P("x", "y")),
    "contracted axis is gone": (jnp.matmul, (A, B), (P(None, "y"), P("y")), P()),
    "larger operand wins a conflict": (jnp.matmul, (A, B), (P("x"), P(None, "x")), P(None, "x")),
    "batch beats size": (
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
        (f32(4, 8, 8), f32(4, 8, 64)),
        (P("x"), P(None, None, "x")),
        P("x"),
    ),
    "reduction drops the dim": (lambda c: c.sum(1), (C,), (P("x", "y"),), P("x")),
    "merge keeps the major dim": (lambda c: c.reshape(32, 16), (C,), (P("x"),), P("x")),
    "split goes to the major part": (
        lambda a: a.reshape(8, 4, 4),
        (A,),
        (P(None, "y"),),
        P(None, "y"),
    ),
    "split over more than the major part takes sub-axes": (
        lambda a: a.reshape(8, 2, 8),
        (A,),
        (P(None, "y"),),
        P(None, "y.0", "y.1"),
    ),
    "broadcast of a bias": (lambda a, v: a + v, (A, f32(16)), (P(), P("y")), P(None, "y")),
    "gather of rows": (
        lambda t, i: t[i],
        (B, jax.ShapeDtypeStruct((8,), jnp.int32)),
        (P(None, "y"), P("x")),
        P("x", "y"),
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name):
    fn, args, specs, expected = FORWARD[name]
    _, found = completed(fn, args, specs)
    assert found == expected


BACKWARD = {
    "elementwise": (jnp.exp, (A,), P("x", "y"), (P("x", "y"),)),
    "matmul": (jnp.matmul, (A, B), P("x", "y"), (P("x"), P(None, "y"))),
    "reduction": (lambda c: c.sum(1), (C,), P("x", "y"), (P("x", None, "y"),)),
    "broadcast": (lambda v: jnp.broadcast_to(v, (8, 16)), (f32(16),), P("x", "y"), (P("y"),)),
    "one operand tells the other": (
        lambda a, b: a + b,
        (A, A),
        P("x"),
        (P("x"), P("x")),
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name):
    fn, args, out_spec, expected = BACKWARD[name]
    found, _ = completed(fn, args, None, out_spec)
    assert found == expected


def test_contracting_dim_comes_from_the_other_operand():
    found, _ = completed(jnp.matmul, (A, B), (P(None, "y"), None))
    assert found[1] == P("y")


def test_hints_hold_to_the_letter():
    def fn(a):
        return mw.shard(a * 2, P(None, "x")) + 1

    ins, outs = completed(fn, (A,), (P("x", "y"),), P("y"))
    assert ins == (P("x", "y"),)
    assert outs == P("y")


def test_open_dims_are_filled_in():
    def fn(a):
        return mw.shard(a, P("x", S)) * 1.5

    _, outs = completed(fn, (A,), (P(None, "y"),))
    assert outs == P("x", "y")


def test_constants_tie_nothing_together():
    def fn(a, b):
        zeros = jnp.zeros_like(a)
        return lax.max(a, zeros), lax.max(b, zeros)

    _, outs = completed(fn, (A, A), (P("x"), P(None, "y")))
    assert outs == (P("x"), P(None, "y"))


def test_completion_is_idempotent():
    def fn(a, b):
        return jnp.tanh(a @ b).sum(0)

    ins, outs = completed(fn, (A, B), (P("x", None), None), P("y"))
    again = completed(fn, (A, B), ins, outs)
    assert again == (ins, outs)


def test_every_sharded_dim_has_a_cause_that_leads_to_a_hint():
    def fn(a, b):
        return jax.nn.softmax(jnp.tanh(a @ b)).sum(0)

    step = mw.jit(fn, mesh=MESH, in_shardings=(P("x"), P(None, "y")))
    plan = step.partition(A, B).plan
    equations = plan.program.equations
    for (var, dim), cause in plan.completion.causes.items():
        if cause.equation is None:
            assert "in_shardings" in cause.hint
        else:
            tensors = [*equations[cause.equation].invars, *equations[cause.equation].outvars]
            assert var in tensors, (var, dim, cause)
