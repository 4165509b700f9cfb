"""Regions are cut where another layout begins, if that sends less."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

MESH = mesh_of(x=2, y=4)
BLOCKS, ROWS = P("x", "y"), P(("x", "y"))
SHAPE = (32, 32)
MOVED = 3 / 4 * 16 * 8 * 4  # blocks to rows: a device keeps a fourth of its block


def halved(p, g, t):
    p = p - 0.1 * g
    return p, t - p, 0.5 * p


def distance(p, g, t):
    p = p - 0.1 * g
    t = 0.9 * t + 0.1 * p
    return p, t, ((t - p) ** 2).sum()


CASES = {  # a function, how its results lie, and what is sent
    "made anew of what was moved": (halved, (BLOCKS, ROWS, ROWS), MOVED),
    "read only where it meets others": (distance, (BLOCKS, ROWS, P()), MOVED + 14 / 8 * 4),
}


@pytest.mark.parametrize("case", CASES)
def test_one_value_moves(case):
    function, results, sent = CASES[case]
    step = mw.jit(function, mesh=MESH, in_shardings=(BLOCKS, BLOCKS, ROWS), out_shardings=results)
    random = np.random.default_rng(0)
    args = [random.normal(size=SHAPE).astype(np.float32) for _ in range(3)]
    program = step.partition(*args)
    assert program.wire_bytes == sent
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        program.simulate(*args),
        function(*args),
    )


def orthogonal(x):
    """Newton's and Schulz' iteration to the nearest orthogonal matrices, as in Muon."""
    x = x / jnp.sqrt((x * x).sum((-1, -2), keepdims=True))
    for _ in range(2):
        square = x @ x.swapaxes(-1, -2)
        x = 3 * x + (square - 4 * square @ square) @ x
    return x


def updated(weights, gradient, momentum):
    momentum = 0.9 * momentum + gradient
    return weights - 0.02 * orthogonal(momentum), momentum


def test_a_stack_of_momenta_moves_to_layers_and_the_update_back():
    """Each device orthogonalises a layer of its own; one region has momenta and updates."""
    lie = P(None, "x", "y")
    random = np.random.default_rng(0)
    args = [random.normal(size=(8, 16, 16)).astype(np.float32) for _ in range(3)]
    step = mw.jit(updated, mesh=MESH, in_shardings=lie, out_shardings=lie)
    program = step.partition(*args)
    assert program.wire_bytes == 2 * 7 / 8 * 16 * 16 * 4
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        program.simulate(*args),
        updated(*args),
    )


def test_where_little_moves_at_regions_none_is_cut(monkeypatch):
    """A hundredth of what is sent: what cutting could save is not worth a descent."""

    def never(*_):
        raise AssertionError("a region is cut")

    monkeypatch.setattr("meshwise.choose.cutting.decided_apart", never)
    step = mw.jit(
        lambda p, g, t, x: (*halved(p, g, t), x),
        mesh=MESH,
        in_shardings=(BLOCKS, BLOCKS, ROWS, ROWS),
        out_shardings=(*CASES["made anew of what was moved"][1], BLOCKS),
    )
    small, large = (jax.ShapeDtypeStruct((n, n), jnp.float32) for n in (32, 512))
    assert step.partition(small, small, small, large).wire_bytes > 50 * 2 * MOVED
