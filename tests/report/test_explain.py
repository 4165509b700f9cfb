"""The report of a program, as golden text, and what must be in it."""

import importlib
import inspect
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise.cost.memory import peak_memory
from tests.report import programs

ROOT = pathlib.Path(__file__).parents[2]
MESH = AbstractMesh((2, 4), ("x", "y"))


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch):
    """Paths in reports are relative to the working directory."""
    monkeypatch.chdir(ROOT)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def explained(function, *arguments, mesh=MESH, **options):
    return mw.jit(function, mesh=mesh, **options).partition(*arguments).explain()


def megatron(**options):
    arguments = (struct(16, 128), struct(128, 512), struct(512, 128))
    hints = (P("x"), P(None, "y"), None)
    return explained(programs.megatron_mlp, *arguments, in_shardings=hints, **options)


def test_tensor_parallel_layer(golden):
    golden("explain_megatron_mlp", megatron())


def test_uneven_rows_and_completed_arguments(golden):
    arguments = (struct(12, 4), struct(17, 12), struct(17, 4))
    text = explained(
        programs.gradient_of_rows,
        *arguments,
        mesh=AbstractMesh((8,), ("data",)),
        in_shardings=(None, P("data"), None),
    )
    golden("explain_uneven_rows", text)
    assert "uneven: dim 0 of 17 on 8 keeps 24, +41.2%" in text


def test_operator_without_a_rule(golden):
    golden("explain_without_a_rule", explained(programs.with_unknown, struct(8, 4)))


def moves_nothing(s):
    """A script without moves."""


def splits_the_sum(s):
    s.split(s.find("all_reduce")[0])


@pytest.mark.parametrize("schedule", ["auto", moves_nothing, splits_the_sum])
def test_a_schedule_keeps_the_warning_and_hints(schedule):
    def summed(x):
        return x.sum(0), programs.with_unknown(x)

    text = explained(summed, struct(8, 4), in_shardings=P("x"), schedule=schedule)
    assert "Warning: computed whole on every device" in text
    assert "[x, -]  hint P('x')" in text
    assert ("modelled time" in text) == (schedule is not splits_the_sum)


def test_open_hint_is_completed(golden):
    text = explained(
        programs.with_open_hint,
        struct(8, 16),
        struct(16, 4),
        in_shardings=(P("x", P.UNCONSTRAINED), None),
    )
    golden("explain_open_hint", text)


def test_nothing_is_sent_and_equal_arguments_share_a_row(golden):
    tree = {"here": struct(8, 4), "there": struct(8, 4)}
    golden("explain_nothing_sent", explained(programs.elementwise, tree, in_shardings=P("y")))


def test_decisions_name_what_they_beat(golden):
    arguments = (struct(32, 128), struct(128, 32), struct(64, 32))
    text = explained(
        programs.gradient_of_products,
        *arguments,
        in_shardings=P(("x", "y")),
        out_shardings=P(("x", "y")),
    )
    golden("explain_decisions", text)
    assert "beaten" in text


def test_what_is_beaten_several_times_costs_that_each_time():
    def heads(x, ws):
        return [x @ w for w in ws]

    specs = P("x"), P(None, "y")
    text = explained(heads, struct(64, 256), [struct(256, 256)] * 2, in_shardings=specs)
    head, _, beaten = text.split("Decisions, ")[1].splitlines()[1:4]
    assert head.endswith("2 times: i j, j k -> i k | sum=j")
    added, first = (
        float(line.split("+")[1].split("%")[0].replace(",", "")) for line in (head, beaten)
    )
    assert added == pytest.approx(2 * first, rel=0.01)
    assert text.rstrip().endswith(", each time")


def test_completion_kept_as_it_is_says_so():
    assert "with every value as completion has it" in megatron(completion="gspmd")


def test_a_program_that_shares_work_out_without_hints_does_not_say_it_does_none():
    def loss(w, x):
        return mw.stage_boundary(x @ w).mean()

    step = mw.pipeline_value_and_grad(loss, axis="x", microbatches=2)
    stages = explained(step, struct(4, 4), struct(8, 4), mesh=AbstractMesh((2,), ("x",)))
    alone = explained(lambda x: x @ x, struct(4, 4))
    assert "0 inside\n" in stages
    assert "0 inside: none shards, each device does everything\n" in alone


def test_every_collective_is_counted_once():
    program = mw.jit(
        programs.gradient_of_rows, mesh=MESH, in_shardings=(P(None, "y"), P("x", "y"), P("x"))
    ).partition(struct(12, 4), struct(16, 12), struct(16, 4))
    section = program.explain().split("Collectives, ")[1].split("\n\n")[0]
    rows = [line.split() for line in section.splitlines()[2:] if line[:8].strip()]
    assert sum(int(row[2]) for row in rows) == sum(c.count for c in program.collectives)
    assert sum(float(row[0]) for row in rows) == pytest.approx(program.wire_bytes / 1024, abs=0.1)


def layers(weights, x):
    def layer(h, w):
        return h + jax.nn.sigmoid(h @ w[0]) @ w[1], None

    return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()


def test_what_is_held_where_memory_is_most():
    """All at the peak, arguments apart; what a loop keeps for the way back by its own line."""
    weights, hints = (struct(6, 64, 256), struct(6, 256, 64)), (P(None, "x", "y"), P(None, "y"))
    program = mw.jit(
        jax.grad(layers), mesh=MESH, in_shardings=(hints, P("x")), out_shardings=hints
    ).partition(weights, struct(32, 64))
    section = program.explain().split("Held beside arguments where memory is most\n")[1]
    rows = section.split("\n\n")[0].splitlines()[1:]
    value = rows[0].index("f32")
    outer = [line for line in rows if line[value] != " "]
    memory = peak_memory(program.jaxpr, program.per_device.mesh.axis_size)
    held = (memory.peak_bytes - memory.argument_bytes) / 1024
    shown = sum(float(line.split()[0].replace(",", "")) for line in outer)
    assert shown == pytest.approx(held, abs=0.4)
    assert "mark_" not in program.explain()
    assert "a loop's row of a stack at" in program.explain()
    assert any("scan of" in line and "test_explain.py" in line for line in outer)
    assert f"memory         {memory.peak_bytes / 1024:,.1f} KiB at most" in program.explain()


def test_donated_arguments_are_free_after_their_last_reader():
    def update(w, g):
        return w - g

    given = struct(64, 64), struct(64, 64)
    kept, donated = (
        explained(update, *given, in_shardings=P("x"), out_shardings=P("x"), **options)
        for options in ({}, {"donate_argnums": 0})
    )
    assert "memory         24.0 KiB at most" in kept
    assert "memory         16.0 KiB at most" in donated


def test_lines_fit_a_terminal():
    assert max(map(len, megatron().splitlines())) <= 120


@pytest.mark.parametrize("function", [lambda x: x * 2, lambda x: jnp.sin(x * 2)])
def test_the_line_of_what_a_result_is_gathered_of(function):
    mesh = AbstractMesh((8,), ("x",))
    fn = mw.jit(function, mesh=mesh, in_shardings=P("x"), out_shardings=P())
    (gather,) = fn.partition(jax.ShapeDtypeStruct((16,), "float32")).collectives
    assert "test_explain.py" in gather.source


LIBRARY = """
import jax

def layer(x, w):
    return jax.nn.relu(x @ w)
"""


def test_in_a_library_the_users_line_is_shown_too(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "layers_of_a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    layer = importlib.import_module("layers_of_a_library").layer

    def model(x, w):
        return layer(x, w) * 2  # calls the library

    line = inspect.getsourcelines(model)[1] + 1
    text = explained(model, struct(8, 16), struct(16, 4), in_shardings=(P(None, "y"), P("y")))
    shown = f"tests/report/test_explain.py:{line} (layers_of_a_library.py:5)"
    assert f"all_reduce  y     f32[8,4]       {shown}" in text
