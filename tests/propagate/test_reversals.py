"""Reversals that undo each other through element-wise work: nothing sent, the same numbers."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.propagate import directed
from meshwise.propagate.turned_together import View


def around(x: Any) -> Any:
    return jnp.flip(jnp.sin(jnp.flip(x)) * 2)


def gradient(x: Any) -> Any:
    """Reversed in the forward pass, and back in the backward pass."""
    return jax.grad(lambda x: (jnp.flip(jnp.tanh(jnp.flip(x, 1)) ** 2, 1) ** 3).sum())(x)


def turned_half(x: Any) -> Any:
    return jax.grad(lambda x: (jnp.rot90(x, 2) ** 2).sum())(x)


def with_rows(x: Any) -> Any:
    """What is repeated along the reversed dim is the same from either end."""
    return jnp.flip(jnp.flip(x, 0) * x[:1] + 1, 0)


def total(x: Any) -> Any:
    return (jnp.flip(x) * jnp.flip(jnp.cos(x))).sum()


def twice(x: Any) -> Any:
    return lax.rev(lax.rev(x, (0,)), (0,))


def weighted(x: Any) -> Any:
    """One operand is read the other way round instead."""
    return jnp.flip(jnp.flip(x) * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape))


def in_a_loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda _, x: jnp.flip(jnp.cos(jnp.flip(x)) - 1), x)


def read_twice(x: Any) -> Any:
    """The reversed value is a result itself."""
    y = jnp.sin(jnp.flip(x))
    return jnp.flip(y), y


def both_ways(x: Any) -> Any:
    """Blocks move once."""
    return jnp.flip(jnp.sin(jnp.flip(x, 0)), 1)


def rows_apart(x: Any) -> Any:
    """A maximum over one dim of what is reversed in both stays reversed."""
    return jnp.flip(x).max(0)


def quarter_gradient(x: Any) -> Any:
    """A transpose on the way there, and one on the way back."""
    return jax.grad(lambda x: (jnp.sin(jnp.rot90(x)) ** 2).sum())(x)


def turned_back(x: Any) -> Any:
    """Columns are reversed, and rows of the transpose of what is computed of them."""
    return jnp.flip(jnp.sin(jnp.flip(x, 1)).T * 2, 0).T


def stood_up(x: Any) -> Any:
    """Dims of one element come and go between."""
    y = jnp.flip(x, 1)[None, :, :, None]
    return jnp.flip(jnp.tanh(y.transpose(2, 0, 3, 1)).squeeze((1, 2)), 0).T


def weighted_by_place(x: Any) -> Any:
    """What is computed of a transpose meets an operand of its own."""
    y = jnp.flip(x, 1).T * jnp.arange(x.shape[1], dtype=x.dtype)[:, None]
    return jnp.flip(y, 0) + y


def with_own_transpose(x: Any) -> Any:
    """One value by two dims."""
    y = jnp.flip(x[:7, :7], 0)
    return jnp.flip(jnp.sin(y) + y.T, 0)


def with_own_transpose_both(x: Any) -> Any:
    y = jnp.flip(x[:7, :7])
    return jnp.flip(jnp.sin(y) + y.T)


def row_sums(x: Any) -> Any:
    """A reduction over columns, of rows from the last: its result is reversed, which is smaller."""
    return jnp.flip(x, 0).sum(1)


def half_summed(x: Any) -> Any:
    """Of two reversed dims one is reduced."""
    return jnp.exp(jnp.flip(x)).max(1)


def projected(x: Any) -> Any:
    return jnp.flip(x, 0) @ jnp.arange(float(x.shape[1]))


def inner(x: Any) -> Any:
    """Both operands are reversed in what is summed over."""
    return jnp.flip(x, 0).T @ jnp.flip(x * x, 0)


def inner_reversed(x: Any) -> Any:
    """And one in another dim as well."""
    return jnp.flip(x).T @ jnp.flip(x * x, 0)


def inner_read_twice(x: Any) -> Any:
    y = jnp.flip(x)
    return y.T @ jnp.flip(x * x, 0), y


def best_column(x: Any) -> Any:
    return jnp.argmax(jnp.flip(x, 0), 1), jnp.argmax(jnp.flip(x, 0).sum(1))


def in_steps_of_a_loop(x: Any) -> Any:
    """Half of what is reversed outside would be reversed in every step."""
    y = jnp.flip(x)
    return lax.fori_loop(0, 3, lambda i, c: c + jnp.sin(y).max(1) * i, jnp.zeros(x.shape[0]))


def odd_bits(x: Any) -> Any:
    return lax.reduce_xor(jnp.flip(x > 0, 0), (0,))


def with_itself(x: Any) -> Any:
    """One operand's rows are reversed, and not those of the other one, which is the same."""
    y = jnp.sin(jnp.flip(x[:7, :7], 0))
    return jnp.flip(y @ y, 0)


def last_largest(x: Any) -> Any:
    return jnp.argmax(jnp.flip(x, 0) > 1, 0)


def first_of_last(x: Any) -> Any:
    return jnp.argmin(jnp.round(jnp.flip(x)), 1)


SUMMED = [
    last_largest,
    first_of_last,
    with_itself,
    row_sums,
    half_summed,
    projected,
    inner,
    inner_reversed,
    inner_read_twice,
    best_column,
    in_steps_of_a_loop,
    odd_bits,
]

NOTHING = [
    around,
    gradient,
    turned_half,
    twice,
    in_a_loop,
    quarter_gradient,
    turned_back,
]
SOME = [
    stood_up,
    both_ways,
    with_rows,
    total,
    weighted,
    read_twice,
    rows_apart,
    weighted_by_place,
    with_own_transpose,
    with_own_transpose_both,
]


KERNEL = np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)


def convolved(x: Any, **params: Any) -> Any:
    said = {"window_strides": (1, 1), "padding": ((1, 1), (2, 0)), **params}
    return lax.conv_general_dilated(x[None, None], KERNEL[None, None], **said)[0, 0]


def sums(x: Any) -> Any:
    return jnp.cumsum(x, 0)


def sums_from_the_last(x: Any) -> Any:
    return jnp.flip(sums(jnp.flip(x, 0)), 0)


def convolved_back(x: Any) -> Any:
    return jnp.flip(convolved(jnp.flip(x)))


def correlated(x: Any) -> Any:
    return jax.scipy.signal.correlate2d(x, KERNEL, "same")


def dilated_back(x: Any) -> Any:
    return jnp.flip(convolved(jnp.flip(x), lhs_dilation=(1, 2), rhs_dilation=(2, 1)))


def in_steps(x: Any) -> Any:
    """Every other row of windows is not every other from the other end."""
    return jnp.flip(convolved(jnp.flip(x), window_strides=(2, 1)))


def pooled(x: Any) -> Any:
    said = (3, 2), (1, 1), ((2, 0), (0, 1))
    return jnp.flip(lax.reduce_window(jnp.flip(x), -np.inf, lax.max, *said))


def padded(x: Any) -> Any:
    return jnp.flip(lax.pad(jnp.flip(x), np.float32(3), ((1, 2, 0), (0, 0, 1))))


def largest_so_far_of_parts(x: Any) -> Any:
    return jnp.flip(lax.cummax(jnp.flip(x[:, 1:]) * x[:, :-1], 1, reverse=True), 1)


def cut_and_joined(x: Any) -> Any:
    """Every other row of two values, one before the other, and a few rows twice."""
    y = jnp.flip(x, 0)
    return jnp.flip(jnp.concatenate([y[1::2], jnp.sin(y)[::3], y[2:4], y[2:2]]), 0)


def walls(x: Any) -> Any:
    """Rows set at either end, and in the middle, of rows elsewhere; turned before and after."""
    y = jnp.flip(x, 0)
    y = y.at[0].set(2 * y[1] - y[3]).at[4:6].add(y[:2][::-1] * x.sum()).at[-1].set(y[2] - y[5])
    return jnp.flip(y.at[:, 1].multiply(y[:, 0]), 0)


def scanned(x: Any) -> Any:
    return lax.associative_scan(lambda a, b: 2 * a + b, x, axis=0)


def scanned_back(x: Any) -> Any:
    return lax.associative_scan(lambda a, b: 2 * a + b, x, axis=0, reverse=True)


DIRECTED = [
    cut_and_joined,
    walls,
    scanned_back,
    sums_from_the_last,
    convolved_back,
    correlated,
    dilated_back,
    in_steps,
    pooled,
    padded,
    largest_so_far_of_parts,
]


@pytest.mark.parametrize(
    ("turned", "straight"),
    [
        (sums_from_the_last, sums),
        (convolved_back, convolved),
        (correlated, convolved),
        (scanned_back, scanned),
    ],
    ids=["sums", "convolution", "correlation", "scan"],
)
def test_what_goes_the_other_way_sends_no_more(turned, straight) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    x = np.zeros((64, 64), np.float32)
    sent = [mw.jit(f, mesh=mesh, in_shardings=P("x")).partition(x) for f in (turned, straight)]
    assert sent[0].wire_bytes <= sent[1].wire_bytes


def test_what_is_cut_of_rows_from_the_last_one() -> None:
    """All slices of seven rows, in all steps."""
    x = np.arange(7)
    for start, limit, step in itertools.product(range(8), range(8), range(1, 5)):
        if start <= limit:
            cut = partial(lax.slice, start_indices=(start,), limit_indices=(limit,))
            (eqn,) = jax.make_jaxpr(partial(cut, strides=(step,)))(x).jaxpr.eqns
            params = directed.DIRECTED["slice"].turned(eqn, frozenset({0}))
            found = lax.slice_p.bind(x[::-1], **(eqn.params | params))
            np.testing.assert_array_equal(found, x[start:limit:step][::-1])


@pytest.mark.parametrize(
    ("turned", "straight"),
    [
        (row_sums, lambda x: x.sum(1)),
        (half_summed, lambda x: jnp.exp(x).max(1)),
        (projected, lambda x: x @ jnp.arange(64.0)),
        (inner, lambda x: x.T @ (x * x)),
        (inner_reversed, lambda x: x.T @ (x * x)),
        (last_largest, lambda x: jnp.argmax(x > 1, 0)),
        (first_of_last, lambda x: x.argmin(1)),
    ],
    ids=[
        "sums",
        "maxima",
        "product with a vector",
        "product",
        "product, reversed in another dim",
        "last of the largest",
        "places, reversed in both dims",
    ],
)
def test_what_is_summed_moves_after(turned, straight) -> None:
    """No more is sent than for what is not reversed, but for the result."""
    mesh = jax.make_mesh((8,), ("x",))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    ours, other = [
        mw.jit(f, mesh=mesh, in_shardings=P("x"), out_shardings=P("x")).partition(x)
        for f in (turned, straight)
    ]
    of_a_part = math.prod(ours.jaxpr.out_avals[0].shape) * 4
    assert ours.wire_bytes <= other.wire_bytes + of_a_part


def test_what_is_around_all_of_them_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each convolution's gradient reverses a kernel, and from each one comes to all of them."""

    def loss(x: Any, kernels: Any) -> Any:
        for kernel in kernels:
            x = jnp.tanh(lax.conv(x, kernel, (1, 1), "SAME"))
        return (x**2).sum()

    def gone_through(layers: int) -> int:
        found, around = list[Any](), View.around
        with monkeypatch.context() as patch:
            patch.setattr(View, "around", lambda *a: found.append(around(*a)) or found[-1])
            kernels = [jax.ShapeDtypeStruct((4, 4, 3, 3), jnp.float32)] * layers
            x = jax.ShapeDtypeStruct((8, 4, 6, 6), jnp.float32)
            hints = P("x"), None
            mesh = jax.make_mesh((8,), ("x",))
            step = mw.jit(jax.grad(loss), mesh=mesh, in_shardings=hints)
            step.partition(x, kernels)
        return sum(bool(each.values) for each in found)

    few, many = gone_through(3), gone_through(9)
    assert few > 0
    assert many == few


@pytest.mark.parametrize("function", NOTHING + SOME + SUMMED + DIRECTED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y")], ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (7, 9)], ids=str)
def test_numbers(function: Callable[..., Any], spec: P, shape: tuple[int, int]) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    sent = mw.jit(function, mesh=mesh, in_shardings=spec).partition(x)
    if function in NOTHING and shape == (8, 12):
        assert sent.wire_bytes == 0
    if function is both_ways and spec == P("x", "y"):
        assert len(sent.collectives) == 1 or shape == (7, 9)
    for ours, wanted in zip(
        jax.tree.leaves(sent.simulate(x)), jax.tree.leaves(function(x)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), wanted, rtol=1e-4, atol=1e-5)
