"""Positions of 64 bits, where they are enabled."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.rules.case import Case
from tests.rules.cases_indexing import CLIP, PROMISE, ROWS, WINDOW, rows, scatter
from tests.rules.test_truth import test_claimed_splits_are_true as check_claimed_splits

I64 = jnp.int64


def wide(function):
    """The second argument and all after the third as 64-bit integers."""
    return lambda x, i, *rest: function(x, i.astype(I64), *rest)


CASES = [
    Case("gather", "gather", wide(rows()), "f32[7,5] i32[6,1]~7", ""),
    Case("gather, clip", "gather", wide(rows(CLIP)), "f32[7,5] i32[6,1]~7", ""),
    Case("gather of huge positions", "gather",
         lambda x, i: rows(CLIP)(x, i.astype(I64) * 2**40), "f32[7,5] i32[6,1]~7", ""),
    Case("scatter-add", "scatter-add", wide(scatter(lax.scatter_add, ROWS)),
         "f32[7,5] i32[6,1]~7 f32[6,5]", ""),
    Case("scatter-add, clip", "scatter-add", wide(scatter(lax.scatter_add, ROWS, CLIP)),
         "f32[7,5] i32[6,1]~7 f32[6,5]", ""),
    Case("scatter of a window", "scatter", wide(scatter(lax.scatter, WINDOW, PROMISE)),
         "f32[7,6] i32[2]<4 f32[3,2]", ""),
    Case("dynamic_slice", "dynamic_slice",
         lambda x, i: lax.dynamic_slice(x, (i.astype(I64), 0), (1, 5)), "f32[7,5] i32[]<7", ""),
    Case("dynamic_update_slice", "dynamic_update_slice",
         lambda x, u, i: lax.dynamic_update_slice(x, u, (i.astype(I64), i.astype(I64))),
         "f32[7,5] f32[3,2] i32[]<4", ""),
    Case("argmax", "argmax", lambda x: lax.argmax(x, 1, I64), "f32[5,7]", ""),
    Case("iota", "iota", lambda: lax.iota(I64, 7), "", ""),
    Case("iota in double precision", "iota", lambda: lax.iota(jnp.float64, 7), "", ""),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_claimed_splits_are_true(case):
    with jax.enable_x64(True):
        assert case.rule.factors.sizes
        check_claimed_splits(case)
