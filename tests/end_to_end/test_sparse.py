"""`jax.experimental.sparse`: products with sparse arrays whose elements lie in shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import meshwise as mw

N8 = AbstractMesh((8,), ("x",))
ROWS, ELEMENTS = 64, 300  # of which no eight parts are equal
DRAW = np.random.default_rng(0)
VALUES = DRAW.normal(size=ELEMENTS).astype(np.float32)
PLACES = DRAW.integers(0, ROWS, (ELEMENTS, 2)).astype(np.int32)
STARTS = np.linspace(0, ELEMENTS, ROWS + 1).astype(np.int32)
X = DRAW.normal(size=(ROWS, 16)).astype(np.float32)
SHAPE = (ROWS, ROWS)


def bcoo(values: Any, places: Any) -> Any:
    return sparse.BCOO((values, places), shape=SHAPE)


def product(values: Any, places: Any, x: Any) -> Any:
    return bcoo(values, places) @ x


def slope(values: Any, places: Any, x: Any) -> Any:
    return jax.grad(lambda v: ((bcoo(v, places) @ x) ** 2).sum())(values)


def by_rows(values: Any, places: Any, x: Any) -> Any:
    return sparse.BCSR((values, places[:, 1], jnp.asarray(STARTS)), shape=SHAPE) @ x


def by_coordinates(values: Any, places: Any, x: Any) -> Any:
    return sparse.COO((values, places[:, 0], places[:, 1]), shape=SHAPE) @ x


def by_starts(values: Any, places: Any, x: Any) -> Any:
    return sparse.CSR((values, places[:, 1], jnp.asarray(STARTS)), shape=SHAPE) @ x


def spread(values: Any, places: Any, x: Any) -> Any:
    return bcoo(values, places).todense() @ x


SENT = 7 * (ROWS // 8) * 16 * 4  # the terms of a product, scattered to its rows
CASES: dict[str, tuple[Callable[..., Any], P, int | None]] = {
    "product": (product, P("x"), SENT),
    "with a vector": (lambda v, p, x: product(v, p, x[:, 0]), P("x"), SENT // 16),
    "transposed": (lambda v, p, x: bcoo(v, p).T @ x, P("x"), SENT),
    "from the right": (lambda v, p, x: jnp.asarray(x).T @ bcoo(v, p), P(None, "x"), SENT),
    "gradient of the elements": (slope, P("x"), None),
    "rows after each other": (by_rows, P("x"), None),
    "coordinates": (by_coordinates, P("x"), None),
    "starts of rows": (by_starts, P("x"), None),
    "made dense": (spread, P("x"), None),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_partitioned(name: str) -> None:
    function, result, sent = CASES[name]
    specs = P("x"), P("x"), P()
    program = mw.jit(
        function, mesh=N8, in_shardings=specs, out_shardings=result, strict=True
    ).partition(VALUES, PLACES, X)
    assert not program.per_device.whole
    assert sent is None or program.wire_bytes == sent
    np.testing.assert_allclose(
        program.simulate(VALUES, PLACES, X), function(VALUES, PLACES, X), rtol=1e-4, atol=1e-4
    )
