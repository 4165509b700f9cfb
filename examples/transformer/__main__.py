"""Train a dense transformer on one device and on eight, and plan it for thousands.

python -m examples.transformer [--steps N]
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
import jax.numpy as jnp
import numpy as np

from examples.beside import measure, run, runs_table, terminal, trained
from examples.gpt.data import corpus
from examples.sizes import plan, sizes_table
from examples.transformer import hints, model


def batch(step: int, config: model.Config) -> jax.Array:
    """The tokens of one step: windows of the source of Python's standard library, as bytes."""
    text, draw = corpus(), np.random.default_rng((0, step))
    starts = draw.integers(0, len(text) - config.sequence, config.batch)
    return jnp.asarray(text[starts[:, None] + np.arange(config.sequence + 1)], jnp.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    options = parser.parse_args()
    console, config = terminal(), model.Config()
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0), config))
    data = [(batch(step, config),) for step in range(options.steps)]
    cases = [hints.case(scheme, config) for scheme in hints.SCHEMES]
    with console.status("training on one device"):
        single = run(jax.jit(cases[0].step), params, data, trained)
    rows = []
    for case in cases:
        with console.status(f"{case.title}, on {case.devices} devices"):
            rows.append(measure(case, params, data, single.state))
    losses = f"{single.figures[0]:.4f} to {single.figures[-1]:.6f}"
    console.print(runs_table(rows, f"{options.steps} steps; one device's loss goes from {losses}"))
    plans = []
    for case in hints.large_cases():
        with console.status(f"planning {case.title} for {case.devices} devices"):
            plans.append(plan(case))
    console.print(sizes_table(plans, "Float32, plain gradient descent, layers recomputed."))


if __name__ == "__main__":
    main()
