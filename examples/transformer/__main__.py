"""Train a dense transformer on one device and on eight, and plan it for thousands.

python -m examples.transformer [--steps N]
"""

from __future__ import annotations

import examples.devices  # noqa: F401  first: it sets JAX up for eight devices

# isort: split
import argparse

import jax
import numpy as np

from examples.beside import measure, run, runs_table, terminal, trained
from examples.gpt.data import windows
from examples.sizes import show_sizes
from examples.transformer import hints, model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    options = parser.parse_args()
    console, config = terminal(), model.Config()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), config))
    data = [(windows(step, config.batch, config.sequence),) for step in range(options.steps)]
    cases = [hints.case(scheme, config) for scheme in hints.SCHEMES]
    with console.status("training on one device"):
        single = run(jax.jit(cases[0].step), params, data, trained)
    rows = []
    for case in cases:
        with console.status(f"{case.title}, on {case.devices} devices"):
            rows.append(measure(case, params, data, single.state))
    losses = f"{single.figures[0]:.4f} to {single.figures[-1]:.6f}"
    console.print(runs_table(rows, f"{options.steps} steps; one device's loss goes from {losses}"))
    show_sizes(console, hints.large_cases(), "Float32, plain gradient descent, layers recomputed.")


if __name__ == "__main__":
    main()
