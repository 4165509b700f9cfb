"""What a cached call costs beside `jax.jit`'s: until it returns, not until it is done.

    python -m benchmarks.dispatch

Calls of the two functions alternate, so that what else the machine does falls on both; each figure
is the median of many, of the seconds that the calling thread was running, which waits for others do
not change. The program is one addition for each leaf, sharded over eight devices.
"""

from __future__ import annotations

import os

# Before JAX is imported, which reads them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwise as mw

LEAVES = (1, 10, 1000)
PARTITIONERS = {"GSPMD": False, "Shardy": True}


@dataclass(frozen=True)
class Dispatch:
    """Median seconds of the calling thread in a cached call, ours and theirs."""

    ours_s: float
    theirs_s: float

    @property
    def ratio(self) -> float:
        """Ours over theirs: below 1 where ours returns sooner."""
        return self.ours_s / self.theirs_s


def dispatch_ratio(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    args: Sequence[Any],
    rounds: int = 50,
    calls: int = 10,
) -> Dispatch:
    """What a call of two functions costs that are called alternately, `calls` times each round.

    The arguments must be in their place, and no function may donate them.
    """
    functions = (ours, theirs)
    for function in (*functions, *functions):
        jax.block_until_ready(function(*args))
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            function = functions[which]
            outs: list[Any] = []
            start = time.thread_time()
            for _ in range(calls):
                outs = function(*args)
            seconds[which].append((time.thread_time() - start) / calls)
            jax.block_until_ready(outs)
    return Dispatch(*[statistics.median(s) for s in seconds])


def add_one(leaves: list[Any]) -> list[Any]:
    """One addition for each leaf."""
    return [x + 1 for x in leaves]


def measured(leaves: int, rounds: int) -> Dispatch:
    """The dispatch of a program of as many leaves under the partitioner that JAX is set to."""
    mesh = jax.make_mesh((8,), ("x",), (AxisType.Auto,), devices=jax.devices()[:8])
    place = NamedSharding(mesh, P("x"))
    args = [[jax.device_put(jnp.ones(8), place) for _ in range(leaves)]]
    calls = 20 if leaves < LEAVES[-1] else 1
    return dispatch_ratio(mw.jit(add_one), jax.jit(add_one), args, rounds, calls)


def main() -> None:
    """Print a row for each partitioner and number of leaves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds of each pair")
    rounds = parser.parse_args().rounds
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, median of {rounds} rounds")
    print(f"{'partitioner':<12}{'leaves':>7}{'mw.jit us':>12}{'jax.jit us':>12}{'ratio':>8}")
    for name, is_shardy in PARTITIONERS.items():
        jax.config.update("jax_use_shardy_partitioner", is_shardy)
        for leaves in LEAVES:
            found = measured(leaves, rounds)
            ours, theirs = found.ours_s * 1e6, found.theirs_s * 1e6
            print(f"{name:<12}{leaves:>7}{ours:>12.1f}{theirs:>12.1f}{found.ratio:>8.2f}")


if __name__ == "__main__":
    main()
