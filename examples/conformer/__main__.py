"""Train a Conformer in a pipeline on eight devices, and plan larger ones.

python -m examples.conformer [--steps N]
"""

from __future__ import annotations

import examples.devices  # noqa: F401  first: it sets JAX up for eight devices

# isort: split
import argparse

import jax
import numpy as np

from examples.beside import measure, run, runs_table, terminal, trained
from examples.conformer import hints, model
from examples.sizes import show_sizes


def batch(step: int, config: model.Config) -> tuple[np.ndarray, np.ndarray]:
    """Frames in which tones come and go, and which tone is the loudest in each."""
    draw = np.random.default_rng((0, step))
    loud = draw.normal(size=(config.batch, config.frames, config.classes)).cumsum(1) / 4
    mixing = np.random.default_rng(1).normal(size=(config.classes, config.features))
    return (loud @ mixing).astype(np.float32), loud.argmax(-1).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: 10)")
    options = parser.parse_args()
    console, config = terminal(), model.Config()
    data = [batch(step, config) for step in range(options.steps)]
    rows, losses = [], ()
    for case in (hints.case(scheme, config) for scheme in hints.SCHEMES):
        with console.status(f"{case.title}, on {case.devices} devices"):
            own = case.step.keywords["config"]
            params = jax.tree.map(np.asarray, model.init(jax.random.key(0), own))
            single = run(jax.jit(case.step), params, data, trained)
            losses = single.figures
            rows.append(measure(case, params, data, single.state))
    text = f"{losses[0]:.4f} to {losses[-1]:.6f}"
    console.print(runs_table(rows, f"{options.steps} steps; one device's loss goes from {text}"))
    show_sizes(console, hints.large_cases(), "Float32, plain gradient descent, stages recomputed.")


if __name__ == "__main__":
    main()
