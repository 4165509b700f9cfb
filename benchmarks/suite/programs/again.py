"""What goes to frequencies or in order again and again, biases in shards, reversals before sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.suite.program import (
    GRID,
    NONE,
    Array,
    Best,
    Program,
    X,
    exchanged,
    gathered,
    passed,
    reduced,
)

matmul = partial(Program, "matmul")
transformer = partial(Program, "transformer", tolerance=1e-3)
indexing = partial(Program, "indexing")
ordering = partial(Program, "ordering", tolerance=1e-3)
science = partial(Program, "science", tolerance=1e-3)


def dispersed(u: Any) -> Any:
    """Four steps of a wave whose derivatives are taken among frequencies."""
    n = u.shape[0]
    k = jnp.fft.rfftfreq(n) * n

    def step(f: Any, _: Any) -> Any:
        square = jnp.fft.rfft(jnp.fft.irfft(f) ** 2)
        return f - 1e-4 * (3j * k * square - 1j * k**3 * f / 1e6), None

    return jnp.fft.irfft(lax.scan(step, jnp.fft.rfft(u), None, length=4)[0])


def whirled(w: Any) -> Any:
    """A step of vorticity in two dims."""
    n = w.shape[0]
    k = jnp.fft.fftfreq(n) * n
    kx, ky = k[:, None], k[None, : n // 2 + 1]
    square = jnp.where(kx**2 + ky**2 == 0, 1, kx**2 + ky**2)
    f = jnp.fft.rfft2(w)
    u, v = jnp.fft.irfft2(1j * ky * f / square), jnp.fft.irfft2(-1j * kx * f / square)
    carried = u * jnp.fft.irfft2(1j * kx * f) + v * jnp.fft.irfft2(1j * ky * f)
    return jnp.fft.irfft2(f - 0.01 * jnp.fft.rfft2(carried) - 0.01 * square * f)


def in_order(x: Any) -> Any:
    for _ in range(4):
        x = jnp.sin(3 * jnp.sort(x))
    return x


def in_order_both_ways(x: Any, times: int = 3) -> Any:
    """Rows are whole where columns are in order, and the other way round: each has room to move."""
    for _ in range(times):
        x = jnp.sin(3 * jnp.sort(jnp.sort(x, 0), 1))
    return x


def perceptron(x: Any, up: Any, bias: Any, down: Any, shift: Any) -> Any:
    return x + jax.nn.gelu(x @ up + bias) @ down + shift


def nearest(x: Any, codes: Any, norms: Any) -> Any:
    return codes[jnp.argmin(norms - 2 * x @ codes.T, 1)]


LAYER = (
    Array((384, 64), X),
    Array((64, 256), X, scale=0.1),
    Array((256,), X),
    Array((256, 64), X, scale=0.1),
    Array((64,), X),
)
TABLE = [
    science("waves among frequencies, 4 steps", dispersed, (Array((2048,), X, scale=0.1),), X,
        best=Best(gathered(2048, 8), "the wave gathered once")),
    science("whirls among frequencies", whirled, (Array((64, 64), X),), X,
        best=Best(gathered(64 * 64, 8), "the field gathered once"),
        reason="flops beside Shardy, which gathers seven times and computes parts in between"),
    science("whirls among frequencies, 2x4", whirled, (Array((64, 64), GRID),), GRID, (2, 4),
        best=Best(gathered(64 * 64, 8), "the field gathered once"),
        reason="flops beside Shardy, which gathers oftener and computes parts in between"),
    ordering("a vector in order, four times over", in_order, (Array((4096,), X),), X,
        best=Best(gathered(4096, 8), "the vector gathered once"),
        reason="flops beside GSPMD, which gathers four times and computes parts in between"),
    ordering("columns and rows in order, in turns", in_order_both_ways, (Array((64, 64), X),), X,
        best=Best(6 * exchanged(64 * 64 / 8, 8), "to columns and back for each")),
    transformer("layer, weights and biases in shards", perceptron, LAYER, X,
        best=Best(gathered(2 * 64 * 256 + 256 + 64, 8), "weights and biases gathered")),
    transformer("gradient of a layer, weights and biases in shards",
        jax.grad(lambda *layer: (perceptron(*layer) ** 2).sum(), range(1, 5)),
        LAYER, (X, X, X, X),
        best=Best(2 * gathered(2 * 64 * 256 + 256 + 64, 8), "gathered, gradients scattered")),
    indexing("nearest codes, in shards", nearest,
        (Array((512, 16), X), Array((256, 16), X), Array((256,), X)), X),
    matmul("rows from the last, summed", lambda x: x[::-1].sum(1), (Array((512, 64), X),), X,
        best=Best(passed(1, 64), "a device's sums to the one opposite")),
    matmul("inner products of rows from the last", lambda x, y: x[::-1].T @ y[::-1],
        (Array((512, 32), X), Array((512, 32), X)), NONE,
        best=Best(reduced(32 * 32, 8), "all reduced")),
    matmul("an image turned half round, summed", lambda x: jnp.rot90(x, 2).sum(1),
        (Array((64, 64), X),), NONE, best=Best(gathered(64, 8), "sums of rows gathered")),
]  # fmt: skip
