"""Train a Conformer in a pipeline on eight devices, and plan larger ones.

python -m examples.conformer [--steps N]
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
from examples.conformer import hints, model
from examples.sizes import plan, sizes_table


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
    plans = []
    for case in hints.large_cases():
        with console.status(f"planning {case.title} for {case.devices} devices"):
            plans.append(plan(case))
    console.print(sizes_table(plans, "Float32, plain gradient descent, stages recomputed."))


if __name__ == "__main__":
    main()
