"""Training steps of a small transformer under the schemes people use, and inference with a cache.

A step is forward, backward and Adam. Its parameters, moments and batch lie as the scheme says; the
activations named in it are annotated, for XLA and for us alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.suite.program import (
    GRID,
    NONE,
    SECOND,
    Array,
    Best,
    Program,
    X,
    exchanged,
    gathered,
    integers,
    reduced,
    scattered,
)

row = partial(Program, "transformer")
Shard = Callable[[Any, P], Any]


@dataclass(frozen=True)
class Sizes:
    """A batch of sequences, and the width of a layer."""

    batch: int
    length: int
    width: int
    heads: int
    head: int
    inner: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """A layer's parameters."""
        return {
            "norm1": (self.width,),
            "wq": (self.width, self.heads, self.head),
            "wk": (self.width, self.heads, self.head),
            "wv": (self.width, self.heads, self.head),
            "wo": (self.heads, self.head, self.width),
            "norm2": (self.width,),
            "up": (self.width, self.inner),
            "down": (self.inner, self.width),
        }


SMALL = Sizes(batch=16, length=32, width=64, heads=8, head=8, inner=256)
BATCH, LENGTH, WIDTH, HEADS, HEAD = SMALL.batch, SMALL.length, SMALL.width, SMALL.heads, SMALL.head
SHAPES = SMALL.shapes
SIZE = sum(prod(shape) for shape in SHAPES.values())
MATRICES = SIZE - 2 * WIDTH


@dataclass(frozen=True)
class Scheme:
    """Where parameters, the batch and the annotated activations of a step lie."""

    weights: Mapping[str, P] = field(default_factory=dict)
    batch: P = X
    residual: P | None = None
    heads: P | None = None
    inner: P | None = None


DATA = Scheme()
ZERO = Scheme({name: X for name in SHAPES})
MEGATRON_WEIGHTS = {
    "wq": P(None, "y"),
    "wk": P(None, "y"),
    "wv": P(None, "y"),
    "wo": P("y"),
    "up": P(None, "y"),
    "down": P("y"),
}
PARALLEL = {"heads": P("x", None, "y"), "inner": P("x", None, "y")}
MEGATRON = Scheme(MEGATRON_WEIGHTS, residual=X, **PARALLEL)
SEQUENCE = Scheme(MEGATRON_WEIGHTS, residual=GRID, **PARALLEL)
BOTH_WEIGHTS = {
    "norm1": X,
    "norm2": X,
    "wq": GRID,
    "wk": GRID,
    "wv": GRID,
    "wo": P("y", None, "x"),
    "up": GRID,
    "down": P("y", "x"),
}
ZERO_MEGATRON = Scheme(BOTH_WEIGHTS, residual=X, **PARALLEL)
FINALISED = Scheme(BOTH_WEIGHTS, residual=P("x", None, "y"), **PARALLEL)
THREE = Scheme(
    {name: P(*("z" if a == "x" else a for a in spec)) for name, spec in BOTH_WEIGHTS.items()},
    batch=P(("x", "z")),
    residual=P(("x", "z")),
    heads=P(("x", "z"), None, "y"),
    inner=P(("x", "z"), None, "y"),
)


def normalise(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def block(shard: Shard, scheme: Scheme, p: Mapping[str, Any], x: Any) -> Any:
    """One layer, pre-norm, causal."""

    def at(value: Any, spec: P | None) -> Any:
        return value if spec is None else shard(value, spec)

    h = normalise(x, p["norm1"])
    q, k, v = (at(jnp.einsum("bsd,dhk->bshk", h, p[w]), scheme.heads) for w in ("wq", "wk", "wv"))
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    x = at(x + jnp.einsum("bshk,hkd->bsd", attend(q, k, v, mask), p["wo"]), scheme.residual)
    h = at(jax.nn.gelu(normalise(x, p["norm2"]) @ p["up"]), scheme.inner)
    return at(x + h @ p["down"], scheme.residual)


def forward(scheme: Scheme) -> Callable[..., Any]:
    return lambda shard, p, x: block(shard, scheme, p, x)


def adam(p: Any, m: Any, v: Any, g: Any) -> tuple[Any, Any, Any]:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-2 * m / (jnp.sqrt(v) + 1e-4), m, v


def step_of(run: Callable[..., Any]) -> Callable[..., Any]:
    """Loss, gradient and update; the state is a tree of (parameter, moment, moment)."""

    def step(shard: Shard, state: Any, x: Any, y: Any) -> Any:
        parameters = {name: leaves[0] for name, leaves in state.items()}

        def loss(p: Any) -> Any:
            return ((run(shard, p, x) - y) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(parameters)
        return {n: adam(*leaves, g=gradient[n]) for n, leaves in state.items()}, value

    return step


def layers(scheme: Scheme, remat: bool = False) -> Callable[..., Any]:
    """The blocks of stacked parameters, one after the other."""

    def forward(shard: Shard, p: Any, x: Any) -> Any:
        one = partial(block, shard, scheme)
        one = jax.checkpoint(one) if remat else one
        return lax.scan(lambda h, w: (one(w, h), None), x, p)[0]

    return forward


def train(
    name: str,
    scheme: Scheme,
    mesh: tuple[int, ...],
    best: Best | None = None,
    stack: int = 0,
    remat: bool = False,
    reason: str = "",
    sizes: Sizes = SMALL,
) -> Program:
    """A training step; `stack` layers under a scan, or one."""
    shapes = sizes.shapes
    specs = {n: scheme.weights.get(n, NONE) for n in shapes}
    ahead: tuple[int, ...] = ()
    if stack:
        ahead, specs = (stack,), {n: P(None, *spec) for n, spec in specs.items()}
    state = {
        n: (
            Array((*ahead, *shape), specs[n], scale=shape[0] ** -0.5),
            Array((*ahead, *shape), specs[n], scale=0.01),
            Array((*ahead, *shape), specs[n], scale=0.0),  # a mean of squares, not below nothing
        )
        for n, shape in shapes.items()
    }
    data = Array((sizes.batch, sizes.length, sizes.width), scheme.batch)
    results = ({n: (spec,) * 3 for n, spec in specs.items()}, NONE)
    run = layers(scheme, remat) if stack else forward(scheme)
    function, arguments = step_of(run), (state, data, data)
    return Program("transformer", name, function, arguments, results, mesh, best, True,
                   reason, tolerance=2e-3)  # fmt: skip


# A step of Adam divides by a root that may be small: errors of a sum's order grow, so 2e-3.


def activations(devices: int) -> float:
    """Elements of the residual stream on one of `devices` rows of the batch."""
    return BATCH * LENGTH * WIDTH / devices


def decode(shard: Shard, p: Any, keys: Any, values: Any, x: Any, place: Any) -> Any:
    """One token of attention with a cache: [B, T, H, D], written at `place`."""
    h = normalise(x, p["norm1"])
    q, k, v = (jnp.einsum("bd,dhk->bhk", h, p[w]) for w in ("wq", "wk", "wv"))
    start = (0, place[0], 0, 0)
    keys = lax.dynamic_update_slice(keys, k[:, None], start)
    values = lax.dynamic_update_slice(values, v[:, None], start)
    mask = jnp.arange(keys.shape[1])[None, None, None] <= place[0]
    out = attend(q[:, None], keys, values, mask)[:, 0]
    x = x + jnp.einsum("bhk,hkd->bd", out, p["wo"])
    return x + jax.nn.gelu(normalise(x, p["norm2"]) @ p["up"]) @ p["down"], keys, values


def decoding(
    name: str, weights: Mapping[str, P], cache: P, x: P, mesh: tuple[int, ...], best: Best | None
) -> Program:
    p = {n: Array(s, weights.get(n, NONE), scale=s[0] ** -0.5) for n, s in SHAPES.items()}
    room = Array((16, 128, HEADS, HEAD), cache)
    args = (p, room, room, Array((16, WIDTH), x), integers((1,), 128))
    return row(name, decode, args, (x, cache, cache), mesh, best, hinted=True)


def prefill(shard: Shard, p: Any, x: Any) -> Any:
    """A block over a whole prompt, queries and keys spread over the mesh by position."""
    return block(shard, Scheme(residual=SECOND), p, x)


def cross_entropy(table: Any, h: Any, labels: Any) -> Any:
    """The mean loss over a vocabulary, and the gradient of its table."""

    def loss(table: Any) -> Any:
        logits = jax.nn.log_softmax(h @ table.T)
        return -jnp.take_along_axis(logits, labels[:, None], 1).mean()

    return jax.value_and_grad(loss)(table)


def rope(x: Any) -> Any:
    """Rotary positions: halves of each head turned by an angle of the position."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10.0 ** -jnp.arange(half)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


TABLE = [
    train("data parallel", DATA, (8,), Best(
        reduced(SIZE, 8) + reduced(1, 8), "an all-reduce of every gradient, and of the loss")),
    train("data parallel over both axes, 2x4", Scheme(batch=P(("x", "y"))), (2, 4), Best(
        reduced(SIZE, 8) + reduced(1, 8), "an all-reduce of every gradient, and of the loss")),
    train("ZeRO-3", ZERO, (8,), Best(
        gathered(SIZE, 8) + scattered(SIZE, 8) + reduced(1, 8),
        "each parameter gathered once, its gradient reduce-scattered")),
    train("Megatron, 2x4", MEGATRON, (2, 4)),
    train("Megatron, 4x2", MEGATRON, (4, 2), Best(
        3 * reduced(activations(4), 2) + reduced(MATRICES / 2 + WIDTH, 4)
        + reduced(WIDTH, 8) + reduced(1, 4),
        "activations after both halves, a cotangent between them; gradients over x")),
    train("sequence parallel, 2x4", SEQUENCE, (2, 4)),
    train("sequence parallel, 4x2", SEQUENCE, (4, 2)),
    train("ZeRO-3 and Megatron, 2x4", ZERO_MEGATRON, (2, 4)),
    train("ZeRO-3 and Megatron, 4x2", ZERO_MEGATRON, (4, 2)),
    train("2-D finalised, 2x4", FINALISED, (2, 4)),
    train("2-D finalised, 4x2", FINALISED, (4, 2)),
    train("data, tensor and ZeRO-3, 2x2x2", THREE, (2, 2, 2)),
    train("ZeRO-3, four scanned layers", ZERO, (8,), None, 4),
    train("ZeRO-3, four scanned layers recomputed", ZERO, (8,), None, 4, True),
    train("Megatron, four scanned layers, 2x4", MEGATRON, (2, 4), None, 4),
    train("2-D finalised, four scanned layers, 2x4", FINALISED, (2, 4), None, 4,
          reason="more and smaller exchanges in each step, for fewer bytes"),
    decoding("decode, batch sharded", {}, X, X, (8,), Best(0, "every device has its sequences")),
    decoding("decode, heads sharded",
        {"wq": SECOND, "wk": SECOND, "wv": SECOND, "wo": X, "up": SECOND, "down": X},
        P(None, None, "x"), NONE, (8,),
        Best(2 * reduced(16 * WIDTH, 8), "an all-reduce after attention and after the rest")),
    decoding("decode, batch and heads, 2x4", MEGATRON_WEIGHTS, P("x", None, "y"), X, (2, 4),
        Best(2 * reduced(8 * WIDTH, 4), "an all-reduce after attention and after the rest")),
    decoding("decode, cache sharded by position", {}, SECOND, NONE, (8,), None),
    row("prefill, sequence sharded", prefill,
        ({n: Array(s, scale=s[0] ** -0.5) for n, s in SHAPES.items()},
         Array((BATCH, 64, WIDTH), SECOND)), SECOND, hinted=True,
        best=Best(2 * exchanged(BATCH * 64 * WIDTH / 8, 8), "sequences to devices, and back")),
    row("loss and table's gradient, vocabulary sharded", cross_entropy,
        (Array((1024, 64), X, scale=0.1), Array((128, 64)), integers((128,), 1024)), (NONE, X),
        best=Best(2 * reduced(128, 8) + reduced(1, 8),
                  "largest and sum of each row; of the labels' logits only the sum")),
    row("rotary positions, sequence sharded", rope, (Array((4, 128, 8, 16), SECOND),), SECOND,
        best=Best(0, "positions are known on the spot")),
    row("tied embedding, forward and back", lambda table, ids: jax.grad(
        lambda t: ((t[ids] @ t.T) ** 2).mean())(table),
        (Array((512, 32), X), integers((64,), 512)), X),
]  # fmt: skip
