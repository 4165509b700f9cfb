"""Moves that are not legal: which value forbids them and why, and that nothing has changed."""

import re

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of
from tests.schedule.steps import random

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


def norm_step(g, h, w, m):
    """A sum, what is computed from it, another device's own values beside it."""
    total = lax.psum(g[0], "x")
    m = 0.9 * m + total
    noise = lax.psum(m * h[0], "x")
    ranks = jnp.cumsum(total, axis=0)
    return w - m, m, noise, ranks, lax.pmax(g[0], "x")


def two_axes(g, w):
    """Sums over one axis, the other, and both."""
    a, b, c = lax.psum(g[0], "x"), lax.psum(g[0], "y"), lax.psum(g[0], ("x", "y"))
    return a[None, None], b[None, None], c * w, lax.psum(jnp.sum(g), ("x", "y"))


def in_groups(g):
    """Sums and gathers in pairs of devices, and a gather that stacks."""
    total = lax.psum(g[0], "x", axis_index_groups=PAIRS)
    joined = lax.all_gather(g[0], "x", axis_index_groups=PAIRS, tiled=True)
    return total[None], joined[None], lax.all_gather(g[0], "x")


def one_after_another(g, w):
    """A sum that is needed for another one's operand."""
    first = lax.psum(g[0], "x")
    middle = jnp.sort(first * w)
    return lax.psum(middle * g[0], "x"), first


def of_states(g, w, m, s, n):
    """States: in slices, of another type, of the device's own, a scalar."""
    total = lax.psum(g[0], "x")
    part = lax.dynamic_slice(m, (lax.axis_index("x") * 2,), (2,))
    return w + total, m * 1, g[0] * 2, s + 1, (m > 0), part, n * 2


def step(fn, outs, mesh, *shapes, specs=None):
    args = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    specs = specs or (P(mesh.axis_names),) + (P(),) * (len(shapes) - 1)
    return mw.Schedule(mw.SpmdProgram.from_shard_map(fn, mesh, specs, outs, *args))


X8, X4Y2 = mesh_of(x=8), mesh_of(x=4, y=2)


def norms():
    specs = (P("x"), P("x"), P(), P())
    return step(norm_step, P(), X8, (8, 16), (8, 16), (16,), (16,), specs=specs)


def axes():
    return step(two_axes, (P("y", "x"), P("x", "y"), P(), P()), X4Y2, (8, 16), (16,))


def groups():
    return step(in_groups, (P("x"), P("x"), P()), X8, (8, 16))


def row():
    return step(one_after_another, P(), X8, (8, 16), (16,))


def states():
    outs = (P(), P(), P("x"), P(), P(), P("x"), P("x"))
    specs = (P("x"), P(), P(), P(), P("x"))
    return step(of_states, outs, X8, (8, 16), (16,), (16,), (), (16, 3), specs=specs)


def empty():
    """A sum, and a state, of which one dim has no elements."""

    def fn(g, m):
        return lax.psum(g[0] * 2, "x"), m + 1

    return step(fn, (P(), P()), X8, (8, 8, 0), (8, 0), specs=(P("x"), P()))


def elsewhere():
    """A state that goes in by rows and comes out by columns."""

    def fn(g, w):
        return jnp.tile(w, (8, 1))[:, :1] + lax.psum(g, "x")

    return step(fn, P(None, "x"), X8, (8, 8), (8, 8), specs=(P(None, "x"), P("x")))


def gathered(s, number=0):
    return s.split(s.find("all_reduce")[number])[1]


REFUSED = {
    # split
    "split what is no sum": (
        norms, lambda s: s.split(s.find("cumsum")[0]),
        r"f32\[16\] of cumsum at tests/schedule/test_illegal.py", "all_reduces that sum (psum)"),
    "split a maximum": (
        norms, lambda s: s.split(s.find("all_reduce")[-1]),
        r"f32\[16\] of pmax", "all_reduces that sum (psum)"),
    "split along a dim that is not there": (
        norms, lambda s: s.split(s.find("all_reduce")[0], dim=1),
        r"f32\[16\] of psum at \S+ has no dim 1", "Name one of its dims"),
    "split a scalar": (
        axes, lambda s: s.split(s.find("all_reduce")[3]),
        r"f32\[\] of psum at \S+ is a scalar", "a scalar's all_reduce cannot be split"),
    "split without padding": (
        lambda: step(norm_step, P(), X8, (8, 9), (8, 9), (9,), (9,),
                     specs=(P("x"), P("x"), P(), P())),
        lambda s: s.split(s.find("all_reduce")[0], pad=False),
        r"f32\[9\] of psum at \S+: dim 0 over x, 8 devices", "parts of equal size"),
    "split along a dim without elements": (
        empty, lambda s: s.split(s.find("all_reduce")[0], dim=1),
        r"f32\[8,0\] of psum at \S+: dim 1 has no elements", "Name one that has elements"),
    "a ring along a dim without elements": (
        empty, lambda s: s.overlap(s.find("all_reduce")[0], dim=1),
        r"f32\[8,0\] of psum at \S+: dim 1 has no elements", "Name one that has elements"),
    "a state cut along a dim without elements": (
        empty, lambda s: s.slice_state("m", result=1, dim=1, axes="x"),
        r"dim 1 of m has no elements", "Choose one that has elements"),
    "split in groups within an axis": (
        groups, lambda s: s.split(s.find("all_reduce")[0]),
        r"f32\[16\] of psum at \S+ has axis_index_groups", "no axis of the mesh"),
    "a tree in groups within an axis": (
        groups, lambda s: s.split_to_root(s.find("all_reduce")[0]),
        r"f32\[16\] of psum at \S+ has axis_index_groups", "no axis of the mesh"),
    "a tree over two axes": (
        axes, lambda s: s.split_to_root(s.find("all_reduce")[2]),
        r"f32\[16\] of psum at \S+ over x, y, root 0", "A tree is over one axis"),
    "a tree from a device that is not there": (
        norms, lambda s: s.split_to_root(s.find("all_reduce")[0], root=8),
        r"split_to_root is refused: f32\[16\] of psum at \S+ over x, root 8",
        "its root one of the axis' devices.\nName one from 0 to 7."),
    # reorder
    "reorder what is no gather": (
        norms, lambda s: s.reorder(s.find("all_reduce")[0]),
        r"f32\[16\] of psum at", "This move is for an all_gather"),
    "reorder a gather in groups": (
        groups, lambda s: s.reorder(s.find("all_gather")[0]),
        r"f32\[32\] of all_gather at", "without axis_index_groups"),
    "reorder a gather that stacks": (
        groups, lambda s: s.reorder(s.find("all_gather")[1]),
        r"f32\[8,16\] of all_gather at", "joins tiles along one dim"),
    "reorder gathers over other axes": (
        axes, lambda s: s.reorder([gathered(s, 0), gathered(s, 0)]),
        r"f32\[16\] of all_gather at \S+ over y", "over the same axes (groups)"),
    "reorder past what mixes the dim": (
        norms, lambda s: s.reorder(gathered(s), s.find("cumsum")),
        r"cumsum at \S+ \(i -> i \| permute=i\) needs more than this device's part",
        "Every computation that is moved must be one that each"),
    "reorder past a device's own values": (
        norms, lambda s: s.reorder(gathered(s), s.find("add") + s.find("mul")),
        r"f32\[16\] of squeeze at \S+ is Local over x: a device's own values, read by mul",
        "each device can do on its part"),
    "reorder past a collective over the same axes": (
        row, lambda s: s.reorder(gathered(s), [*s.find("mul"), s.find("sort")[0]]),
        r"sort", "each device can do on its part"),
    "reorder past what comes back": (
        row, lambda s: s.reorder(gathered(s), s.find("mul")),
        r"f32\[16\] of sort at \S+ is computed from what is moved, and read by mul",
        "no path may leave it and come back"),
    "reorder where nothing reads tiles": (
        lambda: step(lambda g, w: jnp.cumsum(lax.psum(g[0], "x")) * w, P(), X8, (8, 16), (16,)),
        lambda s: s.reorder(gathered(s)),
        r"nothing that reads f32\[16\] of all_gather at", "if its own rule cuts that dim"),
    "reorder to more bytes": (
        norms, lambda s: s.reorder(gathered(s)),
        r"gathers 168 bytes after it, 56 before", "together that is more"),
    # slice_state
    "a state of another type": (
        states, lambda s: s.slice_state("m", result=4, dim=0, axes="x"),
        r"m is float32\[16\], what is to be its next value bool\[16\]", "both are of one type"),
    "a state that comes out in another way": (
        elsewhere,
        lambda s: s.slice_state("w", result=0, dim=0, axes="x"),
        r"w lies as \[x, -\], its next value as \[-, x\]", "come out as it goes in"),
    "a state that is read in no slices": (
        states, lambda s: s.slice_state("w", result=0),
        r"w is read whole, in no slices", "the one slice that the step reads"),
    "a state cut along a dim that is not there": (
        states, lambda s: s.slice_state("m", result=1, dim=1, axes="x"),
        r"m has 1 dims, and no dim 1", "cut along one of its dims"),
    "a scalar state": (
        states, lambda s: s.slice_state("s", result=3, dim=0, axes="x"),
        r"s has 0 dims, and no dim 0", "A scalar stays replicated"),
    "a state whose next value is each device's own": (
        lambda: step(lambda g, w: w + g[0], P(), X8, (8, 16), (16,)),
        lambda s: s.slice_state("w", result=0, dim=0, axes="x"),
        r"the next w is Local over x", "Only what all devices of the group hold alike"),
    "a state that is in slices": (
        states, lambda s: s.slice_state("n", result=6, dim=1, axes="x"),
        r"n is Sliced\(0\) over x", "Only what all devices of the group hold alike"),
    "a state that is read whole": (
        norms, lambda s: s.slice_state("m", result=1, dim=0, axes="x"),
        r"m is read whole by mul at", "nothing but this device's part"),
    "a state whose shards do not divide": (
        lambda: step(lambda g, w: w + lax.psum(g[0, 0], "x")[0], P("y"), X4Y2, (8, 1, 4), (6,),
                     specs=(P(("x", "y")), P("y"))),
        lambda s: s.slice_state("w", result=0, dim=0, axes="x", gathers=True),
        r"dim 0 of w: 3 a device, over x", "only where its shards divide"),
    "two states with one next value": (
        norms, lambda s: s.slice_state(["m", "w"], result=1, dim=0, axes="x", gathers=True),
        r"- m: result 1\n  - w: result 1", "Each state has a next value of its own"),
    # bucket
    "a bucket of one": (
        norms, lambda s: s.bucket(s.find("all_reduce")[:1]),
        "1 of float32$", "A bucket joins two collectives or more"),
    "a bucket of what is no collective": (
        norms, lambda s: s.bucket(s.find("mul")),
        r"f32\[16\] of mul at", "all_reduces, reduce_scatters and all_gathers"),
    "a bucket of maxima": (
        norms, lambda s: s.bucket(s.find("all_reduce")[2:]),
        r"f32\[16\] of pmax at", "all_reduces, reduce_scatters and all_gathers"),
    "a bucket too small": (
        axes, lambda s: s.bucket([s.find("all_reduce")[2], s.find("all_reduce")[3]], max_bytes=4),
        "2 of float32, of which no two fit in 4 bytes", "Raise max_bytes"),
    "a bucket over two groups": (
        axes, lambda s: s.bucket(s.find("all_reduce")[:2]),
        r"1 psum over y, first f32\[16\] of psum at", "over the same axes (groups)"),
    "a bucket of two kinds": (
        norms, lambda s: s.bucket([gathered(s), s.find("all_reduce")[0]]),
        r"1 all_gather over x, first f32\[16\] of all_gather at", "all are of one kind"),
    "a bucket in groups within an axis": (
        groups, lambda s: s.bucket([*s.find("all_gather")]),
        r"2 all_gather over x, untiled or in axis_index_groups", "all are of one kind"),
    "a bucket of sums that wait for each other": (
        row, lambda s: s.bucket(s.find("all_reduce")),
        r"f32\[16\] of psum at \S+ is computed from f32\[16\] of psum at",
        "none may wait for another"),
    # fuse
    "fuse one equation": (
        norms, lambda s: s.fuse(s.find("mul")[:1]),
        "1 equation", "Two or more are fused"),
    "fuse collectives over two groups": (
        axes, lambda s: s.fuse(s.find("all_reduce")[:2]),
        r"f32\[16\] of psum at \S+ over y", "go over the same axes (groups)"),
    "fuse two collectives": (
        norms, lambda s: s.fuse(s.find("all_reduce")[1:]),
        r"f32\[16\] of pmax at", "One collective goes in one fused equation"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_its_reason_and_changes_nothing(name):
    make, move, offender, rule = REFUSED[name]
    s = make()
    prepared = []

    class Refused(Exception):
        pass

    # The last move is the one that is refused: note the program just before each.
    for kind in ("split", "split_to_root", "reorder", "slice_state", "bucket", "fuse", "overlap"):
        plain = getattr(s, kind)

        def noted(*args, plain=plain, **options):
            prepared.append((s.view, moves_of(s)))
            return plain(*args, **options)

        setattr(s, kind, noted)
    with pytest.raises(mw.IllegalMove, match=re.escape(rule)) as refusal:
        move(s)
    assert re.search(offender, str(refusal.value), re.MULTILINE), str(refusal.value)
    assert (s.view, moves_of(s)) == prepared[-1]


def moves_of(s):
    """The lines of a script that are moves."""
    return [line for line in s.script().splitlines() if "s.find(" not in line]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda s: s.find("all_reduces"), "kind='all_reduces'"),
        (lambda s: s.find(["psum"]), r"kind=\['psum'\]"),
        (lambda s: s.split(s.find("all_reduce")[0], dim="a"), "dim='a'"),
        (lambda s: s.split_to_root(s.find("all_reduce")[0], root=0.5), "root=0.5"),
        (lambda s: s.slice_state("m", dim=True), "dim=True"),
        (lambda s: s.overlap(s.find("all_reduce"), chunks=2.0, dim=None), "chunks=2.0"),
        (lambda s: s.bucket(s.find("all_reduce"), max_bytes="1 MiB"), "max_bytes='1 MiB'"),
        (lambda s: s.bucket(s.find("all_reduce"), max_bytes=-3), "max_bytes=-3"),
        (lambda s: s.hoist(s.find("all_reduce")[0], max_bytes=1e6), "max_bytes=1000000.0"),
    ],
)
def test_what_is_no_kind_and_no_number_is_said(asked, said):
    s = step(two_axes, (P("x", "y"), P("x", "y"), P(), P()), X4Y2, (8, 8), (8,))
    before = s.program.jaxpr
    with pytest.raises(mw.ArgumentError, match=said):
        asked(s)
    with pytest.raises(mw.ArgumentError, match=said):  # in a script too, which undoes its moves
        s.run(lambda s: (s.split(s.find("all_reduce")[0]), asked(s)))
    assert s.program.jaxpr is before
    assert s.script() == mw.Schedule(s.original).script()


def test_a_kind_that_a_program_lacks_is_not_found():
    s = step(two_axes, (P("x", "y"), P("x", "y"), P(), P()), X4Y2, (8, 8), (8,))
    assert s.find("all_gather") == s.find("tanh") == []
