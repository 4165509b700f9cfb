"""The largest of each row on CPU are found without a sort, whatever is cut of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwise import _jax

CASES = {
    "the last of them": lambda x: lax.top_k(x, 10)[0][:, -1:],
    "some, and where": lambda x: [found[:, 2:5] for found in lax.top_k(x, 10)],
    "in a loop": lambda x: lax.fori_loop(0, 2, lambda _, y: y - lax.top_k(y, 4)[0][:, 3:], x),
}


@pytest.mark.parametrize("case", CASES)
def test_no_row_is_sorted(case):
    x = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    x[0, :9] = x[0, 9]
    before = jax.make_jaxpr(CASES[case])(jnp.asarray(x))
    compiled = [
        jax.jit(_jax.jaxpr_as_fun(jaxpr)).lower(x).compile()
        for jaxpr in (before, _jax.as_cpu_compiles(before, {}))
    ]
    assert [" sort(" in one.as_text() for one in compiled] == [True, False]
    for found, wanted in zip(compiled[1](x), jax.tree.leaves(CASES[case](x)), strict=True):
        np.testing.assert_array_equal(found, wanted)
