"""The demonstration and the benchmark, without training: hints, batches, and what they print."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from rich.console import Console

from benchmarks import gpt as benchmark
from benchmarks.peers import hlo
from examples.gpt import demo, hints, model
from examples.gpt.data import batch, corpus

WIDTHS = pytest.mark.parametrize("width", [100, 120])
SENT = benchmark.Bytes(12345.6 * 1024, 2345.6 * 1024)


def rendered(table, width):
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize(("main", "steps"), [(demo.main, "0"), (benchmark.main, "-1")])
def test_numbers_of_steps_that_are_none(main, steps, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["program", "--steps", steps])
    with pytest.raises(SystemExit):
        main()
    assert "--steps is" in capsys.readouterr().err


@WIDTHS
def test_table_of_the_demonstration_fits(width):
    peers = {which: hlo.Report(()) for which in hlo.PARTITIONERS}
    kinds = {"all_gather": 37, "all_to_all": 4, "ppermute": 1, "reduce_scatter": 136}
    rows = [
        demo.Row(f"{title}\ndata 2 x model 4", 2.609031, kinds, 12345.6 * 1024, peers, 13 << 20)
        for title in ("tensor parallel\n(Megatron)", "two-dimensional\n(GSPMD)")
    ]
    text = rendered(demo.table(rows, 2.609, 40, peers_only=False), width)
    assert "…" not in text and "136 reduce_scatter" in text and "12,345.6" in text
    assert "(+1.2e-05)" in text


@WIDTHS
def test_tables_of_the_benchmark_fit(width):
    row = benchmark.Row("megatron", "2x2x2", deviation=1e-7)
    for who in (*hlo.PARTITIONERS, "meshwise"):
        row.sent[who] = SENT
        row.times[who].before += [10.0, 12.0, 99.0] if who == "meshwise" else [0.5, 0.4]
        row.times[who].compile += [20.0]
    sent = rendered(benchmark.bytes_table([row]), width)
    assert "…" not in sent and "12,345.6 (2,345.6)" in sent and "1.00 (1.00)" in sent
    seconds = rendered(benchmark.seconds_table([row], 3), width)
    assert "…" not in seconds and "0.45 + 20.00" in seconds and "1.70" in seconds


@pytest.mark.parametrize("scheme", hints.SCHEMES, ids=lambda scheme: scheme.name)
def test_hints_fit_the_state_on_every_mesh(scheme):
    state = jax.eval_shape(model.init, jax.random.key(0))
    for shape in benchmark.MESHES.values():
        mesh = AbstractMesh(shape, benchmark.NAMES[: len(shape)])
        shardings = hints.state_shardings(scheme, mesh)
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
            assert len(sharding.shard_shape(leaf.shape)) == leaf.ndim


def test_batches_are_the_same_in_every_run_and_the_targets_follow():
    first, again, other = batch(3), batch(3), batch(4)
    assert (first.tokens == again.tokens).all() and not (first.tokens == other.tokens).all()
    assert (first.tokens[:, 1:] == first.targets[:, :-1]).all()
    assert corpus().dtype == np.uint8


def test_a_stage_is_a_line_where_there_is_no_terminal(capsys):
    screen = demo.Screen(stages=1)
    with screen.bars, screen.stage("one device", 2) as advance:
        advance()
    assert capsys.readouterr().out.strip().endswith("s  one device")
