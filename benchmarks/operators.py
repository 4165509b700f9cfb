"""One operator a row: the bytes each device sends, beside XLA's two partitioners, in one run.

    python -m benchmarks.operators [NAME ...] [--markdown]

How it is measured is said in `beside.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.beside import Row, main  # first: it sets JAX up for eight devices

# isort: split
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P


def conv(**options: Any) -> Callable[..., Any]:
    """A convolution of images with their channels last."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


SAME = conv(window_strides=(1, 1), padding="SAME")
GROUPED = conv(window_strides=(1, 1), padding="SAME", feature_group_count=2)


def gradient(function: Callable[..., Any], which: int = 0) -> Callable[..., Any]:
    """The gradient of one argument; the last operand is the cotangent."""
    return lambda *args: jax.vjp(function, *args[:-1])[1](args[-1])[which]


def max_pool(x: jax.Array) -> jax.Array:
    """Windows of three that move by two."""
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of integer labels."""
    rows = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -rows.mean()


def jacobi(u: jax.Array) -> jax.Array:
    """A step of a stencil that leaves its boundary as it is."""
    inner = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
    return u.at[1:-1, 1:-1].set(inner)


X, NONE, COLUMNS, TILES = P("x"), P(), P(None, "x"), P(None, "x", "y")
IMAGE = (4, 64, 64, 16)
ROWS = (1024, 64)

TABLE = [
    Row("conv 3x3, rows sharded", SAME, (IMAGE, (3, 3, 16, 16)), (COLUMNS, NONE), COLUMNS),
    Row("conv 3x3, rows and columns", SAME, (IMAGE, (3, 3, 16, 16)), (TILES, NONE), TILES, (2, 4)),
    Row("conv 19x3, wider than a shard", SAME, (IMAGE, (19, 3, 16, 16)), (COLUMNS, NONE), COLUMNS),
    Row("conv, gradient of the kernel", gradient(SAME, 1), (IMAGE, (3, 3, 16, 16), IMAGE),
        (COLUMNS, NONE, COLUMNS), NONE),
    Row("grouped conv, batch sharded", GROUPED, ((16, 32, 32, 16), (3, 3, 8, 16)), (X, NONE), X),
    Row("max pooling", max_pool, (IMAGE,), (COLUMNS,), COLUMNS),
    Row("max pooling, gradient", gradient(max_pool), (IMAGE, (4, 32, 32, 16)), (COLUMNS, COLUMNS),
        COLUMNS),
    Row("Jacobi step of 61 x 67", jacobi, ((61, 67),), (P("x", "y"),), P("x", "y"), (2, 4)),
    Row("roll by one", lambda x: jnp.roll(x, 1, 0), (ROWS,), (X,), X),
    Row("cumsum", lambda x: jnp.cumsum(x, 0), (ROWS,), (X,), X),
    Row("associative_scan", lambda x: lax.associative_scan(jnp.add, x), (ROWS,), (X,), X),
    Row("sort, along the sharded dim", lambda x: jnp.sort(x, 0), (ROWS,), (X,), X),
    Row("sort of a vector", jnp.sort, ((1 << 20,),), (X,), X),
    Row("top_k of 8", lambda x: lax.top_k(x, 8)[0], ((4, 1 << 16),), (COLUMNS,), NONE),
    Row("argmax", lambda x: jnp.argmax(x, 1), ((64, 1 << 14),), (COLUMNS,), NONE),
    Row("fft, batch sharded", lambda x: jnp.fft.fft(x).real, ((64, 256),), (X,), X),
    Row("fft2, rows sharded", lambda x: jnp.fft.fft2(x).real, ((256, 256),), (X,), X),
    Row("fft of a vector", lambda x: jnp.fft.fft(x).real, ((1 << 16,),), (X,), X),
    Row("12 heads over 8 devices", lambda x: x.reshape(8, 12, 128), ((8, 1536),), (COLUMNS,),
        COLUMNS),
    Row("two vectors joined", lambda x, y: jnp.concatenate([x, y]), (ROWS, ROWS), (X, X), X),
    Row("dynamic_slice, 8 rows", lambda x, i: lax.dynamic_slice(x, (i[0], 0), (8, 64)),
        (ROWS, (1, None, 2000)), (X, NONE), NONE),
    Row("dynamic_update_slice, 8 rows",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0], 0)),
        (ROWS, (8, 64), (1, None, 2000)), (X, NONE, NONE), X),
    Row("embedding, rows sharded", lambda w, i: w[i], (ROWS, (256, None, 1024)), (X, NONE), NONE),
    Row("segment_sum", lambda e, i: jax.ops.segment_sum(e, i, 1024),
        ((4096, 16), (4096, None, 1024)), (X, X), X),
    Row("cross-entropy, vocabulary sharded", cross_entropy, ((64, 4096), (64, None, 4096)),
        (COLUMNS, NONE), NONE),
    Row("cholesky, batch sharded", lambda x: jnp.linalg.cholesky(x @ x.mT + 8 * jnp.eye(16)),
        ((64, 16, 16),), (X,), X),
]  # fmt: skip


if __name__ == "__main__":
    main(TABLE, __doc__ or "")
