"""What is easily taken for something else: pads, indices, reshapes, bodies with collectives."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of
from tests.schedule.soundness import check_moves, misstated


def program_of(fn, args, specs, outs, **axes):
    return mw.SpmdProgram.from_shard_map(fn, mesh_of(**(axes or {"x": 4})), specs, outs, *args)


def whole_numbers(*shape, seed=0):
    """Floats whose sums are exact in any order."""
    drawn = np.random.default_rng((seed, *shape)).integers(-9, 9, shape)
    return drawn.astype(np.float32)


def on_slices(s):
    """Every all_reduce of an array over x in two halves, what can be computed between."""
    arrays = [h for h in s.find("all_reduce", axes="x") if h.value.aval.shape]
    s.reorder(s.split(arrays)[1], more_bytes=True)


# What layouts say


def test_a_dim_that_a_reshape_joins_to_another_is_not_lost():
    x = whole_numbers(2, 16)
    program = program_of(lambda x: x.reshape(-1), (x,), (P(None, "x"),), P("x"))
    assert not misstated(program.per_device, (x,))


# Slices that are none


def test_padding_has_a_value():
    """The program's own padding is read; that of moves is not."""

    def step(g, w):
        g = lax.psum(g[0], "x")
        own = [
            lax.dynamic_slice(
                jnp.pad(v, (0, 3), constant_values=c), (4 * lax.axis_index("x"),), (4,)
            )
            for v, c in ((w, 1.0), (w, 5.0), (g * w + 1, 7.0), (w + 1, 9.0))
        ]
        return [lax.psum(jnp.sum(part), "x") for part in own], g * w + 1

    args = whole_numbers(4, 13), whole_numbers(13)
    program = program_of(step, args, (P("x"), P()), P())
    s = check_moves(program, args, on_slices)
    assert len(s.find("reduce_scatter")) == 1


def test_padding_that_is_a_result_stays():
    def step(g, w):
        padded = jnp.pad(w + 1, (0, 3), constant_values=1.0)
        part = lax.dynamic_slice(padded, (4 * lax.axis_index("x"),), (4,))
        return lax.psum(jnp.sum(part), "x"), padded, lax.psum(g[0], "x") * w

    args = whole_numbers(4, 13), whole_numbers(13)
    check_moves(program_of(step, args, (P("x"), P()), P()), args, on_slices)


@pytest.mark.parametrize(
    ("size", "index"),
    [
        (16, lambda i: i.astype(bool).astype(np.int32) * 2),
        (16, lambda i: (i.astype(np.float32) * 0.5).astype(np.int32) * 2),
        (512, lambda i: (i.astype(np.int8) * np.int8(64)).astype(np.int32)),
        (16, lambda i: (7 - i) * 2),
        (16, lambda i: (i * 2) % 8),
    ],
)
def test_an_index_that_counts_otherwise_is_no_own_part(size, index):
    def step(g, w):
        moved = lax.psum(g[0], "x") * w
        at = index(lax.axis_index("x"))
        part = lax.dynamic_slice(moved, (at,), (size // 8,), allow_negative_indices=False)
        return moved, part[None]

    args = whole_numbers(8, size), whole_numbers(size)
    program = program_of(step, args, (P("x"), P()), (P(), P("x")), x=8)
    assert check_moves(program, args, on_slices).find("reduce_scatter")


# Bodies


BODIES = {
    "device number": lambda c: c * 2 + lax.axis_index("x"),
    "sum": lambda c: c * 2 + lax.psum(c, "x"),
    "sum over another axis": lambda c: c * 2 + lax.psum(c, "y"),
}
AROUND = {
    "scan": lambda f, v: lax.scan(lambda c, _: (f(c), None), v, None, length=2)[0],
    "rows": lambda f, v: lax.scan(lambda c, _: (c, f(v)), 0.0, None, length=2)[1],
    "cond": lambda f, v: lax.cond(v[0] > -1e6, f, lambda c: c, v),
    "while": lambda f, v: lax.while_loop(lambda c: c[1] < 2, lambda c: (f(c[0]), c[1] + 1), (v, 0))[
        0
    ],
    "jit": lambda f, v: jax.jit(f)(v),
    "checkpoint": lambda f, v: jax.checkpoint(f)(v),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("around", AROUND)
def test_collectives_in_bodies_are_left_alone(around, body):
    def step(g, w):
        g = lax.psum(g[0], "x") * w
        return jnp.sum(lax.all_gather(AROUND[around](BODIES[body], g), "x"), 0), g

    args = whole_numbers(2, 16), whole_numbers(16)
    check_moves(program_of(step, args, (P("x"), P()), P(), x=2, y=2), args, on_slices)


# Scripts and handles


def test_a_zero_is_said_in_a_script():
    def step(g, w):
        return lax.psum(g[0], "x") * w

    args = whole_numbers(4, 3, 8), whole_numbers(3, 8)
    s = mw.Schedule(program_of(step, args, (P("x"), P()), P()))
    s.split(s.find("all_reduce")[0], dim=0)
    assert "dim=0" in s.script()
    again = mw.Schedule(s.original).run(s.script())
    assert str(again.program) == str(s.program)


def test_what_nothing_reads_is_not_found():
    def step(g, w):
        lax.psum(g[0] + 1, "x")
        return lax.psum(g[0], "x") * w

    args = whole_numbers(4, 8), whole_numbers(8)
    s = mw.Schedule(program_of(step, args, (P("x"), P()), P()))
    found = s.find("all_reduce")
    assert len(found) == 1
    s.split([*found, *found])
    assert [c.kind.value for c in s.program.collectives] == ["reduce_scatter", "all_gather"]


# The ten traps that the original falls into. Local with Sliced, and Replicated with Sliced, are
# of layouts that a program states: tests/schedule/language. Refusals: test_illegal.py. More to
# gather than an all_reduce saves: test_autotune.py.


def test_a_way_out_of_what_is_fused_and_back_is_fused_too():
    def step(g, w):
        first = lax.psum(g[0], "x") * w
        return jnp.cumsum(first + 1) * first

    args = whole_numbers(4, 16), whole_numbers(16)
    s = check_moves(
        program_of(step, args, (P("x"), P()), P()), args, lambda s: s.fuse(s.find("mul"))
    )
    assert not s.find("cumsum")


def test_a_reduce_and_a_broadcast_are_no_reduce_scatter_and_all_gather():
    def step(g, w):
        return lax.psum(g[0], "x") * w

    args = whole_numbers(6, 7), whole_numbers(7)
    program = program_of(step, args, (P("x"), P()), P(), x=6)
    for root in (0, 5):
        s = check_moves(
            program, args, lambda s, r=root: s.split_to_root(s.find("all_reduce")[0], r)
        )
        assert {c.kind.value for c in s.program.collectives} == {"ppermute"}
        with pytest.raises(mw.IllegalMove, match="This move is for an all_gather"):
            s.reorder(s.find("ppermute")[-1])


def test_the_norm_of_a_tile_is_one_sum_of_partial_sums():
    def step(g, w):
        g = lax.psum(g[0], "x") * w
        return g * jnp.floor(jnp.sqrt(jnp.sum(g * g)))

    args = whole_numbers(4, 3, 16), whole_numbers(3, 16)
    s = check_moves(program_of(step, args, (P("x"), P()), P()), args, on_slices)
    kinds = [c.kind.value for c in s.program.collectives]
    assert kinds == ["reduce_scatter", "all_reduce", "all_gather"]
    assert not s.find("all_reduce")[0].value.aval.shape
    assert len(s.find("sqrt")) == 1


SUMS = {
    "uneven": (lambda g, w: lax.psum(g[0], "x") * w, (13,), "float32"),
    "smaller than the axis": (lambda g, w: lax.psum(g[0], "x") * w, (3,), "float32"),
    "integers": (lambda g, w: lax.psum(g[0], "x") * w, (13,), "int32"),
    "bytes that wrap": (lambda g, w: lax.psum(g[0] * 19, "x") * w, (16,), "int8"),
    "how many are true": (lambda g, w: lax.psum(g[0] > 0, "x") * w, (13,), "int32"),
    "both axes": (lambda g, w: lax.psum(g[0], ("x", "y")) * w, (16,), "float32"),
    "both axes, the other way": (lambda g, w: lax.psum(g[0], ("y", "x")) * w, (13,), "float32"),
    "one axis, then the other": (
        lambda g, w: lax.psum(lax.psum(g[0], "x") * w, "y"), (16,), "int32"),
    "one operand twice": (
        lambda g, w: (lax.psum(g[0], "x") * w, lax.psum(g[0], ("x", "y")) - w), (16,), "float32"),
    "operands of two types": (
        lambda g, w: lax.psum((g[0], (g[0] * 65537).astype("int32")), "x")[1] * w.astype("int32"),
        (16,), "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("together", [False, True])
def test_sums_of_any_kind(name, together):
    fn, shape, dtype = SUMS[name]

    def step(g, w):
        out = fn(g, w)
        return [lax.psum(x, "x")[None] for x in jax.tree.leaves(out)], lax.psum(jnp.sum(w), "x")

    args = [whole_numbers(4, *shape).astype(dtype), whole_numbers(*shape, seed=1).astype(dtype)]

    def moves(s):
        if together:
            with contextlib.suppress(mw.IllegalMove):  # of another type, or over another group
                s.bucket([s.find("all_reduce")[0], s.find("all_reduce")[-1]])
        on_slices(s)

    program = program_of(step, args, (P(("x", "y")), P()), (P("y"), P()), x=2, y=2)
    kinds = {c.kind.value for c in check_moves(program, args, moves).program.collectives}
    assert "reduce_scatter" in kinds or name == "one axis, then the other"


def test_masks_of_dropout_are_the_same_on_slices():
    def step(g, w, seed):
        key = jax.random.fold_in(jax.random.key(3), seed)
        kept = jax.random.bernoulli(key, 0.5, w.shape)
        return jnp.where(kept, lax.psum(g[0], "x") * w, 0), kept

    args = whole_numbers(4, 6, 13), whole_numbers(6, 13), np.int32(5)
    s = check_moves(program_of(step, args, (P("x"), P(), P()), P()), args, on_slices)
    assert len(s.find("reduce_scatter")) == 1


def test_how_state_lies_is_not_a_matter_of_tuning():
    def step(g, h, m, v):
        g, h = lax.psum(g[0], "x"), lax.psum(h[0], "x")
        m, v = m + g, v * 2 + h
        return m * v, m, v

    args = [whole_numbers(4, 12, seed=1), whole_numbers(4, 12, seed=2),
            whole_numbers(12, seed=3), whole_numbers(12, seed=4)]  # fmt: skip
    program = program_of(step, args, (P("x"), P("x"), P(), P()), P())

    def tuned(together, first):
        def moves(s):
            on_slices(s)
            for name in first:
                s.slice_state(name, {"m": 1, "v": 2}[name])
            if together:
                s.bucket(s.find("reduce_scatter"))

        return check_moves(program, args, moves).program.per_device

    lies = {
        (p.in_shardings, p.out_shardings)
        for p in (tuned(b, f) for b in (False, True) for f in ("mv", "vm"))
    }
    assert len(lies) == 1
