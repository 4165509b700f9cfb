"""Train a 3-D U-Net on one device and on eight, and plan it for thousands.

python -m examples.unet [--steps N]
"""

from __future__ import annotations

import os

# Before JAX is imported, which reads them: eight devices on one host, without C++ chatter.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse

import jax
import numpy as np

from examples.beside import measure, run, runs_table, terminal, trained
from examples.sizes import plan, sizes_table
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
    plans = []
    for case in hints.large_cases():
        with console.status(f"planning {case.title} for {case.devices} devices"):
            plans.append(plan(case))
    console.print(sizes_table(plans, "Float32; ppermutes are halos, all_reduces gradients."))


if __name__ == "__main__":
    main()
