"""Ragged products, mixtures of experts, and losses over a sharded vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.end_to_end.sent import Row, below, check_numbers, names, reals, reduced, sent_by

X, Y, XY, NONE = P("x"), P(None, "x"), P("x", "y"), P()

TOKENS, EXPERTS, K, N = 64, 8, 128, 96
LEFT, RIGHT = reals(TOKENS, K), reals(EXPERTS, K, N)
SIZES = np.array([8, 0, 16, 4, 12, 8, 10, 6], np.int32)
OF_FEW = np.array([20, 0, 30, 3], np.int32)  # eight rows are in no group


def ragged(contract: Any, batch: Any, rows: Any, groups: Any) -> Any:
    numbers = lax.RaggedDotDimensionNumbers((contract, batch), rows, groups)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


def half_square(function: Any, which: Any = 0) -> Any:
    return jax.grad(lambda *args: 0.5 * (function(*args) ** 2).sum(), which)


# The rows of each of four have sizes of their own; some are in no group.
BATCHED = ragged(((2,), (1,)), ((), ()), [1], [0])
FEW, OF_EACH = reals(4, 24, K), below(5, 4, 8)

RAGGED = [
    Row("rows", lax.ragged_dot, (LEFT, RIGHT, SIZES), (8,), (X, NONE, NONE), X, {}, 1e-5),
    Row("uneven rows", lax.ragged_dot, (LEFT[:61], RIGHT[:4], OF_FEW), (8,), (X, NONE, NONE), X,
        {}, 1e-5),
    Row("experts", lax.ragged_dot, (LEFT, RIGHT, SIZES), (8,), (NONE, X, NONE), NONE,
        reduced(TOKENS * N), 1e-5),
    Row("experts, to rows", lax.ragged_dot, (LEFT, RIGHT, SIZES), (8,), (NONE, X, NONE), X,
        {"reduce_scatter": (1, TOKENS * N * 4 * 7 // 8)}, 1e-5),
    Row("uneven experts", lax.ragged_dot, (reals(61, 90), reals(13, 90, 50), below(5, 13)),
        (8,), (NONE, X, NONE), NONE, reduced(61 * 50), 1e-5),
    Row("rows and experts", lax.ragged_dot, (LEFT, RIGHT, SIZES), (8,), (X, X, NONE), X,
        {"all_gather": (1, TOKENS * K * 4 * 7 // 8),
         "reduce_scatter": (1, TOKENS * N * 4 * 7 // 8)}, 1e-5),
    Row("rows by x, experts by y", lax.ragged_dot, (LEFT, RIGHT, SIZES), (2, 4),
        (X, P("y"), NONE), X, reduced(TOKENS // 2 * N, 4), 1e-5),
    Row("all three", lax.ragged_dot, (LEFT, RIGHT, SIZES), (2, 2, 2),
        (X, P("y", None, "z"), NONE), P("x", "z"), reduced(TOKENS // 2 * N // 2, 2), 1e-5),
    Row("columns", lax.ragged_dot, (LEFT, RIGHT, SIZES), (8,), (NONE, P(None, None, "x"), NONE), Y,
        {}, 1e-5),
    Row("contracted", lax.ragged_dot, (LEFT, RIGHT, SIZES), (8,), (Y, Y, NONE), NONE,
        reduced(TOKENS * N), 1e-5),
    Row("groups of the contracted dim", ragged(((0,), (0,)), ((), ()), [0], []),
        (reals(4096, 16), reals(4096, 8), np.array([1000, 96, 2000, 900], np.int32)), (8,),
        (X, X, NONE), NONE, reduced(4 * 16 * 8), 1e-4),
    Row("groups of a batch", ragged(((2,), (1,)), ((0,), (0,)), [0], []),
        (reals(16, 4, 8), reals(16, 8, 4), np.array([3, 10, 3], np.int32)), (8,), (X, X, NONE), X,
        {}, 1e-5),
    Row("sizes of each batch", jax.vmap(lax.ragged_dot),
        (reals(16, 12, 8), reals(16, 3, 8, 4), below(5, 16, 3)), (8,), (X, X, X), X, {}, 1e-5),
    Row("experts, sizes of each of a few", BATCHED, (FEW, RIGHT, OF_EACH), (8,), (NONE, X, NONE),
        NONE, reduced(4 * 24 * N), 1e-5),
    Row("uneven experts, sizes of each of a few", BATCHED, (FEW, RIGHT[:7], OF_EACH[:, :7]), (2, 4),
        (X, P("y"), X), X, reduced(2 * 24 * N, 4), 1e-5),
    Row("gradients by experts, sizes of each of a few", half_square(BATCHED, (0, 1)),
        (FEW, RIGHT, OF_EACH), (2, 4), (X, P("y"), X), (X, P("y")),
        {"all_reduce": (2, 2 * 24 * (N + K) * 6),  # rows travel, as the experts are larger
         "all_to_all": (1, 48 * K * 2), "all_gather": (3, (48 * N + K * N + 16) * 4)}, 1e-4),
    Row("gradients by experts", half_square(lax.ragged_dot, (0, 1)), (LEFT, RIGHT, SIZES), (8,),
        (NONE, X, NONE), (NONE, X),
        {"all_reduce": (2, (TOKENS * N + TOKENS * K) * 4 * 14 // 8)}, 1e-4),
    Row("gradients by many rows", half_square(lax.ragged_dot, (0, 1)),
        (reals(4096, 16), reals(4, 16, 8), np.array([1000, 96, 2000, 1000], np.int32)), (8,),
        (X, NONE, NONE), (X, NONE), reduced(4 * 16 * 8), 1e-4),
]  # fmt: skip

GROUPS, WORDS, SLOTS, WIDTH = 16, 32, 4, 64
ROUTES, INPUTS = reals(GROUPS, WORDS, EXPERTS, SLOTS), reals(GROUPS, WORDS, WIDTH)
WEIGHTS = reals(EXPERTS, WIDTH, WIDTH) / 8
MOVED = GROUPS * EXPERTS * SLOTS * WIDTH * 4 // 8 * 7 // 8  # one device's part, but its own


def dispatched(routes: Any, inputs: Any) -> Any:
    return mw.shard(jnp.einsum("gsec,gsm->egcm", routes, inputs), X)


def mixture(routes: Any, inputs: Any, weights: Any) -> Any:
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", dispatched(routes, inputs), weights))
    return jnp.einsum("gsec,egcm->gsm", routes, mw.shard(hidden, X))


MIXTURES = [
    Row("dispatch", dispatched, (ROUTES, INPUTS), (8,), (X, X), X, {"all_to_all": (1, MOVED)},
        1e-5),
    Row("dispatch on two axes", lambda r, i: jnp.einsum("gsec,gsm->egcm", r, i), (ROUTES, INPUTS),
        (2, 4), (P(("x", "y")),) * 2, P("y", "x"), {"all_to_all": (1, MOVED // 7 * 8 * 3 // 4)},
        1e-5),
    Row("mixture", mixture, (ROUTES, INPUTS, WEIGHTS), (8,), (X, X, X), X,
        {"all_to_all": (2, 2 * MOVED)}, 1e-4),
    Row("gradients of a mixture", half_square(mixture, (1, 2)), (ROUTES, INPUTS, WEIGHTS), (8,),
        (X, X, X), (X, X), {"all_to_all": (4, 4 * MOVED)}, 1e-4),
]  # fmt: skip

B, V = 64, 512
LOGITS, LABELS = reals(B, V), below(V, B)


def normalised(x: Any, scale: Any, shift: Any) -> Any:
    mean = x.mean(1, keepdims=True)
    variance = ((x - mean) ** 2).mean(1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def with_one_hot(x: Any, labels: Any) -> Any:
    return -(jax.nn.one_hot(labels, V) * jax.nn.log_softmax(x, 1)).sum(1).mean()


def with_positions(x: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(x, 1), labels[:, None], 1).mean()


def with_rows(x: Any, labels: Any) -> Any:
    return (jax.nn.logsumexp(x, 1) - x[jnp.arange(B), labels]).mean()


LOSSES = {"one-hot": with_one_hot, "positions": with_positions, "rows and positions": with_rows}
# What the loss itself adds: a number, together with the last sum over the vocabulary or not. How
# many ones there are in a row, each device counts in its share of the rows.
FORWARD = {"one-hot": (3, 903), "positions": (3, 903), "rows and positions": (3, 903)}
COUNTED = {"one-hot": {"all_gather": (1, 224)}, "positions": {}, "rows and positions": {}}

VOCABULARY = [
    Row("logsumexp", lambda x: jax.nn.logsumexp(x, 1), (LOGITS,), (8,), (Y,), NONE,
        reduced(B, times=2), 1e-5),
    Row("softmax", lambda x: jax.nn.softmax(x, 1), (LOGITS,), (8,), (Y,), Y, reduced(B, times=2),
        1e-5),
    Row("softmax of an uneven dim", lambda x: jax.nn.softmax(x, 1), (LOGITS[:, :501],), (8,), (Y,),
        Y, reduced(B, times=2), 1e-5),
    Row("gradient of softmax", jax.grad(lambda x, u: (jax.nn.softmax(x, 1) * u).sum()),
        (LOGITS, LOGITS[::-1]), (8,), (Y, Y), Y, reduced(B, times=3), 1e-5),
    Row("layer norm", normalised, (LOGITS, LOGITS[0], LOGITS[1]), (8,), (Y, X, X), Y,
        reduced(B, times=2), 1e-5),
    Row("gradients of layer norm", half_square(normalised, (0, 1, 2)),
        (LOGITS, LOGITS[0], LOGITS[1]), (8,), (Y, X, X), (Y, X, X), reduced(B, times=4), 1e-4),
    *(
        Row(f"loss by {name}", loss, (LOGITS, LABELS), (8,), (Y, NONE), NONE,
            {"all_reduce": FORWARD[name]}, 1e-5)
        for name, loss in LOSSES.items()
    ),
    *(
        Row(f"loss and gradient by {name}", jax.value_and_grad(loss), (LOGITS, LABELS), (8,),
            (Y, NONE), (NONE, Y), {"all_reduce": FORWARD[name]} | COUNTED[name], 1e-5)
        for name, loss in LOSSES.items()
    ),
    *(
        Row(f"loss and gradient of a batch by {name}", jax.value_and_grad(loss), (LOGITS, LABELS),
            (8,), (X, X), (NONE, X), reduced(1), 1e-5)
        for name, loss in LOSSES.items()
    ),
    *(
        Row(f"loss and gradient of both by {name}", jax.value_and_grad(loss), (LOGITS, LABELS),
            (2, 4), (XY, X), (NONE, XY), {"all_reduce": sent}, 1e-5)
        for (name, loss), sent in zip(
            LOSSES.items(), [(4, 583), (3, 391), (3, 391)], strict=True
        )
    ),
]  # fmt: skip

A, W = reals(64, 128), reals(128, 48)
ADDED = reals(64, 48)


def both_of_sum(a: Any, w: Any, b: Any) -> Any:
    added = a @ w + b
    return added.sum(), added


# What is whole is added to a term of a sum where less is left to be reduced.
WHOLE = [
    Row("sum of a product and what is added", lambda a, w, b: (a @ w + b).sum(), (A, W, ADDED),
        (8,), (Y, X, NONE), NONE, reduced(1), 1e-4),
    Row("sums of rows", lambda a, w, b: 2 * (b - a @ w).sum(1), (A, W, ADDED), (8,), (Y, X, NONE),
        NONE, reduced(64), 1e-4),
    Row("to rows", lambda a, w, b: (b - a @ w).sum(1), (A, W, ADDED), (8,), (Y, X, NONE), X,
        {"reduce_scatter": (1, 64 * 4 * 7 // 8)}, 1e-4),
    Row("twice", lambda a, w, b: (b - (a @ w + jnp.tanh(b))).mean(), (A, W, ADDED), (8,),
        (Y, X, NONE), NONE, reduced(1), 1e-4),
    Row("uneven", lambda a, w, b: (a @ w + b).sum(), (A[:, :99], W[:99], ADDED), (8,),
        (Y, X, NONE), NONE, reduced(1), 1e-4),
    Row("what is added sharded by other axes", lambda a, w, b: (a @ w + b).sum(), (A, W, ADDED),
        (2, 4), (P(None, "y"), P("y"), X), NONE, reduced(1), 1e-4),
    Row("not linear", lambda a, w, b: ((a @ w + b) ** 2).sum(), (A, W, ADDED), (8,),
        (Y, X, NONE), NONE,
        {"reduce_scatter": (1, 64 * 48 * 4 * 7 // 8), "all_reduce": (1, 7)}, 1e-4),
    Row("read twice", both_of_sum, (A, W, ADDED), (8,),
        (Y, X, NONE), NONE, reduced(64 * 48), 1e-4),
    Row("in a loop", lambda a, w, b: lax.scan(
        lambda t, x: (t + (x @ w + b[0]).sum(), None), 0.0, a.reshape(8, 8, 128))[0],
        (A, W, ADDED), (8,), (Y, X, NONE), NONE, reduced(1), 1e-4),
]  # fmt: skip


def product(a: Any, w: Any) -> Any:
    return a @ w


# Of a matrix that a hint says is whole no sum need be made, where the other one is small.
GATHERED = {"all_gather": (1, 64 * 8 * 4 * 7 // 8)}
HINTED = [
    Row("whole by rows", product, (A[:, :64], W[:64, :8]), (8,), (NONE, X), NONE, GATHERED, 1e-4),
    Row("tall whole by rows", product, (reals(512, 64), W[:64, :8]), (8,), (NONE, X), NONE,
        GATHERED, 1e-4),
    Row("columns by whole", product, (A[:8, :64], reals(64, 200)), (8,), (Y, NONE), NONE, GATHERED,
        1e-4),
    Row("hinted inside", lambda a, w: mw.shard(jnp.tanh(a), NONE) @ w, (A[:, :64], W[:64, :8]),
        (8,), (NONE, X), NONE, GATHERED, 1e-4),
    Row("wide whole by rows", product, (reals(8, 64), W[:64, :8]), (8,), (NONE, X), NONE,
        reduced(64), 1e-4),
    Row("rows of which columns are sharded too", product, (A[:, :64], W[:64, :8]), (2, 4),
        (NONE, XY), NONE, {"all_gather": (2, 32 * 2 * 4 + 48 * 8 * 4)}, 1e-4),
    Row("in every step", lambda a, w: lax.fori_loop(0, 4, lambda i, w: a @ w / 8, w),
        (reals(64, 64), reals(64, 64)), (8,), (NONE, X), X,
        {"all_to_all": (2, 2 * 64 * 8 * 4 * 7 // 8)}, 1e-4),
]  # fmt: skip


def half_turned(x: Any, w: Any) -> Any:
    first, second = jnp.split(x @ w, 2, axis=1)
    return first + jnp.flip(second, 0)


def of_both_ways(e: Any) -> Any:
    both = jnp.concatenate([e, jnp.flip(e, 1)], 1)
    return (both @ both.T).sum()


# What a product makes moves in its own region.
MOVING = [
    Row("half of it turned", half_turned, (reals(16, 16), W[:16, :16]), (8,), (X, NONE), X,
        {"ppermute": (1, 2 * 8 * 4)}, 1e-5),
    Row("gradient of both ways joined", jax.grad(of_both_ways), (reals(16, 8),), (8,), (NONE,),
        NONE, {}, 1e-5),
]  # fmt: skip

ROWS = [*RAGGED, *MOVING, *WHOLE, *HINTED, *MIXTURES, *VOCABULARY]
TABLE_OF_ROWS = pytest.mark.parametrize("row", ROWS, ids=names(ROWS))


@TABLE_OF_ROWS
def test_sends(row: Row):
    assert sent_by(row) == row.sent


@pytest.mark.parametrize("row", ROWS[::3], ids=names(ROWS[::3]))
def test_numbers_simulated(row: Row):
    check_numbers(row, real=False)


@TABLE_OF_ROWS
def test_numbers_on_eight_devices(row: Row):
    check_numbers(row, real=True)
