"""Rows that shards fetch of each other: the right ones, and zeros outside where that is claimed."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwise.ir.mesh import refine_mesh
from meshwise.rules.halo import Fetch, fetch_filled, fetch_rows

FILLS = [np.float32(fill) for fill in (0, -0.0, 7, -np.inf)]
# Of 4 shards in blocks: where each begins to read, and how many rows.
BLOCKS = {"full": (12, 3), "uneven": (10, 3), "the last one empty": (9, 3)}
STARTS = {
    "halo": ((-1, 2, 5, 8), 5),
    "wide halo": ((-4, -1, 2, 5), 11),
    "before only": ((-2, 1, 4, 7), 5),
    "after only": ((1, 4, 7, 10), 3),
    "other blocks": ((-2, 2, 6, 10), 4),
    "backwards": ((9, 6, 3, 0), 3),
    "all of the first": ((0, 0, 0, 0), 3),
    "one of nobody": ((-3, 0, 3, 12), 3),
    "own ones but the last": ((0, 3, 6, 12), 3),
}
# Of 2, which may send each other a border at once.
BLOCKS_OF_TWO = {
    "full, of two": (6, 3),
    "longer, of two": (16, 8),
    "uneven, of two": (5, 3),
    "one row in two": (1, 3),
}
STARTS_OF_TWO = {
    "halo, of two": ((-1, 2), 5),
    "wide halo, of two": ((-3, 0), 9),
    "halo that reaches further": ((-5, -2), 13),
    "uneven halo": ((-2, 1), 6),
    "before only, of two": ((-2, 1), 5),
    "changed places": ((3, 0), 3),
    "apart": ((-3, 1), 5),
    "from one row": ((1, 2), 3),
    "windows inside": ((0, 6), 10),
}
CASES = [
    *itertools.product(BLOCKS, STARTS),
    *itertools.product(BLOCKS_OF_TWO, STARTS_OF_TWO),
]


def rows_of(blocks, starts):
    size, block = (BLOCKS | BLOCKS_OF_TWO)[blocks]
    return Fetch(size, block, *(STARTS | STARTS_OF_TWO)[starts])


def run(fetch):
    """What each shard gets of rows numbered from one (padding is 99): as fetched, and filled."""
    shards = len(fetch.starts)
    mesh = refine_mesh(("x",), (shards,))
    held = np.full(shards * fetch.block, 99.0, np.float32)
    held[: fetch.size] = 1 + np.arange(fetch.size)

    def body(x):
        axes = mesh.names, mesh
        filled = [fetch_filled(x, 0, *axes, fetch, fetch.size, fill) for fill in FILLS]
        return fetch_rows(x, 0, *axes, fetch), *filled

    devices = np.array(jax.devices()[:shards]).reshape(mesh.sizes)
    spec = P(mesh.names)
    mapped = jax.shard_map(
        body,
        mesh=jax.sharding.Mesh(devices, mesh.names),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return [np.asarray(x).reshape(shards, fetch.length) for x in jax.jit(mapped)(held)]


def wanted(fetch, fill):
    rows = np.array([np.arange(fetch.length) + s for s in fetch.starts])
    return np.where((rows >= 0) & (rows < fetch.size), 1 + rows, fill)


@pytest.mark.parametrize("blocks, starts", CASES)
def test_rows_are_those_asked_for(blocks, starts):
    fetch = rows_of(blocks, starts)
    fetched, *filled = run(fetch)
    right = wanted(fetch, np.nan)
    inside = ~np.isnan(right)
    np.testing.assert_array_equal(fetched[inside], right[inside])
    if fetch.has_zeros_outside(fetch.size):
        np.testing.assert_array_equal(fetched, wanted(fetch, 0))
    for fill, got in zip(FILLS, filled, strict=True):
        np.testing.assert_array_equal(got, wanted(fetch, fill))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted(fetch, fill)))


def test_windows_inside_of_two_are_cut_out_of_a_row():
    fetch = rows_of("longer, of two", "windows inside")
    assert len(fetch.pieces) == 2
    axes = (("x",), refine_mesh(("x",), (2,)))
    x = jax.ShapeDtypeStruct((8, 4), np.float32)
    jaxpr = jax.make_jaxpr(lambda x: fetch_rows(x, 0, *axes, fetch), axis_env=[("x", 2)])(x)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("ppermute") == names.count("concatenate") == 1
    assert not {"gather", "select_n"} & set(names)


def claims_zeros(case):
    fetch = rows_of(*case)
    return fetch.has_zeros_outside(fetch.size)


def test_zeros_are_claimed_where_no_piece_reaches_outside():
    assert {case for case in CASES if claims_zeros(case)} == {
        *(("full", starts) for starts in ("halo", "before only", "after only", "backwards")),
        ("the last one empty", "backwards"),
        *((blocks, "one of nobody") for blocks in BLOCKS),
        *(("full, of two", starts) for starts in ("before only, of two", "changed places")),
        *(("one row in two", starts) for starts in ("changed places", "from one row")),
    }


def test_rows_that_nobody_reads_are_not_outside():
    shift = Fetch(11, 3, (-1, 2, 5, 8), 3)  # `jnp.pad(x, (1, 0))[:-1]` of 12 rows
    assert shift.has_zeros_outside(12)
