"""merge: two collectives that are one."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import named_axes
from meshwise.ir.mesh import plain_mesh
from meshwise.schedule.moves.merge import merge
from meshwise.schedule.moves.split import split
from meshwise.schedule.tiling import cut, one_dim
from meshwise.schedule.view import View
from tests.meshes import mesh_of
from tests.schedule.steps import kinds, only, random, simulate

AXES = {"x": 2, "y": 3}


def program_of(fn, specs, outs, args, axes=None):
    return mw.SpmdProgram.from_shard_map(fn, mesh_of(**(axes or AXES)), specs, outs, *args)


def check(program, args, view, exact=False):
    before = simulate(program, View(program.per_device), args)
    for got, want in zip(simulate(program, view, args), before, strict=True):
        if exact:
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def last(view, name):
    return [e.outvars[0] for e in view.eqns if e.primitive.name == name][-1]


@pytest.mark.parametrize(("inner", "outer"), [("x", "y"), ("y", "x")])
@pytest.mark.parametrize("kind", ["psum", "pmax", "all_gather", "reduce_scatter"])
def test_two_in_a_row_are_one_over_both_groups(kind, inner, outer):
    def fn(x):
        for axis in (inner, outer):
            if kind == "psum":
                x = lax.psum(x, axis)
            elif kind == "pmax":
                x = lax.pmax(x, axis)
            elif kind == "all_gather":
                x = lax.all_gather(x, axis, axis=1, tiled=True)
            else:
                x = lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)
        return x * 2.0

    x = random(5, 36)
    out = P(None, (inner, outer)) if kind == "reduce_scatter" else P()
    program = program_of(fn, (P(None, ("x", "y")),), out, (x,))
    view = View(program.per_device)
    done = merge(view, last(view, kind))
    assert len(kinds(done.view)) == 1
    assert (done.view.program.wire_bytes < view.program.wire_bytes) == (kind in ("psum", "pmax"))
    assert done.view.program.wire_bytes <= view.program.wire_bytes
    made = done.view.eqns[done.view.maker[done.value]]
    wanted = {"all_gather": (outer, inner), "reduce_scatter": (inner, outer)}
    assert named_axes(made) == wanted.get(kind, ("x", "y"))
    check(program, (x,), done.view, exact=kind in ("pmax", "all_gather"))


def test_two_in_a_row_that_are_not_one_are_refused():
    def other_dim(x):
        return lax.all_gather(lax.all_gather(x, "x", axis=0, tiled=True), "y", axis=1, tiled=True)

    def same_axis(x):
        return lax.psum(lax.psum(x, "x"), "x")

    def read_twice(x):
        y = lax.psum(x, "x")
        return lax.psum(y, "y") + jnp.sum(y)

    def returned(x):
        y = lax.psum(x, "x")
        return lax.psum(y, "y"), y

    def grouped(x):
        return lax.psum(lax.psum(x, "x", axis_index_groups=[[0], [1]]), "y")

    x, spec = random(6, 6), P("x", "y")
    for fn, outs, kind, match in (
        (other_dim, P(), "all_gather", "along dims"),
        (same_axis, P(None, "y"), "psum", "over an axis once"),
        (read_twice, P(None, "y"), "psum", r"is read by reduce_sum at .* too"),
        (returned, (P(), P(None, "y")), "psum", "the program's results too"),
        (grouped, P(), "psum", "axis_index_groups"),
    ):
        view = View(program_of(fn, (spec,), outs, (x,)).per_device)
        with pytest.raises(mw.IllegalMove, match=match):
            merge(view, last(view, kind))


@pytest.mark.parametrize("size", [24, 23, 3])
@pytest.mark.parametrize("cut_axes", [("x", "y"), ("y", "x"), ("y",)])
def test_a_sum_of_which_parts_are_kept_is_a_reduce_scatter(cut_axes, size):
    count = int(np.prod([AXES[a] for a in cut_axes]))
    part = -(-size // count)
    refined = plain_mesh(tuple(AXES), tuple(AXES.values()))

    def fn(x):
        total = lax.psum(jnp.sin(x[0]), ("x", "y"))
        if size % count:
            return cut(total, one_dim(2, 1, cut_axes), refined) * 2.0
        start = lax.axis_index(cut_axes) * part
        first = lax.dynamic_slice_in_dim(total, start, part, axis=1)
        return first * 2.0 + lax.dynamic_slice_in_dim(total, start, part, axis=1)

    x = random(6, 5, size)
    program = program_of(fn, (P(("x", "y")),), P(None, cut_axes), (x,))
    view = View(program.per_device)
    rest = ["all_reduce"] if len(cut_axes) == 1 else []
    for value in (only(view, "psum"), last(view, "dynamic_slice")):
        done = merge(view, value)
        assert kinds(done.view) == ["reduce_scatter", *rest]
        assert "dynamic_slice" not in {e.primitive.name for e in done.view.eqns}
        check(program, (x,), done.view)
    if size == 24 and not rest:
        assert done.view.program.wire_bytes * 2 == view.program.wire_bytes


def test_a_sum_that_is_read_whole_or_cut_in_two_ways_is_refused():
    def whole(x):
        total = lax.psum(x[0], "x")
        return lax.dynamic_slice_in_dim(total, lax.axis_index("x") * 3, 3), jnp.tanh(total)

    def two_ways(x):
        total = lax.psum(x[0], "x")
        at = lax.axis_index("x") * 3
        return lax.dynamic_slice_in_dim(total, at, 3), lax.dynamic_slice_in_dim(
            total, at, 3, axis=1
        )

    def other_axis(x):
        return lax.dynamic_slice_in_dim(lax.psum(x[0], "x"), lax.axis_index("y") * 2, 2)

    def no_sum(x):
        return lax.dynamic_slice_in_dim(lax.pmax(x[0], "x"), lax.axis_index("x") * 3, 3)

    def uncut(x):
        return lax.psum(x[0], "x")

    x = random(2, 6, 6)
    for fn, outs, match in (
        (whole, (P("x"), P()), r"is read by tanh at .* too"),
        (two_ways, (P("x"), P(None, "x")), "makes one part"),
        (other_axis, P("y"), "cuts over axes that it sums over"),
        (no_sum, P("x"), "is no all_reduce"),
    ):
        view = View(program_of(fn, (P("x"),), outs, (x,)).per_device)
        with pytest.raises(mw.IllegalMove, match=match):
            merge(view, last(view, "dynamic_slice"))
    view = View(program_of(uncut, (P("x"),), P(), (x,)).per_device)
    with pytest.raises(mw.IllegalMove, match="no slice keeps"):
        merge(view, only(view, "psum"))


@pytest.mark.parametrize("size", [12, 11, 2])
def test_merge_undoes_split(size):
    def fn(x):
        return jnp.tanh(lax.psum(x[0], ("x", "y")))

    x = random(6, size)
    program = program_of(fn, (P(("x", "y")),), P(), (x,))
    view = View(program.per_device)
    halves = split(view, [only(view, "psum")])
    done = merge(halves.view, halves.seconds[0])
    assert kinds(done.view) == ["all_reduce"]
    assert done.view.program.wire_bytes == view.program.wire_bytes
    assert [e.primitive.name for e in done.view.eqns] == [e.primitive.name for e in view.eqns]
    check(program, (x,), done.view, exact=True)


def test_halves_that_others_read_or_that_do_not_match_are_refused():
    def read(x):
        part = lax.psum_scatter(x[0], "x", tiled=True)
        return lax.all_gather(part, "x", tiled=True), part

    def other_dim(x):
        part = lax.psum_scatter(x[0], "x", tiled=True)
        return lax.all_gather(part, "x", axis=1, tiled=True)

    def other_axis(x):
        part = lax.psum_scatter(x[0], "x", tiled=True)
        return lax.all_gather(part, "y", tiled=True)

    x = random(2, 6, 6)
    for fn, outs, match in (
        (read, (P(), P("x")), "the program's results too"),
        (other_dim, P("x"), "along the same dim"),
        (other_axis, P("x"), "over the same axes in the same order"),
    ):
        view = View(program_of(fn, (P("x"),), outs, (x,)).per_device)
        with pytest.raises(mw.IllegalMove, match=match):
            merge(view, only(view, "all_gather"))


@pytest.mark.parametrize("kind", ["psum", "reduce_scatter", "all_gather", "ppermute"])
def test_a_sum_of_two_is_one_of_the_sum(kind):
    def collective(x):
        if kind == "psum":
            return lax.psum(x, ("x", "y"))
        if kind == "reduce_scatter":
            return lax.psum_scatter(x, "y", scatter_dimension=1, tiled=True)
        if kind == "all_gather":
            return lax.all_gather(x, "y", axis=1, tiled=True)
        return lax.ppermute(x, "y", [(0, 1), (2, 0)])

    def fn(x, w):
        return collective(jnp.sin(x)) - collective(w) + collective(x * w)

    out = {"psum": P(), "reduce_scatter": P("x", "y"), "all_gather": P("x")}.get(kind, P("x", "y"))
    args = random(4, 9), random(4, 9, seed=1)
    program = program_of(fn, (P("x", "y"), P("x", "y")), out, args)
    view = View(program.per_device)
    once = merge(view, last(view, "sub"))
    twice = merge(once.view, last(once.view, "add"))
    assert len(kinds(twice.view)) == 1
    assert twice.view.program.wire_bytes * 3 == pytest.approx(view.program.wire_bytes, abs=3)
    check(program, args, twice.view)


def test_sums_of_what_is_not_alike_are_refused():
    def other_axes(x):
        return lax.psum(x, "x") + lax.psum(x, ("x", "y"))

    def one_only(x):
        return lax.psum(x, "x") + x

    def maxima(x):
        return lax.pmax(x, "x") + lax.pmax(x * 2, "x")

    def itself(x):
        y = lax.psum(x, "x")
        return y + y

    def read(x):
        y = lax.psum(x, "x")
        return y + lax.psum(x * x, "x"), jnp.tanh(y)

    x = random(4, 9)
    for fn, outs, match in (
        (other_axes, P(None, "y"), "are of one kind"),
        (one_only, P("x", "y"), "are of one kind"),
        (maxima, P(None, "y"), "are of one kind"),
        (itself, P(None, "y"), "are of one kind"),
        (read, (P(None, "y"), P(None, "y")), r"is read by tanh at .* too"),
    ):
        view = View(program_of(fn, (P("x", "y"),), outs, (x,)).per_device)
        with pytest.raises(mw.IllegalMove, match=match):
            merge(view, last(view, "add"))


def test_what_is_no_pair_is_refused():
    def fn(x):
        return jnp.tanh(lax.all_gather(x, "x", tiled=True))

    view = View(program_of(fn, (P("x"),), P(), (random(4, 9),)).per_device)
    for value in (only(view, "tanh"), only(view, "all_gather"), view.inputs[0]):
        with pytest.raises(mw.IllegalMove, match="Merged are two collectives"):
            merge(view, value)


@pytest.mark.parametrize(
    ("shape", "config"),
    [((7,), [(1, 0, 0)]), ((7, 3), [(0, 1, 0), (1, -1, 0)]), ((7, 3), [(0, 1, 0), (0, 0, 0)])],
    ids=["before", "shifted besides", "behind"],
)
def test_only_what_was_padded_is_cut_off(shape, config):
    """What is cut off after an all_gather is what was padded, if that was behind the same dim."""

    def fn(x):
        rows = lax.psum_scatter(lax.pad(x[0], 0.0, config), "x", tiled=True)
        whole = lax.all_gather(rows, "x", tiled=True)
        return lax.slice(whole, (0,) * len(shape), shape)

    rows = shape[0] + sum(config[0])
    sizes = {"x": next(n for n in (4, 3) if rows % n == 0)}
    args = (random(sizes["x"], *shape),)
    program = program_of(fn, (P("x"),), P(), args, sizes)
    view = View(program.per_device)
    if config == [(0, 1, 0), (0, 0, 0)]:
        check(program, args, merge(view, last(view, "slice")).view)
        return
    with pytest.raises(mw.IllegalMove, match="must be what was padded"):
        merge(view, last(view, "slice"))
