"""Blocks from large memory through fast memory and back, the next fetched while one is used."""

from collections.abc import Callable, Sequence
from typing import Any

from meshwise._jax import pallas as pl
from meshwise._jax import pallas_tpu as pltpu


def pipeline(
    body: Callable[..., None],
    grid: tuple[int, ...],
    in_specs: Sequence["pl.BlockSpec"],
    out_specs: Sequence["pl.BlockSpec"],
    refs: Sequence[Any],
) -> None:
    """Run `body` on every block of a grid: references of inputs, then of outputs.

    Blocks divide the dims that they cut.
    """
    # Pallas looks up a TPU's register tiles to cut the last block of a dim, unless it is told.
    # Blocks here divide their dims: whichever it is told is never used, no TPU need be at hand.
    run = pltpu.emit_pipeline(
        body, grid=grid, in_specs=in_specs, out_specs=out_specs, tiling=pltpu.Tiling.SPARSE_CORE
    )
    run(*refs)
