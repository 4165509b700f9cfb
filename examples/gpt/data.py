"""Real text that is on every machine: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from examples.gpt.model import DEMO, Batch, Config


@cache
def corpus() -> NDArray[np.uint8]:
    """Every module at the top of the standard library, joined in the order of their names, [n].

    Packages are left out: what is installed beside the library (site-packages, its tests)
    differs between machines.
    """
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name)
    return np.frombuffer(b"\n".join(path.read_bytes() for path in paths), np.uint8)


def windows(step: int, count: int, length: int, seed: int = 0) -> NDArray[np.int32]:
    """Parts of the corpus at places drawn from `(seed, step)`, [count, length + 1]."""
    text = corpus()
    draw = np.random.default_rng((seed, step))
    starts = draw.integers(0, len(text) - length - 1, size=count)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def batch(step: int, config: Config = DEMO, seed: int = 0) -> Batch:
    """The batch of one step: windows of the corpus at places drawn from `(seed, step)`."""
    found = windows(step, config.batch, config.sequence, seed)
    return Batch(jnp.asarray(found[:, :-1]), jnp.asarray(found[:, 1:]))


def batches(steps: int, config: Config = DEMO, seed: int = 0) -> Iterator[Batch]:
    """The batches of steps `0 .. steps - 1`."""
    return (batch(step, config, seed) for step in range(steps))
