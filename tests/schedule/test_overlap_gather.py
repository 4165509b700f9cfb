"""overlap of products with the all_gather of an operand: rings of tiles."""

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

EINSUMS = {  # the gathered operand first: where the gathered dim is, and whether it is summed over
    "free": ("gk,kj->gj", 0, False),
    "free, right": ("kg,ik->ig", 1, False),
    "free, batched": ("bgk,bkj->bgj", 1, False),
    "batch": ("gik,gkj->gij", 0, False),
    "inner batch": ("bgk,bkgj->bgj", 1, False),
    "contracted": ("ig,gj->ij", 1, True),
    "contracted, two dims": ("igk,gkj->ij", 1, True),
}
SIZES = {"i": 5, "j": 7, "k": 6, "b": 2}


def gathered_product(kind, devices, size=None, dtype=np.float32, bad=0.0):
    """`einsum(all_gather(x), w)`; with `size` the gathered dim is cut to it, with `bad` padding.

    Where the gathered dim is summed over, each device makes its own columns of the result.
    """
    text, dim, is_sum = EINSUMS[kind]
    left, right = text.split("->")[0].split(",")
    part = 2 if size is None else -(-size // devices)
    sizes = {**SIZES, "g": part * devices, "j": 2 * devices if is_sum else 7}
    x = random(*(sizes[c] for c in left), seed=1).astype(dtype)
    inner = {**sizes, "g": size or sizes["g"]}
    w = random(*(inner[c] for c in right), seed=2).astype(dtype)
    if size is not None:
        x[(slice(None),) * dim + (slice(size, None),)] = bad
    spec = P(*((None,) * dim), "x")

    def fn(x, w):
        whole = lax.all_gather(x, "x", axis=dim, tiled=True)
        if size is not None:
            whole = lax.slice_in_dim(whole, 0, size, axis=dim)
        return jnp.einsum(text, whole, w)

    columns, result = (P(*(None,) * (w.ndim - 1), "x"), P(None, "x")) if is_sum else (P(), P())
    mesh = mesh_of(x=devices)
    program = mw.SpmdProgram.from_shard_map(fn, mesh, (spec, columns), result, x, w)
    return program, (x, w)


def sends(view):
    return [c.count for c in view.program.collectives if c.kind.value == "ppermute"]


@pytest.mark.parametrize(
    ("kind", "devices", "bidirectional"),
    [(kind, 3, True) for kind in EINSUMS]
    + [(kind, 4, False) for kind in EINSUMS]
    + [("free", 2, True), ("free", 8, True), ("contracted", 8, True)],
)
def test_a_ring_computes_what_the_gather_and_product_do(kind, devices, bidirectional):
    program, args = gathered_product(kind, devices)
    view = View(program.per_device)
    done = overlap(view, only(view, "dot_general"), bidirectional=bidirectional)
    assert sends(done.view) == [1] * (devices - 1)
    assert kinds(done.view) == ["ppermute"] * (devices - 1)
    assert done.view.program.wire_bytes == view.program.wire_bytes
    (got,), (want,) = simulate(program, done.view, args), simulate(program, view, args)
    if EINSUMS[kind][2]:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("devices", "size", "bidirectional"), [(4, 10, True), (3, 1, False)])
@pytest.mark.parametrize("kind", ["free, right", "inner batch", "contracted, two dims"])
def test_padding_that_was_cut_off_is_never_seen(kind, devices, size, bidirectional):
    program, args = gathered_product(kind, devices, size, bad=np.nan)
    view = View(program.per_device)
    done = overlap(view, only(view, "dot_general"), bidirectional=bidirectional)
    assert kinds(done.view) == ["ppermute"] * (devices - 1)
    (got,), (want,) = simulate(program, done.view, args), simulate(program, view, args)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_both_directions_take_half_of_the_steps(bidirectional):
    program, _ = gathered_product("free", 8)
    view = View(program.per_device)
    done = overlap(view, only(view, "dot_general"), bidirectional=bidirectional).view
    up = [(i, (i + 1) % 8) for i in range(8)]
    found = [e.params["perm"] for e in done.eqns if e.primitive.name == "ppermute"]
    ups = [perm for perm in found if sorted(perm) == up]
    downs = [perm for perm in found if sorted((b, a) for a, b in perm) == up]
    assert (len(ups), len(downs)) == ((4, 3) if bidirectional else (7, 0))


def test_no_product_waits_for_the_send_beside_it():
    program, _ = gathered_product("free", 4)
    view = View(program.per_device)
    done = overlap(view, only(view, "dot_general")).view
    after: dict = {}
    for eqn in done.eqns:
        read = [a for a in eqn.invars if not hasattr(a, "val")]
        depth = max([after.get(a, 0) for a in read], default=0)
        after[eqn.outvars[0]] = depth + (eqn.primitive.name == "ppermute")
    products = [e.outvars[0] for e in done.eqns if e.primitive.name == "dot_general"]
    assert [after[v] for v in products] == [0, 1, 2, 3]


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x"), ("y",)])
@pytest.mark.parametrize("kind", ["free", "contracted", "batch"])
def test_a_ring_over_several_axes_follows_their_order(kind, axes):
    text, dim, is_sum = EINSUMS[kind]
    left, right = text.split("->")[0].split(",")
    sizes = {**SIZES, "g": 12}
    x = random(*(sizes[c] for c in left), seed=1)
    w = random(*({**sizes, "j": 6}[c] for c in right), seed=2)

    def fn(x, w):
        return jnp.einsum(text, lax.all_gather(x, axes, axis=dim, tiled=True), w)

    columns, result = (P(*(None,) * (w.ndim - 1), axes), P(None, axes)) if is_sum else (P(), P())
    specs = (P(*((None,) * dim), axes), columns)
    program = mw.SpmdProgram.from_shard_map(fn, mesh_of(x=2, y=3), specs, result, x, w)
    view = View(program.per_device)
    count = {"x": 2, "y": 3}
    devices = int(np.prod([count[a] for a in axes]))
    for bidirectional in (False, True):
        done = overlap(view, only(view, "dot_general"), bidirectional=bidirectional)
        assert kinds(done.view) == ["ppermute"] * (devices - 1)
        assert done.view.program.wire_bytes == view.program.wire_bytes
        (got,) = simulate(program, done.view, (x, w))
        np.testing.assert_allclose(got, np.einsum(text, x, w), rtol=1e-5, atol=1e-5)
        if not is_sum:
            np.testing.assert_array_equal(got, simulate(program, view, (x, w))[0])


def test_terms_in_bfloat16_are_added_in_single_precision():
    program, args = gathered_product("contracted", 8, dtype=jnp.bfloat16)
    view = View(program.per_device)
    done = overlap(view, only(view, "dot_general"))
    assert done.values[0].aval.dtype == jnp.bfloat16
    (got,), (want,) = simulate(program, done.view, args), simulate(program, view, args)
    exact = np.einsum("ig,gj->ij", *(a.astype(np.float64) for a in args))
    rounded = exact.astype(jnp.bfloat16).astype(np.float64)
    # no more than the last place from the exact sum's rounding, as the product in one piece
    np.testing.assert_allclose(got.astype(np.float64), rounded, rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=2**-7)


def test_beyond_sixteen_devices_the_program_does_not_grow():
    counts = {}
    for devices in (32, 64):
        for bidirectional in (False, True):
            program, args = gathered_product("free", devices)
            view = View(program.per_device)
            done = overlap(view, only(view, "dot_general"), bidirectional=bidirectional)
            assert sum(sends(done.view)) == devices - 1
            assert done.view.program.wire_bytes == view.program.wire_bytes
            assert {c.reason[:7] for c in done.view.program.collectives} == {"overlap"}
            counts[devices, bidirectional] = len(done.view.eqns)
            if devices == 32:
                got, want = simulate(program, done.view, args), simulate(program, view, args)
                np.testing.assert_array_equal(got[0], want[0])
    assert counts[32, False] == counts[64, False] < 30
    assert counts[32, True] == counts[64, True] < 60


def three_products(devices=4):
    """Queries, keys and a residual of one gathered activation."""

    def fn(x, q, k):
        whole = lax.all_gather(x, "x", axis=0, tiled=True)
        return whole @ q, jnp.einsum("tf,hf->th", whole, k), whole + 1.0

    args = random(8, 6, seed=1), random(6, 5, seed=2), random(3, 6, seed=3)
    mesh = mesh_of(x=devices)
    specs = (P("x"), P(), P())
    program = mw.SpmdProgram.from_shard_map(fn, mesh, specs, (P(), P(), P()), *args)
    return program, args


def test_products_of_one_gathered_value_share_its_ring():
    program, args = three_products()
    view = View(program.per_device)
    products = [e.outvars[0] for e in view.eqns if e.primitive.name == "dot_general"]
    done = overlap(view, products, keeps=True)
    assert kinds(done.view) == ["ppermute"] * 3
    assert done.view.program.wire_bytes == view.program.wire_bytes
    assert len(done.values) == 2
    assert done.whole in done.view.maker
    for got, want in zip(
        simulate(program, done.view, args), simulate(program, view, args), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    by_gather = overlap(view, only(view, "all_gather"), keeps=True)
    assert len(by_gather.values) == 2


def test_what_a_slice_leaves_of_a_gathered_value_is_kept_for_others():
    """Rows that the product does not read are data to who reads them: here of the last tile."""

    def fn(x, w):
        whole = lax.all_gather(x, "x", axis=1, tiled=True)
        return whole[:, :10] @ w, whole * 2.0

    args = random(5, 12, seed=1), random(10, 8, seed=2)
    specs, outs = (P(None, "x"), P(None, "x")), (P(None, "x"), P())
    program = mw.SpmdProgram.from_shard_map(fn, mesh_of(x=4), specs, outs, *args)
    view = View(program.per_device)
    done = overlap(view, only(view, "dot_general"), keeps=True)
    got, whole = simulate(program, done.view, args)
    np.testing.assert_allclose(got, args[0][:, :10] @ args[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(whole, args[0] * 2.0)


def test_a_gathered_value_that_others_read_is_refused_unless_it_is_kept():
    program, _ = three_products()
    view = View(program.per_device)
    first, second = [e.outvars[0] for e in view.eqns if e.primitive.name == "dot_general"]
    with pytest.raises(mw.IllegalMove, match=r"is read by dot_general at .* too"):
        overlap(view, first)
    with pytest.raises(mw.IllegalMove, match=r"is read by add at (.|\n)*keeps=True"):
        overlap(view, [first, second])


def test_a_gathered_value_that_is_returned_is_refused_unless_it_is_kept():
    def fn(x, w):
        whole = lax.all_gather(x, "x", axis=0, tiled=True)
        return whole @ w, whole

    args = random(8, 6, seed=1), random(6, 5, seed=2)
    program = mw.SpmdProgram.from_shard_map(fn, mesh_of(x=4), (P("x"), P()), (P(), P()), *args)
    view = View(program.per_device)
    with pytest.raises(mw.IllegalMove, match="is read by the program's results too"):
        overlap(view, only(view, "dot_general"))
    done = overlap(view, only(view, "dot_general"), keeps=True)
    assert kinds(done.view) == ["ppermute"] * 3
    for got, want in zip(
        simulate(program, done.view, args), simulate(program, view, args), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_a_sum_that_is_to_be_the_same_on_all_devices_is_refused():
    def fn(x, w):
        return lax.all_gather(x, "x", axis=1, tiled=True) @ w

    args = random(5, 8, seed=1), random(8, 6, seed=2)
    for columns, mesh in ((P(), mesh_of(x=4)), (P(None, "y"), mesh_of(x=4, y=2))):
        specs = (P(None, "x"), columns)
        program = mw.SpmdProgram.from_shard_map(fn, mesh, specs, columns, *args)
        view = View(program.per_device)
        with pytest.raises(mw.IllegalMove, match="the same on all devices along x"):
            overlap(view, only(view, "dot_general"))


def test_a_product_of_a_gathered_value_with_itself_is_refused():
    def fn(x):
        whole = lax.all_gather(x, "x", axis=0, tiled=True)
        return whole @ whole.T

    def plain(x):
        whole = lax.all_gather(x, "x", axis=0, tiled=True)
        return lax.dot_general(whole, whole, (((1,), (1,)), ((), ())))

    x = random(8, 6)
    for function, why in ((plain, "as 2 operands"), (fn, "begins before all")):
        program = mw.SpmdProgram.from_shard_map(function, mesh_of(x=4), (P("x"),), P(), x)
        view = View(program.per_device)
        with pytest.raises(mw.IllegalMove, match=why):
            overlap(view, only(view, "dot_general"))


def test_a_product_that_is_computed_from_the_whole_itself_is_refused():
    def fn(x):
        whole = lax.all_gather(x, "x", axis=0, tiled=True)
        return whole @ jnp.tanh(whole).T

    x = random(8, 6)
    program = mw.SpmdProgram.from_shard_map(fn, mesh_of(x=4), (P("x"),), P(), x)
    view = View(program.per_device)
    with pytest.raises(mw.IllegalMove, match="begins before all of them are there"):
        overlap(view, only(view, "dot_general"), keeps=True)


def test_of_two_gathered_operands_the_larger_goes_round_unless_it_is_said():
    def fn(x, w):
        x = lax.all_gather(x, "x", axis=0, tiled=True)
        return x @ lax.all_gather(w, "x", axis=1, tiled=True)

    args = random(16, 8, seed=1), random(8, 4, seed=2)
    program = mw.SpmdProgram.from_shard_map(fn, mesh_of(x=4), (P("x"), P(None, "x")), P(), *args)
    view = View(program.per_device)
    shapes = {}
    for operand in (None, 0, 1):
        done = overlap(view, only(view, "dot_general"), operand=operand)
        assert sorted(kinds(done.view)) == ["all_gather"] + ["ppermute"] * 3
        assert done.view.program.wire_bytes == view.program.wire_bytes
        shapes[operand] = {c.shape for c in done.view.program.collectives if c.kind == "ppermute"}
        (got,) = simulate(program, done.view, args)
        np.testing.assert_allclose(got, args[0] @ args[1], rtol=1e-5, atol=1e-5)
    assert shapes == {None: {(4, 8)}, 0: {(4, 8)}, 1: {(8, 1)}}


def test_computations_between_gather_and_product_are_refused():
    def fn(x, w):
        return jnp.tanh(lax.all_gather(x, "x", axis=0, tiled=True)) @ w

    args = random(8, 6, seed=1), random(6, 5, seed=2)
    program = mw.SpmdProgram.from_shard_map(fn, mesh_of(x=4), (P("x"), P()), P(), *args)
    view = View(program.per_device)
    with pytest.raises(mw.IllegalMove, match=r"of tanh at (.|\n)*Reorder the all_gather past"):
        overlap(view, only(view, "dot_general"))
    with pytest.raises(mw.IllegalMove, match="no product reads"):
        overlap(view, only(view, "all_gather"))
    with pytest.raises(mw.IllegalMove, match="What overlaps is a product with"):
        overlap(view, only(view, "tanh"))
    with pytest.raises(mw.IllegalMove, match=r"between them .* of tanh at (.|\n)*alone, of a sum"):
        overlap(view, [only(view, "all_gather"), only(view, "dot_general")])
    with pytest.raises(mw.IllegalMove, match="argument 0"):
        overlap(view, view.inputs[0])


def test_rings_run_on_real_devices(mesh8, mesh2x4):
    for mesh, axes in ((mesh8, ("x",)), (mesh2x4, ("y", "x"))):

        def fn(x, w, axes=axes):
            return lax.all_gather(x, axes, axis=0, tiled=True) @ w

        args = random(16, 6, seed=1), random(6, 5, seed=2)
        program = mw.SpmdProgram.from_shard_map(fn, mesh, (P(axes), P()), P(), *args)
        view = View(program.per_device)
        done = overlap(view, only(view, "dot_general"), bidirectional=True)
        changed = {name: getattr(program, name) for name in program.__dataclass_fields__}
        ring = mw.SpmdProgram(**{**changed, "per_device": done.view.program})
        np.testing.assert_allclose(ring(*args), args[0] @ args[1], rtol=1e-5, atol=1e-6)
