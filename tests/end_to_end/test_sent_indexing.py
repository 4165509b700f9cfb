"""Gathers, scatters and slices at positions that are data: what they send, and the numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.end_to_end.sent import (
    Row,
    around,
    below,
    check_numbers,
    names,
    program_of,
    reals,
    reduced,
    sent_by,
)

X, Y, XY, YX, NONE = P("x"), P(None, "x"), P("x", "y"), P("y", "x"), P()
TABLE, NUMBERS, UPDATES = reals(1600, 48), below(1600, 40), reals(40, 48)
SEQUENCES, STARTS, TOKENS = reals(32, 128, 16), around(128, 32), reals(32, 4, 16)
AT = np.int32(90)


def taken(**options: Any) -> Any:
    return lambda x, i: x.at[i].get(**options)


def updated(how: str, **options: Any) -> Any:
    return lambda x, i, u: getattr(x.at[i], how)(u, **options)


def by_row(x: Any, i: Any) -> Any:
    return x[jnp.arange(x.shape[0]), i]


def by_row_and_column(x: Any, i: Any) -> Any:
    return x[jnp.arange(x.shape[0])[:, None], np.arange(x.shape[1]), i]


def along_rows(x: Any, i: Any) -> Any:
    return jnp.take_along_axis(x, i, 1)


@jax.vmap
def windows(x: Any, start: Any) -> Any:
    return lax.dynamic_slice_in_dim(x, start, 4)


@jax.vmap
def tokens_written(x: Any, u: Any, start: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(x, u, start, 0)


def window(rows: int, axis: int = 0) -> Any:
    return lambda x, i: lax.dynamic_slice_in_dim(x, i, rows, axis)


def written(x: Any, u: Any, i: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(x, u, i, 0)


def gradient(function: Any, which: Any = 0) -> Any:
    def loss(*args: Any) -> Any:
        found = function(*args)
        return (found * found * 0.5).sum()

    return jax.grad(loss, which)


GATHERS = [
    # 40 rows of 48 numbers: an all_reduce, or a reduce_scatter where the result is sharded.
    Row("rows of a table by rows", taken(), (TABLE, NUMBERS), (8,), (X, NONE), NONE,
        reduced(40 * 48)),
    Row("rows of a table by rows, to rows", taken(), (TABLE, NUMBERS), (8,), (X, NONE), X,
        {"reduce_scatter": (1, 40 * 48 * 4 * 7 // 8)}),
    Row("rows, numbers and result by rows", taken(), (TABLE, NUMBERS), (8,), (X, X), X,
        {"all_gather": (1, 40 * 4 * 7 // 8), "reduce_scatter": (1, 40 * 48 * 4 * 7 // 8)}),
    Row("rows by x, batch by y", taken(), (TABLE, NUMBERS), (2, 4), (X, P("y")), P("y"),
        reduced(10 * 48, 2)),
    Row("rows by x, features by y, batch by z", taken(), (TABLE, NUMBERS), (2, 2, 2),
        (XY, P("z")), P("z", "y"), reduced(20 * 24, 2)),
    Row("rows of a table by features", taken(), (TABLE, NUMBERS), (8,), (Y, NONE), Y),
    Row("rows of a whole table", taken(), (TABLE, NUMBERS), (8,), (NONE, X), X),
    Row("uneven rows", taken(), (reals(1001, 5), below(1001, 13)), (8,), (X, NONE), NONE,
        reduced(13 * 5)),
    Row("clipped", taken(mode="clip"), (TABLE, around(1600, 40)), (8,), (X, NONE), NONE,
        reduced(40 * 48)),
    Row("filled with NaN", taken(mode="fill"), (TABLE, around(1600, 40)), (8,), (X, NONE), NONE,
        reduced(40 * 48)),
    Row("filled with a number", taken(mode="fill", fill_value=3.5), (TABLE, around(1600, 40)),
        (8,), (X, NONE), NONE, reduced(40 * 48)),
    Row("promised", taken(mode="promise_in_bounds"), (TABLE, NUMBERS), (8,), (X, NONE), NONE,
        reduced(40 * 48)),
    Row("points", lambda x, i, j: x[i, j], (TABLE, NUMBERS, below(48, 40)), (2, 4),
        (XY, NONE, NONE), NONE, reduced(40)),
    Row("numbers of several dims", taken(), (TABLE, below(1600, 16, 5)), (8,), (NONE, X), X),
    Row("columns", lambda x, i: x[:, i], (TABLE, below(48, 10)), (8,), (X, NONE), X),
    Row("along the batch", along_rows, (SEQUENCES[..., 0], below(128, 32, 3)), (8,), (X, X), X),
    Row("along the sharded dim", along_rows, (SEQUENCES[..., 0], below(128, 32, 3)), (8,),
        (Y, NONE), NONE, reduced(32 * 3)),
    Row("an element a row", by_row, (SEQUENCES, below(128, 32)), (8,), (X, X), X),
    Row("an element of uneven rows", by_row, (reals(29, 7), below(7, 29)), (8,), (X, X), X),
    Row("an element a row of sharded columns", by_row, (reals(32, 128), below(128, 32)), (2, 4),
        (XY, X), X, reduced(16, 4)),
    Row("an element a row and column", by_row_and_column, (SEQUENCES, below(16, 32, 128)),
        (2, 4), (XY, XY), XY),
    Row("a diagonal", lambda x: by_row(x, jnp.arange(32)), (reals(32, 32),), (8,), (X,), X),
    Row("windows of sequences", windows, (SEQUENCES, STARTS), (8,), (X, X), X),
    Row("windows of sharded sequences", windows, (SEQUENCES, STARTS), (8,), (Y, NONE), NONE,
        reduced(32 * 4 * 16)),
    Row("windows of both", windows, (SEQUENCES, STARTS), (2, 4), (XY, X), X,
        reduced(16 * 4 * 16, 4)),
    Row("one row at a time", lambda x, i: x[i], (TABLE, AT), (8,), (X, NONE), NONE, reduced(48)),
    Row("a fixed row", lambda x: x[3], (TABLE,), (8,), (X,), NONE, reduced(48)),
    Row("a window of rows", window(5), (TABLE, AT), (8,), (X, NONE), NONE, reduced(5 * 48)),
    Row("a window over two shards", window(30), (TABLE, np.int32(190)), (8,), (X, NONE), NONE,
        reduced(30 * 48)),
    Row("a window past the end", window(30), (TABLE, np.int32(5000)), (8,), (X, NONE), NONE,
        reduced(30 * 48)),
    Row("a window of uneven rows", window(5), (reals(1001, 6), np.int32(998)), (8,), (X, NONE),
        NONE, reduced(5 * 6)),
    Row("a window wider than a shard", window(7), (reals(13, 3), AT % 7), (8,), (X, NONE), NONE,
        reduced(7 * 3)),
    Row("a window of whole columns", window(5, 1), (TABLE, AT % 9), (8,), (X, NONE), X),
]  # fmt: skip

SENT_UPDATES = {"all_gather": (2, (40 * 48 * 4 + 40 * 4) * 7 // 8)}
MANY, HERE, CHANGES = reals(64, 48), around(64, 5000), reals(5000, 48)
ROWS_OF_MANY = {"reduce_scatter": (1, 64 * 48 * 4 * 7 // 8)}

SCATTERS = [
    *(
        Row(f"{how} into rows", updated(how), (TABLE, NUMBERS, UPDATES), (8,), (X, NONE, NONE), X,
            tolerance=1e-6)
        for how in ("set", "add", "subtract", "multiply", "min", "max")
    ),
    *(
        Row(f"{how} into features", updated(how), (TABLE, NUMBERS, UPDATES), (8,),
            (Y, NONE, Y), Y, tolerance=1e-6)
        for how in ("set", "add", "multiply", "max")
    ),
    *(
        Row(f"{how} by {mode}", updated(how, mode=mode), (TABLE, numbers, UPDATES), (2, 4),
            (XY, NONE, P(None, "y")), XY, tolerance=1e-6)
        for how in ("set", "add")
        for mode, numbers in (
            ("clip", around(1600, 40)), ("drop", around(1600, 40)), ("promise_in_bounds", NUMBERS)
        )
    ),
    # Few updates of a large table travel, ...
    Row("add of sharded updates", updated("add"), (TABLE, NUMBERS, UPDATES), (8,), (X, X, X), X,
        SENT_UPDATES, 1e-6),
    Row("set of sharded updates", updated("set"), (TABLE, NUMBERS, UPDATES), (8,), (X, X, X), X,
        SENT_UPDATES),
    # ... and of many updates a term of the small table.
    Row("add of many", updated("add"), (MANY, HERE, CHANGES), (8,), (NONE, X, X), NONE,
        reduced(64 * 48), 1e-5),
    Row("add of many in new rows", lambda i, u: jnp.zeros_like(MANY).at[i].add(u),
        (HERE, CHANGES), (8,), (X, X), X, ROWS_OF_MANY, 1e-5),
    Row("add of many to the other axis", updated("add"), (MANY, HERE, CHANGES), (2, 4),
        (X, P("y"), P("y")), X, reduced(32 * 48, 4), 1e-5),
    Row("max of many", updated("max"), (MANY, HERE, CHANGES), (8,), (NONE, X, X), NONE,
        reduced(64 * 48)),
    Row("set of many", updated("set"), (MANY, HERE, CHANGES), (8,), (NONE, X, X), NONE,
        {"all_reduce": (2, (64 * 48 + 64) * 4 * 14 // 8)}),
    Row("set of many, clipped, to the other axis", updated("set", mode="clip"),
        (MANY, HERE, CHANGES), (2, 4), (X, P("y"), P("y")), X,
        {"all_reduce": (2, (32 * 48 + 32) * 4 * 6 // 4)}),
    Row("set of each row", lambda x, i, u: x.at[jnp.arange(32), i].set(u),
        (SEQUENCES, below(128, 32), reals(32, 16)), (2, 4), (XY, X, X), XY),
    Row("add to each row", lambda x, i, u: x.at[np.arange(32), i].add(u),
        (SEQUENCES, below(128, 32), reals(32, 16)), (8,), (X, X, X), X),
    Row("the first rows", lambda x, u: x.at[0:3].set(u), (TABLE, UPDATES[:3]), (8,), (X, NONE), X),
    Row("the first rows of features", lambda x, u: x.at[0:3].set(u), (TABLE, UPDATES[:3]), (8,),
        (Y, Y), Y),
    Row("add to a fixed row", lambda x, u: x.at[3].add(u), (TABLE, UPDATES[0]), (8,), (X, NONE), X),
    Row("a column", lambda x, u: x.at[:, 3].set(u), (TABLE, TABLE[:, 0]), (8,), (X, X), X),
    Row("rows of a cache", written, (TABLE, UPDATES, AT), (8,), (X, NONE, NONE), X),
    Row("rows of a cache, past the end", written, (TABLE, UPDATES, np.int32(5000)), (8,),
        (X, NONE, NONE), X),
    Row("rows of an uneven cache", written, (reals(1001, 6), reals(7, 6), np.int32(998)), (8,),
        (X, NONE, NONE), X),
    Row("sharded rows of a cache", written, (TABLE, UPDATES, AT), (8,), (X, X, NONE), X,
        {"all_gather": (1, 40 * 48 * 4 * 7 // 8)}),
    Row("tokens of sequences", tokens_written, (SEQUENCES, TOKENS, STARTS), (8,), (X, X, X), X),
    Row("tokens of sharded sequences", tokens_written, (SEQUENCES, TOKENS, STARTS), (2, 4),
        (XY, X, X), XY),
]  # fmt: skip

EDGES, SOURCES, TARGETS, NODES = reals(4096, 32), below(256, 4096), below(250, 4096), 256


def summed(how: str) -> Any:
    function = getattr(jax.ops, f"segment_{how}")
    return lambda e, s: function(e, s, num_segments=NODES)


def messages(h: Any, source: Any, target: Any) -> Any:
    return jax.ops.segment_sum(h[source], target, num_segments=NODES)


NODE_BYTES = NODES * 32 * 4
TO_NODES = {"reduce_scatter": (1, NODE_BYTES * 7 // 8)}
# The numbers of all edges to everyone; the nodes to features, and back.
BY_FEATURES = {
    "all_gather": (2, 2 * 4096 * 4 * 7 // 8),
    "all_to_all": (2, 2 * NODE_BYTES // 8 * 7 // 8),
}

SEGMENTS = [
    Row("sum of edges to nodes", summed("sum"), (EDGES, TARGETS), (8,), (X, X), X, TO_NODES, 1e-5),
    Row("sum of edges", summed("sum"), (EDGES, TARGETS), (8,), (X, X), NONE,
        reduced(NODES * 32), 1e-5),
    Row("sum of all edges to nodes", summed("sum"), (EDGES, TARGETS), (8,), (NONE, NONE), X),
    Row("sum of edges by features", summed("sum"), (EDGES, TARGETS), (2, 4), (XY, X), P(None, "y"),
        reduced(NODES * 8, 2), 1e-5),
    Row("max of edges to nodes", summed("max"), (EDGES, TARGETS), (8,), (X, X), X,
        {"all_to_all": (1, NODE_BYTES * 7 // 8)}),
    Row("any of edges to nodes", lambda e, t: jnp.zeros(512, bool).at[t].max(e > 1),
        (EDGES[:, 0], TARGETS), (8,), (X, X), X, {"all_to_all": (1, 512 * 7 // 8)}),
    Row("all of edges to nodes", lambda e, t: jnp.ones(512, bool).at[t].min(e > -2),
        (EDGES[:, 0], TARGETS), (8,), (X, X), NONE, {"all_reduce": (1, 2 * 512 * 7 // 8)}),
    Row("max of uneven edges", summed("max"), (EDGES[:4001], TARGETS[:4001]), (8,), (X, X), NONE,
        reduced(NODES * 32)),
    Row("messages", messages, (reals(NODES, 32), SOURCES, TARGETS), (8,), (X, X, X), X,
        BY_FEATURES, 1e-5),
]  # fmt: skip

GRADIENTS = [
    Row("of rows of a table", gradient(taken()), (TABLE, NUMBERS), (8,), (X, NONE), X,
        reduced(40 * 48)),
    # As many bytes as all rows reduced would be, and each device computes with a quarter of them.
    Row("of rows, batch by y", gradient(taken()), (TABLE, NUMBERS), (2, 4), (X, P("y")), X,
        {"all_reduce": (1, 10 * 48 * 4), "all_gather": (2, 40 * 49 * 4 * 3 // 4)}, 1e-6),
    Row("of an element a row and column", gradient(by_row_and_column),
        (SEQUENCES, below(16, 32, 128)), (2, 4), (XY, XY), XY),
    Row("of windows", gradient(windows), (SEQUENCES, STARTS), (2, 4), (XY, X), XY,
        reduced(16 * 4 * 16, 4)),
    Row("of a window", gradient(window(5)), (TABLE, AT), (8,), (X, NONE), X, reduced(5 * 48)),
    Row("of a cache", gradient(written, (0, 1)), (TABLE, UPDATES, AT), (8,), (X, NONE, NONE),
        (X, NONE), reduced(40 * 48)),
    Row("of messages", gradient(messages), (reals(NODES, 32), SOURCES, TARGETS), (8,),
        (X, X, X), X,
        BY_FEATURES, 1e-4),
]  # fmt: skip

ROWS = [*GATHERS, *SCATTERS, *SEGMENTS, *GRADIENTS]
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


def edges(name: str, function: Any, *args: Any, out: Any = NONE, ins: Any = NONE) -> Row:
    """A program on four by two devices: its first argument by x, the others as `ins` says."""
    return Row(name, function, args, (4, 2), (X, *[ins] * (len(args) - 1)), out)


EDGE_CASES = [
    edges("fewer rows than devices", taken(), reals(3, 4), below(3, 5)),
    edges("add to fewer rows", updated("add"), reals(3, 4), below(3, 4), reals(4, 4), out=X),
    edges("set of fewer rows", updated("set"), reals(3, 4), below(3, 5), reals(5, 4), out=X,
          ins=P("y")),
    edges("window of fewer rows", window(2), reals(3, 4), np.int32(1)),
    edges("cache of fewer rows", written, reals(3, 4), reals(2, 4), np.int32(9), out=X),
    edges("no positions", taken(), reals(16, 4), below(3, 0)),
    edges("no updates", updated("set"), reals(16, 4), below(3, 0), reals(0, 4), out=X),
    edges("no features", updated("set"), reals(16, 0), below(9, 8), reals(8, 0), out=X,
          ins=P("y")),
    edges("one row", taken(), reals(1, 4), below(1, 5)),
    edges("one position", taken(), reals(13), np.int32(-3)),
    edges("one position outside", taken(mode="fill"), reals(13), np.int32(33)),
]  # fmt: skip


@pytest.mark.parametrize("row", EDGE_CASES, ids=names(EDGE_CASES))
def test_edges(row: Row):
    # JAX itself cannot read a sharded array without elements back.
    check_numbers(row, real=0 not in row.args[0].shape)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "uint32", "float16", "bfloat16", "float8_e4m3fn", "complex64"],
)
def test_numbers_of_every_type(dtype: str):
    """Rows read, written and cut out, of a table by rows; updates by the other axis."""
    draw = np.random.default_rng(5)

    def numbers(*shape: int) -> Any:
        return jnp.asarray(draw.integers(0, 4, shape)).astype(dtype)

    table, updates, places = numbers(61, 5), numbers(24, 5), around(61, 24)

    def function(x: Any, i: Any, u: Any) -> Any:
        return (
            x.at[i].get(mode="clip"),
            x.at[i].get(mode="fill", fill_value=1),
            lax.dynamic_slice_in_dim(x, i[0], 7, 0),
            x.at[i].set(u, mode="drop"),
            x if dtype == "bool" else x.at[i].add(u, mode="clip"),
            x if dtype == "complex64" else x.at[i].max(u),
            written(x, u, i[1]),
            windows(x, i[:1].repeat(61) % 2) if x.shape[1] > 4 else x,
        )

    args = (table, places, updates)
    row = Row(dtype, function, args, (4, 2), (X, P("y"), P("y")), (NONE,) * 3 + (X,) * 5)
    wanted = jax.jit(function)(*args)
    found = program_of(row, real=True)(*args)
    for value, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(value, "c8"), np.asarray(want, "c8"))
