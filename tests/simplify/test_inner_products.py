"""Inner products of flattened arrays: blocks stay where they are, and a number is sent."""

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


def with_itself(x: Any, y: Any) -> Any:
    return jnp.vdot(x, x) + jnp.vdot(y, y)


def also_returned(x: Any, y: Any) -> Any:
    """What is flattened for somebody else is flattened still."""
    flat = x.ravel()
    return flat @ y.ravel(), flat


def otherwise_flattened(x: Any, y: Any) -> Any:
    """Elements meet others than in the arrays."""
    return x.ravel() @ y.T.reshape(-1)


def in_the_other_order(x: Any, y: Any) -> Any:
    """The trace of a product of matrices, as it is written; one reshape transposes first."""
    return x.ravel(order="F") @ y.ravel()


def solved(x: Any, y: Any) -> Any:
    """Conjugate gradients of a field: `jax.scipy` takes products of all that is in it."""
    product = lambda v: v + 0.1 * jnp.roll(v, 1, 0) + 0.1 * jnp.roll(v, -1, 0)  # noqa: E731
    return jax.scipy.sparse.linalg.cg(product, x + y, maxiter=3)[0]


def in_steps(x: Any, y: Any) -> Any:
    flat = y.ravel()
    return lax.fori_loop(0, 3, lambda _, x: x / (2 + jnp.tanh(x.ravel() @ flat)), x)


CASES: dict[str, tuple[Callable[..., Any], P, int | None]] = {
    "with another": (jnp.vdot, P(), 7),
    "with itself": (with_itself, P(), 7),
    "also returned": (also_returned, P(), None),
    "otherwise flattened": (otherwise_flattened, P(), None),
    "in the other order": (in_the_other_order, P(), None),
    "solved": (solved, P("x", "y"), None),
    "in steps": (in_steps, P("x", "y"), 3 * 7),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(16, 32), (15, 30)], ids=["even", "uneven"])
def test_products_of_blocks(name: str, shape: tuple[int, int]) -> None:
    function, result, sent = CASES[name]
    draw = np.random.default_rng(0)
    x, y = (draw.normal(size=shape).astype(np.float32) for _ in range(2))
    program = mw.jit(function, mesh=N24, in_shardings=P("x", "y"), out_shardings=result).partition(
        x, y
    )
    if sent is not None:
        assert program.wire_bytes == sent
    elif name == "solved":
        assert program.wire_bytes < x.nbytes / 3  # of which most for the rows beside a block
    for ours, wanted in zip(
        jax.tree.leaves(program.simulate(x, y)), jax.tree.leaves(function(x, y)), strict=True
    ):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)


def test_the_first_of_complex_arrays_is_conjugated() -> None:
    draw = np.random.default_rng(0)
    x, y = (draw.normal(size=(15, 30, 2)) @ [1, 1j] for _ in range(2))
    x, y = x.astype(np.complex64), y.astype(np.complex64)
    program = mw.jit(jnp.vdot, mesh=N24, in_shardings=P("x", "y"), out_shardings=P()).partition(
        x, y
    )
    assert program.wire_bytes == 14
    np.testing.assert_allclose(program.simulate(x, y), np.vdot(x, y), rtol=1e-4)
