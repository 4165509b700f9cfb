"""Timelines: exact on programs timed by hand, laws on random ones, and what the text shows."""

import itertools
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import make_jaxpr_over_axes
from meshwise.cost.communication import wire_seconds
from meshwise.cost.gantt import Event, draw, show_seconds
from meshwise.cost.hardware import CPU, DGX2_RING, DGX2_SHARED_CARDS, GENERIC, H100, V100, Hardware
from meshwise.cost.links import Links, dgx2
from meshwise.cost.orders import Ordered, orders_of
from meshwise.cost.timeline import timeline
from meshwise.ir.collectives import collectives_of

SIZES = {"a": 2, "b": 4}

# One flop and one byte of memory a nanosecond, a byte of wire in ten; a launch of a microsecond for
# a collective, half of one for a kernel.
MACHINE = Hardware("test", 1e8, 1e-6, 1e9, 1e9, "made up", kernel_s=0.5e-6)
NS = 1e-9


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def traced(function, *args):
    return make_jaxpr_over_axes(function, list(SIZES.items()), args)


def run(function, *args, hardware=MACHINE, overlaps=True):
    return timeline(traced(function, *args), SIZES, hardware, overlaps=overlaps)


def shown(found):
    """Events as (first word of the name, resource, start, end) in nanoseconds."""
    return [
        (e.name.split()[0], e.resource, round(e.start_s / NS), round(e.end_s / NS))
        for e in found.events
    ]


X = array(8, 8)  # 256 bytes, 64 elements
PRODUCT = 500 + 1024  # ns: 2 * 8 * 8 * 8 flops take longer than 768 bytes
ELEMENTS = 500 + 512  # ns: of one operand, read and written
REDUCE_A = 1000 + 10 * 256  # ns: 2 * 1/2 * 256 bytes over two devices
REDUCE_B = 1000 + 10 * 384  # ns: 2 * 3/4 * 256 bytes over four


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


SHIFT = [(i, (i + 1) % 4) for i in range(4)]


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
    assert (minor - CPU.launch_s) / (major - CPU.launch_s) == pytest.approx(10 / 3.5)


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


# --- laws ---


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


# --- an emitted program ---


def mlp_step(first, second, x, y):
    def loss(weights):
        return jnp.mean((jax.nn.gelu(x @ weights[0]) @ weights[1] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)((first, second))
    return value, [w - 0.1 * g for w, g in zip((first, second), gradients, strict=True)]


def emitted():
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = (P(None, "model"), P("model", None), P("data", None), P("data", None))
    args = array(1024, 4096), array(4096, 1024), array(2048, 1024), array(2048, 1024)
    return mw.jit(mlp_step, mesh=mesh, in_shardings=specs).partition(*args)


def test_an_emitted_step_hides_gradients_behind_products():
    program = emitted()
    sizes = program.per_device.mesh.axis_size
    machine = dgx2(inside=("model",), between=("data",))
    serial, found = (
        timeline(program.jaxpr, sizes, machine, overlaps=overlaps) for overlaps in (False, True)
    )
    sent = sum(machine.seconds(c, sizes) for c in program.collectives)
    assert serial.exposed_seconds == pytest.approx(sent)
    assert serial.seconds == pytest.approx(sum(serial.busy_seconds.values()))
    assert set(found.busy_seconds) == {"compute", "link data", "link model"}
    assert found.exposed_seconds < serial.exposed_seconds
    assert found.busy_seconds == pytest.approx(serial.busy_seconds)


def test_the_text_fits_and_lists_what_takes_longest():
    program = emitted()
    sizes = program.per_device.mesh.axis_size
    found = timeline(program.jaxpr, sizes, dgx2(("model",), ("data",)), overlaps=True)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.endswith("|")]
    assert [row.split()[0] for row in rows] == ["compute", "link", "link"]
    longest = max(found.events, key=lambda e: e.seconds)
    assert any(longest.name in line and show_seconds(longest.seconds) in line for line in lines)


def test_the_row_of_a_chart_is_to_scale():
    lines = str(run(lambda x: jnp.tanh(lax.psum(x, "a")), X)).splitlines()
    compute, link = (line.split("|")[1] for line in lines if line.endswith("|"))
    columns = len(link)
    reduce = round(columns * REDUCE_A / (REDUCE_A + ELEMENTS))
    assert abs(link.count("A") - reduce) <= 1 and abs(compute.count("B") - columns + reduce) <= 1
    assert link.rstrip(".-") == "A" * link.count("A") and compute.lstrip(".-")[0] == "B"


def test_a_column_shows_how_much_of_it_is_filled():
    """Of a hundred columns, 93 are time, beside the name."""
    width = 1.0 / 93
    spans = [(0, 0.01), (1, 1.2), (2, 2.6), (3, 3.3), (3.3, 3.6), (4, 6)]
    events = [Event("e", "link", a * width, b * width, 0) for a, b in spans]
    row = draw(events, ["link"], 1.0).splitlines()[0].split("|")[1]
    assert len(row) == 93
    assert row[:3] == ".-" + row[2] and row[2].isalpha()
    assert row[3] == "#" and row[4] == row[5] and row[4].isalpha()
    assert set(row[6:]) == {"."}


def test_the_trace_is_what_perfetto_reads():
    found = run(lambda x, y: jnp.tanh(lax.psum(x, "a") + lax.psum(y, "b")), X, X)
    events = json.loads(found.to_chrome_trace())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert sorted(tracks.values()) == ["compute", "link a", "link b"]
    expected = [Event(e.name, e.resource, e.start_s * 1e6, 0, 0) for e in found.events]
    assert [(e["name"], tracks[e["tid"]], e["ts"]) for e in spans] == [
        (e.name, e.resource, e.start_s) for e in expected
    ]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(found.seconds * 1e6)


def test_a_program_that_does_nothing():
    for overlaps in (False, True):
        found = run(lambda x: x, X, overlaps=overlaps)
        assert found.seconds == 0.0 and found.events == found.critical_path == ()
        assert "0 s" in str(found) and json.loads(found.to_chrome_trace())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (1.5, "1.5 s"), (0.99999, "1 s"), (2e-3, "2 ms"), (3.14159e-6, "3.14 us")],
)
def test_times_as_text(seconds, text):
    assert show_seconds(seconds) == text


# --- the machine of the paper ---


def test_rings_over_all_nodes_take_what_a_reduction_by_levels_takes():
    """A ring over 256 devices, and the same by node: alike but for the launches."""
    size = 2**28
    flat = Links(V100, (("all", DGX2_RING),))
    levels = dgx2(inside=("gpu",), between=("node",))
    x = array(size // 4)

    def seconds(axes, links, sizes):
        jaxpr = make_jaxpr_over_axes(lambda x: lax.psum(x, axes), list(sizes.items()), (x,))
        return timeline(jaxpr, sizes, links, overlaps=True).seconds

    ring_s = seconds("all", flat, {"all": 256})
    levels_s = seconds(("node", "gpu"), levels, {"node": 16, "gpu": 16})
    inside_s = 2 * 15 / 16 * size / V100.link_bytes_per_s
    assert levels_s - inside_s == pytest.approx(ring_s, rel=0.08)
    assert math.isclose(DGX2_SHARED_CARDS.link_bytes_per_s * 16, DGX2_RING.link_bytes_per_s)


GPT2 = [
    pytest.param(batch, width, id=f"{name}, batch {batch}")
    for batch in (8, 16)
    for name, width in (("attention", 3072), ("mlp", 4 * 3072))
]


def layer(batch, width, parts):
    """A product and its reduction over 16 devices, as in a layer of GPT-2 8.3B, in some parts."""

    def function(x, w):
        return [lax.psum(part @ w, "gpu") for part in jnp.split(x, parts)]

    half = np.dtype(np.float16)
    shapes = ((1024 * batch, width // 16), (width // 16, 3072))
    args = [jax.ShapeDtypeStruct(shape, half) for shape in shapes]
    jaxpr = make_jaxpr_over_axes(function, [("gpu", 16)], args)
    return timeline(jaxpr, {"gpu": 16}, dgx2(inside=("gpu",)), overlaps=True)


@pytest.mark.parametrize(("batch", "width"), GPT2)
def test_overlap_in_a_layer_of_gpt2(batch, width):
    """All of the product but its first part is hidden, at the price of a launch for each part."""
    whole = layer(batch, width, 1)
    product, sent = whole.busy_seconds["compute"], whole.busy_seconds["link gpu"]
    assert sent > product  # as in the paper, communication is the longer of the two
    for parts in (2, 4, 8):
        found = layer(batch, width, parts)
        first = found.busy_seconds["compute"] / parts
        launches = (parts - 1) * V100.launch_s
        assert found.seconds == pytest.approx(first + sent + launches, rel=1e-6)
        assert found.exposed_seconds < whole.seconds - product + launches
