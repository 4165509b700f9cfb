"""Figures that are not of the suite's programs: what a cached call costs."""

from __future__ import annotations

import jax

from benchmarks.dispatch import LEAVES, measured
from benchmarks.peers.hlo import PARTITIONERS, partitioner
from benchmarks.suite.figures import Figure

DISPATCH = "dispatch of a cached call, jax.jit / ours"
ROUNDS = 50
LEAST = 0.95


def dispatch() -> Figure:
    """A cached call of `jax.jit` over one of `mw.jit`, for several numbers of leaves."""
    found: dict[int, list[float]] = {leaves: [] for leaves in LEAVES}
    for which in PARTITIONERS:
        with partitioner(which):
            jax.clear_caches()
            for leaves in LEAVES:
                found[leaves].append(1 / measured(leaves, ROUNDS).ratio)
    worst = {leaves: min(ratios) for leaves, ratios in found.items()}
    said = ", ".join(f"{ratio:.2f} with {leaves:,} leaves" for leaves, ratio in worst.items())
    return Figure(DISPATCH, said, f"≥ {LEAST}", min(worst.values()) >= LEAST)
