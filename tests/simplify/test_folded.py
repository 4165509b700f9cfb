"""Rows of an array and its ends at the other ends, added up: moved round, or what only looks so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

ROWS, GRID = mesh_of(x=8), mesh_of(x=2, y=4)
N = 16


def placed(w, first, rows, at, size=N):
    """So many rows of an array, at some place among zeros."""
    return lax.pad(w[first : first + rows], w.dtype.type(0), ((at, size - rows - at, 0), (0, 0, 0)))


def folded(w, before=1, after=1, size=N):
    """Its rows from one on, with those before and behind these at the other ends."""
    found = w[before : before + size]
    if before:
        found = found + placed(w, 0, before, size - before, size)
    return found + placed(w, before + size, after, 0, size) if after else found


def padded(*terms, total=N + 2, of=lax.pad):
    """Arrays laid some rows down among zeros, added up."""
    found = []
    for low, u in terms:
        found.append(of(u, u.dtype.type(0), ((low, total - low - u.shape[0], 0), (0, 0, 0))))
    return sum(found[1:], found[0])


def convolved(u, low=2, high=2):
    kernel = jnp.asarray([1, 2, 4], u.dtype).reshape(3, 1, 1, 1)
    window = lax.conv_general_dilated(
        u.T[:, :, None, None], kernel, (1, 1), ((low, high), (0, 0)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    return window[:, :, 0, 0].T


def of_two(function):
    """A function of an array and of a sum of two that are made of it, two rows apart."""
    return lambda u: function(u, padded((0, u), (2, 3 * u)))


CASES = {
    "shifts": lambda u: folded(padded((0, u), (1, 2 * u), (2, u * u))),
    "shifts that are alike": lambda u: folded(padded((2, u), (0, u * u), (2, 3 * u))),
    "two rows": lambda u: folded(padded((0, u), (4, u * u), total=N + 4), 2, 2),
    "before alone": lambda u: folded(padded((0, u), (2, u * u)), 2, 0),
    "behind alone": lambda u: folded(padded((0, u), (2, u * u)), 0, 2),
    "and more": lambda u: u * u + folded(padded((0, u), (2, u * u))) + jnp.flip(u, 0),
    "among others": of_two(
        lambda u, w: w[1:-1] + u * u + placed(w, 0, 1, N - 1) + 2 * u + placed(w, N + 1, 1, 0)
    ),
    "an end is missing": of_two(lambda u, w: w[1:-1] + placed(w, 0, 1, N - 1)),
    "an end is there twice": of_two(lambda u, w: folded(w) + placed(w, 0, 1, N - 1)),
    "an end is there twice, first": of_two(
        lambda u, w: sum([placed(w, 0, 1, N - 1)] * 2, w[1:-1]) + placed(w, N + 1, 1, 0)
    ),
    "ends at their own ends": of_two(
        lambda u, w: w[1:-1] + placed(w, 0, 1, 0) + placed(w, N + 1, 1, N - 1)
    ),
    "the ends of another": of_two(
        lambda u, w: w[1:-1] + placed(padded((0, u), (1, u)), 0, 1, N - 1) + placed(w, N + 1, 1, 0)
    ),
    "one row more": lambda u: folded(padded((0, u), (2, 3 * u), total=N + 3), 1, 2),
    "of other sizes": lambda u: folded(padded((0, u), (1, u[:-1]), (2, 3 * u))),
    "among ones": lambda u: folded(
        padded((0, u), (2, u), of=lambda x, _, config: lax.pad(x, x.dtype.type(1), config))
    ),
    "multiplied": of_two(
        lambda u, w: (w[1:-1] + placed(w, 0, 1, N - 1)) * placed(w, N + 1, 1, 0)
    ),
    "a window": lambda u: folded(convolved(u)),
    "a window, an end twice": of_two(
        lambda u, _: folded(convolved(u)) + placed(convolved(u), 0, 1, N - 1)
    ),
    "an end of one sum twice": of_two(
        lambda u, w: w[1:-1] + placed(w, 0, 1, N - 1) * 2 + placed(w, N + 1, 1, 0)
    ),
    "a window, and it is returned": lambda u: (folded(w := convolved(u)), w),
    "a window that reads less": lambda u: folded(convolved(u, 1, 3)),
    "one whose ends are folded elsewhere": lambda u: folded(convolved(u), 2, 0),
    "twice as many are read": lambda u: folded(convolved(u, 3, 3), 2, 2),
}  # fmt: skip
KINDS = {"floats": np.float32, "integers": np.int32, "bytes": np.uint8}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_right_however_it_is_written(case, kind):
    u = (np.random.default_rng(0).normal(size=(N, 8)) * 9).astype(np.int32).astype(KINDS[kind])
    function = CASES[case]
    for mesh, spec in ((ROWS, P("x")), (GRID, P("x", "y")), (mesh_of(x=3), P("x"))):
        program = mw.jit(function, mesh=mesh, in_shardings=spec).partition(u)
        found, wanted = jax.tree.leaves(program.simulate(u)), jax.tree.leaves(function(u))
        for ours, plain in zip(found, wanted, strict=True):
            assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
            np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("order", ["NHWC", "NWHC", "NCWH"])
def test_dims_of_a_result_that_lie_elsewhere(dim, order):
    """A square image, whose dims are turned by the window."""

    def function(u, kernel):
        window = lax.conv_general_dilated(
            u[None, None], kernel[None, None], (1, 1), [(2, 2)] * 2,
            dimension_numbers=("NCHW", "OIHW", order),
        )  # fmt: skip
        rows = jnp.moveaxis(window, dim, 0).reshape(window.shape[dim], -1)
        turned = jnp.moveaxis(window, dim, 0)
        ends = [
            lax.pad(turned, 0.0, [amounts, *[(0, 0, 0)] * 3])
            for amounts in ((-1, -1, 0), (-1 - N, N - 1, 0), (N - 1, -1 - N, 0))
        ]
        direct = [
            lax.pad(window, 0.0, [amounts if d == dim else (0, 0, 0) for d in range(4)])
            for amounts in ((-1, -1, 0), (-1 - N, N - 1, 0), (N - 1, -1 - N, 0))
        ]
        return sum(ends[1:], ends[0]), sum(direct[1:], direct[0]), rows.sum()

    if order == "NCWH":
        dim += 1
    random = np.random.default_rng(0)
    args = [random.normal(size=shape).astype(np.float32) for shape in ((N, N), (3, 3))]
    for spec in (P("x"), P(None, "x")):
        program = mw.jit(function, mesh=ROWS, in_shardings=(spec, P())).partition(*args)
        for ours, plain in zip(program.simulate(*args), function(*args), strict=True):
            assert ours.shape == plain.shape
            np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


def test_a_batch_of_nothing():
    """Whose channels are summed up before ends are folded."""

    def function(u):
        window = lax.reduce_window(u, 0.0, lax.add, (1, 1, 3), (1, 1, 1), [(0, 0), (0, 0), (2, 2)])
        return folded(window.sum(1).T)

    u = np.zeros((0, 3, N), np.float32)
    program = mw.jit(function, mesh=ROWS, in_shardings=P(None, None, "x")).partition(u)
    assert program.simulate(u).shape == function(u).shape


def test_gradients_of_all_neighbours_send_each_row_once():
    """Forward and backward, of a plane that is wrapped in both dims."""

    def energy(u):
        padded = jnp.pad(u, 1, mode="wrap")
        near = sum(padded[i : i + 64, j : j + 64] for i in range(3) for j in range(3))
        return (near**2).sum()

    u = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    step = mw.jit(jax.grad(energy), mesh=ROWS, in_shardings=P("x"), out_shardings=P("x"))
    program = step.partition(u)
    assert program.wire_bytes == 2 * 2 * 64 * 4
    np.testing.assert_allclose(program.simulate(u), jax.grad(energy)(u), rtol=1e-4, atol=1e-3)


def test_long_sums_are_read_in_part():
    """Of thousands of terms some are looked at."""

    def function(u):
        found = u
        for k in range(1500):
            found = found + u[k % 8]
        return found + placed(u, 0, 1, N - 1)

    u = np.random.default_rng(0).normal(size=(N, 8)).astype(np.float32)
    program = mw.jit(function, mesh=ROWS, in_shardings=P("x")).partition(u)
    np.testing.assert_allclose(program.simulate(u), function(u), rtol=1e-3)
