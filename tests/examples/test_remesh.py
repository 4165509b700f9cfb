"""The example that goes from eight devices to four and back, with a small model."""

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from examples import remesh
from examples.gpt.model import Config

SMALL = Config(sequence=8, batch=8, width=32, heads=4, hidden=64, layers=0)
PLACES = [remesh.shardings_on(remesh.make_mesh(shape), SMALL) for shape in remesh.SHAPES]


def some_state() -> remesh.Training:
    """A state in which nothing is zero, so that nothing can be lost unseen."""
    start = jax.device_put(remesh.start(SMALL), PLACES[0])
    state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), start.state)
    return start._replace(state=state, step=start.step + 7)


@pytest.mark.slow
def test_training_goes_on(capsys):
    report = remesh.main(["--steps", "2"], SMALL)
    printed = capsys.readouterr().out
    assert [move.title for move in report.moves] == ["2 x 4 to 2 x 2", "2 x 2 to 4 x 2"]
    assert printed.count("bits identical") == 2 and "DIFFERENT" not in printed
    assert all(move.is_identical and move.is_freed for move in report.moves)
    assert report.losses == pytest.approx(report.stayed, rel=1e-5)


def test_the_state_moves_to_the_bit():
    training = some_state()
    for places in PLACES[1:]:
        training, move = remesh.move(training, places, "there")
        assert move.is_identical and move.is_freed
        assert move.arrays == 19 and move.launches > 0 and move.wire_bytes > 0
        assert move.largest <= max(move.held_before, move.held_after)


def test_planted_difference_is_found():
    training = some_state()
    copies = remesh.to_host(training)
    assert remesh.is_identical(training, copies)
    assert not remesh.is_identical(training._replace(step=training.step + 1), copies)
    assert not remesh.is_identical(training._replace(key=jax.random.key(5)), copies)


@pytest.mark.parametrize("width", [100, 120])
def test_tables_fit(width):
    sizes = dict(launches=1234, wire_bytes=12345678.0, largest=6 << 20)
    held = dict(state_bytes=12 << 20, held_before=12 << 20, held_after=12 << 20)
    move = remesh.Move(
        "2 x 4 to 2 x 2", 167, **sizes, **held, seconds=12.3, is_identical=True, is_freed=True
    )
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(remesh.moves_table([move]))
    text = capture.get()
    assert "…" not in text and "1234 collectives" in text and "12,056.3 KiB sent" in text
    assert "12,288.0" in text and "bits identical" in text and "old arrays freed" in text
