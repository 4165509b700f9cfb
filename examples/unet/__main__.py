"""Train a 3-D U-Net on one device and on eight, and plan it for thousands.

python -m examples.unet [--steps N]
"""

from __future__ import annotations

import examples.devices  # noqa: F401  first: it sets JAX up for eight devices

# isort: split
import argparse

import jax
import numpy as np

from examples.beside import measure, run, runs_table, terminal, trained
from examples.sizes import show_sizes
from examples.unet import hints, model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="training steps (default: 6)")
    options = parser.parse_args()
    console, config = terminal(), model.Config()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), config))
    keys = jax.random.split(jax.random.key(1), options.steps)
    data = [jax.tree.map(np.asarray, model.spheres(key, config)) for key in keys]
    cases = [hints.case(name, config) for name in hints.SCHEMES]
    with console.status("training on one device"):
        single = run(jax.jit(cases[0].step), params, data, trained)
    rows = []
    for case in cases:
        with console.status(f"{case.title}, on {case.devices} devices"):
            rows.append(measure(case, params, data, single.state))
    size = " x ".join(map(str, config.size))
    console.print(
        runs_table(
            rows,
            f"{options.steps} steps on volumes of {size}; one device's loss goes from "
            f"{single.figures[0]:.4f} to {single.figures[-1]:.6f}",
        )
    )
    show_sizes(console, hints.large_cases(), "Float32; ppermutes are halos, all_reduces gradients.")


if __name__ == "__main__":
    main()
