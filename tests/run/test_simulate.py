"""The simulator against eight real devices, and its errors."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwise import _jax
from meshwise.errors import MeshwiseError, ReplicationError
from meshwise.ir.mesh import Mesh, refine_mesh
from meshwise.ir.sharding import Sharding
from meshwise.run.simulate import simulate

CUBE = refine_mesh(("x", "y", "z"), (2, 2, 2))
MESH = refine_mesh(("data", "model"), (2, 4))
MODEL = ("model.0", "model.1")


BOTH = (True, False)


def sharding(*dims):
    return Sharding(tuple(tuple(d.split()) for d in dims))


def trace(function, mesh, *avals):
    local = [a if hasattr(a, "dtype") else jax.ShapeDtypeStruct(a, jnp.float32) for a in avals]
    return _jax.make_jaxpr_over_axes(
        function, list(zip(mesh.names, mesh.sizes, strict=True)), local
    )


def spec(sharding):
    return P(*(axes or None for axes in sharding.dims))


def on_devices(jaxpr, mesh, ins, outs, args):
    auto = (AxisType.Auto,) * len(mesh.names)
    devices = jax.make_mesh(mesh.sizes, mesh.names, auto)
    function = _jax.jaxpr_as_fun(jaxpr)
    in_specs, out_specs = tuple(map(spec, ins)), list(map(spec, outs))
    run = jax.shard_map(
        function, mesh=devices, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(run)(*args)


def check(function, mesh, ins, outs, args, rtol=1e-6, ways=(True,)):
    """Simulate and run; dims divide. `ways`: compiled or not."""
    local = [
        jax.ShapeDtypeStruct(
            [n // mesh.size(a) for n, a in zip(x.shape, s.dims, strict=True)], x.dtype
        )
        for x, s in zip(args, ins, strict=True)
    ]
    jaxpr = trace(function, mesh, *local)
    wanted = on_devices(jaxpr, mesh, ins, outs, args)
    shapes = [w.shape for w in wanted]
    for compiled in ways:
        got = simulate(jaxpr, mesh, ins, outs, shapes, args, compiled=compiled)
        for g, w in zip(got, wanted, strict=True):
            assert g.dtype == w.dtype
            is_key = jnp.issubdtype(g.dtype, jax.dtypes.prng_key)
            pair = [np.asarray(jax.random.key_data(a) if is_key else a) for a in (g, w)]
            np.testing.assert_allclose(*pair, rtol=rtol, atol=1e-6)
    return wanted


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)


GROUPS = [("y",), ("z", "x"), ("x", "y", "z")]
EVERYWHERE = sharding("x y z", "")


def remaining(group):
    return " ".join(a for a in CUBE.names if a not in group)


@pytest.mark.parametrize("group", GROUPS)
def test_reductions(group):
    dtypes = [np.float32, np.int32, jnp.bfloat16]
    check(
        lambda *xs: [r(x, group) for x in xs for r in (lax.psum, lax.pmax, lax.pmin)],
        CUBE,
        [EVERYWHERE] * 3,
        [sharding(remaining(group), "")] * 9,
        [numbers(8, 3, dtype=d) for d in dtypes],
    )


@pytest.mark.parametrize("group", GROUPS)
def test_all_gather(group):
    out, flat = sharding(remaining(group), "", ""), sharding(remaining(group), "")
    check(
        lambda x: [lax.all_gather(x, group, axis=d, tiled=t) for t in (0, 1) for d in (0, 1)],
        CUBE,
        [EVERYWHERE],
        [out, out, flat, flat],
        [numbers(16, 3)],
    )


@pytest.mark.parametrize("group", GROUPS)
def test_reduce_scatter(group):
    n = CUBE.size(group)

    def function(x, square):
        scatter = functools.partial(lax.psum_scatter, axis_name=group)
        return [
            *(scatter(x, scatter_dimension=d, tiled=True) for d in (0, 1)),
            *(scatter(square, scatter_dimension=d) for d in (0, 1)),
        ]

    outs = [EVERYWHERE, EVERYWHERE, sharding("x y z"), sharding("x y z")]
    args = [numbers(8 * n, 2 * n), numbers(8 * n, n)]
    check(function, CUBE, [EVERYWHERE] * 2, outs, args)


@pytest.mark.parametrize("group", GROUPS)
def test_all_to_all(group):
    n = CUBE.size(group)
    places = [(0, 1), (1, 0), (1, 1), (2, 0)]
    check(
        lambda x: [lax.all_to_all(x, group, *p, tiled=t) for t in (False, True) for p in places],
        CUBE,
        [sharding("x y z", "", "")],
        [sharding("x y z", "", "")] * 8,
        [numbers(8 * n, n, n)],
    )


@pytest.mark.parametrize("group", GROUPS)
def test_ppermute_and_axis_index(group):
    n = CUBE.size(group)
    ring = [(i, (i + 1) % n) for i in range(n)]
    # jax 0.11 refuses axes in another order than the mesh's; before, it took that order itself.
    order = CUBE.permute_order(group) if jax.__version_info__ >= (0, 11) else group

    def function(x):
        index = jnp.full((1, 1), lax.axis_index(group))
        return [lax.ppermute(x, order, ring), lax.ppermute(x, order, ring[:-1]), index]

    check(function, CUBE, [EVERYWHERE], [EVERYWHERE] * 3, [numbers(8, 3)])


def test_collectives_of_typed_keys():
    keys = jax.random.split(jax.random.key(3), 8)
    EVERYWHERE = sharding("x y z")

    def function(k):
        shifted = lax.ppermute(k, ("x", "y", "z"), [(i, (i + 3) % 8) for i in range(8)])
        gathered = lax.all_gather(k, ("x", "y", "z"), tiled=True)
        return [shifted, jax.random.fold_in(gathered[5], 1), jax.random.uniform(k[0], (1,))]

    check(function, CUBE, [EVERYWHERE], [EVERYWHERE, sharding(), EVERYWHERE], [keys])


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_bits_are_those_of_each_device(kind):
    keys = jax.random.split(jax.random.key(3, impl=kind), 8)

    def function(k):
        first, _ = jax.random.split(k[0])
        return [jax.random.bits(first, (1, 5)), jax.jit(jax.random.normal)(k[0])[None]]

    check(function, CUBE, [sharding("x y z")], [sharding("x y z", ""), sharding("x y z")], [keys])


def test_counters_of_which_one_is_each_devices_own():
    def function(x):
        key, low = jnp.uint32(7), jnp.arange(3, dtype=jnp.uint32)[None]
        high = low * 0 + lax.axis_index("y").astype(jnp.uint32)
        return [jnp.stack(_jax.threefry2x32_p.bind(key, key, high, low)), x]

    check(function, CUBE, [EVERYWHERE], [sharding("", "y", ""), EVERYWHERE], [numbers(8, 3)])


def test_a_value_that_is_nobodys_own():
    check(
        lambda x: [lax.psum(x, "y"), lax.all_gather(x, "x"), lax.psum_scatter(x, "z", tiled=True)],
        CUBE,
        [sharding("")],
        [sharding(""), sharding("", ""), sharding("z")],
        [numbers(4)],
    )


def loops(x):
    """Every kind of body with a collective inside."""

    @jax.custom_jvp
    def doubled(y):
        return lax.psum(y, "x")

    doubled.defjvp(lambda p, t: (doubled(*p), t[0]))

    @jax.custom_vjp
    def tripled(y):
        return y + lax.pmax(y, ("x", "y"))

    tripled.defvjp(lambda y: (tripled(y), None), lambda _, g: (g,))

    def body(carry, row):
        total, count = carry
        total = jnp.tanh(total + lax.psum(row * x, MODEL_OR_Y))
        return (total, count + 1), (lax.ppermute(total, "x", [(0, 1), (1, 0)]), count)

    rows = jnp.arange(5.0)[:, None, None] * 0.1
    start = jnp.zeros_like(x)
    (total, count), (each, counts) = lax.scan(body, (start, 0), rows)
    (_, _), (back, _) = lax.scan(body, (start, 0), rows, reverse=True)
    grown = lax.while_loop(
        lambda s: lax.pmax(s[0].max(), ("x", "y", "z")) < 30,
        lambda s: (s[0] + lax.psum(jnp.abs(x) + 1, "z"), s[1] + 1),
        (x, 0),
    )
    chosen = lax.cond(
        lax.psum(x.sum(), ("x", "y", "z")) > 1e9,
        lambda v: v,
        lambda v: lax.psum(v, "y"),
        x,
    )
    inner = jax.checkpoint(lambda v: jax.jit(lambda w: lax.psum(w, "z") * v)(v))(x)
    return [total, each, counts + count, back, *grown, chosen, doubled(x), tripled(x), inner]


MODEL_OR_Y = ("y", "z")


def test_bodies_with_collectives():
    EVERYWHERE, rows = sharding("x y z", ""), sharding("", "x y z", "")
    outs = [EVERYWHERE, rows, sharding(""), rows, EVERYWHERE, sharding()]
    outs += [EVERYWHERE] * 4
    check(loops, CUBE, [EVERYWHERE], outs, [numbers(8, 3)], 1e-5, BOTH)


def test_bodies_without_collectives():
    def function(x):
        def body(c, row):
            return jnp.sin(c + row), c.sum()

        c, sums = lax.scan(body, x[0], x)
        c = lax.while_loop(lambda c: c.sum() < 40, lambda c: c + 1 + jnp.abs(c), c)
        c = lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, c)
        return [c[None], sums[None]]

    check(function, CUBE, [EVERYWHERE], [EVERYWHERE, EVERYWHERE], [numbers(16, 3)], 1e-5, BOTH)


@pytest.mark.parametrize("trips", [0, 1])
def test_short_scans(trips):
    def function(x):
        total, each = lax.scan(
            lambda c, _: (c + lax.psum(c, "x"), lax.pmax(c, "y")), x, None, length=trips
        )
        return [total, each]

    outs = [EVERYWHERE, sharding("", "x y z", "")]
    check(function, CUBE, [EVERYWHERE], outs, [numbers(8, 3)], ways=BOTH)


def test_a_predicate_from_ones_own_index_may_agree():
    def function(x):
        same = lax.axis_index("x") < 2
        return [lax.cond(same, lambda v: lax.psum(v, "x"), lambda v: v, x)]

    check(function, CUBE, [EVERYWHERE], [EVERYWHERE], [numbers(8, 3)])


@pytest.mark.parametrize("compiled", [True, False])
def test_disagreement_on_a_predicate(compiled):
    def function(x):
        both = ("x", "y")
        return [lax.cond(lax.axis_index("x") < 1, lambda v: lax.psum(v, both), lambda v: v, x)]

    places = sharding("x y z")
    with pytest.raises(ReplicationError) as caught:
        jaxpr = trace(function, CUBE, (1,))
        simulate(jaxpr, CUBE, [places], [places], [(8,)], [numbers(8)], compiled=compiled)
    lines = str(caught.value).splitlines()
    assert re.fullmatch(
        r"Devices disagree on the predicate of cond at .*test_simulate\.py:\d+:", lines[0]
    )
    assert lines[1:] == [
        "  - (x=0): 1",
        "  - (x=1): 0",
        "Its body holds collectives, which every device must run in the same order; on real"
        " devices this program would hang or give wrong numbers.",
        "Compute the predicate from values that are replicated, or reduce it with psum or pmax"
        " first.",
    ]


def test_padding_is_garbage():
    def function(*values):
        return [jnp.concatenate([v, v]) for v in values]

    dtypes = [np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_, np.complex64]
    places = [sharding("x")] * len(dtypes)
    args = [np.zeros(3, d) for d in dtypes]
    jaxpr = trace(function, CUBE, *(jax.ShapeDtypeStruct((2,), d) for d in dtypes))
    got = simulate(jaxpr, CUBE, places, places, [(8,)] * len(dtypes), args)
    pads = [np.nan, np.nan, 2**31 - 1, 255, True, np.nan]
    for g, d, pad in zip(got, dtypes, pads, strict=True):
        wanted = np.zeros(8, d)
        wanted[[5, 7]] = pad
        wide = np.complex64 if d is np.complex64 else np.float32
        np.testing.assert_array_equal(np.asarray(g).astype(wide), wanted.astype(wide))


def test_padding_of_keys_and_of_zero_rows():
    keys = jax.random.split(jax.random.key(0), 3)
    jaxpr = trace(lambda k: [k], CUBE, jax.eval_shape(lambda: keys[:2]))
    places = [sharding("x")]
    (got,) = simulate(jaxpr, CUBE, places, places, [(4,)], [keys])
    assert (got[:3] == keys).all()
    assert (np.asarray(jax.random.key_data(got))[3] == 2**32 - 1).all()
    jaxpr = trace(lambda x: [x.sum(1), x], CUBE, (0, 2))
    ins, outs = [sharding("x", "y")], [sharding("x"), sharding("x", "y")]
    got = simulate(jaxpr, CUBE, ins, outs, [(0,), (0, 3)], [np.zeros((0, 3), np.float32)])
    assert [g.shape for g in got] == [(0,), (0, 3)]


def test_padding_of_copies_is_not_compared():
    def function(x):
        return [jnp.where(jnp.arange(2) + 2 * lax.axis_index("x") < 3, x, lax.axis_index("y"))]

    jaxpr = trace(function, CUBE, jax.ShapeDtypeStruct((2,), jnp.int32))
    places = [sharding("x")]
    (got,) = simulate(jaxpr, CUBE, places, places, [(3,)], [np.arange(3, dtype=np.int32)])
    np.testing.assert_array_equal(got, [0, 1, 2])


def differing(function, out, shape, mesh=MESH):
    places = sharding("data")
    with pytest.raises(ReplicationError) as caught:
        x = np.arange(2, dtype=np.float32)
        simulate(trace(function, mesh, (1,)), mesh, [places], [out], [shape], [x])
    return str(caught.value)


def test_error_names_result_axes_devices_and_size():
    assert differing(lambda x: [x * 3], sharding(""), (1,)) == (
        "Results that should be replicated differ between devices: result 0 (1,), sharded [-],"
        " differs along data: devices (data=1) differ from (data=0); first at [0]: 0.0 and 3.0;"
        " largest difference 3\n"
        "A result must be the same, bit for bit, on all devices that differ only along axes its"
        " sharding does not name. JAX would show one device's copy and the others would go on with"
        " theirs.\n"
        "A reduction over these axes is missing, or the value was computed from something that is"
        " each device's own (its index, its shard, its padding)."
    )


def test_error_shows_the_axes_that_matter():
    text = differing(lambda x: [x * 0 + lax.axis_index("model.1")], sharding("data"), (2,))
    assert "sharded [data], differs along model.1: devices (model.1=1) differ from" in text
    text = differing(lambda x: [x * 0 + lax.axis_index(MODEL)], sharding("data"), (2,))
    assert "differs along model: devices (model=1), (model=2), (model=3) differ from" in text
    big = refine_mesh(("a", "b"), (2, 32))
    subs = big.sub_axes["b"]
    out, shape = sharding("a"), (2,)
    with pytest.raises(ReplicationError, match=r"\(b=8\) and 23 more differ from \(b=0\)"):
        jaxpr = trace(lambda x: [x + lax.axis_index(subs)], big, (1,))
        simulate(jaxpr, big, [out], [out], [shape], [np.zeros(2, np.float32)])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.0, -0.0), "0.0 and -0.0; largest difference 0"),
        ((np.nan, 1.0), "nan and 1.0; one of them is not a number"),
        ((1, 2), "1 and 2; largest difference 1"),
        ((True, False), "True and False; 1 elements differ"),
        ((1 + 0j, 1 + 2j), r"\(1\+0j\) and \(1\+2j\); largest difference 2"),
    ],
)
def test_bits_matter(values, words):
    def function(x):
        return [jnp.where(lax.axis_index("x") == 0, *map(jnp.asarray, values)) + x]

    if isinstance(values[0], bool):
        x = np.zeros((), bool)
        jaxpr = trace(lambda x: [(lax.axis_index("x") == 0) ^ x], CUBE, x)
    elif values[1] == 0:
        x = np.ones((), np.float32)
        jaxpr = trace(lambda x: [x * jnp.where(lax.axis_index("x") == 0, 0.0, -0.0)], CUBE, x)
    else:
        x = np.zeros((), np.asarray(values[0]).dtype.name.replace("64", "32").replace("128", "64"))
        x = x.astype(np.complex64) if isinstance(values[0], complex) else x
        jaxpr = trace(function, CUBE, x)
    with pytest.raises(ReplicationError, match=words):
        simulate(jaxpr, CUBE, [sharding()], [sharding()], [()], [x])


def test_every_nan_is_the_same():
    def function(x):
        return [jnp.where(lax.axis_index("x") == 0, jnp.nan, -jnp.nan) + x]

    jaxpr = trace(function, CUBE, ())
    (got,) = simulate(jaxpr, CUBE, [sharding()], [sharding()], [()], [np.float32(0)])
    assert np.isnan(got)


def test_two_results_are_named_at_once():
    places = sharding("data")
    jaxpr = trace(lambda x: [x, x + 1, lax.psum(x, "data")], MESH, (1,))
    whole = sharding("")
    with pytest.raises(ReplicationError) as caught:
        simulate(
            jaxpr,
            MESH,
            [places],
            [whole] * 3,
            [(1,)] * 3,
            [np.arange(2, dtype=np.float32)],
            out_names=["loss", "grads['w']", "fine"],
        )
    assert "\n  - loss (1,)," in str(caught.value)
    assert "\n  - grads['w'] (1,)," in str(caught.value)
    assert "fine" not in str(caught.value)


def test_a_mesh_of_one_device():
    one = refine_mesh(("x",), (1,))
    assert one == Mesh((), (), (("x", ()),))
    jaxpr = trace(lambda x: [x.sum(), x], one, (3, 4))
    x = numbers(3, 4)
    got = simulate(
        jaxpr, one, [sharding("", "")], [sharding(), sharding("", "")], [(), (3, 4)], [x]
    )
    np.testing.assert_array_equal(got[0], x.sum())
    np.testing.assert_array_equal(got[1], x)


def test_constants_unused_results_and_repeats():
    table = jnp.arange(4.0)

    def function(x, unused):
        a, _ = jnp.sort(x), unused * 2
        return [a, a, table + 1, jnp.float32(3), x]

    places = sharding("x")
    outs = [places, places, sharding(""), sharding(), places]
    args = [numbers(8), numbers(2)]
    check(function, CUBE, [places, sharding("")], outs, args)


def test_sixty_four_devices():
    mesh = refine_mesh(("a", "b"), (8, 8))
    a, b = mesh.sub_axes["a"], mesh.sub_axes["b"]
    jaxpr = trace(lambda x, w: [lax.psum(x @ w, b)], mesh, (2, 1), (1, 5))
    x, w = numbers(16, 8), numbers(8, 5)
    ins, outs = [Sharding((a, b)), Sharding((b, ()))], [Sharding((a, ()))]
    (got,) = simulate(jaxpr, mesh, ins, outs, [(16, 5)], [x, w])
    np.testing.assert_allclose(got, x @ w)


def test_index_groups_and_unknown_collectives_are_refused():
    places = sharding("x")
    jaxpr = trace(lambda x: [lax.pbroadcast(x, "x", 0)], CUBE, (1,))
    with pytest.raises(MeshwiseError, match="does not know the collective pbroadcast"):
        simulate(jaxpr, CUBE, [places], [places], [(2,)], [numbers(2)])
    jaxpr = trace(lambda x: [lax.psum(x, "x", axis_index_groups=[[0], [1]])], CUBE, (1,))
    with pytest.raises(MeshwiseError, match="takes no axis_index_groups, as psum has"):
        simulate(jaxpr, CUBE, [places], [places], [(2,)], [numbers(2)])
    jaxpr = trace(lambda x: [lax.psum(x, "data")], MESH, (1,))
    with pytest.raises(MeshwiseError, match=r"psum is over \['data'\], the mesh has \['x', 'y'"):
        simulate(jaxpr, CUBE, [places], [places], [(2,)], [numbers(2)])


UNARY = [jnp.tanh, jnp.negative, lambda v: v[::-1], lambda v: v * lax.axis_index("y")]
MOVES = [
    lambda v: lax.psum(v, ("x", "z")),
    lambda v: lax.pmax(v, "y"),
    lambda v: lax.psum_scatter(lax.all_gather(v, "z", tiled=True), "x", tiled=True),
    lambda v: lax.all_to_all(v, ("y", "x"), 0, 0, tiled=True),
    lambda v: lax.ppermute(v, ("z", "y"), [(0, 3), (3, 1), (1, 0)]),
    lambda v: lax.scan(lambda c, _: (lax.pmin(c, "x") + 0.5 * v, None), v, None, length=3)[0],
    lambda v: lax.cond(lax.psum(v.sum(), CUBE.names) > 0, lambda w: lax.psum(w, "y"), jnp.sin, v),
]


@hypothesis.settings(max_examples=8)
@hypothesis.given(st.lists(st.tuples(st.sampled_from(UNARY), st.sampled_from(MOVES)), max_size=4))
def test_random_programs(steps):
    def function(x, w):
        for unary, move in steps:
            x = jnp.tanh(move(unary(x)) @ w)
        return [x]

    args = [numbers(64, 4), numbers(4, 4) * np.float32(0.1)]
    check(function, CUBE, [EVERYWHERE, sharding("", "")], [EVERYWHERE], args, 2e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes_in_context_and_in_constants(kind):
    devices = jax.make_mesh((2, 4), ("data", "model"), (kind,) * 2)
    placed = jax.device_put(numbers(8), NamedSharding(devices, P("model")))
    whole = jax.device_put(numbers(8), NamedSharding(devices, P()))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), placed.sharding)
    place = sharding("data")
    with jax.set_mesh(devices):
        jaxpr = trace(
            lambda x, k: [x + whole[1] + lax.psum(x, "data"), k], MESH, (4,), jax.typeof(keys[:4])
        )
        got, same = simulate(jaxpr, MESH, [place] * 2, [place] * 2, [(8,)] * 2, [placed, keys])
    total = numbers(8).reshape(2, 4).sum(0)
    np.testing.assert_array_equal(got, numbers(8) + numbers(8)[1] + np.tile(total, 2))
    assert (jax.random.key_data(same) == jax.random.key_data(keys)).all()
