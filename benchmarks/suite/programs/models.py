"""Parts of models as people write them: attention in its variants, optimisers, states, routing."""

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
    Y,
    exchanged,
    gathered,
    integers,
    passed,
    reduced,
    scattered,
)

attention = partial(Program, "transformer", tolerance=1e-3)
routed = partial(Program, "moe", tolerance=1e-3)
image = partial(Program, "conv", tolerance=1e-3)
loop = partial(Program, "control flow", tolerance=1e-3)
HEADS, COLUMNS, LAST = P("x", None, "y"), P(None, "y"), P(None, None, None, "x")


def squared(function: Any, *which: int) -> Any:
    """Gradients of a sum of squares."""
    return jax.grad(lambda *args: (function(*args) ** 2).sum(), which)


def attend(q: Any, k: Any, v: Any) -> Any:
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def attention_back(x: Any, wq: Any, wk: Any, wv: Any, back: Any) -> Any:
    """Gradients of attention without its last projection."""

    def heads(x: Any, *weights: Any) -> Any:
        return attend(*(jnp.einsum("bsd,dhk->bshk", x, w) for w in weights))

    return jax.vjp(heads, x, wq, wk, wv)[1](back)


def attention_back_of_input(x: Any, *others: Any) -> Any:
    return attention_back(x, *others)[0]


def gated_back(x: Any, gate: Any, up: Any, back: Any) -> Any:
    """Gradients of a gated MLP without its last product."""
    return jax.vjp(lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up), x, gate, up)[1](back)


def grouped_queries(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    """Four queries a key, causal."""
    q = jnp.einsum("bsd,dhk->bshk", x, wq)
    k, v = (jnp.einsum("bsd,dgk->bsgk", x, w) for w in (wk, wv))
    b, s, h, d = q.shape
    q = q.reshape(b, s, k.shape[2], -1, d)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k) / d**0.5
    p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9), -1)
    out = jnp.einsum("bgrqk,bkgd->bqgrd", p, v).reshape(b, s, h, d)
    return jnp.einsum("bshd,hdm->bsm", out, wo)


def short_layers() -> Any:
    """Layers one after another, computed in `bfloat16` of weights in `float32`."""

    def layer(x: Any, weight: Any) -> Any:
        return jnp.tanh(x @ weight.astype(jnp.bfloat16)), None

    def loss(weights: Any, x: Any) -> Any:
        return (lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

    return jax.grad(loss)


def gated(w: Any, u: Any, x: Any, h: Any) -> Any:
    """A step of a gated recurrent unit, the weights of its gates in a stack."""
    update, reset = (jax.nn.sigmoid(x @ w[i] + h @ u[i]) for i in range(2))
    return update * h + (1 - update) * jnp.tanh(x @ w[2] + (reset * h) @ u[2])


def contrasted(queries: Any, keys: Any, i: Any, j: Any) -> Any:
    """The loss of two towers: each query is to find its own key among all of a batch."""
    return -jnp.diag(jax.nn.log_softmax(queries[i] @ keys[j].T)).mean()


def windowed(q: Any, k: Any, v: Any) -> Any:
    """Each block of eight positions looks at itself and at the block before."""
    b, s, h, d = q.shape
    q, k, v = (t.reshape(b, s // 8, 8, h, d) for t in (q, k, v))

    def with_last(t: Any) -> Any:
        before = jnp.pad(t[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
        return jnp.concatenate([before, t], 2)

    scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q, with_last(k)) / d**0.5
    i, j = jnp.arange(8)[:, None] + 8, jnp.arange(16)[None]
    p = jax.nn.softmax(jnp.where((j <= i) & (i - j < 8), scores, -1e9), -1)
    return jnp.einsum("bnhqk,bnkhd->bnqhd", p, with_last(v)).reshape(b, s, h, d)


def latent(x: Any, down: Any, wk: Any, wv: Any, wq: Any, wo: Any) -> Any:
    """Keys and values of a small latent."""
    c = x @ down
    k, v = (jnp.einsum("bsc,chd->bshd", c, w) for w in (wk, wv))
    return x + jnp.einsum("bshd,hdm->bsm", attend(jnp.einsum("bsd,dhk->bshk", x, wq), k, v), wo)


def decoded(x: Any, keys: Any, values: Any, place: Any) -> Any:
    """A token for each sequence, each at its own place."""
    write = jax.vmap(lambda cache, row, at: lax.dynamic_update_slice(cache, row[None], (at, 0, 0)))
    keys, values = write(keys, x, place), write(values, 2 * x, place)
    scores = jnp.einsum("bhd,bkhd->bhk", x, keys)
    seen = jnp.arange(keys.shape[1])[None, None] <= place[:, None, None]
    p = jax.nn.softmax(jnp.where(seen, scores, -1e9), -1)
    return jnp.einsum("bhk,bkhd->bhd", p, values), keys, values


def pages(q: Any, pool: Any, table: Any) -> Any:
    kv = pool[table].reshape(table.shape[0], -1, *pool.shape[2:])
    return attend(q[:, None], kv, kv)[:, 0]


def linear_attention(q: Any, k: Any, v: Any) -> Any:
    states = jnp.cumsum(jnp.einsum("bsd,bse->bsde", jax.nn.elu(k) + 1, v), 1)
    return jnp.einsum("bsd,bsde->bse", jax.nn.elu(q) + 1, states)


def long_convolution(x: Any, taps: Any, gate: Any) -> Any:
    n = 2 * x.shape[1]
    mixed = jnp.fft.rfft(x, n=n, axis=1) * jnp.fft.rfft(taps, n=n, axis=0)
    return gate * jnp.fft.irfft(mixed, n=n, axis=1)[:, : x.shape[1]]


def triangles(z: Any, a: Any, b: Any) -> Any:
    return z + jnp.einsum("ikc,jkc->ijc", jax.nn.sigmoid(z @ a), z @ b)


def adapted(x: Any, w: Any, a: Any, b: Any, y: Any) -> Any:
    """Gradients of a low-rank correction, the weight itself kept."""
    return jax.grad(lambda a, b: ((x @ w + x @ a @ b - y) ** 2).mean(), (0, 1))(a, b)


def orthogonalised(g: Any) -> Any:
    """Muon's five Newton-Schulz steps."""
    x = g / jnp.linalg.norm(g)
    for _ in range(5):
        m = x @ x.T
        x = 3.4445 * x + (-4.775 * m + 2.0315 * m @ m) @ x
    return x


def clipped_each(w: Any, x: Any, y: Any) -> Any:
    """The mean of gradients, each clipped (DP-SGD)."""
    one = jax.grad(lambda w, x, y: ((jnp.tanh(x @ w) - y) ** 2).sum())
    g = jax.vmap(one, (None, 0, 0))(w, x, y)
    return (g * jnp.minimum(1, 1 / jnp.sqrt((g * g).sum((1, 2), keepdims=True)))).mean(0)


def accumulated(w: Any, x: Any, y: Any) -> Any:
    def step(total: Any, batch: Any) -> Any:
        g = jax.grad(lambda w: ((jnp.tanh(batch[0] @ w) - batch[1]) ** 2).mean())(w)
        return total + g, None

    return lax.scan(step, jnp.zeros_like(w), (x, y))[0]


def sorted_dispatch(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """Two best experts; tokens sorted by expert, each with room for a few."""
    n, e, room = x.shape[0], up.shape[0], 4 * x.shape[0] // up.shape[0]
    weight, expert = lax.top_k(jax.nn.softmax(x @ gate), 2)
    flat = expert.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    mine, token = flat[order], order // 2
    place = jnp.arange(2 * n) - jnp.searchsorted(mine, jnp.arange(e))[mine]
    slot = jnp.where(place < room, mine * room + place, e * room)
    rows = jnp.zeros((e * room + 1, x.shape[1])).at[slot].set(x[token])[:-1]
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", rows.reshape(e, room, -1), up))
    out = jnp.einsum("ecf,efd->ecd", h, down).reshape(e * room, -1)
    out = jnp.where((place < room)[:, None], out[jnp.minimum(slot, e * room - 1)], 0)
    return jnp.zeros_like(x).at[token].add(out * weight.reshape(-1)[order][:, None])


def experts_choose(x: Any, gate: Any, up: Any, down: Any) -> Any:
    weight, i = lax.top_k(jax.nn.softmax(x @ gate).T, 16)
    h = jax.nn.relu(jnp.einsum("ecd,edf->ecf", x[i], up))
    out = jnp.einsum("ecf,efd->ecd", h, down) * weight[..., None]
    return jnp.zeros_like(x).at[i.reshape(-1)].add(out.reshape(-1, x.shape[1]))


def shifted_windows(x: Any) -> Any:
    """Attention within windows of 4 x 4, shifted by two."""
    b, h, w, c = x.shape
    t = jnp.roll(x, (-2, -2), (1, 2)).reshape(b, h // 4, 4, w // 4, 4, c)
    t = t.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, 16, c)
    t = jax.nn.softmax(jnp.einsum("bnqc,bnkc->bnqk", t, t) / c**0.5, -1) @ t
    t = t.reshape(b, h // 4, w // 4, 4, 4, c).transpose(0, 1, 3, 2, 4, 5)
    return jnp.roll(t.reshape(b, h, w, c), (2, 2), (1, 2))


def conv(x: Any, w: Any, groups: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def normalised(x: Any, mean: Any, var: Any) -> Any:
    """A batch normalised, and the statistics kept up."""
    m, v = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - m) / jnp.sqrt(v + 1e-5), 0.9 * mean + 0.1 * m, 0.9 * var + 0.1 * v


def selective(x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    """Mamba's recurrence: decays and inputs of each step's own."""

    def step(h: Any, now: Any) -> Any:
        x, dt, b, c = now
        h = jnp.exp(-dt[..., None] * jnp.exp(a)) * h + (dt * x)[..., None] * b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    steps = tuple(jnp.moveaxis(t, 1, 0) for t in (x, jax.nn.softplus(dt), b, c))
    start = jnp.zeros((x.shape[0], x.shape[2], a.shape[1]))
    return jnp.moveaxis(lax.scan(step, start, steps)[1], 0, 1)


def best_paths(moves: Any, seen: Any) -> Any:
    """Viterbi: from which state the best path to each comes, in every step."""

    def step(score: Any, own: Any) -> Any:
        paths = score[:, None] + moves
        return paths.max(0) + own, jnp.argmax(paths, 0)

    return lax.scan(step, seen[0], seen[1:])[1]


def smoothed(x: Any) -> Any:
    return lax.scan(lambda c, row: (0.9 * c + 0.1 * row,) * 2, jnp.zeros(x.shape[1:]), x)[1]


def heads(spec: P, n: int = 64) -> tuple[Array, ...]:
    return (Array((4, n, 8, 8), spec),) * 3


SMALL = (Array((64, 32), X), Array((32, 8)), Array((8, 32, 64), X, scale=0.2),
         Array((8, 64, 32), X, scale=0.2))  # fmt: skip
STEPS = Array((4, 64, 64), SECOND)
TABLE = [
    attention("grouped queries, 2x4", grouped_queries, (
        Array((8, 64, 64), X), Array((64, 8, 8), COLUMNS, scale=0.1),
        Array((64, 4, 8), COLUMNS, scale=0.1), Array((64, 4, 8), COLUMNS, scale=0.1),
        Array((8, 8, 64), Y, scale=0.1)), X, (2, 4)),
    attention("gradient of attention's input, features sharded, 2x4", attention_back_of_input, (
        Array((16, 32, 64), HEADS), *(Array((64, 8, 8), COLUMNS, scale=0.1),) * 3,
        Array((16, 32, 8, 8), HEADS)), HEADS, (2, 4),
        best=Best(3 * exchanged(8 * 32 * 64 / 4, 4) + 3 * gathered(64 * 64, 4),
                  "features to sequences and back, and weights gathered")),
    attention("gradient of attention, features and weights sharded, 2x4", attention_back, (
        Array((16, 32, 64), HEADS), *(Array((64, 8, 8), GRID, scale=0.1),) * 3,
        Array((16, 32, 8, 8), HEADS)), (HEADS, GRID, GRID, GRID), (2, 4)),
    attention("gradient of a gated unit, weights in blocks, 2x4", gated_back, (
        Array((16, 32, 64), X), *(Array((64, 256), GRID, scale=0.1),) * 2,
        Array((16, 32, 256), P(("x", "y")))), (X, GRID, GRID), (2, 4),
        best=Best(2 * (gathered(64 * 64, 2) + scattered(64 * 64, 2)) + exchanged(2 * 32 * 256, 4)
                  + reduced(8 * 32 * 64, 4),
                  "weights over rows, what comes back by columns, and a sum")),
    attention("sliding window by blocks, sequence sharded", windowed,
        (Array((2, 128, 4, 8), SECOND),) * 3, SECOND,
        best=Best(2 * passed(2, 8, 4, 8), "a block of keys and of values to the next"),
        reason="keys and values travel together, and are copied apart: a fifth less time"),
    attention("sliding window by blocks, gradient", squared(windowed, 0, 1, 2),
        (Array((2, 128, 4, 8), SECOND),) * 3, SECOND,
        best=Best(4 * passed(2, 8, 4, 8), "blocks to the next, their gradients back")),
    attention("latent keys and values, 2x4", latent, (
        Array((4, 32, 64), X), Array((64, 16), scale=0.1), Array((16, 8, 8), COLUMNS, scale=0.2),
        Array((16, 8, 8), COLUMNS, scale=0.2), Array((64, 8, 8), COLUMNS, scale=0.1),
        Array((8, 8, 64), Y, scale=0.1)), X, (2, 4),
        best=Best(reduced(2 * 32 * 64, 4), "an all-reduce of what attention adds")),
    attention("decode at places of their own, cache by position", decoded,
        (Array((8, 8, 8)), Array((8, 64, 8, 8), SECOND), Array((8, 64, 8, 8), SECOND),
         integers((8,), 64)), (NONE, SECOND, SECOND),
        best=Best(reduced(8 * 8 * 10, 8), "largest, sum and result of each head")),
    attention("decode from pages, pool sharded", pages,
        (Array((8, 4, 8), X), Array((32, 8, 4, 8), X), integers((8, 4), 32, X)), X),
    attention("linear attention, sequence sharded", linear_attention,
        (Array((4, 64, 8), SECOND),) * 3, SECOND,
        best=Best(2 * exchanged(4 * 8 * 8, 8), "totals to columns, and back")),
    attention("long convolution by FFT, 2x4", long_convolution,
        (Array((4, 64, 16), HEADS), Array((64, 16), COLUMNS), Array((4, 64, 16), HEADS)), HEADS,
        (2, 4), LOCAL),
    attention("triangle multiplication", triangles,
        (Array((32, 32, 16), X), Array((16, 16), scale=0.2), Array((16, 16), scale=0.2)), X),
    attention("gradient of a low-rank correction, all sharded", adapted,
        (Array((64, 128), X), Array((128, 256), X, scale=0.1), Array((128, 8), X),
         Array((8, 256), SECOND), Array((64, 256), X)), (X, SECOND),
        reason="fewer bytes in collectives that wait for each other; XLA's gathers do not"),
    attention("Muon, layers inner sharded", jax.vmap(orthogonalised),
        (Array((8, 32, 64), P(None, None, "x")),), P(None, None, "x"),
        best=Best(2 * exchanged(8 * 32 * 8, 8), "a layer to each device, and back")),
    attention("Muon, columns sharded", orthogonalised, (Array((64, 256), SECOND),), SECOND,
        best=Best(5 * reduced(64 * 64, 8) + reduced(1, 8), "a Gram matrix a step, and a norm")),
    attention("gradients clipped one by one", clipped_each,
        (Array((32, 32)), Array((64, 32), X), Array((64, 32), X)), NONE,
        best=Best(reduced(32 * 32, 8), "an all-reduce of their mean")),
    attention("gated unit, gradient, batch sharded", squared(gated, 0, 1), (
        Array((3, 64, 64)), Array((3, 64, 64)), Array((512, 64), X), Array((512, 64), X)), NONE,
        best=Best(2 * reduced(3 * 64 * 64, 8), "an all-reduce of each gradient")),
    attention("two towers, gradient", jax.grad(contrasted, (0, 1)), (
        Array((1024, 32), X), Array((1024, 32), X), integers((256,), 1024, X),
        integers((256,), 1024, X)), X),
    attention("gradient accumulated, weight sharded", accumulated,
        (Array((64, 64), X), STEPS, STEPS), X,
        best=Best(gathered(64 * 64, 8) + scattered(64 * 64, 8),
                  "the weight gathered once, its gradient reduce-scattered once"),
        reason="the whole gradient added up, and scattered once; XLA scatters in every step"),
    attention("gradient of scanned layers in short floats", short_layers(),
        (Array((4, 64, 64), scale=0.1), Array((512, 64), X, "bfloat16")), NONE, tolerance=5e-2,
        best=Best(4 * reduced(64 * 64, 8, 2), "an all-reduce of each gradient, as it is made"),
        reason="twelve kernels and copies a step backward; XLA has eight, and holds 2.2 times as"
        " much"),
    attention("gradient of scanned layers in short floats, weights sharded", short_layers(),
        (Array((4, 64, 64), SECOND, scale=0.1), Array((512, 64), X, "bfloat16")), SECOND,
        tolerance=5e-2),
    attention("gradient of scanned layers in short floats, batch and columns, 2x4", short_layers(),
        (Array((4, 64, 64), P(None, "x", "y"), scale=0.1), Array((512, 64), X, "bfloat16")),
        P(None, "x", "y"), (2, 4), tolerance=5e-2),
    routed("tokens sorted by expert", sorted_dispatch, SMALL, X),
    routed("tokens sorted by expert, gradient", squared(sorted_dispatch, 1, 2, 3), SMALL,
        (NONE, X, X)),
    routed("experts choose tokens", experts_choose, SMALL, X),
    image("shifted windows, rows sharded", shifted_windows, (Array((2, 32, 16, 8), SECOND),),
        SECOND, best=Best(2 * passed(2, 2, 16, 8), "two rows to a neighbour, and back")),
    image("eight groups, channels sharded", partial(conv, groups=8),
        (Array((2, 16, 16, 64), LAST), Array((3, 3, 8, 64), LAST)), LAST, best=LOCAL),
    image("batch norm and its statistics", normalised,
        (Array((16, 8, 8, 32), X), Array((32,)), Array((32,))), (X, NONE, NONE),
        best=Best(2 * reduced(32, 8), "an all-reduce of two moments")),
    loop("selective states, channels sharded, 2x4", selective, (
        Array((4, 32, 32), HEADS), Array((4, 32, 32), HEADS), Array((32, 8), Y),
        Array((4, 32, 8), X), Array((4, 32, 8), X)), HEADS, (2, 4), LOCAL),
    loop("selective states, sequence sharded", selective, (
        Array((2, 32, 16), SECOND), Array((2, 32, 16), SECOND), Array((16, 4)),
        Array((2, 32, 4), SECOND), Array((2, 32, 4), SECOND)), SECOND,
        reason="XLA gathers what the steps read, and every device computes all of it"),
    loop("best paths, states sharded", best_paths,
        (Array((64, 64), SECOND), Array((12, 64), SECOND)), SECOND),
    loop("moving average, time sharded", smoothed, (Array((128, 8), X),), X,
        best=Best(2 * exchanged(128, 8), "time to devices, and back")),
]  # fmt: skip
