"""Values written twice, each with a hint, are no contradiction, though they are found equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

N24 = AbstractMesh((2, 4), ("x", "y"))


def each_with_a_hint(x: Any) -> Any:
    return mw.shard(jnp.sin(x), P("x")) + 1, mw.shard(jnp.sin(x), P("y")) + 2


def in_a_loop_and_after(x: Any) -> Any:
    added = lax.fori_loop(0, 3, lambda _, c: c + mw.shard(jnp.sin(x), P("x")), x)
    return added + mw.shard(jnp.sin(x), P("y"))


def laid_otherwise_and_back(x: Any) -> Any:
    return mw.shard(mw.shard(x * 2, P("x")).reshape(-1).reshape(x.shape), P("y"))


CASES = [each_with_a_hint, in_a_loop_and_after, laid_otherwise_and_back]


@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("rows", [12, 11], ids=["even", "uneven"])
def test_they_are_placed_as_each_says(function: Callable[..., Any], rows: int) -> None:
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype(np.float32)
    program = mw.jit(function, mesh=N24).partition(x)
    said = [hint.given_as for hint in program.plan.program.hints.values()]
    assert sorted(said) == ["P('x',)", "P('y',)"]
    for ours, wanted in zip(
        jax.tree.leaves(program.simulate(x)), jax.tree.leaves(function(x)), strict=True
    ):
        np.testing.assert_allclose(ours, wanted, rtol=1e-6)


def test_of_one_value_two_hints_are_a_contradiction() -> None:
    def function(x: Any) -> Any:
        same = jnp.sin(x)
        return mw.shard(same, P("x")) + 1, mw.shard(same, P("y")) + mw.shard(jnp.sin(x), P())

    with pytest.raises(mw.HintError) as refused:
        mw.jit(function, mesh=N24).partition(jax.ShapeDtypeStruct((12, 6), jnp.float32))
    assert str(refused.value).count("is P(") == 1  # what is written apart says nothing of it


def test_a_gradient_may_lie_otherwise_than_its_value_was_hinted():
    """Nobody stated of a cotangent that it lies as its value does, so a hint on it is the only."""

    def step(w, x):
        gradient = jax.grad(lambda w: (jnp.tanh(x @ mw.shard(w, P())) ** 2).mean())(w)
        return w - 0.1 * mw.shard(gradient, P(None, "x"))

    draw = np.random.default_rng(0)
    w, x = (draw.normal(size=shape).astype(np.float32) for shape in ((64, 64), (256, 64)))
    columns = P(None, "x")
    mesh = AbstractMesh((8,), ("x",))
    jitted = mw.jit(step, mesh=mesh, in_shardings=(columns, P("x")), out_shardings=columns)
    program = jitted.partition(w, x)
    assert sorted(c.kind.value for c in program.collectives) == ["all_gather", "reduce_scatter"]
    np.testing.assert_allclose(program.simulate(w, x), step(w, x), rtol=1e-4, atol=1e-5)
