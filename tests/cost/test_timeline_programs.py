"""Timelines of emitted programs, as text, as a chart and as a trace; and the paper's machine."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise._jax import make_jaxpr_over_axes
from meshwise.cost.gantt import Event, draw, show_seconds
from meshwise.cost.hardware import DGX2_RING, DGX2_SHARED_CARDS, V100
from meshwise.cost.links import Links, dgx2
from meshwise.cost.timeline import timeline
from tests.cost.timelines import (
    ELEMENTS,
    REDUCE_A,
    X,
    array,
    run,
)


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
