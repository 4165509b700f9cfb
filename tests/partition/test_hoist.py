"""What a loop reads in another sharding: before it, or in each step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.end_to_end.sent import assert_same, mesh_of, reals

STEPS, SIZE = 4, 32
GATHER = 7 * SIZE * SIZE * 4 // 8
HELD = SIZE * SIZE * 4


def recurrent(v, w, h, rows):
    return lax.scan(lambda h, row: (jnp.tanh(h @ v) @ w + row, None), h, rows)[0]


ARGS = reals(SIZE, SIZE), reals(SIZE, SIZE) / 2, reals(128, SIZE), reals(STEPS, 128, SIZE)


def program(hoist_bytes, function=recurrent):
    step = mw.jit(
        function,
        mesh=mesh_of(8),
        in_shardings=(P("x"), P("x"), P("x"), P(None, "x")),
        out_shardings=P("x"),
        hoist_bytes=hoist_bytes,
    )
    return step.partition(*ARGS)


@pytest.mark.parametrize(
    ("hoist_bytes", "before"), [(None, 2), (2 * HELD, 2), (2 * HELD - 1, 1), (HELD, 1), (0, 0)]
)
def test_a_limit_keeps_gathers_in_the_loop(hoist_bytes, before):
    found = program(hoist_bytes)
    gathers = [c for c in found.collectives if c.kind == "all_gather"]
    assert sorted(c.count for c in gathers) == [1] * before + [STEPS] * (2 - before)
    assert sum(c.wire_bytes for c in gathers) == GATHER * (before + STEPS * (2 - before))
    assert sum("once before it" in read for read in found.per_device.loop_reads) == before
    assert_same(found.simulate(*ARGS), recurrent(*ARGS), 1e-5)


def test_the_report_says_which():
    text = " ".join(program(HELD).explain().split())
    assert f"once before it, {GATHER:,} bytes sent each time, {HELD:,} held" in text
    assert f"in each of its {STEPS} steps, {GATHER:,} bytes sent each time, {HELD:,} held" in text


@pytest.mark.parametrize(("hoist_bytes", "where"), [(0, "in each step"), (None, "once before it")])
def test_no_steps_are_counted_that_only_the_data_knows(hoist_bytes, where):
    def function(w, h, steps):
        state = h, 0
        return lax.while_loop(
            lambda state: state[1] < steps,
            lambda state: (jnp.tanh(state[0] @ w), state[1] + 1),
            state,
        )[0]

    step = mw.jit(
        function, mesh=mesh_of(8), in_shardings=(P("x"), P("x"), P()), hoist_bytes=hoist_bytes
    )
    found = step.partition(ARGS[0], reals(2048, SIZE), 3)
    text = " ".join(found.explain().split())
    assert f"{where}, {GATHER:,} bytes sent each time, {HELD:,} held" in text
    says_so = "in 1 collective; a `while` counts for one trip" in text
    assert says_so == (hoist_bytes == 0) and found.wire_bytes == GATHER


def test_a_branch_gathers_for_itself():
    """What only a branch reads is not gathered where the branch is not taken."""

    def function(v, w, h, rows):
        def step(h, row):
            return lax.cond(h[0, 0] > 9, lambda: jnp.tanh(h @ v), lambda: h + row), None

        return lax.scan(step, h @ w, rows)[0]

    found = program(None, function)
    assert not found.per_device.loop_reads
    assert_same(found.simulate(*ARGS), function(*ARGS), 1e-5)
    gathers = [c for c in found.collectives if c.kind == "all_gather"]
    assert sorted(c.count for c in gathers if c.shape == (SIZE // 8, SIZE)) == [1, STEPS]


def test_what_all_branches_read_is_gathered_before_the_loop():
    """Whichever is taken, `w` is there; `v` is gathered where it is used."""

    def function(v, w, h, rows):
        def step(h, row):
            ways = (lambda: (jnp.tanh(h @ w), v), lambda: (h - h @ w, v), lambda: ((h @ v) @ w, v))
            h, kept = lax.switch(jnp.int32(h[0, 0] * 3), ways)
            return h + row, kept[0]

        return lax.scan(step, h, rows)[0]

    found = program(None, function)
    gathers = [c for c in found.collectives if c.kind == "all_gather" and c.shape == (4, SIZE)]
    assert sorted(c.count for c in gathers) == [1, STEPS]
    assert_same(found.simulate(*ARGS), function(*ARGS), 1e-5)


@pytest.mark.parametrize("is_read_after", [True, False])
def test_what_is_read_anyway_is_made_before_a_choice(is_read_after):
    """One reduction where the sum is read after the choice, whichever branch was taken."""

    def function(x, y, first):
        total = jnp.sin(x).sum(0)
        chosen = lax.cond(first, lambda: jnp.tanh(total), lambda: y)
        return chosen + jnp.cos(total) if is_read_after else chosen

    args = ARGS[0], ARGS[1][0], True
    step = mw.jit(function, mesh=mesh_of(8), in_shardings=(P("x"), P(), P()), out_shardings=P())
    found = step.partition(*args)
    sums = ("psum", "reduce_scatter")
    assert sum(c.kind in ("all_reduce", "reduce_scatter") for c in found.collectives) == 1
    assert any(e.primitive.name in sums for e in found.jaxpr.jaxpr.eqns) == is_read_after
    assert_same(found.simulate(*args), function(*args), 1e-5)


def test_what_an_outer_loop_has_an_inner_one_has_too():
    def function(v, w, h, rows):
        def step(h, row):
            return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w) + row, h), None

        return lax.scan(step, h, rows)[0]

    found = program(None, function)
    assert [c.count for c in found.collectives] == [1]
    assert len(found.per_device.loop_reads) == 1
    assert_same(found.simulate(*ARGS), function(*ARGS), 1e-5)


def test_nothing_is_said_of_loops_that_read_nothing_else():
    step = mw.jit(lambda x: lax.fori_loop(0, 3, lambda i, x: x * 2, x), mesh=mesh_of(8))
    assert not step.partition(jax.ShapeDtypeStruct((8,), np.float32)).per_device.loop_reads


def rows_and_columns(w, h, g):
    """Rows of `h` meet all of `w`, columns of `g` a part: a slice of what is gathered for `h`."""
    return lax.scan(
        lambda c, _: ((jnp.tanh(c[0] @ w), jnp.tanh(c[1] * w)), None), (h, g), length=STEPS
    )[0]


def columns_then_rows(w, h, g):
    """The loop reads columns of `w` alone: of what is gathered for `h`, after it."""
    g = lax.scan(lambda g, _: (jnp.tanh(g * w), None), g, length=STEPS)[0]
    return jnp.tanh(h @ w), g


@pytest.mark.parametrize(
    ("function", "gathers_within"),
    [(rows_and_columns, [STEPS]), (columns_then_rows, [1, STEPS])],
)
@pytest.mark.parametrize("hoist_bytes", [None, HELD, HELD - 1, 0])
def test_a_slice_is_made_before_a_loop_only_with_what_it_is_of(
    function, gathers_within, hoist_bytes
):
    """It sends nothing itself; what it is a slice of is gathered, and counts."""
    args = ARGS[0], reals(2048, SIZE), ARGS[1]
    shardings = (P("x"), P("x"), P(None, "x"))
    step = mw.jit(
        function,
        mesh=mesh_of(8),
        in_shardings=shardings,
        out_shardings=shardings[1:],
        hoist_bytes=hoist_bytes,
    )
    found = step.partition(*args)
    fits = hoist_bytes is None or hoist_bytes >= HELD
    gathers = [c.count for c in found.collectives if c.kind == "all_gather"]
    assert sorted(gathers) == ([1] if fits else gathers_within)
    where = "once before it" if fits else f"in each of its {STEPS} steps"
    (read,) = found.per_device.loop_reads
    assert f"{where}, {GATHER:,} bytes sent each time, {HELD:,} held" in read
    assert_same(found.simulate(*args), function(*args), 1e-5)
