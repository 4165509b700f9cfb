"""Results that nobody hinted: gathered in the end only where somebody wants them whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwise as mw
from tests.meshes import mesh_of

MESH = mesh_of(x=8)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def solved(a, b):
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


def read_whole(a, b):
    x = solved(a, b)
    return x, lax.linalg.triangular_solve(a, jnp.sort(x, 1), left_side=True, lower=True).sum(0)


SQUARES = f32(512, 512), f32(512, 512)
ROWS = P(), P("x")
EXCHANGED = 7 / 8 * 64 * 512 * 4  # rows to columns
CASES = {  # a function, its arguments, how they lie; how the first result comes back, what is sent
    "made in columns": (solved, SQUARES, ROWS, P(None, "x"), EXCHANGED),
    "read in columns too": (
        lambda a, b: (x := solved(a, b), jnp.cumsum(x, 0)[:, ::2].sum()),
        SQUARES,
        ROWS,
        P(None, "x"),
        None,
    ),
    "made whole, cut by one who reads it": (
        lambda a, b, c: (x := jnp.linalg.eigh(a)[1], (x @ b).sum(), c * 2),
        (*SQUARES, SQUARES[0]),
        (P(), P(), P("x")),
        P(),
        7 / 4 * 4,
    ),
    "hinted inside": (
        lambda a, b: mw.shard(solved(a, b), P()),
        SQUARES,
        ROWS,
        P(),
        9 * EXCHANGED,
    ),
    "columns that do not divide": (solved, (f32(512, 512), f32(512, 508)), ROWS, P(), None),
    "without a hint": (solved, SQUARES, None, P(), None),
    "a sum": (lambda a, b: a.T @ b, SQUARES, (P("x"), P("x")), P(), 14 / 8 * 512 * 512 * 4),
    "reached by a hint": (lambda a, b: jnp.tanh(a @ b), SQUARES, (P("x"), P()), P("x"), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_how_results_without_a_hint_come_back(case):
    function, args, specs, lies, sent = CASES[case]
    program = mw.jit(function, mesh=MESH, in_shardings=specs).partition(*args)
    first = jax.tree.leaves(program.out_shardings)[0]
    assert first.spec == lies
    assert sent is None or program.wire_bytes == sent


def test_values_are_those_of_one_device():
    random = np.random.default_rng(0)
    a = np.tril(random.normal(size=(512, 512))).astype(np.float32) / 32 + np.eye(512, dtype="f")
    b = random.normal(size=(512, 512)).astype(np.float32)
    for function in (solved, read_whole):
        program = mw.jit(function, mesh=MESH, in_shardings=ROWS).partition(*SQUARES)
        got, want = program.simulate(a, b), jax.jit(function)(a, b)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3), got, want)


def test_a_hint_for_the_result_is_kept():
    whole = mw.jit(solved, mesh=MESH, in_shardings=ROWS, out_shardings=P()).partition(*SQUARES)
    assert whole.out_shardings.spec == P()
    assert whole.wire_bytes == 9 * EXCHANGED


@pytest.mark.parametrize("out", [(P(), None), (None, P()), (P(), None, None), (None, P("x"), None)])
def test_a_value_that_is_returned_twice_comes_back_as_one_hint_says(out):
    def twice(x, w):
        return (x @ w,) * len(out)

    random = np.random.default_rng(1)
    x, w = (random.normal(size=(16, 16)).astype(np.float32) for _ in range(2))
    step = mw.jit(twice, mesh=MESH, in_shardings=(P(), P("x")), out_shardings=out)
    program = step.partition(x, w)
    for result in program.simulate(x, w):
        np.testing.assert_allclose(result, x @ w, rtol=1e-5, atol=1e-5)


def test_what_was_beaten_is_priced_with_results_as_they_come_back():
    """Whole, what is solved would be completion's plan, eight times as dear; and not gathered."""
    text = mw.jit(solved, mesh=MESH, in_shardings=ROWS).partition(*SQUARES).explain()
    assert "returned as it is made: no hint reaches it" in text
    (beaten,) = (line for line in text.splitlines() if "beaten  nothing sharded" in line)
    assert float(beaten.partition("(+")[2].partition("%")[0]) > 600
