"""What holds of the timeline of any program, on any machine."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from meshwise.cost.hardware import Hardware
from meshwise.cost.links import Links
from meshwise.cost.orders import Ordered, orders_of
from meshwise.cost.timeline import timeline
from tests.cost.timelines import (
    NS,
    PRODUCT,
    REDUCE_B,
    SHIFT,
    SIZES,
    X,
    array,
    run,
    traced,
)


@st.composite
def programs(draw):
    """Random programs over both axes, as a function of their arguments' size and its steps."""
    steps = draw(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=14))

    def function(*arguments):
        values = list(arguments)
        for kind, first, second in steps:
            x, y = values[first % len(values)], values[second % len(values)]
            match kind:
                case 0 | 1:
                    made = x @ y
                case 2:
                    made = jnp.tanh(x) + y
                case 3:
                    made = lax.psum(x, "a")
                case 4:
                    made = lax.psum(x, "b")
                case 5:
                    made = lax.psum(x, ("b", "a"))
                case 6:
                    made = lax.ppermute(x, "b", SHIFT)
                case 7:
                    made = lax.all_gather(x[: len(x) // 4], "b", tiled=True) * y
                case 8:
                    made = lax.scan(lambda x, y: (lax.psum(x * y, "a"), None), x, y)[0]
                case _:
                    made = x - x.mean(0)
            values.append(made)
        return values[len(arguments) :]

    return function


speeds = st.sampled_from([1e7, 1e8, 1e9, 1e11])


@st.composite
def machines(draw):
    device = Hardware("m", draw(speeds), 1e-6, draw(speeds), draw(speeds), "drawn", kernel_s=1e-7)
    return Links(device, (("a", replace(device, link_bytes_per_s=draw(speeds))),))


@given(programs(), machines())
def test_laws_of_any_timeline(function, machine):
    """Overlap never takes longer than one after another, nor less than any bound."""
    serial = run(function, X, X, hardware=machine, overlaps=False)
    found = run(function, X, X, hardware=machine)
    least = 1 - 1e-9
    assert found.seconds * least <= serial.seconds
    assert found.seconds >= found.longest_chain_s * least
    assert found.seconds >= max(found.busy_seconds.values()) * least
    assert serial.longest_chain_s >= found.longest_chain_s * least
    for timed in (serial, found):
        ends: dict[str, float] = {}
        for event in timed.events:  # in order of their starts
            assert event.start_s >= ends.get(event.resource, 0.0) * least
            ends[event.resource] = event.end_s
        assert max(ends.values()) == timed.seconds
        path = timed.critical_path
        assert path[0].start_s == 0.0 and path[-1].end_s == timed.seconds
        assert all(a.end_s == b.start_s for a, b in itertools.pairwise(path))


@given(programs(), machines(), st.sampled_from([1.5, 4.0, 50.0]))
def test_more_work_never_ends_sooner(function, machine, factor):
    """Slower arithmetic, memory or links, and longer launches, never shorten a timeline."""
    jaxpr = traced(function, X, X)
    device = machine.device
    slower = [
        replace(device, flops_per_s=device.flops_per_s / factor),
        replace(device, memory_bytes_per_s=device.memory_bytes_per_s / factor),
        replace(device, link_bytes_per_s=device.link_bytes_per_s / factor),
        replace(device, launch_s=device.launch_s * factor),
        replace(device, kernel_s=device.kernel_s * factor),
    ]
    for overlaps in (False, True):
        before = timeline(jaxpr, SIZES, machine, overlaps=overlaps).seconds
        for changed in slower:
            links = replace(machine, device=changed)
            after = timeline(jaxpr, SIZES, links, overlaps=overlaps).seconds
            assert after >= before * (1 - 1e-9)


@given(programs(), machines())
def test_larger_arrays_never_end_sooner(function, machine):
    small, large = [
        run(function, array(*[n] * 2), array(*[n] * 2), hardware=machine).seconds for n in (8, 16)
    ]
    assert large >= small * (1 - 1e-9)


@given(programs(), machines())
def test_the_same_program_has_the_same_timeline(function, machine):
    first, second = (run(function, X, X, hardware=machine) for _ in range(2))
    assert first == second and str(first) == str(second)


@given(st.lists(st.tuples(st.sets(st.integers(0, 40)), st.integers(0, 3)), max_size=40))
def test_every_order_takes_all_tasks_after_what_they_wait_for(drawn):
    kinds = ("compute",), ("link a",), ("link b",), ("link a", "link b")
    tasks = [
        Ordered(kinds[kind], tuple(sorted(w % k for w in waits if k)), bool(kind))
        for k, (waits, kind) in enumerate(drawn)
    ]
    orders = orders_of(tasks)
    assert orders[0] == list(range(len(tasks)))
    for order in orders:
        place = {k: i for i, k in enumerate(order)}
        assert sorted(order) == orders[0]
        assert all(place[w] < place[k] for k, task in enumerate(tasks) for w in task.waits)


def test_gathers_do_not_hold_up_what_is_needed_sooner():
    """One link for weights of all layers and for sums that the next layer waits for."""

    def function(x, *tiles):
        for tile in tiles:
            x = lax.psum(x @ lax.all_gather(tile, "b", tiled=True), "b")
        return x

    found = run(function, X, *[array(2, 8)] * 6)
    gather = 1000 + 10 * 192
    link = 6 * (gather + REDUCE_B)
    assert found.seconds == pytest.approx((link + PRODUCT) * NS)
