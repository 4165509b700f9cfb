"""overlap of products with the reduce_scatter or all_reduce of their sum: rings of partial sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.schedule.moves.overlap import overlap
from meshwise.schedule.view import View
from tests.meshes import mesh_of
from tests.schedule.steps import kinds, only, random, simulate

EINSUMS = {  # the product whose sum is scattered, and along which of its dims
    "rows": ("ik,kj->ij", 0),
    "columns": ("ik,kj->ij", 1),
    "batch": ("bik,bkj->bij", 0),
    "tokens": ("bik,kj->bij", 1),
    "transposed": ("ik,jk->ji", 1),
}


def scattered_product(kind, devices, dtype=np.float32, axes=("x",), mesh=None):
    """`psum_scatter(einsum(x, w))`, the contracted dim sharded."""
    text, dim = EINSUMS[kind]
    left, right = text.split("->")[0].split(",")
    sizes = dict.fromkeys("bij", 2 * devices) | {"k": 4 * devices}
    x = random(*(sizes[c] for c in left), seed=1).astype(dtype)
    w = random(*(sizes[c] for c in right), seed=2).astype(dtype)

    def fn(x, w):
        return lax.psum_scatter(jnp.einsum(text, x, w), axes, scatter_dimension=dim, tiled=True)

    mesh = mesh or mesh_of(x=devices)
    specs = tuple(P(*(axes if c == "k" else None for c in cs)) for cs in (left, right))
    out = P(*((None,) * dim), axes)
    return mw.SpmdProgram.from_shard_map(fn, mesh, specs, out, x, w), (x, w)


def check(program, args, done, tolerance=1e-5):
    """Values as before, as far as sums in another order are; scaled by the largest."""
    for got, want in zip(
        simulate(program, done, args),
        simulate(program, View(program.per_device), args),
        strict=True,
    ):
        exact = want.astype(np.float64)
        margin = tolerance * np.abs(exact).max()
        np.testing.assert_allclose(got.astype(np.float64), exact, rtol=tolerance, atol=margin)


@pytest.mark.parametrize(
    ("kind", "devices", "bidirectional"),
    [(kind, 3, True) for kind in EINSUMS]
    + [(kind, 4, False) for kind in EINSUMS]
    + [("rows", 2, True), ("rows", 8, True), ("rows", 8, False), ("batch", 5, True)],
)
def test_a_ring_computes_what_the_product_and_scatter_do(kind, devices, bidirectional):
    program, args = scattered_product(kind, devices)
    view = View(program.per_device)
    done = overlap(view, only(view, "reduce_scatter"), bidirectional=bidirectional)
    assert kinds(done.view) == ["ppermute"] * (devices - 1)
    assert done.view.program.wire_bytes == view.program.wire_bytes
    check(program, args, done.view)


def test_each_device_begins_with_the_chunk_that_is_farthest():
    """Step t of device i computes chunk (i - 1 - t) mod n, and the last is its own."""
    program, _ = scattered_product("rows", 4)
    view = View(program.per_device)
    done = overlap(view, only(view, "reduce_scatter")).view
    offsets = []
    for eqn in done.eqns:
        if eqn.primitive.name == "add" and not eqn.outvars[0].aval.shape:
            offsets.append(int(eqn.invars[1].val))
    assert offsets == [3, 2, 1, 0]
    products = [i for i, e in enumerate(done.eqns) if e.primitive.name == "dot_general"]
    made = {v: i for i, e in enumerate(done.eqns) for v in e.outvars}

    def before(i):
        read = [made[a] for a in done.eqns[i].invars if not hasattr(a, "val") and a in made]
        return {i}.union(*map(before, read))

    sends = {i for i, e in enumerate(done.eqns) if e.primitive.name == "ppermute"}
    assert len(products) == 4
    assert not any(before(p) & sends for p in products)


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("y",)])
def test_a_ring_over_several_axes_follows_their_order(axes):
    program, args = scattered_product("rows", 6, axes=axes, mesh=mesh_of(x=2, y=3))
    view = View(program.per_device)
    for bidirectional in (False, True):
        done = overlap(view, only(view, "reduce_scatter"), bidirectional=bidirectional)
        assert kinds(done.view) == ["ppermute"] * (5 if len(axes) == 2 else 2)
        assert done.view.program.wire_bytes == view.program.wire_bytes
        check(program, args, done.view)
        (got,) = simulate(program, done.view, args)
        np.testing.assert_allclose(got, args[0] @ args[1], rtol=1e-4, atol=1e-4)


def test_bfloat16_sums_go_round_in_bfloat16():
    program, args = scattered_product("rows", 8, jnp.bfloat16)
    view = View(program.per_device)
    done = overlap(view, only(view, "reduce_scatter"))
    assert {c.dtype for c in done.view.program.collectives} == {np.dtype(jnp.bfloat16)}
    assert done.view.program.wire_bytes == view.program.wire_bytes
    check(program, args, done.view, tolerance=8 * 2**-8)


def test_beyond_sixteen_devices_the_program_does_not_grow():
    counts = {}
    for devices in (32, 64):
        for bidirectional in (False, True):
            program, args = scattered_product("rows", devices)
            view = View(program.per_device)
            done = overlap(view, only(view, "reduce_scatter"), bidirectional=bidirectional).view
            assert sum(c.count for c in done.program.collectives) == devices - 1
            assert done.program.wire_bytes == view.program.wire_bytes
            assert {c.reason[:7] for c in done.program.collectives} == {"overlap"}
            counts[devices, bidirectional] = len(done.eqns)
            if devices == 32:
                check(program, args, done)
    assert counts[32, False] == counts[64, False] < 30
    assert counts[32, True] == counts[64, True] < 60


def megatron(size, devices=4):
    """A row-parallel layer: product, bias, scale, cast, and the all_reduce of it."""

    def fn(x, w, b, s, key):
        mask = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.5, (size, 6))
        y = ((x @ w + b) * s).astype(jnp.bfloat16) * mask
        return lax.psum(y.T, "x")

    args = (
        random(size, 4 * devices, seed=1),
        random(4 * devices, 6, seed=2),
        random(6, seed=3),
        random(size, 1, seed=4),
        np.asarray(jax.random.key_data(jax.random.key(1))),
    )
    specs = (P(None, "x"), P("x"), P(), P(), P())
    return mw.SpmdProgram.from_shard_map(fn, mesh_of(x=devices), specs, P(), *args), args


@pytest.mark.parametrize(("size", "dim"), [(12, None), (11, 1), (11, 0), (3, 1)])
def test_an_all_reduce_with_computations_between_is_a_ring_and_a_gather(size, dim):
    program, args = megatron(size)
    view = View(program.per_device)
    done = overlap(view, only(view, "psum"), dim=dim, bidirectional=True)
    assert kinds(done.view) == ["ppermute"] * 3 + ["all_gather"]
    assert done.view.eqns[done.view.maker[done.whole]].primitive.name in ("slice", "all_gather")
    check(program, args, done.view, tolerance=2**-6)
    if dim is None:
        assert done.view.program.wire_bytes == view.program.wire_bytes


def test_padding_of_a_scatter_by_hand_stays_what_it_was():
    """The rows that were padded are zeros in the sum, whatever the bias adds to the product's."""

    def fn(x, w, b):
        y = jnp.pad(x @ w + b, ((0, 3), (0, 0)), constant_values=2.0)
        return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)

    args = random(5, 8, seed=1), random(8, 6, seed=2), random(6, seed=3)
    mesh = mesh_of(x=4)
    program = mw.SpmdProgram.from_shard_map(fn, mesh, (P(None, "x"), P("x"), P()), P("x"), *args)
    view = View(program.per_device)
    done = overlap(view, only(view, "reduce_scatter"))
    assert kinds(done.view) == ["ppermute"] * 3
    check(program, args, done.view)
    np.testing.assert_array_equal(simulate(program, done.view, args)[0][5:], 8.0)


def test_terms_that_are_sums_of_two_products():
    def fn(x, w, y, v):
        return lax.psum_scatter(x @ w - (y @ v).T, "x", scatter_dimension=1, tiled=True)

    args = (
        random(5, 16, seed=1),
        random(16, 8, seed=2),
        random(8, 16, seed=3),
        random(16, 5, seed=4),
    )
    specs = (P(None, "x"), P("x"), P(None, "x"), P("x"))
    program = mw.SpmdProgram.from_shard_map(fn, mesh_of(x=4), specs, P(None, "x"), *args)
    view = View(program.per_device)
    done = overlap(view, only(view, "reduce_scatter"))
    assert [e.primitive.name for e in done.view.eqns].count("dot_general") == 8
    check(program, args, done.view)


def test_a_product_of_a_product_with_a_residual():
    """Along rows a chunk of the second product is of a chunk of the first; along columns of all."""

    def along(dim):
        def fn(x, w, v):
            y = x @ w
            return lax.psum_scatter(y + y @ v, "x", scatter_dimension=dim, tiled=True)

        return fn

    args = random(8, 16, seed=1), random(16, 12, seed=2), random(12, 12, seed=3)
    specs = (P(None, "x"), P("x"), P())
    program = mw.SpmdProgram.from_shard_map(along(0), mesh_of(x=4), specs, P("x"), *args)
    view = View(program.per_device)
    done = overlap(view, only(view, "reduce_scatter"))
    assert [e.primitive.name for e in done.view.eqns].count("dot_general") == 8
    check(program, args, done.view)
    refused(along(1), specs, P(None, "x"), args, "reduce_scatter", "read whole by dot_general")


def test_a_product_read_along_two_dims_is_refused():
    def fn(x, w):
        y = x @ w
        return lax.psum_scatter(y + y.T, "x", scatter_dimension=0, tiled=True)

    args = random(8, 16, seed=1), random(16, 8, seed=2)
    match = "made in chunks along dim . of|made in chunks along dim ., and read along dim . by"
    refused(fn, (P(None, "x"), P("x")), P("x"), args, "reduce_scatter", match)


def test_a_tensor_parallel_block_in_two_rings():
    """Tokens gathered, two products with the activation between, and their sum scattered."""

    def block(x, up, gate, down):
        whole = lax.all_gather(x, "x", axis=1, tiled=True)
        hidden = jnp.tanh(whole @ up) * (whole @ gate)
        return x + lax.psum_scatter(hidden @ down, "x", scatter_dimension=1, tiled=True)

    args = (random(2, 8, 6, seed=1), random(6, 16, seed=2), random(6, 16, seed=3), random(16, 6))
    specs = (P(None, "x"), P(None, "x"), P(None, "x"), P("x"))
    program = mw.SpmdProgram.from_shard_map(block, mesh_of(x=4), specs, P(None, "x"), *args)
    view = View(program.per_device)
    first = overlap(view, only(view, "all_gather"), bidirectional=True)
    assert len(first.values) == 2
    second = overlap(first.view, only(first.view, "reduce_scatter"), bidirectional=True)
    assert kinds(second.view) == ["ppermute"] * 6
    assert second.view.program.wire_bytes == view.program.wire_bytes
    check(program, args, second.view)


def refused(fn, specs, out, args, kind, match, **options):
    program = mw.SpmdProgram.from_shard_map(fn, mesh_of(x=4), specs, out, *args)
    view = View(program.per_device)
    with pytest.raises(mw.IllegalMove, match=match):
        overlap(view, only(view, kind), **options)


def test_what_cannot_be_done_in_chunks_is_refused():
    args = random(8, 8, seed=1), random(8, 8, seed=2)
    specs = (P(None, "x"), P("x"))

    def scattered(y):
        return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)

    def mixes(x, w):
        return scattered(jnp.cumsum(x @ w, axis=0))

    def sums(x, w):
        y = x @ w
        return scattered(y / jnp.sum(y, axis=0, keepdims=True))

    def no_product(x, w):
        return scattered(x * 2.0)

    def argument(x, w):
        return scattered(x)

    def untiled(x, w):
        return lax.psum_scatter((x @ w).reshape(4, 2, 8), "x", scatter_dimension=0)

    def grouped(x, w):
        groups = [[0, 1], [2, 3]]
        return lax.psum_scatter(x @ w, "x", axis_index_groups=groups, tiled=True)

    out = P("x")
    refused(mixes, specs, out, args, "reduce_scatter", r"cumsum .*(.|\n)*dim 0 of .*is scattered")
    refused(sums, specs, out, args, "reduce_scatter", "is read by reduce_sum at .* too")
    refused(no_product, specs, P("x"), args, "reduce_scatter", "dim 0 of")
    refused(argument, specs, out, args, "reduce_scatter", "no product makes it")
    refused(untiled, specs, out, args, "reduce_scatter", "is not tiled")
    refused(grouped, specs, out, args, "reduce_scatter", "axis_index_groups")


def test_a_product_that_others_read_is_refused():
    def fn(x, w):
        y = x @ w
        return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True), jnp.tanh(y)

    def returned(x, w):
        y = x @ w
        return lax.psum(y, "x"), y

    args = random(8, 8, seed=1), random(8, 8, seed=2)
    specs = (P(None, "x"), P("x"))
    refused(fn, specs, (P("x"), P("x")), args, "reduce_scatter", "is read by tanh at .* too")
    refused(returned, specs, (P(), P("x")), args, "psum", "the program's results too")


def test_a_scalar_sum_and_a_dim_that_is_not_there_are_refused():
    def fn(x, w):
        return lax.psum(jnp.vdot(x, w), "x")

    args = random(8, seed=1), random(8, seed=2)
    refused(fn, (P("x"), P("x")), P(), args, "psum", "a scalar")

    def matrix(x, w):
        return lax.psum(x @ w, "x")

    args = random(8, 8, seed=1), random(8, 8, seed=2)
    refused(matrix, (P(None, "x"), P("x")), P(), args, "psum", "has no dim 5", dim=5)
    row = args[0][:1], args[1]
    refused(matrix, (P(None, "x"), P("x")), P(), row, "psum", "of one element", dim=0)


def test_rings_run_on_real_devices(mesh8, mesh2x4):
    for mesh, axes in ((mesh8, ("x",)), (mesh2x4, ("y", "x"))):
        program, args = scattered_product("rows", 8, axes=axes, mesh=mesh)
        view = View(program.per_device)
        done = overlap(view, only(view, "reduce_scatter"), bidirectional=True)
        changed = {name: getattr(program, name) for name in program.__dataclass_fields__}
        ring = mw.SpmdProgram(**{**changed, "per_device": done.view.program})
        np.testing.assert_allclose(ring(*args), args[0] @ args[1], rtol=1e-4, atol=1e-4)
