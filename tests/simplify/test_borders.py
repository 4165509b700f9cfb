"""Programs whose moves of rows are merged: what is left, and that it computes the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwise.flatten import flatten
from tests.fuzz.evaluate.run import evaluate

# Functions of `x[12, 9]` and `u[6, 9]`, and the equations that are left of them.
Table = dict[str, tuple[Callable[..., Any], str | None]]


def of_rows() -> Table:
    """Slices, pads, rolls and joins."""
    return {
        "slice of a slice": (lambda x, u: x[2:11][1:7:2], "slice"),
        "slice of one with strides": (lambda x, u: x[1::3][1:3], "slice"),
        "slice of a pad": (lambda x, u: jnp.pad(x, ((2, 1), (0, 0)))[1:9], "pad"),
        "slice of only the fill": (lambda x, u: jnp.pad(x, ((5, 1), (0, 0)))[:3], "pad"),
        "columns of a pad between rows": (lambda x, u: between(x)[:, 2:5], "pad"),
        "rows of a pad between rows": (lambda x, u: between(x)[2:5], "pad slice"),
        "pad of a slice": (lambda x, u: jnp.pad(x[:-2], ((3, 0), (0, 1))), "pad"),
        "pad where a slice left rows out": (lambda x, u: jnp.pad(x[1:], ((2, 0), (0, 0))),
                                            "slice pad"),
        "split into unlike parts": (
            lambda x, u: sum(jnp.sin(p).sum() for p in jnp.split(x, (1, 11))),
            "slice slice slice sin sin sin reduce_sum reduce_sum reduce_sum add add add"),
        "split into like parts": (lambda x, u: jnp.stack(jnp.split(x, 3)).sum(0), None),
        "roll": (lambda x, u: jnp.roll(x, -5, 1), "roll"),
        "roll of two dims": (lambda x, u: jnp.roll(x, (3, 2), (0, 1)), "roll roll"),
        "roll of a roll": (lambda x, u: rolled(x, 2, 5), "roll"),
        "rolls there and back": (lambda x, u: rolled(x, 2, 1, -3), "copy"),
        "rolls of unlike dims": (lambda x, u: jnp.roll(rolled(x, 2), 1, 1), "roll roll"),
        "roll of a roll that is read": (lambda x, u: twice_rolled(x), "roll roll add"),
        "gradient of a roll": (lambda x, u: jax.vjp(lambda x: jnp.roll(x, 5, 0), x)[1](x)[0],
                               "roll add"),
        "two slices of two values": (lambda x, u: jnp.concatenate([x[6:], u[:6]]),
                                     "slice concatenate"),
        "two slices that are no roll": (lambda x, u: jnp.concatenate([x[5:], x[:6]]),
                                        "slice slice concatenate"),
        "dynamic_slice": (lambda x, u: lax.dynamic_slice(x, (9, -3), (6, 4)), "slice"),
        "slice of what is turned round": (lambda x, u: x[::-1, 2:5][2:4], "slice rev"),
        "turned round and turned back": (lambda x, u: x[:1][::-1] + x[:1], "slice add"),
        "empty slice of a slice": (lambda x, u: x[:, ::2][:, 9:], None),
    }  # fmt: skip


def of_sums() -> Table:
    """Sums of pads with zeros, as gradients of splits and stacks are: they are joins."""
    return {
        "gradient of a split": (
            lambda x, u: jax.vjp(lambda x: (x[:5] * 2, x[5:]), x)[1](
                (jnp.sin(x[3:8]), jnp.sin(x[:7])))[0],
            "slice sin mul slice sin concatenate add"),
        "gradient of a stack": (
            lambda x, u: jax.vjp(lambda x: (x[0] * 2, x[1:4] * 3, x[4:12]), x)[1](
                (jnp.sin(x[3]), x[5:8], jnp.cos(x[:8])))[0],
            "slice slice slice sin cos mul mul concatenate add"),
        "gradient of a part of a stack": (
            lambda x, u: jax.vjp(lambda x: (x[2:4], x[4:9]), x)[1](
                (jnp.sin(x[5:7]), jnp.cos(x[:5])))[0],
            "slice slice sin cos concatenate add pad"),
        "gradient of rows with others between": (
            lambda x, u: jax.vjp(lambda x: (x[:4], x[5:]), x)[1](
                (jnp.sin(x[5:9]), jnp.cos(x[:7])))[0],
            "slice slice sin cos pad pad add_any"),
        "gradient of a stack of columns": (
            lambda x, u: jax.vjp(lambda x: [x[:, i] for i in range(9)], x)[1](
                [jnp.sin(x[:, 8 - i]) for i in range(9)])[0],
            " ".join(["slice sin"] * 9) + " concatenate add"),
        "pads with zeros of two signs": (
            lambda x, u: lax.pad(x[:7], 0.0, [(0, 5, 0), (0, 0, 0)])
            + lax.pad(x[:5], -0.0, [(7, 0, 0), (0, 0, 0)]),
            "slice pad pad add"),
        "pads that share a row": (
            lambda x, u: jnp.pad(x[:7], ((0, 5), (0, 0))) + jnp.pad(x[:6], ((6, 0), (0, 0))),
            "pad pad slice add"),
        "pads of other dims": (
            lambda x, u: jnp.pad(x[:7], ((0, 5), (0, 0))) + jnp.pad(x[:, :2], ((0, 0), (7, 0))),
            "pad pad slice add"),
        "pads with other fill": (
            lambda x, u: jnp.pad(x[:7], ((0, 5), (0, 0)), constant_values=1.0)
            + jnp.pad(x[:5], ((7, 0), (0, 0))),
            None),
    }  # fmt: skip


def of_neighbours() -> Table:
    """Rows of one value that are laid side by side near where they were."""
    shifts = "iota pad ge select_n"
    return {
        "the next, the last again": (lambda x, u: jnp.concatenate([x[1:], x[-1:]]), shifts),
        "the next, from a pad": (
            lambda x, u: jnp.pad(x, ((1, 1), (0, 0)), mode="edge")[2:], shifts),
        "the next, mirrored": (
            lambda x, u: jnp.pad(x, ((1, 1), (0, 0)), mode="symmetric")[2:], shifts),
        "the one before, of columns": (
            lambda x, u: jnp.pad(x, ((0, 0), (1, 1)), mode="edge")[:, :-2],
            "iota pad lt select_n"),
        "rows left out": (lambda x, u: jnp.concatenate([x[:5], x[6:], x[-1:]]),
                          "iota pad lt ge select_n select_n"),
        "mirrored far away": (lambda x, u: jnp.concatenate([x, x[::-1]]), "rev concatenate"),
        "read by a product": (lambda x, u: jnp.concatenate([x[1:], x[-1:]]) @ u.T,
                              "slice slice concatenate dot_general"),
        "of two values": (lambda x, u: jnp.concatenate([u[:1], x[:-1]]), "pad set_rows"),
        "pairs, neither of which is most": (
            lambda x, u: jnp.concatenate([jnp.sin(x[:1]), jnp.cos(u[:1])]),
            "slice slice sin cos concatenate"),
    }  # fmt: skip


def of_updates() -> Table:
    """Updates at places that are known."""
    return {
        "dynamic_update_slice": (lambda x, u: lax.dynamic_update_slice(x, u, (99, 0)),
                                 "pad iota ge lt and select_n"),
        "update of a few rows": (lambda x, u: lax.dynamic_update_slice(x, u[:2], (3, 0)),
                                 "set_rows"),
        "at, set": (lambda x, u: x.at[3:9].set(u), "pad iota ge lt and select_n"),
        "at, add": (lambda x, u: x.at[3:9].add(u), "pad add"),
        "at, multiply": (lambda x, u: x.at[3:9].multiply(u), "pad mul"),
        "at, a function": (lambda x, u: x.at[3:9].apply(jnp.negative), None),
        "at, the same": (lambda x, u: x.at[3:9].apply(lambda v: v), None),
        "every other row, a function": (lambda x, u: x.at[::2].apply(jnp.sin), None),
        "at, min": (lambda x, u: x.at[3:9].min(u), "broadcast_in_dim scatter-min"),
        "every other row, set": (lambda x, u: x.at[1::2].set(u),
                                 "pad iota ge lt sub rem eq and and select_n"),
        "every other row, add": (lambda x, u: x.at[::2].add(u), "pad add"),
        "every other column, add": (lambda x, u: x.T.at[:, 1::2].add(u.T),
                                    "transpose transpose pad add"),
        "multiply complex numbers": (lambda x, u: complex_of(x).at[3:9].multiply(2).real,
                                     None),
        "a row to be dropped": (lambda x, u: jnp.zeros((9, 9)).at[rows_of(u)].add(u)[:8], None),
        "a row to be dropped, of what was there": (
            lambda x, u: x.at[rows_of(u)].max(u)[:11], None),
        "a row to be dropped, clipped": (
            lambda x, u: x.at[rows_of(u) - 3].add(u, mode="clip")[:11], None),
        "the last rows of a scatter": (lambda x, u: x.at[rows_of(u)].add(u)[1:], None),
        "columns of a scatter": (lambda x, u: x.at[rows_of(u)].add(u)[:, :8], None),
        "outside": (lambda x, u: x.at[jnp.arange(6) * 3].add(u), None),
    }  # fmt: skip


def of_single_rows() -> Table:
    """Rows, columns and corners that are set, and gradients of such."""
    return {
        "a row": (lambda x, u: x.at[3].set(u[0]), "set_rows"),
        "a row of far fewer": (lambda x, u: x.at[3].set(u[:2][0]), "set_rows"),
        "a row of a column": (lambda x, u: x.at[3].set(u[0, 1]), None),
        "a row, mirrored": (lambda x, u: x.at[:1].set(x[1:2][::-1]), "set_rows"),
        "two rows, mirrored": (lambda x, u: x.at[:2].set(u[2:4][::-1]), "set_rows"),
        "a row of what is turned round": (lambda x, u: x.at[:1].set(u[::-1][:1]),
                                          "slice rev scatter"),
        "a column of columns": (lambda x, u: x.at[:, -1].set(2 * x[:, 0] - x[:, 3]), "set_rows"),
        "two rows, of one and a number": (
            lambda x, u: x.at[2:4].set(jnp.where(x[5:7] > 0, x[8:10], 0.5)), "set_rows"),
        "a row, of one read before": (
            lambda x, u: x.at[0].set(x[1]).at[4].set(x[0] * x[3]), "set_rows set_rows"),
        "a column without its ends": (
            lambda x, u: x.at[1:-1, 0].set(-x[1:-1, 1]),
            "set_rows iota ge lt and"),
        "a column without its ends, of rows elsewhere": (
            lambda x, u: x.at[1:-1, 0].set(x[2:, 1]), "slice concatenate scatter"),
        "a corner": (lambda x, u: x.at[0, 0].set(2 * x[1, 1] - x[2, 2]), "set_rows"),
        "a corner of rows that change places": (
            lambda x, u: x.at[:2, -2:].set(x[-2:, 1:3][::-1, ::-1]), "set_rows"),
        "a row outside": (lambda x, u: x.at[12].set(x[1]), None),
        "a row that is applied": (lambda x, u: x.at[0].apply(jnp.sin), None),
        "a row with the sum of another": (lambda x, u: x.at[0].set(x[1].sum()),
                                          "slice reduce_sum scatter"),
        "rows added, subtracted, multiplied": (
            lambda x, u: x.at[0].add(x[1]).at[5].subtract(x[4]).at[-1].multiply(x[3]),
            "set_rows set_rows set_rows"),
        "gradient of a wall": (
            lambda x, u: jax.vjp(lambda x: x.at[0].set(x[1]), x)[1](x)[0],
            "scatter set_rows add"),
        "a sum with a row of zeros that have signs": (
            lambda x, u: x + jnp.pad(-abs(x[4:5]) * 0, ((0, 11), (0, 0))), "set_rows add"),
        "gradient of rows that are multiplied": (
            lambda x, u: jax.vjp(lambda x: x.at[0].multiply(x[3]), x)[1](x)[0], None),
        "gradient of single rows": (
            lambda x, u: jax.vjp(lambda x: (x[3], x[7]), x)[1]((x[1], 2 * x[2]))[0],
            "set_rows set_rows add"),
    }  # fmt: skip


def of_copies_and_windows() -> Table:
    """Copies laid end to end, and windows."""
    return {
        "reshape of a transpose": (lambda x, u: lax.reshape(x, (27, 4), (1, 0)),
                                   "transpose reshape"),
        "copies told apart": (lambda x, u: jnp.tile(x, (2, 3)).reshape(2, 12, 3, 9),
                              "broadcast_in_dim"),
        "copies of parts of rows": (
            lambda x, u: jnp.tile(x, (2, 3)).reshape(2, 3, 4, 3, 3, 3), "broadcast_in_dim reshape"),
        "copies told apart in one dim": (lambda x, u: jnp.tile(x, (2, 3)).reshape(2, 12, 27),
                                         "tile reshape"),
        "rows across copies": (lambda x, u: jnp.tile(x, (2, 1)).reshape(3, 8, 9), "tile reshape"),
        "window over a pad": (lambda x, u: lax.reduce_window(
            between(x), 0.0, lax.add, (3, 2), (2, 1), "VALID"), "reduce_window_sum"),
        "window over other fill": (lambda x, u: lax.reduce_window(
            jnp.pad(x, 1, constant_values=2.0), 0.0, lax.add, (3, 2), (2, 1), "VALID"), None),
        "window over what is repeated": (lambda x, u: lax.reduce_window(
            jnp.broadcast_to(x[:, 1:2], (12, 9)), 0.0, lax.add, (3, 1), (2, 1), "SAME"),
            "slice reduce_window_sum"),
        "how many a window has": (lambda x, u: lax.reduce_window(
            jnp.ones_like(x), 0.0, lax.add, (3, 4), (2, 1), "SAME", None, (2, 1)), None),
        "how many, columns of their own": (lambda x, u: lax.reduce_window(
            jnp.broadcast_to(jnp.round(x[1]), (12, 9)), 0.0, lax.add, (4, 1), (1, 1),
            ((2, 3), (0, 0))), None),
        "largest of what is repeated": (lambda x, u: lax.reduce_window(
            jnp.broadcast_to(x[:, 1:2], (12, 9)), -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"),
            "slice reduce_window_max"),
        "window over a whole dim": (lambda x, u: lax.reduce_window(
            jnp.round(x), 0.0, lax.add, (12, 3), (1, 2), "VALID"),
            "round reduce_sum reduce_window_sum"),
        "window over all": (lambda x, u: lax.reduce_window(
            x, -jnp.inf, lax.max, (12, 9), (5, 1), "VALID"), "reduce_max"),
        "window over a whole dim and more": (lambda x, u: lax.reduce_window(
            x, jnp.inf, lax.min, (12, 2), (1, 1), ((1, 0), (0, 0))), "reduce_window_min"),
        "gradient of a window over all": (lambda x, u: jax.vjp(lambda x: lax.reduce_window(
            x, 0.0, lax.add, (12, 9), (1, 1), "VALID"), x)[1](x[3:4, 2:3])[0], "slice"),
        "a row in every window": (lambda x, u: lax.reduce_window(
            x[:1], 0.0, lax.add, (7, 2), (2, 3), ((6, 5), (0, 0))),
            "slice reduce_window_sum"),
        "a row in most windows": (lambda x, u: lax.reduce_window(
            x[:1], 0.0, lax.add, (7, 1), (1, 1), ((7, 6), (0, 0))), "slice reduce_window_sum"),
        "a row between others": (lambda x, u: lax.reduce_window(
            x[:1], 0.0, lax.add, (3, 1), (1, 1), ((4, 4), (0, 0)), window_dilation=(2, 1)),
            "slice reduce_window_sum"),
        "convolution of a crop": (lambda x, u: lax.conv_general_dilated(
            lax.pad(x[None], np.float32(0), [(0, 0, 0), (0, 0, 0), (-2, -1, 0)]),
            u[None, :, :3].repeat(2, 1), (1,), "SAME"), None),
        "convolution of a pad": (lambda x, u: lax.conv(
            jnp.pad(x[None, None], ((0, 0), (0, 0), (2, 1), (1, 1))), u[None, None, :, :3],
            (1, 1), "VALID")[0, 0], "conv_general_dilated slice"),
    }  # fmt: skip


def of_selected_rows() -> Table:
    """Slices beside the dims along which a pad or a join moves rows."""
    return {
        "rows of columns that are padded": (lambda x, u: sides(x)[2:3] * sides(x)[4:5],
                                            "pad pad mul"),
        "rows of what is read padded": (lambda x, u: sides(x) * sides(x)[2:3], "pad slice mul"),
        "rows of what is read joined": (
            lambda x, u: ends(x) * ends(x)[2:3] + ends(x)[4:5],
            "slice slice concatenate slice slice mul add"),
        "columns of what is read joined": (
            lambda x, u: ends(x)[:, 2:5] + ends(x).sum(1, keepdims=True),
            "slice slice slice concatenate reduce_sum add"),
    }  # fmt: skip


def sides(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (1, 2)))


def ends(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x[:, :1], x, x[:, -1:]], 1)


def between(x: jax.Array) -> jax.Array:
    return lax.pad(x, np.float32(0), [(1, 2, 1), (0, 0, 0)])


def rolled(x: jax.Array, *shifts: int) -> jax.Array:
    for shift in shifts:
        x = jnp.roll(x, shift, 0)
    return x


def twice_rolled(x: jax.Array) -> jax.Array:
    return (once := rolled(x, 2)) + rolled(once, 5)


def complex_of(x: jax.Array) -> jax.Array:
    return lax.complex(jnp.where(x > 1, jnp.inf, x), jnp.zeros_like(x))


def rows_of(u: jax.Array) -> jax.Array:
    """A row for each of `u`, some of them outside; their numbers are known to nobody."""
    return lax.convert_element_type(u[:, 0] * 8, jnp.int32)


def values() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x, u = draw.normal(size=(12, 9)), draw.normal(size=(6, 9))
    x[0, 0] = x[4, 4] = -0.0
    return x.astype(np.float32), u.astype(np.float32)


TABLE = (
    of_rows()
    | of_sums()
    | of_neighbours()
    | of_selected_rows()
    | of_updates()
    | of_single_rows()
    | of_copies_and_windows()
)


@pytest.mark.parametrize("name", TABLE)
def test_merged(name: str):
    function, left = TABLE[name]
    x, u = values()
    traced = jax.make_jaxpr(function)(x, u)
    closed = flatten(traced)
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    if left is not None:
        kept = sorted(set(left.split())), sorted(left.split())
        assert sorted(n for n in names if n in kept[0]) == kept[1], names
        assert set(names) <= {*kept[0], "squeeze", "broadcast_in_dim", "convert_element_type"}, (
            names
        )
    for eqn in closed.jaxpr.eqns:
        if "window" in eqn.primitive.name and ("repeated" in name or "how many" in name):
            assert eqn.invars[0].aval.shape == (12, 1) and "how many" not in name
    ((found,), (wanted,)) = (evaluate(jaxpr, (x, u)) for jaxpr in (closed, traced))
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("a row to be dropped", 8),
        ("a row to be dropped, of what was there", 11),
        ("a row to be dropped, clipped", 12),
        ("the last rows of a scatter", 12),
        ("columns of a scatter", 12),
    ],
)
def test_rows_that_are_scattered_into(name: str, rows: int):
    eqns = flatten(jax.make_jaxpr(TABLE[name][0])(*values())).jaxpr.eqns
    (scatter,) = (eqn for eqn in eqns if eqn.primitive.name.startswith("scatter"))
    assert scatter.outvars[0].aval.shape == (rows, 9)
