"""Solvers, neighbours, transforms and flips as people write them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.sparse import linalg as sparse
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    GRID,
    LOCAL,
    NONE,
    SECOND,
    XY,
    Array,
    Best,
    Program,
    X,
    exchanged,
    gathered,
    integers,
    passed,
    reduced,
    scattered,
)

science = partial(Program, "science", tolerance=1e-3)
ordering = partial(Program, "ordering", tolerance=1e-3)
reshape = partial(Program, "reshape")
indexing = partial(Program, "indexing")
control = partial(Program, "control flow")
YX = P(("y", "x"))


def conjugate_gradient(apply: Any, b: Any) -> Any:
    """Until the residual is small, fifteen steps at most."""

    def step(state: Any) -> Any:
        x, r, p, rr, i = state
        ap = apply(p)
        a = rr / (p * ap).sum()
        r = r - a * ap
        new = (r * r).sum()
        return x + a * p, r, r + new / rr * p, new, i + 1

    start = (jnp.zeros_like(b), b, b, (b * b).sum(), 0)
    return lax.while_loop(lambda s: (s[3] > 1e-6) & (s[4] < 15), step, start)[0]


def five_points(u: Any) -> Any:
    p = jnp.pad(u, 1)
    return 4.5 * u - p[:-2, 1:-1] - p[2:, 1:-1] - p[1:-1, :-2] - p[1:-1, 2:]


def sobel(x: Any) -> Any:
    p = jnp.pad(x, 1, mode="edge")
    return jnp.hypot(p[2:, 1:-1] - p[:-2, 1:-1], p[1:-1, 2:] - p[1:-1, :-2])


def nearest(x: Any, points: Any) -> Any:
    d = (x * x).sum(1)[:, None] + (points * points).sum(1) - 2 * x @ points.T
    return lax.top_k(-d, 5)


def rolling_mean(x: Any) -> Any:
    total = jnp.concatenate([jnp.zeros((1, x.shape[1])), jnp.cumsum(x, 0)])
    return (total[8:] - total[:-8]) / 8


def factorised(u: Any, v: Any, i: Any, j: Any, r: Any) -> Any:
    """A step of gradient descent on the ratings of a batch."""
    e = (r - (u[i] * v[j]).sum(1))[:, None]
    return u.at[i].add(0.1 * e * v[j]), v.at[j].add(0.1 * e * u[i])


def transformed(c: Any, e: Any) -> Any:
    """Integrals over atomic orbitals to molecular ones."""
    return jnp.einsum("pi,qj,rk,sl,pqrs->ijkl", c, c, c, c, e, optimize=True)


def derivative(u: Any) -> Any:
    k = jnp.fft.fftfreq(u.shape[0])[:, None]
    return jnp.fft.ifft2(1j * k * jnp.fft.fft2(u)).real


def marched(x: Any, w: Any) -> Any:
    def step(_: Any, x: Any) -> Any:
        return x + 0.1 * jnp.tanh((x + 0.05 * jnp.tanh(x @ w)) @ w)

    return lax.fori_loop(0, 5, step, x)


SQUARE, VECTOR = Array((128, 128), X), Array((128,), X)
TABLE = [
    ordering("largest ten kept, 2x4", lambda x: jnp.where(
        x < lax.top_k(x, 10)[0][:, -1:], -1e9, x), (Array((32, 512), GRID),), GRID, (2, 4)),
    ordering("nearest five, points sharded", nearest, (Array((32, 8)), Array((512, 8), X)), NONE,
        reason="two small exchanges, one after the other, where XLA gathers once"),
    ordering("rolling mean by sums", rolling_mean, (Array((256, 4), X),), NONE),
    ordering("sorted by two keys", lambda a, b: jnp.lexsort((a, b)),
        (integers((512,), 16, X), integers((512,), 16, X)), X),
    ordering("distances of sorted samples", lambda a, b: jnp.abs(jnp.sort(a) - jnp.sort(b)).mean(),
        (Array((1024,), X), Array((1024,), X)), NONE),
    indexing("ratings of a batch", factorised, (Array((128, 8), X), Array((64, 8), X),
        integers((256,), 128, X), integers((256,), 64, X), Array((256,), X)), (X, X),
        reason="features are split: half the bytes; every device computes all ratings, errors too"),
    indexing("columns rolled each by its own", jax.vmap(jnp.roll),
        (Array((32, 64), SECOND), integers((32,), 64)), SECOND),
    reshape("both dims reversed, 2x4", lambda x: x[::-1, ::-1], (Array((64, 64), GRID),), GRID,
        (2, 4), Best(passed(32, 16), "a block to the device on the other side")),
    reshape("a quarter turned, 2x4", jnp.rot90, (Array((64, 64), GRID),), GRID, (2, 4)),
    reshape("tiled, and summed again",
        lambda x: jnp.tile(x, (4, 3)).reshape(4, 32, 3, 16).sum((0, 2)), (Array((32, 16), X),), X,
        best=LOCAL, reason="XLA's own program: 80 microseconds, which differ so between runs"),
    reshape("rows over y and x to rows over x and y, normalised, 2x4",
        lambda x: jax.nn.softmax(x, 0), (Array((64, 16), YX),), XY, (2, 4)),
    control("products in branches", lambda p, a, b: lax.cond(p > 0, lambda: a @ b, lambda: b @ a),
        (Array(()), SQUARE, SQUARE), X, best=Best(gathered(128 * 128, 8), "one of both")),
    science("conjugate gradient while it helps, 2x4", partial(conjugate_gradient, five_points),
        (Array((64, 64), GRID),), GRID, (2, 4)),
    science("conjugate gradient while it helps, rows sharded",
        lambda a, b: conjugate_gradient(lambda v: a.T @ (a @ v) / 64 + v, b),
        (Array((64, 64), X), Array((64,), X)), X),
    science("biconjugate gradient", lambda a, b: sparse.bicgstab(
        lambda v: 3 * v + a @ v / 16, b, maxiter=5)[0], (SQUARE, VECTOR), X),
    science("minimal residual", lambda a, b: sparse.gmres(
        lambda v: 3 * v + a @ v / 16, b, maxiter=2, restart=4)[0], (SQUARE, VECTOR), X),
    science("products of what is carried", lambda a, v: lax.fori_loop(
        0, 4, lambda _, v: a.T @ (a @ v) / 64, v), (Array((64, 32), X), Array((32,))), NONE,
        best=Best(4 * reduced(32, 8), "an all-reduce a step")),
    science("edges of an image, 2x4", sobel, (Array((64, 64), GRID),), GRID, (2, 4)),
    science("kernel density", lambda x, q: jnp.exp(-((q[:, None] - x) ** 2)).mean(1),
        (Array((512,), X), Array((128,), X)), X,
        best=Best(gathered(128, 8) + scattered(128, 8), "places to all, sums to owners")),
    science("orbitals, integrals by rows", transformed,
        (Array((16, 8)), Array((16, 16, 16, 16), X)), X),
    science("fft of three dims, slabs", jnp.fft.fftn, (Array((16, 16, 16), X),), SECOND,
        best=Best(exchanged(16**3 / 8, 8, 8), "an all_to_all of complex numbers")),
    science("derivative by FFT, rows sharded", derivative, (Array((64, 64), X),), X,
        best=Best(2 * exchanged(64 * 64 / 8, 8, 8), "columns to devices, and back")),
    science("differential equation with a weight sharded", marched,
        (Array((64, 32), X), Array((32, 32), SECOND)), X,
        best=Best(gathered(32 * 32, 8), "the weight gathered once")),
]  # fmt: skip
