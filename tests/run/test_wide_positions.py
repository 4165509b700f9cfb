"""Rows are written where their positions say, also where the type of these holds too few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from meshwise import _jax

DIMS = lax.ScatterDimensionNumbers((1, 2), (), (0,))
WRITES = {  # what writes into rows of zeros from a place on, and how many
    "one row": (lambda x, s: lax.dynamic_update_index_in_dim(x, x[0] + 1, s, 0), 1),
    "several rows": (
        lambda x, s: lax.dynamic_update_slice(x, x[:9] + 1, (s, jnp.zeros_like(s))),
        9,
    ),
    "a window of rows added": (
        lambda x, s: lax.scatter_add(x, s[None, None], jnp.ones((1, 9, 8)), DIMS),
        9,
    ),
    "rows of each step": (
        lambda x, s: lax.fori_loop(
            s, s + 9, lambda i, y: lax.dynamic_update_index_in_dim(y, y[0] + 1, i, 0), x
        ),
        9,
    ),
    "rows in a branch": (
        lambda x, s: lax.cond(
            x[0, 0] < 1, lambda: lax.dynamic_update_index_in_dim(x, x[0] + 1, s, 0), lambda: x
        ),
        1,
    ),
    "gradient of a row": (
        lambda x, s: jax.grad(lambda x: lax.dynamic_index_in_dim(x, s, 0).sum())(x),
        1,
    ),
}
PLACES = [np.int8(100), np.uint8(100), np.uint8(200), np.int16(100)]


@pytest.mark.parametrize("lies", [None, P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("case", WRITES)
def test_rows_are_written_where_they_are_to_be(case, lies, mesh8):
    function, rows = WRITES[case]
    x = np.zeros((304, 8), np.float32)
    step = mw.jit(function, mesh=mesh8, in_shardings=(lies, None))
    for place in PLACES:
        for run in (step, step.partition(x, place).simulate):
            written = np.flatnonzero(np.asarray(run(x, place)).any(1))
            assert list(written) == list(range(int(place), int(place) + rows)), (run, place)


@pytest.mark.parametrize(
    ("rows", "dtype", "converted"),
    [(304, "int8", 2), (304, "uint8", 2), (127, "int8", 0), (304, "int32", 0), (304, "int16", 0)],
)
def test_only_types_that_hold_too_few_places_are_converted(rows, dtype, converted):
    types = jax.ShapeDtypeStruct((rows, 4), "float32"), jax.ShapeDtypeStruct((), dtype)
    jaxpr = jax.make_jaxpr(lambda x, s: lax.dynamic_update_slice_p.bind(x, x[:1], s, s))(*types)
    compiling = _jax.as_cpu_compiles(jaxpr, {})
    made = [e for e in compiling.jaxpr.eqns if e.primitive is lax.convert_element_type_p]
    assert len(made) == converted
