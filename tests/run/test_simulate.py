"""The simulator against eight real devices."""

import functools

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
from meshwise.ir.mesh import Mesh, refine_mesh
from meshwise.ir.sharding import Sharding
from meshwise.run.simulate import simulate
from tests.run.simulated import CUBE, EVERYWHERE, MESH, check, numbers, sharding, trace

BOTH = (True, False)
GROUPS = [("y",), ("z", "x"), ("x", "y", "z")]


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
