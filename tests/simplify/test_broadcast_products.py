"""Products with operands that are spread: a smaller product is sent and computed, and is right."""

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

N8 = AbstractMesh((8,), ("x",))


def of_a_mean(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: (x @ w).mean())(w)


def of_both(x: Any, w: Any) -> Any:
    return jax.grad(lambda x, w: (x @ w).mean(), (0, 1))(x, w)


def column(x: Any, w: Any) -> Any:
    """Spread along what is free alone."""
    return x @ jnp.broadcast_to(w[:, :1], (w.shape[0], 5))


def row(x: Any, w: Any) -> Any:
    """Spread along what is summed, which is left."""
    return x @ jnp.broadcast_to(w[0], w.shape[::-1])[: x.shape[1]]


def batches(x: Any, w: Any) -> Any:
    rows = jnp.broadcast_to(x[:, None, :], (x.shape[0], 3, x.shape[1]))
    many = jnp.broadcast_to(w[None, :, :1], (x.shape[0], *w.shape))
    return jnp.einsum("bij,bjk->bki", rows, many)


def chained(x: Any, w: Any) -> Any:
    """What is spread afterwards is an operand again."""
    first = x @ jnp.broadcast_to(w[:, :1], (w.shape[0], 6))
    return jnp.ones((4, x.shape[0])) @ first @ jnp.broadcast_to(0.5, (6, 7))


def in_steps(x: Any, w: Any) -> Any:
    column = jnp.broadcast_to(w[:, :1], (w.shape[0], x.shape[1]))
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ column), x)


def short_floats(x: Any, w: Any) -> Any:
    half = jnp.broadcast_to(w[:, 0].astype(jnp.bfloat16)[:, None], w.shape)
    return jnp.dot(x.astype(jnp.bfloat16), half, preferred_element_type=jnp.float32)


CASES: dict[str, tuple[Callable[..., Any], P]] = {
    "of a mean": (of_a_mean, P()),
    "of both": (of_both, P()),
    "column": (column, P("x")),
    "row": (row, P("x")),
    "batches": (batches, P("x")),
    "chained": (chained, P()),
    "in steps": (in_steps, P("x")),
    "short floats": (short_floats, P("x")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [16, 13], ids=["even", "uneven"])
def test_as_one_device(name: str, rows: int) -> None:
    function, result = CASES[name]
    draw = np.random.default_rng(0)
    x, w = (draw.normal(size=s).astype(np.float32) for s in ((rows, 12), (12, 12)))
    results = (P(), P()) if name == "of both" else result
    program = mw.jit(
        function, mesh=N8, in_shardings=(P("x"), P()), out_shardings=results
    ).partition(x, w)
    found, wanted = program.simulate(x, w), function(x, w)
    for ours, own in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, own, rtol=1e-4, atol=1e-4)


def products(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of the products of a program."""
    return [e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive is lax.dot_general_p]


def test_a_vector_is_summed_where_a_matrix_was() -> None:
    """Of means of 12 features an all_reduce of 40 rows: 7/8 * 2 * 4 bytes each, not 12 times."""
    x, w = jnp.zeros((16, 40)), jnp.zeros((40, 12))
    program = mw.jit(of_a_mean, mesh=N8, in_shardings=(P("x"), P()), out_shardings=P()).partition(
        x, w
    )
    assert program.wire_bytes == 2 * 7 / 8 * 40 * 4
    assert products(program.jaxpr.jaxpr) == [(40,)]


def test_a_hint_on_what_is_spread_is_kept() -> None:
    def hinted(x: Any) -> Any:
        return x @ mw.shard(jnp.broadcast_to(x[0, 0], (x.shape[1], 8)), P(None, "x"))

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    program = mw.jit(hinted, mesh=N8, in_shardings=P(), out_shardings=P(None, "x")).partition(x)
    assert products(program.jaxpr.jaxpr) == [(16, 1)]
    np.testing.assert_allclose(program.simulate(x), x @ np.full((8, 8), x[0, 0]), rtol=1e-5)
