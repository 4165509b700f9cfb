"""`import meshwise` starts no device and loads nothing heavy beyond JAX."""

import functools
import json
import subprocess
import sys

import pytest

from tests.guards.source import ROOT

PALLAS = "jax.experimental.pallas"
HEAVY = ("flax", PALLAS, "matplotlib", "optax", "pandas", "scipy.optimize", "torch")

REPORT = """
import json, sys
from jax._src import xla_bridge
started = xla_bridge.backends_are_initialized()
print(json.dumps({"started": started, "modules": sorted(sys.modules)}))
"""


def weight(statements: str) -> list[str]:
    """What a fresh interpreter did, beyond `import jax`, to run some statements."""
    before, after = _state("import jax"), _state(f"import jax\n{statements}")
    loaded = set(after["modules"]) - set(before["modules"])
    found = [f"{name} is loaded" for name in HEAVY if name in loaded]
    return found + ["a backend is started"] * after["started"]


@functools.cache
def _state(statements: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", statements + REPORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light():
    assert not weight("import meshwise")


@pytest.mark.parametrize(
    ("statements", "offence"),
    [
        ("jax.devices()", "a backend is started"),
        ("x = jax.numpy.zeros(3)", "a backend is started"),
        ("import scipy.optimize", "scipy.optimize is loaded"),
        (f"import {PALLAS}", f"{PALLAS} is loaded"),
        ("import optax", "optax is loaded"),
    ],
)
def test_planted_weight_is_found(statements, offence):
    assert offence in weight(statements)
