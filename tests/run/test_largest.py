"""The largest of each row on CPU are found without a sort, whatever is cut of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwise import _jax

# Whether XLA of JAX 0.10 sorts for the function as it is, and as it is compiled; later ones do not.
CASES = {
    "the last of them": (lambda x: lax.top_k(x, 10)[0][:, -1:], [True, False]),
    "where the last of them is": (lambda x: lax.top_k(x, 10)[1][:, -1:], [True, False]),
    "some, and where": (lambda x: [y[:, 2:5] for y in lax.top_k(x, 10)], [True, False]),
    "in a loop": (
        lambda x: lax.fori_loop(0, 2, lambda _, y: y - lax.top_k(y, 4)[0][:, 3:], x),
        [True, False],
    ),
    # For one barrier that reads the pair as it is XLA ends the process.
    "both, whole": (lambda x: lax.top_k(x, 10), [False, False]),
    "a whole row": (lambda x: lax.top_k(x, 64)[0][:, 3:], [True, True]),
}


@pytest.mark.parametrize("case", CASES)
def test_no_row_is_sorted(case):
    function, sorts = CASES[case]
    x = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    x[0, :9] = x[0, 9]
    before = jax.make_jaxpr(function)(jnp.asarray(x))
    compiled = [
        jax.jit(_jax.jaxpr_as_fun(jaxpr)).lower(x).compile()
        for jaxpr in (before, _jax.as_cpu_compiles(before, {}))
    ]
    wanted = sorts if jax.__version_info__ < (0, 11) else [False, False]
    assert [" sort(" in one.as_text() for one in compiled] == wanted
    for found, true in zip(compiled[1](x), jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_array_equal(found, true)
