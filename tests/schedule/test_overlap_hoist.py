"""hoist: collectives out of loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.schedule.moves.hoist import hoist
from meshwise.schedule.moves.loops import Loop
from meshwise.schedule.view import View
from tests.meshes import mesh_of
from tests.schedule.steps import kinds, only, random, simulate


def program_of(fn, specs, outs, args, **axes):
    return mw.SpmdProgram.from_shard_map(fn, mesh_of(**(axes or {"x": 4})), specs, outs, *args)


def check(program, args, view, tolerance=1e-5):
    """Values as before, but for the order of sums."""
    before = simulate(program, View(program.per_device), args)
    for got, want in zip(simulate(program, view, args), before, strict=True):
        exact = want.astype(np.float64)
        margin = tolerance * max(1.0, np.abs(exact).max())
        np.testing.assert_allclose(got.astype(np.float64), exact, rtol=tolerance, atol=margin)


def accumulated(dtype=np.float32, **axes):
    """Gradients of micro-batches, each reduced and scaled; the weights are gathered in each."""
    names = tuple(axes or {"x": 4})

    def fn(xs, w, rate):
        def step(carry, x):
            total, loss = carry
            whole = lax.all_gather(w * 2, names, axis=0, tiled=True)
            y = jnp.tanh(x @ whole)
            g = lax.psum((x.T @ y).astype(jnp.float32) / 8, names) * rate
            return (total + g, loss - lax.psum(jnp.sum(y.astype(jnp.float32)), names)), g * 0

        start = jnp.ones((12, 12)), jnp.ones(())
        return lax.scan(lambda c, x: (step(c, x)[0], jnp.sum(x)), start, xs)[0]

    args = random(6, 24, 12).astype(dtype), random(12, 12, seed=3).astype(dtype), np.float32(0.1)
    specs = (P(None, names), P(names), P())
    return program_of(fn, specs, (P(), P()), args, **axes), args


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 3}])
def test_sums_leave_a_loop_and_what_is_the_same_in_all_steps(axes):
    program, args = accumulated(**axes)
    view = View(program.per_device)
    assert [c.count for c in view.program.collectives] == [6, 6, 6]
    done = hoist(view, only_scan(view))
    assert kinds(done.view) == ["all_gather", "all_reduce", "all_reduce"]
    assert [c.count for c in done.view.program.collectives] == [1, 1, 1]
    assert done.view.program.wire_bytes * 6 == pytest.approx(view.program.wire_bytes, rel=0.01)
    assert {c.reason[:5] for c in done.view.program.collectives} == {"hoist"}
    assert len(done.values) == 3
    check(program, args, done.view)


def collectives_in_loops(view):
    """Their results in the bodies of scans, in order."""
    loops = [Loop(view, i) for i, e in enumerate(view.eqns) if e.primitive.name == "scan"]
    return [v for loop in loops for v in loop.collectives]


def only_scan(view):
    (found,) = [e.outvars[0] for e in view.eqns if e.primitive.name == "scan"]
    return found


def test_one_collective_by_its_result_in_the_body():
    program, args = accumulated()
    view = View(program.per_device)
    gather, gradient, loss = collectives_in_loops(view)
    for value, counts in ((gather, [1, 6, 6]), (gradient, [6, 6, 1]), (loss, [6, 6, 1])):
        done = hoist(view, value)
        assert [c.count for c in done.view.program.collectives] == counts
        assert done.values[0] in done.view.maker
        check(program, args, done.view)


def test_bfloat16_terms_are_carried_in_the_sums_type():
    program, args = accumulated(jnp.bfloat16)
    view = View(program.per_device)
    done = hoist(view, only_scan(view))
    assert [c.count for c in done.view.program.collectives] == [1, 1, 1]
    check(program, args, done.view, tolerance=2**-8)


def test_what_is_held_is_bounded():
    program, _ = accumulated()
    view = View(program.per_device)
    gather = collectives_in_loops(view)[0]
    held = 12 * 12 * 4
    assert hoist(view, gather, max_bytes=held).values
    with pytest.raises(mw.IllegalMove, match="576 bytes are held, 575 allowed"):
        hoist(view, gather, max_bytes=held - 1)
    done = hoist(view, only_scan(view), max_bytes=held - 1)
    assert [c.count for c in done.view.program.collectives] == [6, 1, 1]


def test_a_loop_may_run_backwards_with_stacked_results_and_consts():
    def fn(xs, w):
        def step(total, x):
            y = x * w
            return total + lax.psum(y, "x").T * 2.0 - lax.psum(y, "x").T, jnp.sum(y, axis=0)

        return lax.scan(step, jnp.ones((5, 3)), xs, reverse=True, unroll=2)

    args = random(7, 3, 20), random(3, 20, seed=1)
    specs = (P(None, None, "x"), P(None, "x"))
    program = program_of(fn, specs, (P(), P(None, "x")), args)
    view = View(program.per_device)
    done = hoist(view, only_scan(view))
    assert [c.count for c in done.view.program.collectives] == [1]
    params = next(e.params for e in done.view.eqns if e.primitive.name == "scan")
    assert (params["reverse"], params["unroll"]) == (True, 2)
    check(program, args, done.view)


def test_a_scattered_sum_is_carried_whole_if_there_is_room():
    def fn(xs):
        def step(total, x):
            return total + 2.0 * lax.psum_scatter(jnp.sin(x), "x", tiled=True), None

        return lax.scan(step, jnp.ones((2, 5)), xs)[0]

    args = (random(3, 8, 20),)
    program = program_of(fn, (P(None, None, "x"),), P("x"), args)
    view = View(program.per_device)
    done = hoist(view, only_scan(view))
    assert [(c.kind.value, c.count) for c in done.view.program.collectives] == [
        ("reduce_scatter", 1)
    ]
    check(program, args, done.view)
    with pytest.raises(mw.IllegalMove, match="160 bytes are held, 100 allowed"):
        hoist(view, only_scan(view), max_bytes=100)


@pytest.mark.parametrize(("allowed", "leave"), [(256, 1), (700, 2), (768, 3)])
def test_own_sums_that_leave_together_are_held_together(allowed, leave):
    def fn(xs):
        def step(carry, x):
            tiles = [lax.psum_scatter(jnp.sin(x + k), "x", tiled=True) for k in range(3)]
            return [c + t for c, t in zip(carry, tiles, strict=True)], None

        return lax.scan(step, [jnp.zeros(16)] * 3, xs)[0]

    args = (random(5, 64),)
    program = program_of(fn, P(), P("x"), args)
    view = View(program.per_device)
    done = hoist(view, only_scan(view), max_bytes=allowed)
    assert sorted(c.count for c in done.view.program.collectives) == [1] * leave + [5] * (3 - leave)
    assert done.held_bytes == 256 * leave
    check(program, args, done.view)


def refused(body, match, start=None, args=None, specs=None):
    """A loop over rows x, in which w is the same; the refusal of its only collective."""

    def fn(xs, w):
        return lax.scan(lambda c, x: body(c, x, w), jnp.ones(3), xs)

    args = random(5, 12), random(12, seed=1)
    program = program_of(fn, (P(None, "x"), P("x")), (P(), P()), args)
    view = View(program.per_device)
    for value in (only_scan(view), collectives_in_loops(view)[0]):
        with pytest.raises(mw.IllegalMove, match=match):
            hoist(view, value)


def test_a_sum_that_steps_use_is_refused():
    psum = lambda x: lax.psum(x, "x")  # noqa: E731
    refused(lambda c, x, w: (c * 0.9 + psum(x), None), "carried value 0 is read by mul")
    refused(lambda c, x, w: (psum(x) - c, None), "carried value 0 is subtracted")
    refused(lambda c, x, w: (c + jnp.tanh(psum(x)), None), "of tanh at .* can not be computed")
    refused(lambda c, x, w: (c + psum(x) + 1.0, None), "is added as well, and is no psum")
    refused(lambda c, x, w: (c + psum(x) * w, None), "of mul at .* can not be computed")
    refused(lambda c, x, w: (c, psum(x)), "is not added to a carried value")

    def stacked(c, x, w):
        g = psum(x)
        return c + g, jnp.sum(g)

    refused(stacked, "is read by others too")

    def seen(c, x, w):
        c = c + psum(x)
        return c, c

    refused(seen, "is read in the same step")

    def squared(c, x, w):
        g = psum(x)
        return c + g * g, None

    refused(squared, "can not be computed|read by others")


def test_what_is_no_collective_of_a_loop_is_refused():
    def fn(x):
        return lax.scan(lambda c, r: (c + r, None), lax.psum(x, "x")[0], x)[0]

    args = (random(5, 12),)
    program = program_of(fn, (P(None, "x"),), P("x"), args)
    view = View(program.per_device)
    for value in (only(view, "psum"), only_scan(view), view.inputs[0]):
        with pytest.raises(mw.IllegalMove, match="for collectives within a loop"):
            hoist(view, value)


def test_a_hoisted_loop_runs_on_real_devices(mesh8):
    def fn(xs):
        def step(total, x):
            return total + lax.psum(jnp.sin(x), "x"), None

        return lax.scan(step, jnp.ones((2,)), xs)[0]

    args = (random(5, 16),)
    program = mw.SpmdProgram.from_shard_map(fn, mesh8, (P(None, "x"),), P(), *args)
    done = hoist(View(program.per_device), only_scan(View(program.per_device)))
    changed = {name: getattr(program, name) for name in program.__dataclass_fields__}
    hoisted = mw.SpmdProgram(**{**changed, "per_device": done.view.program})
    np.testing.assert_allclose(hoisted(*args), program(*args), rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(hoisted(*args)) == jax.tree.structure(program(*args))


def scattered(computed, *rows, dim=0, tiled=True):
    """A loop that adds up what is computed of its rows, summed and scattered in each step."""

    def fn(xs):
        def step(x):
            part = lax.psum_scatter(x[0], "x", scatter_dimension=dim, tiled=tiled)
            return computed(part)

        start = jnp.zeros(jax.eval_shape(step, xs[0]).shape)
        return lax.scan(lambda carry, x: (carry + step(x), None), start, xs)[0][None]

    args = (random(3, 4, *rows),)
    return program_of(fn, P(None, "x"), P("x"), args), args


def windows(rows):
    sizes = (3,) + (1,) * (rows.ndim - 1)
    return lax.reduce_window(rows, 0.0, lax.add, sizes, (1,) * rows.ndim, "SAME")


def again(rows):
    """All of an array, by the sizes that it has."""
    zeros = (0,) * rows.ndim
    return lax.slice_p.bind(rows, start_indices=zeros, limit_indices=rows.shape, strides=None)


@pytest.mark.parametrize("rows", [(8,), (4,), (4, 3)], ids=["two", "one", "one of three"])
@pytest.mark.parametrize("mixes", [lax.cumsum, lambda rows: lax.rev(rows, (0,)), windows, again])
def test_what_mixes_the_rows_that_are_scattered_stays_in_the_loop(mixes, rows):
    """Of a tile it is another thing than of all rows, and of one row perhaps nothing."""
    view = View(scattered(mixes, *rows)[0].per_device)
    with pytest.raises(mw.IllegalMove, match="can not be computed from devices' own terms"):
        hoist(view, collectives_in_loops(view)[0])


@pytest.mark.parametrize(
    ("computed", "rows", "dim", "tiled"),
    [
        (jnp.mean, (8,), 0, True),
        (lambda part: lax.rev(part, (1,)), (4, 3, 5), 0, False),
        (lambda part: lax.rev(part, (1,)), (4, 1, 5), 0, False),
        (lax.cumsum, (3, 4), 1, False),
    ],
    ids=["one number", "other dims", "of one row", "no dim"],
)
def test_what_has_other_dims_than_what_is_scattered_stays_in_the_loop(computed, rows, dim, tiled):
    view = View(scattered(computed, *rows, dim=dim, tiled=tiled)[0].per_device)
    with pytest.raises(mw.IllegalMove, match="can not be computed from devices' own terms"):
        hoist(view, collectives_in_loops(view)[0])


def test_numbers_of_an_untiled_scatter_leave_the_loop():
    program, args = scattered(lambda part: -2.0 * part, 3, 4, dim=1, tiled=False)
    view = View(program.per_device)
    done = hoist(view, collectives_in_loops(view)[0])
    assert [c.count for c in done.view.program.collectives] == [1]
    check(program, args, done.view)


def added_up(computed, *others):
    """A loop that adds up what is computed of sums, of a row of each step and of others."""

    def fn(xs, rows, *others):
        def step(x, row):
            return computed(lax.psum(x[0], "x"), row, *others)

        start = jnp.zeros(jax.eval_shape(step, xs[0], rows[0]).shape)
        return lax.scan(lambda c, x: (c + step(*x), None), start, (xs, rows))[0]

    args = (random(3, 4, 6), random(3, 6, seed=1), *others)
    return program_of(fn, (P(None, "x"), *[P()] * (1 + len(others))), P(), args), args


PLACES = np.array([[0], [5], [99], [2]], np.int32)
POINTS = lax.GatherDimensionNumbers((), (0,), (0,))


@pytest.mark.parametrize("fill", [7.0, 0.0, np.nan])
def test_what_is_filled_in_comes_into_a_sum_once(fill):
    """Each device would fill in a number of its own."""

    def filled(total, row, places):
        return lax.gather(total, places, POINTS, (1,), mode="fill", fill_value=fill)

    program, args = added_up(filled, PLACES)
    view = View(program.per_device)
    if fill == 7:
        with pytest.raises(mw.IllegalMove, match=r"of gather at .* can not be computed"):
            hoist(view, only_scan(view))
        return
    done = hoist(view, only_scan(view))
    assert [c.count for c in done.view.program.collectives] == [1]
    check(program, args, done.view)


@pytest.mark.parametrize(
    "computed",
    [
        lambda s, row, _: row * s,
        lambda s, row, w: s * jnp.tanh(w * 2),
        lambda s, row, w: lax.psum(row, "x") * s / (2 + w * w),
    ],
    ids=["of the step", "computed in all steps", "another sum"],
)
def test_sums_are_scaled_by_what_all_devices_have_alike(computed):
    program, args = added_up(computed, random(6, seed=2))
    view = View(program.per_device)
    done = hoist(view, collectives_in_loops(view)[-1])
    assert sorted(c.count for c in done.view.program.collectives)[0] == 1
    check(program, args, done.view)


def test_sums_are_not_scaled_by_what_devices_have_of_their_own():
    own = lambda s, row: s * (row + lax.axis_index("x"))  # noqa: E731
    view = View(added_up(own)[0].per_device)
    with pytest.raises(mw.IllegalMove, match=r"of mul at .* can not be computed"):
        hoist(view, only_scan(view))


def test_what_keeps_the_rows_that_are_scattered_leaves_the_loop():
    def fn(xs):
        def step(carry, x):
            return carry + jnp.cumsum(lax.psum_scatter(x[0], "x", tiled=True) * 2, 1), None

        return lax.scan(step, jnp.zeros((2, 3)), xs)[0]

    args = (random(3, 4, 8, 3),)
    program = program_of(fn, P(None, "x"), P("x"), args)
    view = View(program.per_device)
    done = hoist(view, collectives_in_loops(view)[0])
    assert [c.count for c in done.view.program.collectives] == [1]
    check(program, args, done.view)


def test_all_that_can_leave_a_loop_does_where_a_loop_leaves_with_it():
    """What a gather is computed with is a loop, too: it goes before the one that it was in."""

    def step(xs, w, v):
        def body(carry, row):
            inner = lax.scan(lambda k, _: (jnp.sin(k) * 1.1, None), w, None, length=3)[0]
            first = lax.all_gather(inner, "x", axis=0, tiled=True)
            second = lax.all_gather(v * 2, "x", axis=0, tiled=True)
            return carry + first.sum() * row + second.sum(), None

        return lax.scan(body, jnp.zeros(4), xs)[0]

    args = random(3, 4), random(16), random(16, seed=2)
    program = program_of(step, (P(), P("x"), P("x")), P(), args)
    s = mw.Schedule(program)
    s.hoist(s.find("scan")[0])
    assert [c.count for c in s.program.collectives] == [1, 1]
    check(program, args, s.view)


def test_what_is_small_in_a_loop_and_large_after_it_stays():
    def step(xs):
        def body(carry, row):
            return carry + jnp.broadcast_to(lax.psum(row.sum(), "x"), (1000,)), None

        return lax.scan(body, jnp.ones(1000), xs)[0]

    args = (random(3, 4, 4),)
    program = program_of(step, (P(None, "x"),), P(), args)
    s = mw.Schedule(program)
    with pytest.raises(mw.IllegalMove, match="6,000 bytes are sent after it, 18 before"):
        s.hoist(s.find("scan")[0])
    s.hoist(s.find("scan")[0], more_bytes=True)
    check(program, args, s.view)
