"""Matrix products in blocks, from and to an accelerator's large memory."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from meshwise._jax import pallas as pl
from meshwise.schedule.kernels.pipelines import pipeline

# The largest blocks: what a core's fast memory holds twice, with the sums.
MOST_ROWS = 512
MOST_COLUMNS = 1024


@dataclass(frozen=True)
class MatmulBlocks:
    """Block sizes of rows of the left, columns of the right, and what is added over."""

    rows: int
    columns: int
    inner: int


def matmul_blocks(rows: int, columns: int, inner: int) -> MatmulBlocks:
    """Blocks that keep the matrix unit busy and fit in fast memory, twice."""
    return MatmulBlocks(
        _block(rows, MOST_ROWS, 8),
        _block(columns, MOST_COLUMNS, 128),
        _block(inner, MOST_COLUMNS, 128),
    )


def _block(size: int, most: int, unit: int) -> int:
    """The largest divisor of `size` that is a multiple of `unit`, up to `most`; else all."""
    fitting = [b for b in range(unit, min(size, most) + 1, unit) if size % b == 0]
    return fitting[-1] if fitting else size


def add_product(
    left: Any, right: Any, old: Any, out: Any, sums: Any, blocks: MatmulBlocks, precision: Any
) -> None:
    """Write `old + left @ right` to `out`, which may be `old`; without `old`, the product alone.

    All are references to matrices in large memory; `sums` is one in fast memory, of a block of the
    result in the type in which sums are kept.
    """
    (rows, inner), columns = left.shape, right.shape[1]
    grid = (rows // blocks.rows, columns // blocks.columns, inner // blocks.inner)

    def body(left_block: Any, right_block: Any, *rest: Any) -> None:
        *old_block, out_block = rest
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        sums[...] += jnp.dot(
            left_block[...],
            right_block[...],
            preferred_element_type=sums.dtype,
            precision=precision,
        )

        @pl.when(step == grid[2] - 1)
        def _() -> None:
            total = sums[...]
            for block in old_block:
                total += block[...].astype(sums.dtype)
            out_block[...] = total.astype(out_block.dtype)

    result = pl.BlockSpec((blocks.rows, blocks.columns), lambda i, j, k: (i, j))
    in_specs = [
        pl.BlockSpec((blocks.rows, blocks.inner), lambda i, j, k: (i, k)),
        pl.BlockSpec((blocks.inner, blocks.columns), lambda i, j, k: (k, j)),
    ]
    olds = [] if old is None else [old]
    specs = in_specs + [result] * len(olds)
    pipeline(body, grid, specs, [result], [left, right, *olds, out])
