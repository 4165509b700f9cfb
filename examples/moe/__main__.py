"""Train a mixture of experts on one device and on eight, and plan it for thousands.

python -m examples.moe [--steps N]
"""

from __future__ import annotations

import examples.devices  # noqa: F401  first: it sets JAX up for eight devices

# isort: split
import argparse

import jax
import numpy as np

from examples.beside import measure, run, runs_table, terminal, trained
from examples.gpt.data import windows
from examples.moe import hints, model
from examples.sizes import show_sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    options = parser.parse_args()
    console, config = terminal(), model.Config()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), config))
    data = [(windows(step, config.batch, config.sequence),) for step in range(options.steps)]
    ends, rows = {}, []
    for case in hints.cases(config):
        with console.status(f"{case.title}, on {case.devices} devices"):
            if case.step.keywords["config"] not in ends:
                single = run(jax.jit(case.step), params, data, trained)
                ends[case.step.keywords["config"]] = single
            rows.append(measure(case, params, data, single.state))
    losses = " and ".join(f"{end.figures[0]:.4f} to {end.figures[-1]:.6f}" for end in ends.values())
    console.print(runs_table(rows, f"{options.steps} steps; one device's losses go from {losses}"))
    show_sizes(
        console, hints.large_cases(), "Float32, plain gradient descent, 2,048 tokens a group."
    )


if __name__ == "__main__":
    main()
