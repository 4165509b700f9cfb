"""What a program does beside its results: calls of the host, prints, inspections, settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback, xla_metadata
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.drop_in.same import X, assert_same_outcome, mesh_of, put

MESH = mesh_of(4, 2)
SCALAR = jax.ShapeDtypeStruct((), np.float32)
WHERE = {
    "one device": lambda: X,
    "rows": lambda: put("x"),
    "blocks": lambda: put("x", "y"),
    "whole": put,
}


def printed(text, *values, **options):
    jax.debug.print(text, *values, **options)
    return values[-1]


def row_by_row(x):
    return lax.scan(lambda c, r: (printed("c {}", c + r), printed("s {}", c.sum())), x[0], x)


def choosing(x):
    x = lax.fori_loop(0, 3, lambda i, c: c + printed("i {}", i), x)
    return lax.cond(
        x[0, 0] > 1, lambda v: printed("T {}", v[0]) * v, lambda v: printed("F {}", v[1]) * v, x
    )


PRINTS = {
    "sums": lambda x: printed("{} {}", x.shape[0], x.max()) + x,
    "in order": lambda x: printed("{}", x.max(), ordered=True) + printed("{}", x[0], ordered=True),
    "a part": lambda x: printed("{}", x[:2, 3:5]),
    "nothing": lambda x: (jax.debug.print("hello"), x)[1],
    "no result": lambda x: jax.debug.print("{}", x.max()),
    "in a scan": row_by_row,
    "in a loop and a choice": choosing,
    "of each row": jax.vmap(lambda r: printed("{}", r.max()) * r),
    "of a gradient": jax.grad(lambda x: (printed("{}", x.max()) * x).sum()),
}


@pytest.mark.parametrize("name", PRINTS)
def test_prints(name):
    for where in ("rows", "blocks"):
        assert_same_outcome(
            lambda jit, where=where: jit(PRINTS[name])(WHERE[where]()), places=False
        )


def test_prints_in_order_are_refused_on_several_devices():
    fn = PRINTS["in order"]
    with pytest.raises(mw.MeshError, match="in order, and its mesh has 8 devices"):
        mw.jit(fn, mesh=MESH)(X)
    one = mesh_of(1)
    assert_same_outcome(lambda jit: jit(fn)(put(mesh=one)))


def test_prints_of_calls_in_traces():
    fn = PRINTS["sums"]
    assert_same_outcome(lambda jit: jax.vmap(jit(fn))(put("x")), places=False)
    assert_same_outcome(lambda jit: jax.grad(lambda x: jit(fn)(x).sum())(put("x")), places=False)
    assert_same_outcome(lambda jit: jax.jit(lambda x: jit(fn)(x) * 2)(put("x")), places=False)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_the_host_is_called_once(where, ordered):
    """Twice a call, in order where that was asked for."""

    def calls(jit):
        log = []

        def told(a):
            log.append(round(float(np.asarray(a).sum()), 3))
            return np.float32(a.max())

        def fn(x):
            first = io_callback(told, SCALAR, x, ordered=ordered)
            return first + io_callback(told, SCALAR, x * first, ordered=ordered) * x

        step = jit(fn)
        outs = step(WHERE[where]()), step(WHERE[where]() + 1)
        jax.block_until_ready(outs)
        jax.effects_barrier()
        return *outs, np.array(log)

    assert_same_outcome(calls, places=False)


TYPES = ["float32", "bfloat16", "int8", "uint32", "bool", "complex64", "float16"]


@pytest.mark.parametrize("dtype", TYPES)
def test_answers_of_the_host_reach_every_device(dtype):
    """Minus zero and what is no number included."""
    answer = np.array([-0.0, 1, 3.5, 100], np.float32).astype(jnp.dtype(dtype))

    def fn(x):
        told = io_callback(lambda a: answer, jax.ShapeDtypeStruct((4,), dtype), x)
        return told, jnp.tile(told, 4)

    told, tiled = mw.jit(fn, out_shardings=NamedSharding(MESH, P()))(put("x"))
    for shard in told.addressable_shards:
        assert np.asarray(shard.data).tobytes() == answer.tobytes()
    assert np.asarray(tiled).tobytes() == np.tile(answer, 4).tobytes()


PURE = {
    "sine": lambda x: jax.pure_callback(np.sin, x, x) * 2,
    "sum": lambda x: jax.pure_callback(lambda a: np.float32(np.sum(a)), SCALAR, x) + x,
    "mapped": jax.vmap(
        lambda r: jax.pure_callback(lambda a: np.sort(a, -1), r, r, vmap_method="broadcast_all")
    ),
    "one by one": jax.vmap(
        lambda r: jax.pure_callback(lambda a: np.sort(a, -1), r, r, vmap_method="sequential")
    ),
    "differentiated": jax.grad(lambda x: jax.pure_callback(np.sum, SCALAR, x)),
}


@pytest.mark.parametrize("name", PURE)
def test_pure_functions_of_the_host(name):
    assert_same_outcome(lambda jit: jit(PURE[name])(put("x")), places=False)
    there = NamedSharding(MESH, P("x"))
    assert_same_outcome(lambda jit: jit(lambda x: PURE[name](x) * 1, out_shardings=there)(put("y")))


def test_answers_of_another_shape():
    """Under jax 0.11's own jit the process ends."""

    def wrong(x):
        return jax.pure_callback(lambda a: np.zeros(2, "f"), SCALAR, x)

    with pytest.raises(Exception, match="shape"):
        jax.block_until_ready(mw.jit(wrong)(put("x")))


def test_callbacks_that_are_told_parts():
    def calls(jit, partitioned):
        seen = []

        def fn(x):
            jax.debug.callback(lambda a: seen.append(np.shape(a)), x, partitioned=partitioned)
            return x

        jax.block_until_ready(jit(fn)(put("x", "y")))
        jax.effects_barrier()
        return len(seen), np.array(sorted(seen))

    for partitioned in (True, False):
        assert_same_outcome(lambda jit, p=partitioned: calls(jit, p))


def test_inspections_are_told_what_was_decided():
    def seen_by(jit, fn, arg):
        seen = []
        jax.block_until_ready(jit(lambda x: fn(x, seen.append))(arg))
        return len(seen), seen[0].is_equivalent_to(NamedSharding(MESH, P("x")), 2)

    def constrained(x, tell):
        y = lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("x")))
        jax.debug.inspect_array_sharding(y, callback=tell)
        return y

    def argument(x, tell):
        jax.debug.inspect_array_sharding(x, callback=tell)
        return x

    assert_same_outcome(lambda jit: seen_by(jit, constrained, put("x", "y")))
    assert_same_outcome(lambda jit: seen_by(jit, argument, put("x")))

    def drawn(jit):
        return jit(lambda x: (jax.debug.visualize_array_sharding(x), x)[1])(put("x", "y"))

    assert_same_outcome(drawn)


def on_the_host(x):
    with compute_on("device_host"):
        y = jnp.sin(x)
    return y * 3


def by_metadata(x):
    with set_xla_metadata(a="b"):
        return jnp.sin(x) * 2


def in_a_scope(x):
    with jax.named_scope("there"):
        return x * 2


WORDS = {
    "compute_on": on_the_host,
    "compute_on, differentiated": jax.grad(lambda x: on_the_host(x).sum()),
    "metadata": by_metadata,
    "metadata of a value": lambda x: set_xla_metadata(x * 2, a="b"),
    "a scope": in_a_scope,
    "a barrier": lambda x: lax.optimization_barrier((x * 2, x.max())),
    "a platform": lambda x: lax.platform_dependent(x, cpu=lambda v: v * 2, default=lambda v: v * 3),
}
if hasattr(xla_metadata, "xla_metadata_call"):  # since JAX 0.11
    WORDS["metadata of a function"] = xla_metadata.xla_metadata_call(lambda x: x * 2, a="b")


@pytest.mark.parametrize("name", WORDS)
def test_words_around_a_computation(name):
    assert_same_outcome(lambda jit: jit(WORDS[name])(put("x")))


SETTINGS = {
    "leaks, none": (jax.checking_leaks, lambda x: x * 2),
    "no numbers, none": (lambda: jax.debug_nans(True), jnp.sin),
    "no numbers": (lambda: jax.debug_nans(True), lambda x: jnp.log(x - 100)),
    "infinite": (lambda: jax.debug_infs(True), lambda x: 1 / (x - x)),
    "not compiled": (jax.disable_jit, lambda x: x * 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    setting, fn = SETTINGS[name]

    def run(jit):
        with setting():
            return jit(fn)(put("x"))

    assert_same_outcome(run)


def test_order_over_calls():
    def run(jit):
        log = []

        def noted(letter):
            def note(a):
                log.append(f"{letter}{int(a)}")
                return np.float32(a)

            return jit(lambda x: io_callback(note, SCALAR, x.max(), ordered=True))

        steps = [noted("f"), noted("g")]
        for i in range(3):
            for step in steps:
                step(put("x", x=np.full(8, i, np.float32)))
        jax.effects_barrier()
        return np.array(log)

    assert_same_outcome(run)
