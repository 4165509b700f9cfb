"""Regions written with `jax.shard_map`, other people's partitioning rules, values sharded alike."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.same import X, assert_same_outcome, mesh_of, put


def shard_alike(x, y):
    """Found when it is called: jax 0.11 does not have it any more."""
    return importlib.import_module("jax.experimental.shard_alike").shard_alike(x, y)


MESH = mesh_of(4, 2)
OTHER = mesh_of(2, 4, names="ab")
ROUND = [(i, (i + 1) % 4) for i in range(4)]
XY = {"in_specs": P("x", "y"), "out_specs": P("x", "y")}
SUMMED = {"in_specs": P("x", "y"), "out_specs": P(None, "y")}


def region(fn, mesh=MESH, **options):
    return jax.shard_map(fn, mesh=mesh, **{**XY, **options})


def summed(x):
    return lax.psum(x, "x")


def ring(x):
    return lax.scan(lambda c, _: (lax.ppermute(c, "x", ROUND) * 2, c.sum()), x, None, length=4)[0]


def drawn(x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("x"))
    return x + jax.random.uniform(key, x.shape)


def nested(x):
    inner = {"in_specs": P(None, "y"), "out_specs": P(), "axis_names": {"y"}}
    return jax.shard_map(lambda z: lax.psum(z, "y"), **inner)(x) * lax.psum(1.0, "x")


ONLY_X = {"in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
REGIONS = {
    "psum": region(summed, **SUMMED),
    "psum, unchecked": region(summed, **SUMMED, check_vma=False),
    "psum over both": region(lambda x: lax.psum(x, ("x", "y")), out_specs=P()),
    "pmax": region(lambda x: lax.pmax(x, "y"), out_specs=P("x"), check_vma=False),
    "all_gather": region(lambda x: lax.all_gather(x, "x", tiled=True), **SUMMED, check_vma=False),
    "psum_scatter": region(
        lambda x: lax.psum_scatter(x, "x", tiled=True), in_specs=P(None, "y"), check_vma=False
    ),
    "all_to_all": region(
        lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True), in_specs=P("x"), out_specs=P(None, "x")
    ),
    "ppermute": region(lambda x: lax.ppermute(x, "x", ROUND)),
    "axis_index": region(lambda x: x * lax.axis_index("x") + lax.axis_index(("y", "x"))),
    "sizes": region(lambda x: x / lax.axis_size("x") + lax.psum(1, "y")),
    "ring": region(ring),
    "loop": region(
        lambda x: lax.fori_loop(0, 3, lambda _, c: lax.psum(c, "y") + c, x), check_vma=False
    ),
    "choice": region(lambda x: lax.cond(x.sum() > 1, lambda z: z * 2, lambda z: z, x)),
    "pcast": region(
        lambda x: lax.psum(x * lax.pcast(jnp.ones(()), "x", to="varying"), "x"), **SUMMED
    ),
    "remat inside": region(jax.checkpoint(lambda x: jnp.sin(lax.psum(jnp.sin(x), "x"))), **SUMMED),
    "remat around": jax.checkpoint(region(lambda x: jnp.sin(summed(jnp.sin(x))), **SUMMED)),
    "jit inside": region(jax.jit(summed), **SUMMED),
    "mw.jit inside": region(mw.jit(lambda x: summed(x) * 2), **SUMMED),
    "drawn": region(drawn, check_vma=False),
    "whole operands": region(lambda x: x * 2, in_specs=P(None, "y")),
    "printed": region(lambda x: (jax.debug.print("at {}", lax.axis_index("x")), x)[1]),
    "over x": region(
        lambda x: lax.psum(x @ x.T, "x"), in_specs=P("x"), out_specs=P(), axis_names={"x"}
    ),
    "nested": region(nested, **ONLY_X),
    "another mesh": region(
        lambda x: lax.psum(x, "a"), OTHER, in_specs=P("a", "b"), out_specs=P(None, "b")
    ),
    "in a loop": lambda x: lax.fori_loop(
        0, 3, lambda _, c: region(lambda z: lax.pmean(z, "x") + z)(c), x
    ),
    "mapped": jax.vmap(region(lambda z: summed(z) * z, in_specs=P("x"), out_specs=P("x"))),
    "mapped over y": jax.vmap(
        region(lambda z: summed(z) * z, in_specs=P("x"), out_specs=P("x")), spmd_axis_name="y"
    ),
}
# XLA leaves results over a mesh that is not the arguments' to itself.
FREE = {"another mesh", "nested"}


@pytest.mark.parametrize("name", REGIONS)
def test_regions(name):
    fn = REGIONS[name]
    assert_same_outcome(lambda jit: jit(fn)(X))
    assert_same_outcome(lambda jit: jit(fn)(put("x", "y")), places=name not in FREE)


@pytest.mark.parametrize("name", REGIONS)
def test_gradients_of_regions(name):
    def loss(x):
        return (REGIONS[name](x * 2) ** 2).sum()

    assert_same_outcome(lambda jit: jit(jax.grad(loss))(put("x")), places=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONS)
def test_regions_amid_a_program_and_in_a_context(name):
    fn = REGIONS[name]

    def amid(jit):
        return jit(lambda x: fn(x * 2) * 3, in_shardings=NamedSharding(MESH, P("y")))(X)

    def in_context(jit):
        with jax.set_mesh(MESH):
            return jit(fn)(X)

    assert_same_outcome(amid, places=False)
    if name != "another mesh":
        assert_same_outcome(in_context)
    assert_same_outcome(lambda jit: jax.grad(lambda x: (jit(fn)(x) ** 2).sum())(X), places=False)


def test_a_region_keeps_its_collectives():
    program = mw.jit(REGIONS["ring"]).partition(X)
    assert [c.kind.value for c in program.collectives] == ["ppermute"]
    assert program.in_shardings[0].spec == program.out_shardings.spec == P("x", "y")
    np.testing.assert_array_equal(program.simulate(X), program(X))


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="jax 0.11 refuses axes in another order than the mesh's"
)
def test_devices_are_numbered_in_the_order_of_the_mesh():
    """Whatever the order of a ppermute's axes, and whatever was traced before over other meshes."""
    turned = jax.sharding.Mesh(MESH.devices.T, ("y", "x"))
    steps = [(i, (i + 3) % 8) for i in range(8)]
    for mesh in (turned, MESH, turned):
        for axes in (("x", "y"), ("y", "x")):
            fn = region(lambda x, axes=axes: lax.ppermute(x, axes, steps), mesh)
            wanted = jax.jit(fn)(X)
            np.testing.assert_array_equal(mw.jit(fn)(X), wanted)
            np.testing.assert_array_equal(mw.jit(fn, mesh=MESH)(X), wanted)


REFUSED = {
    "results that are not replicated": (lambda x: x, {"out_specs": P()}, X),
    "blocks that do not divide": (lambda x: x, {}, X[:5]),
    "an axis that is none": (lambda x: lax.psum(x, "z"), {}, X),
    "no dims for a spec": (lambda x: x.sum(), {}, X),
    "another tree": (lambda x, y: x, {"in_specs": (P("x"),)}, X),
    "other devices": (lambda x: x, {"mesh": mesh_of(2, 2)}, put("x")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_regions_that_are_refused(name):
    fn, options, arg = REFUSED[name]
    assert_same_outcome(lambda jit: jit(region(fn, **options))(arg))


def test_regions_of_the_context():
    def mapped(jit):
        with jax.set_mesh(MESH):
            fn = jax.smap(summed, in_axes=0, out_axes=None, axis_name="x")
            return jit(fn)(X), jit(
                jax.shard_map(lambda x: x * 2, in_specs=P("x"), out_specs=P("x"))
            )(X)

    def explicit(jit):
        mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Explicit,) * 2)
        with jax.set_mesh(mesh):
            x = jax.device_put(X, P("x", "y"))
            return jit(jax.shard_map(lambda x: x * 2, out_specs=P("x", "y")))(x)

    assert_same_outcome(mapped)
    assert_same_outcome(explicit)
    assert_same_outcome(lambda jit: jit(jax.pmap(lambda z: z * 2))(X))


@pytest.mark.parametrize("has_mesh", [False, True])
def test_a_program_inside_a_region(has_mesh):
    words = {"mesh": MESH, "strict": True} if has_mesh else {}

    def fn(x):
        return mw.jit(lambda z: jnp.sin(z) @ z.T, **words)(x) + lax.psum(1.0, "x")

    def plain(x):
        return jnp.sin(x) @ x.T + lax.psum(1.0, "x")

    wanted = jax.jit(region(plain))(X)
    for jit in (jax.jit, mw.jit):
        np.testing.assert_allclose(jit(region(fn))(X), wanted, rtol=1e-5, atol=1e-5)


def partitioned(fn, rule, local=None):
    made = custom_partitioning(fn)
    made.def_partition(
        infer_sharding_from_operands=None,
        partition=lambda mesh, args, result: (
            mesh,
            local or fn,
            result.sharding,
            tuple(a.sharding for a in args),
        ),
        sharding_rule=rule,
    )
    return made


def at_x(spec):
    """A callback that wants one axis of the user's mesh, by its name."""

    def partition(mesh, args, result):
        there = NamedSharding(args[0].sharding.mesh, spec)
        return mesh, jax.jit(lambda y: y * 2), there, (there,)

    made = custom_partitioning(lambda x: x * 2)
    made.def_partition(
        infer_sharding_from_operands=None, partition=partition, sharding_rule="i j -> i j"
    )
    return made


def test_functions_that_partition_themselves():
    sine = partitioned(jnp.sin, "i j -> i j")
    total = partitioned(lambda x: x.sum(0), "i j -> j", lambda x: lax.psum(x.sum(0), "x"))
    assert_same_outcome(lambda jit: jit(lambda x: sine(x) * 2)(put("x", "y")))
    assert_same_outcome(lambda jit: jit(at_x(P("x")))(put("x")))
    got = mw.jit(total)(put("x"))
    np.testing.assert_allclose(got, X.sum(0), rtol=1e-5, atol=1e-5)


ALIKE = {
    "a result": (lambda x: shard_alike(x, x * x * 2)[1] * 2, [("x", "y")]),
    "a constant": (lambda x: shard_alike(x, jnp.arange(64.0).reshape(8, 8))[1], [("x", "y")]),
    "two arguments": (shard_alike, [("x",), None]),
    "mapped": (jax.vmap(shard_alike, in_axes=(0, 1)), [("x", "y"), ("y", "x")]),
    "other shapes": (lambda x: shard_alike(x, x[:4]), [("x",)]),
    "differentiated": (
        jax.grad(lambda x: sum(a.sum() for a in shard_alike(x * x, jnp.sin(X)))),
        [("x",)],
    ),
}


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jax 0.11 has no shard_alike")
@pytest.mark.parametrize("name", ALIKE)
def test_values_sharded_alike(name):
    fn, specs = ALIKE[name]
    args = [X if s is None else put(*s) for s in specs]
    assert_same_outcome(lambda jit: jit(fn)(*args))


def test_programs_in_programs():
    def nest(jit):
        halves = NamedSharding(MESH, P("x")), NamedSharding(MESH, P("x", "y"))
        inner = jit(partial(jnp.matmul, X), in_shardings=halves[0], out_shardings=halves[1])
        return jit(lambda x: jax.jit(lambda y: inner(y) + 1)(x * 2))(put("x"))

    assert_same_outcome(nest)


def until(x):
    """Doubled until it is beyond its own size."""

    def one(v):
        return lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], c[2] * 2), v)[2]

    return jax.vmap(lambda v: one((jnp.zeros(()), jnp.abs(v) * 3, v)))(x)


def test_loops_that_end_one_by_one():
    def summed_too(x):
        return lax.psum(until(x), "x")

    for inner, outs in ((until, P("x")), (summed_too, P())):
        fn = region(inner, in_specs=P("x"), out_specs=outs)
        assert_same_outcome(lambda jit, fn=fn: jit(fn)(X[0]), places=False)
    mapped = jax.vmap(region(until, in_specs=P("x"), out_specs=P("x")))
    assert_same_outcome(lambda jit: jit(mapped)(X), places=False)


def test_exchanges_along_an_axis_of_one_device():
    one = mesh_of(4, 1, names="ab")

    def exchanged(x, tiled):
        return lax.all_to_all(x if tiled else x[None], "b", 0, 1, tiled=tiled).reshape(x.shape)

    for tiled in (False, True):
        fn = region(partial(exchanged, tiled=tiled), one, in_specs=P("a"), out_specs=P("a"))
        assert_same_outcome(lambda jit, fn=fn: jit(fn)(X), places=False)


@pytest.mark.parametrize("around", ["nothing", "a scan"])
def test_what_is_recomputed_stays_behind_a_barrier(around):
    """Or it would be merged with what it recomputes, and all of it held."""

    def layer(x, _):
        return jax.checkpoint(lambda x: x + jnp.tanh(jnp.sin(x)))(x), None

    def loss(x):
        if around == "nothing":
            return layer(layer(x, None)[0], None)[0].sum()
        return lax.scan(layer, x, None, length=3)[0].sum()

    grad = region(jax.grad(loss), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    step = mw.jit(grad, mesh=MESH, in_shardings=(P("x"),))
    assert "optimization_barrier" in str(step.partition(X).jaxpr)
    assert_same_outcome(lambda jit: jit(grad)(X), places=False)
