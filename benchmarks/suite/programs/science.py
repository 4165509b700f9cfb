"""Stencils, transforms, solvers, particles: what people compute who train nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    GRID,
    LOCAL,
    NONE,
    SECOND,
    Array,
    Best,
    Program,
    X,
    exchanged,
    gathered,
    integers,
    passed,
    reduced,
)

row = partial(Program, "science")


def jacobi(u: Any) -> Any:
    """A step that leaves its boundary as it is."""
    inner = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
    return u.at[1:-1, 1:-1].set(inner)


def many(step: Any, count: int) -> Any:
    return lambda u: lax.fori_loop(0, count, lambda _, u: step(u), u)


def heat(u: Any) -> Any:
    """Diffusion on a torus, by rolls."""
    around = sum(jnp.roll(u, s, d) for d in (0, 1) for s in (1, -1))
    return u + 0.1 * (around - 4 * u)


def wave(u: Any, before: Any) -> Any:
    """Twenty steps of the wave equation in three dims, fixed at the ends."""

    def step(_: Any, state: Any) -> Any:
        u, before = state
        p = jnp.pad(u, 1)
        around = sum(
            lax.slice_in_dim(p[1:-1, 1:-1] if d == 2 else p[1:-1, :, 1:-1] if d == 1
                             else p[:, 1:-1, 1:-1], s, s + u.shape[d], axis=d)
            for d in range(3) for s in (0, 2)
        )  # fmt: skip
        return 2 * u - before + 0.05 * (around - 6 * u), u

    return lax.fori_loop(0, 20, step, (u, before))[0]


def upwind(u: Any) -> Any:
    """Advection by second-order upwind differences."""
    return u - 0.2 * (3 * u - 4 * jnp.roll(u, 1, 0) + jnp.roll(u, 2, 0)) / 2


def life(u: Any) -> Any:
    """Conway's game on a torus: eight neighbours, diagonal ones too."""
    alive = (u > 0).astype(jnp.float32)
    shifts = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)]
    count = sum(jnp.roll(alive, s, (0, 1)) for s in shifts)
    return ((count == 3) | ((alive > 0) & (count == 2))).astype(jnp.float32)


def shallow_water(h: Any, u: Any, v: Any) -> Any:
    """A step of the shallow-water equations on a torus, forward in time."""

    def dx(f: Any) -> Any:
        return (jnp.roll(f, -1, 0) - jnp.roll(f, 1, 0)) / 2

    def dy(f: Any) -> Any:
        return (jnp.roll(f, -1, 1) - jnp.roll(f, 1, 1)) / 2

    t = 0.01
    return (
        h - t * (dx(h * u) + dy(h * v)),
        u - t * (u * dx(u) + v * dy(u) + dx(h)),
        v - t * (u * dx(v) + v * dy(v) + dy(h)),
    )


def largest_eigenvector(a: Any, v: Any) -> Any:
    def step(v: Any, _: Any) -> Any:
        v = a @ v
        return v / jnp.linalg.norm(v), None

    return lax.scan(step, v, None, length=20)[0]


def conjugate_gradient(a: Any, b: Any) -> Any:
    """Ten steps for `(a a' + 1) x = b`."""
    return jax.scipy.sparse.linalg.cg(lambda x: a @ (a.T @ x) / 100 + x, b, maxiter=10)[0]


def poisson(f: Any) -> Any:
    """Poisson's equation on a torus by FFT."""
    n, m = f.shape
    kx, ky = jnp.fft.fftfreq(n)[:, None], jnp.fft.fftfreq(m)[None]
    k = (2 * jnp.pi) ** 2 * (kx * kx + ky * ky)
    k = jnp.where(k == 0, 1, k)
    return jnp.fft.ifft2(jnp.fft.fft2(f) / k).real


def forces(x: Any, m: Any) -> Any:
    """Gravity among particles, every pair."""
    d = x[None] - x[:, None]
    r2 = (d * d).sum(-1) + 0.1
    return (m[None, :, None] * d * (r2**-1.5)[..., None]).sum(1)


def leapfrog(x: Any, v: Any, m: Any) -> Any:
    def step(_: Any, state: Any) -> Any:
        x, v = state
        v = v + 0.01 * forces(x, m)
        return x + 0.01 * v, v

    return lax.fori_loop(0, 5, step, (x, v))


def kmeans(points: Any, centres: Any) -> Any:
    """Three rounds of Lloyd's algorithm."""

    def step(_: Any, centres: Any) -> Any:
        d = ((points[:, None] - centres[None]) ** 2).sum(-1)
        near = jax.nn.one_hot(jnp.argmin(d, 1), centres.shape[0])
        return (near.T @ points) / jnp.maximum(near.sum(0)[:, None], 1)

    return lax.fori_loop(0, 3, step, centres)


def least_squares(a: Any, b: Any) -> Any:
    """By the normal equations and Cholesky."""
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a.T @ a), a.T @ b)


def standardised(x: Any) -> Any:
    return (x - x.mean(0)) / x.std(0)


def covariance(x: Any) -> Any:
    x = x - x.mean(0)
    return x.T @ x / x.shape[0]


def pagerank(links: Any, rank: Any) -> Any:
    def step(_: Any, r: Any) -> Any:
        r = 0.85 * (links @ r) + 0.15 / r.shape[0]
        return r / r.sum()

    return lax.fori_loop(0, 10, step, rank)


def metropolis(x: Any, seed: Any) -> Any:
    """Independent walkers; random numbers are those of one device."""
    key = jax.random.key(seed[0])
    step, toss = jax.random.normal(key, x.shape), jax.random.uniform(jax.random.key(7), x.shape)
    new = x + 0.5 * step
    return jnp.where(jnp.log(toss) < (x * x - new * new) / 2, new, x)


def tridiagonal(x: Any, d: Any) -> Any:
    """Many systems with a diagonal matrix and its neighbours, one a row."""
    return jax.vmap(lambda d, b: lax.linalg.tridiagonal_solve(
        jnp.ones_like(d), d, jnp.ones_like(d), b[:, None])[:, 0])(d + 4, x)  # fmt: skip


def gradient_norm(x: Any, w: Any) -> Any:
    """Of a mean, features leading: the gradient is their product with one number, spread."""
    gradient = jax.grad(lambda w: (x.T @ w).mean())(w)
    return jnp.sqrt((gradient**2).sum())


TABLE = [
    row("norm of a gradient of means, weights sharded", gradient_norm,
        (Array((512, 512), X), Array((512, 256), X)), NONE,
        best=Best(reduced(1, 8), "an all-reduce of one number")),
    row("Jacobi step of 61 x 67, 2x4", jacobi, (Array((61, 67), GRID),), GRID, (2, 4)),
    row("Jacobi step, rows sharded", jacobi, (Array((64, 64), X),), X,
        best=Best(2 * passed(64), "a row to each neighbour")),
    row("Jacobi, 50 steps, 2x4", many(jacobi, 50), (Array((64, 64), GRID),), GRID, (2, 4)),
    row("heat on a torus, rows sharded", heat, (Array((256, 64), X),), X,
        best=Best(2 * passed(64), "a row to each neighbour")),
    row("heat on a torus, 20 steps, 2x4", many(heat, 20), (Array((64, 64), GRID),), GRID, (2, 4),
        Best(20 * 2 * (passed(16) + passed(32)), "edges to four neighbours, every step")),
    row("wave in three dims, 20 steps, 2x2x2", wave,
        (Array((32, 32, 32), P("x", "y", "z")),) * 2, P("x", "y", "z"), (2, 2, 2),
        Best(20 * 3 * passed(16, 16), "a face to each of three neighbours, every step")),
    row("upwind differences", upwind, (Array((1024, 16), X),), X,
        best=Best(passed(2, 16), "two rows to the next")),
    row("game of life, 2x4", life, (Array((64, 64), GRID),), GRID, (2, 4)),
    row("shallow water, 2x4", shallow_water, (Array((64, 64), GRID),) * 3, (GRID,) * 3, (2, 4)),
    row("power method, rows sharded", largest_eigenvector,
        (Array((128, 128), X), Array((128,))), X,
        reason="the vector is gathered before it is divided by its norm, not after"),
    row("power method, blocks, 2x4", largest_eigenvector,
        (Array((128, 128), GRID), Array((128,))), X, (2, 4)),
    row("conjugate gradient, 10 steps", conjugate_gradient,
        (Array((128, 128), X), Array((128,), X)), X),
    row("fft, batch sharded", lambda x: jnp.fft.fft(x).real, (Array((64, 256), X),), X,
        best=LOCAL),
    row("fft of two dims, rows sharded", lambda x: jnp.fft.fft2(x).real,
        (Array((256, 256), X),), X),
    row("fft of two dims, result turned", jnp.fft.fft2, (Array((256, 256), X),),
        SECOND, best=Best(exchanged(256 * 256 / 8, 8, 8), "an all_to_all of complex numbers")),
    row("fft of a vector", lambda x: jnp.fft.fft(x).real, (Array((1 << 16,), X),), X),
    row("real fft, batch sharded", lambda x: jnp.abs(jnp.fft.rfft(x)), (Array((64, 256), X),), X,
        best=LOCAL),
    row("Poisson by FFT", poisson, (Array((128, 128), X),), X),
    row("forces among particles", forces, (Array((512, 3), X), Array((512,), X)), X,
        best=Best(gathered(512 * 4, 8), "each particle's place and mass to everyone")),
    row("leapfrog, 5 steps", leapfrog,
        (Array((256, 3), X), Array((256, 3), X), Array((256,), X)), (X, X),
        best=Best(gathered(256, 8) + 5 * gathered(256 * 3, 8),
                  "masses to everyone once, places in every step")),
    row("k-means", kmeans, (Array((4096, 8), X), Array((16, 8))), NONE,
        best=Best(3 * reduced(16 * 9, 8), "sums and counts of each centre")),
    row("least squares by normal equations", least_squares,
        (Array((1024, 32), X), Array((1024,), X)), NONE,
        best=Best(reduced(32 * 32 + 32, 8), "an all-reduce of both products"), tolerance=1e-3),
    row("columns standardised", standardised, (Array((4096, 16), X),), X,
        best=Best(2 * reduced(16, 8), "an all-reduce of two moments")),
    row("covariance", covariance, (Array((4096, 32), X),), NONE,
        best=Best(reduced(32, 8) + reduced(32 * 32, 8), "the mean, then the product")),
    row("PageRank", pagerank, (Array((256, 256), SECOND), Array((256,))), NONE),
    row("Metropolis walkers", metropolis, (Array((4096, 8), X), integers((1,), 100)), X,
        best=LOCAL),
    row("batch of Cholesky factors",
        lambda x: jnp.linalg.cholesky(x @ x.mT + 8 * jnp.eye(16)), (Array((64, 16, 16), X),), X,
        best=LOCAL),
    row("batch of tridiagonal systems", tridiagonal,
        (Array((64, 32), X), Array((64, 32), X, scale=0.1)), X, best=LOCAL),
    row("batch of singular values", lambda x: jnp.linalg.svd(x, compute_uv=False),
        (Array((32, 12, 8), X),), X, best=LOCAL),
]  # fmt: skip
