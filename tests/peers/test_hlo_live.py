"""XLA's collectives, read from programs compiled here, on a mesh x=2, y=4 of CPU devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peers import hlo


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def sharded(*spec):
    return NamedSharding(mesh(), P(*spec))


def live(function, out, *arguments, which="shardy", stage="partitioned"):
    """The report of a function of arrays given as (shape, spec)."""
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharded(*spec))
        for shape, spec in arguments
    ]
    with hlo.partitioner(which):
        lowered = jax.jit(function, out_shardings=out).lower(*structs)
        return hlo.read(lowered, stage)


BOTH = pytest.mark.parametrize("which", hlo.PARTITIONERS)
STAGES = pytest.mark.parametrize("stage", ["partitioned", "final"])


@BOTH
@STAGES
def test_live_contraction_is_an_all_reduce(which, stage):
    arguments = ((16, 32), (None, "y")), ((32, 8), ("y", None))
    report = live(jnp.matmul, sharded(), *arguments, which=which, stage=stage)
    (found,) = report.collectives
    assert (found.kind, found.shapes, found.dtypes) == ("all_reduce", ((16, 8),), ("f32",))
    assert found.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.wire_bytes == found.credited_bytes == 1.5 * 16 * 8 * 4


@BOTH
@STAGES
def test_live_contraction_with_a_sharded_output_is_credited(which, stage):
    arguments = ((16, 32), (None, "y")), ((32, 8), ("y", None))
    report = live(jnp.matmul, sharded("y"), *arguments, which=which, stage=stage)
    assert report.by_kind == {"all_reduce": 1}
    assert report.wire_bytes == 1.5 * 16 * 8 * 4
    assert report.credited_bytes == 0.75 * 16 * 8 * 4


@BOTH
@STAGES
def test_live_reshard_is_an_all_to_all(which, stage):
    report = live(jnp.sin, sharded(None, "y"), ((16, 32), ("y", None)), which=which, stage=stage)
    (found,) = report.collectives
    assert found.kind == "all_to_all"
    assert found.wire_bytes == 0.75 * 4 * 32 * 4


@BOTH
@STAGES
def test_live_scan_counts_its_trips(which, stage):
    def loop(x, w):
        def body(carry, _):
            hidden = lax.with_sharding_constraint(carry @ w, sharded(None, None))
            return lax.with_sharding_constraint(hidden, sharded(None, "y")), None

        return lax.scan(body, x, None, length=6)[0]

    arguments = ((16, 32), (None, "y")), ((32, 32), ("y", None))
    report = live(loop, sharded(None, "y"), *arguments, which=which, stage=stage)
    assert not report.unknown_trips
    assert report.by_kind == {"all_reduce": 6}
    assert report.wire_bytes == 6 * 1.5 * 16 * 32 * 4
    assert report.credited_bytes == report.wire_bytes / 2


def test_live_gather_and_permute():
    report = live(lambda x: jnp.roll(x, 1, axis=0), sharded("y"), ((16, 32), ("y", None)))
    assert report.by_kind == {"ppermute": 1}
    report = live(jnp.cos, sharded(), ((16, 32), ("y", None)))
    assert report.by_kind == {"all_gather": 1}
    assert report.wire_bytes == 3 * 4 * 32 * 4


def test_one_device_has_no_collectives():
    lowered = jax.jit(jnp.sin).lower(jnp.ones(4))
    assert hlo.read(lowered) == hlo.Report(())


def test_the_partitioner_is_put_back():
    before = jax.config.jax_use_shardy_partitioner
    with hlo.partitioner("gspmd"):
        assert not jax.config.jax_use_shardy_partitioner
    assert jax.config.jax_use_shardy_partitioner == before


def times_weights(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]


def times_weights_twice(x, w):
    return lax.scan(lambda c, _: (times_weights(c, w), None), x, None, length=3)[0]


def times_weights_where(x, w):
    def step(c, _):
        return lax.cond(c.sum() > 0, lambda c: jnp.tanh(c @ w), lambda c: c, c), None

    return lax.scan(step, x, None, length=5)[0]


@BOTH
@pytest.mark.parametrize(
    ("function", "trips", "most"),
    [(times_weights, 5, 1), (times_weights_twice, 15, 1), (times_weights_where, 5, 5)],
)
def test_live_what_is_the_same_in_every_trip_is_credited_once(function, trips, most, which):
    """XLA's compiler takes it out of loops, but not out of branches."""
    ends = ((64, 64), ("y", None)), ((64, 64), ("y", None))
    once = 0.75 * 64 * 64 * 4
    report = live(function, sharded("y", None), *ends, which=which)
    gathers = [c for c in report.collectives if c.kind == "all_gather"]
    assert sum(c.wire_bytes for c in gathers) == trips * once
    assert sum(c.credited_bytes for c in gathers) == most * once
    final = live(function, sharded("y", None), *ends, which=which, stage="final")
    kept = sum(c.wire_bytes for c in final.collectives if c.kind == "all_gather")
    assert kept == most * once
