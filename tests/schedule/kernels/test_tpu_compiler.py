"""Kernels compiled for TPUs by the compiler that TPUs use; nothing is run."""

import fcntl
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import pytest

from meshwise.flatten import flatten
from meshwise.schedule.kernels import ELEMENTWISE
from tests.schedule.kernels.compiling import FUNCTIONS, adam

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is not installed: pip install libtpu",
)
ROOT = pathlib.Path(__file__).parents[3]


@functools.cache
def compiled():
    lock = pathlib.Path(tempfile.gettempdir()) / "meshwise_tests_tpu_compiler.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one process at a time may hold the compiler
        done = subprocess.run(
            [sys.executable, "-m", "tests.schedule.kernels.compiling"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@needs_compiler
def test_each_is_one_kernel_without_collectives():
    fused = {name: found for name, found in compiled().items() if "fused" in name}
    assert len(fused) > 30
    assert {name: f for name, f in fused.items() if f["kernels"] != 1 or f["collectives"]} == {}


@needs_compiler
def test_before_there_are_collectives_and_no_kernels():
    plain = {name: found for name, found in compiled().items() if "plain" in name}
    assert len(plain) == 7
    assert {n: f for n, f in plain.items() if f["kernels"] or not f["collectives"]} == {}


def test_every_elementwise_primitive_is_compiled():
    long = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    functions = [f for name, f in FUNCTIONS.items() if name != "norms"]
    traced = [jax.make_jaxpr(f)(long) for f in functions]
    traced.append(jax.make_jaxpr(adam)(*[long] * 4, 0.1, 1.0))
    seen = {e.primitive.name for t in traced for e in flatten(t).jaxpr.eqns}
    # What is the identity, or made by JAX's own transformations only.
    assert ELEMENTWISE - seen <= {"add_any", "copy", "pvary", "reshard", "stop_gradient"}
