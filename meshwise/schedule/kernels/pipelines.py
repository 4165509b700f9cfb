"""Blocks from large memory through fast memory and back, the next fetched while one is used."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Pallas looks up a TPU's register tiles to cut the last block of a dim, unless it is told; blocks
# here divide their dims, so whichever it is told is never used, and no TPU need be at hand.
_TILING = pltpu.Tiling.SPARSE_CORE


def pipeline(
    body: Callable[..., None],
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    refs: Sequence[Any],
) -> None:
    """Run `body` on every block of a grid: references of inputs, then of outputs.

    Blocks divide the dims that they cut.
    """
    run = pltpu.emit_pipeline(
        body, grid=grid, in_specs=in_specs, out_specs=out_specs, tiling=_TILING
    )
    run(*refs)
