"""Timelines: exact on programs timed by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwise.cost.communication import wire_seconds
from meshwise.cost.hardware import CPU, GENERIC, H100
from meshwise.cost.links import Links
from meshwise.cost.timeline import timeline
from meshwise.ir.collectives import collectives_of
from tests.cost.timelines import (
    ELEMENTS,
    MACHINE,
    NS,
    PRODUCT,
    REDUCE_A,
    REDUCE_B,
    SHIFT,
    SIZES,
    X,
    array,
    run,
    shown,
    traced,
)


def test_a_chain_takes_all_its_parts():
    def function(x, w):
        return jnp.tanh(lax.psum(x @ w, "a")) * 2

    expected = [
        ("dot_general", "compute", 0, PRODUCT),
        ("psum", "link a", PRODUCT, PRODUCT + REDUCE_A),
        ("mul", "compute", PRODUCT + REDUCE_A, PRODUCT + REDUCE_A + ELEMENTS),
    ]
    for overlaps in (False, True):
        found = run(function, X, X, overlaps=overlaps)
        assert shown(found) == expected
        assert found.seconds == pytest.approx((PRODUCT + REDUCE_A + ELEMENTS) * NS)
        assert found.longest_chain_s == pytest.approx(found.seconds)
        assert found.exposed_seconds == pytest.approx(REDUCE_A * NS)
        assert found.critical_path == found.events
        assert found.busy_seconds == pytest.approx(
            {"compute": (PRODUCT + ELEMENTS) * NS, "link a": REDUCE_A * NS}
        )


def test_events_name_their_equations():
    jaxpr = traced(lambda x, w: jnp.tanh(lax.psum(x @ w, "a")) * 2, X, X)
    found = timeline(jaxpr, SIZES, MACHINE, overlaps=True)
    names = [jaxpr.jaxpr.eqns[e.equation].primitive.name for e in found.events]
    assert names == ["dot_general", "psum", "mul"]


def test_two_links_at_once():
    def function(x, y):
        return lax.psum(x, "a"), lax.psum(y, "b")

    one_by_one = run(function, X, X, overlaps=False)
    assert shown(one_by_one) == [
        ("psum", "link a", 0, REDUCE_A),
        ("psum", "link b", REDUCE_A, REDUCE_A + REDUCE_B),
    ]
    both = run(function, X, X)
    assert shown(both) == [("psum", "link a", 0, REDUCE_A), ("psum", "link b", 0, REDUCE_B)]
    assert both.seconds == pytest.approx(REDUCE_B * NS)


def test_one_link_takes_one_at_a_time():
    def function(x, y):
        return lax.psum(x, "a"), lax.psum(y, "a")

    assert run(function, X, X).seconds == pytest.approx(2 * REDUCE_A * NS)
    shared = Links(MACHINE, shared=(("a", "b"),))
    both = run(lambda x, y: (lax.psum(x, "a"), lax.psum(y, "b")), X, X, hardware=shared)
    assert [e.resource for e in both.events] == ["link a+b"] * 2
    assert both.seconds == pytest.approx((REDUCE_A + REDUCE_B) * NS)


def ring(x, w, steps):
    """A product with every device's tile, each sent on while it is multiplied."""
    products = []
    for step in range(steps):
        products.append(x @ w)
        if step + 1 < steps:
            x = lax.ppermute(x, "b", SHIFT)
    return products


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_ring_hides_all_but_the_longer_of_the_two(steps):
    """The first product starts at once, and the last after the last tile has come."""
    sent = 1000 + 10 * 256
    serial = run(lambda x, w: ring(x, w, steps), X, X, overlaps=False)
    overlapped = run(lambda x, w: ring(x, w, steps), X, X)
    assert serial.seconds == pytest.approx((steps * PRODUCT + (steps - 1) * sent) * NS)
    assert overlapped.seconds == pytest.approx(((steps - 1) * sent + PRODUCT) * NS)
    fast = replace(MACHINE, link_bytes_per_s=1e12, launch_s=1e-7)
    hidden = run(lambda x, w: ring(x, w, steps), X, X, hardware=fast)
    assert hidden.seconds == pytest.approx(steps * PRODUCT * NS)
    assert hidden.exposed_seconds == pytest.approx(0.0, abs=1e-12)


def test_gradients_are_reduced_beside_the_next_layer():
    """Each update is written after its own reduction: it must not hold up the next product."""

    def function(x, *ws):
        made = []
        for w in ws:
            x = x @ w
            made.append(w - lax.psum(x @ x, "b"))
        return made

    found = run(function, *[X] * 5)
    update = 500 + 3 * 256
    # The reductions follow each other from the end of the second product on.
    assert found.seconds == pytest.approx((2 * PRODUCT + 4 * REDUCE_B + update) * NS)
    products = [e for e in found.events if e.name == "dot_general"]
    assert products[-1].end_s == pytest.approx(8 * PRODUCT * NS)


# --- times of kernels and collectives ---


def test_a_kernel_takes_its_flops_or_its_bytes():
    slow_memory = replace(MACHINE, memory_bytes_per_s=1e8)
    assert run(jnp.matmul, X, X).seconds == pytest.approx(PRODUCT * NS)
    found = run(jnp.matmul, X, X, hardware=slow_memory)
    assert found.seconds == pytest.approx((500 + 10 * 768) * NS)


COLLECTIVES = {
    "all_reduce": lambda x: lax.psum(x, "b"),
    "all_gather": lambda x: lax.all_gather(x, "b", tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(x, "b", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "b", 0, 1, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "b", SHIFT),
}


@pytest.mark.parametrize("hardware", [GENERIC, CPU, H100, MACHINE], ids=lambda h: h.name)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_takes_its_wire_seconds(name, hardware):
    [collective] = collectives_of(traced(COLLECTIVES[name], X), SIZES)
    assert collective.kind == name
    expected = wire_seconds(collective.kind, collective.wire_bytes, hardware)
    assert run(COLLECTIVES[name], X, hardware=hardware).seconds == pytest.approx(expected)


def test_a_gather_of_a_minor_dim_costs_what_the_machine_says():
    def gather(axis):
        return lambda x: lax.all_gather(x, "b", axis=axis, tiled=True)

    major, minor = (run(gather(axis), X, hardware=CPU).seconds for axis in (0, 1))
    launch = CPU.start_s("all_gather")
    assert (minor - launch) / (major - launch) == pytest.approx(4.5 / 1.5)


@pytest.mark.parametrize("name", [n for n in COLLECTIVES if n != "ppermute"])
def test_over_several_alike_links_it_is_one_ring(name):
    text = {
        "all_reduce": lambda x: lax.psum(x, ("a", "b")),
        "all_gather": lambda x: lax.all_gather(x, ("a", "b"), tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, ("a", "b"), tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, ("a", "b"), 0, 1, tiled=True),
    }[name]
    [collective] = collectives_of(traced(text, X), SIZES)
    expected = wire_seconds(collective.kind, collective.wire_bytes, MACHINE)
    found = run(text, X)
    assert found.seconds == pytest.approx(expected)
    assert {e.resource for e in found.events} == {"link a", "link b"}


SLOW = replace(MACHINE, link_bytes_per_s=1e7, launch_s=3e-6)  # ten times slower, a longer launch
TWO_SPEEDS = Links(MACHINE, (("a", SLOW),))


def test_over_links_of_two_speeds_the_slow_one_carries_shards():
    """Of 256 bytes, the four devices of `b` reduce 3/4 each, then the two of `a` half of 1/4."""
    found = run(lambda x: lax.psum(x, ("a", "b")), X, hardware=TWO_SPEEDS)
    assert found.seconds == pytest.approx((3000 + 10 * 2 * 192 + 100 * 2 * 32) * NS)
    scattered = run(lambda x: lax.psum_scatter(x, ("a", "b"), tiled=True), X, hardware=TWO_SPEEDS)
    assert scattered.seconds == pytest.approx((3000 + 10 * 192 + 100 * 32) * NS)
    gathered = run(lambda x: lax.all_gather(x, ("a", "b"), tiled=True), X, hardware=TWO_SPEEDS)
    assert gathered.seconds == pytest.approx((3000 + 10 * 8 * 192 + 100 * 8 * 32) * NS)
    exchanged = run(
        lambda x: lax.all_to_all(x, ("a", "b"), 0, 1, tiled=True), X, hardware=TWO_SPEEDS
    )
    assert exchanged.seconds == pytest.approx((3000 + 100 * 128 + 10 * 96) * NS)
    sent = run(lambda x: lax.ppermute(x, ("a", "b"), [(0, 1), (1, 0)]), X, hardware=TWO_SPEEDS)
    assert sent.seconds == pytest.approx((3000 + 100 * 256) * NS)


def test_sub_axes_run_over_the_link_of_their_axis():
    links = Links(MACHINE, (("model", SLOW),))
    assert links.figures("model.1") is SLOW and links.name("model.1") == "link model"[5:]
    assert links.figures("data") is MACHINE and links.name("data") == "data"
    assert Links(MACHINE, (("v.1", SLOW),)).figures("v.1") is SLOW


# --- loops, choices, calls ---


def test_a_loop_is_its_body_times_its_trips():
    def body(x, _):
        return lax.psum(x @ x, "a"), None

    found = run(lambda x: lax.scan(body, x, None, length=7)[0], X)
    assert found.seconds == pytest.approx(7 * (PRODUCT + REDUCE_A) * NS)
    assert {e.resource for e in found.events} == {"compute", "link a"}
    assert {e.name for e in found.events} == {"scan x7"}
    assert found.exposed_seconds == pytest.approx(7 * REDUCE_A * NS)
    assert found.busy_seconds["link a"] == pytest.approx(7 * REDUCE_A * NS)


def test_beside_a_loop_only_links_that_it_leaves_free():
    def body(x, _):
        return lax.psum(x @ x, "a"), None

    def function(x, y, axis):
        return lax.scan(body, x, None, length=7)[0], lax.psum(y, axis)

    loop = 7 * (PRODUCT + REDUCE_A)
    beside = run(lambda x, y: function(x, y, "b"), X, X)
    after = run(lambda x, y: function(x, y, "a"), X, X)
    assert beside.seconds == pytest.approx(loop * NS)
    assert after.seconds == pytest.approx((loop + REDUCE_A) * NS)


def test_the_longest_branch_counts_and_a_while_loop_says_that_it_counts_once():
    def choice(x):
        return lax.cond(x[0, 0] > 0, lambda: lax.psum(x, "b"), lambda: lax.psum(x, "a"))

    found = run(choice, X)
    assert found.busy_seconds["link b"] == pytest.approx(REDUCE_B * NS)
    assert "link a" not in found.busy_seconds
    assert found.notes == ("of a choice the longest branch is counted",)
    loop = run(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: lax.psum(x, "a"), x), X)
    assert loop.busy_seconds["link a"] == pytest.approx(REDUCE_A * NS)
    assert "counted once" in str(loop)


def test_a_fused_call_with_collectives_hides_the_shorter_of_the_two():
    def fused_update(x, w):
        tile = lax.psum_scatter(x, "b", tiled=True)
        return lax.all_gather(tile * 2 + w, "b", tiled=True)

    def apart(x, w):
        return fused_update(x, w)

    tile = array(2, 8)
    one = run(jax.jit(fused_update), X, tile)
    sent = 1000 + 10 * 384
    assert one.seconds == pytest.approx(sent * NS)
    assert {e.resource for e in one.events} == {"compute", "link b"}
    assert run(apart, X, tile).seconds > one.seconds
