"""What models call: activations, normalisations, attention, images, initialisers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.drop_in.drawing import Call, Dice
from tests.drop_in.tables.numbers import Row, rows, unary
from tests.drop_in.tables.reductions import reduction


def _attention(d: Dice) -> Call:
    b, t, s, kv, group, h = d.pick(1, 2, 4), d.integer(1, 6), d.integer(1, 6), d.pick(1, 2), 2, 4
    dtype = d.pick("float32", "bfloat16")
    q = d.ordinary((b, t, kv * group, h), dtype=dtype)
    k, v = (d.ordinary((b, s, kv, h), dtype=dtype) for _ in range(2))
    given: dict[str, Any] = {"is_causal": d.flag(0.3)}
    if d.flag(0.3):
        given["bias"] = d.ordinary((1, kv * group, t, s), dtype=dtype)
    if d.flag(0.3):
        given["mask"] = d.array((b, 1, t, s), "b") | (np.arange(s) == 0)
    if d.flag(0.2):
        given["local_window_size"] = (1, 1)
        given["is_causal"] = False
    return d.call(jax.nn.dot_product_attention, q, k, v, **given)


def _resize(d: Dice) -> Call:
    x = d.ordinary((d.integer(1, 3), d.integer(2, 7), d.integer(2, 7), 2), "f")
    to = (x.shape[0], d.integer(1, 9), d.integer(1, 9), 2)
    method = d.pick("nearest", "linear", "cubic", "lanczos3", "lanczos5")
    return d.call(jax.image.resize, x, to, method, antialias=d.flag())


def _scale_and_translate(d: Dice) -> Call:
    method = d.pick("linear", "cubic")
    return d.call(
        lambda x, s, t: jax.image.scale_and_translate(x, (3, 8, 6), (1, 2), s, t, method),
        d.ordinary((3, 5, 7), dtype="float32"), d.array((2,), dtype="float32", low=0.5, high=2),
        d.array((2,), dtype="float32", low=-1, high=1))  # fmt: skip


def _initialised(maker: Any, *args: Any) -> Row:
    def row(d: Dice) -> Call:
        initialise = maker(*args)
        shape = (3, 3, 4, 8) if maker is jax.nn.initializers.delta_orthogonal else (4, 8)
        key = jax.random.key(d.integer(0, 99))
        return d.call(lambda k, x: (initialise(k, shape), x), key, d.array())

    return row


MODELS: dict[str, Row] = {
    **rows("nn", jax.nn, (
        "celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid"
        " mish relu relu6 selu sigmoid silu soft_sign softplus sparse_plus sparse_sigmoid"
        " squareplus swish tanh"
    ), lambda f: unary(f, "fffi")),
    "nn.log1mexp": unary(jax.nn.log1mexp, "f", low=0.1, high=5),
    "nn.gelu exact": unary(lambda x: jax.nn.gelu(x, approximate=False), "f"),
    "nn.glu": lambda d: (lambda s: d.call(jax.nn.glu, d.ordinary((*s, 8)), axis=-1))(d.shape(0, 2)),
    **rows("nn", jax.nn, "softmax log_softmax", lambda f: reduction(
        f, "f", keepdims=False, least=1)),
    "nn.softmax where": lambda d: (lambda s: d.call(
        lambda x, w: jax.nn.softmax(x, -1, where=w), d.ordinary(s), d.array(s, "b")))(
            d.shape(1, 3, 1)),
    **rows("nn", jax.nn, "logsumexp", lambda f: reduction(f, "f", least=1)),
    **rows("nn", jax.nn, "logmeanexp", lambda f: reduction(f, "f", least=1)),
    "nn.logsumexp of weights": lambda d: (lambda s: d.call(
        lambda x, b: jax.nn.logsumexp(x, axis=-1, b=b, return_sign=True), d.ordinary(
            s, dtype="float32"), d.ordinary(s, dtype="float32")))(d.shape(1, 3, 1)),
    "nn.standardize": lambda d: (lambda s: d.call(
        jax.nn.standardize, d.ordinary(s, dtype="float32"), axis=d.axis(s)))(d.shape(1, 3, 2)),
    "nn.one_hot": lambda d: d.call(
        jax.nn.one_hot, d.array(kinds="i"), d.integer(1, 9), dtype=d.dtype("fi"),
        axis=d.pick(-1, 0)),
    "nn.dot_product_attention": _attention,
    "image.resize": _resize,
    "image.scale_and_translate": _scale_and_translate,
    **rows("nn.initializers", jax.nn.initializers, (
        "normal uniform glorot_normal glorot_uniform he_normal he_uniform kaiming_normal"
        " kaiming_uniform lecun_normal lecun_uniform xavier_normal xavier_uniform orthogonal"
        " delta_orthogonal truncated_normal"
    ), _initialised),
    "nn.initializers.constant": _initialised(jax.nn.initializers.constant, 2.0),
    "nn.initializers.variance_scaling": _initialised(
        jax.nn.initializers.variance_scaling, 2.0, "fan_avg", "uniform"),
    **rows("nn.initializers", jax.nn.initializers, "zeros ones", lambda f: _initialised(lambda: f)),
    "nn gradients": lambda d: (lambda f: d.call(
        jax.grad(lambda x: f(x).sum()), d.ordinary(dtype="float32")))(
            d.pick(jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.relu, jax.nn.logsumexp)),
    "nn layer norm": lambda d: (lambda s: d.call(
        jax.grad(lambda x, w: (jax.nn.standardize(x) * w).sum() ** 2, (0, 1)),
        d.ordinary(s, dtype="float32"), d.ordinary(s[-1:], dtype="float32")))(d.shape(1, 3, 2)),
    "nn cross entropy": lambda d: (lambda b, c: d.call(
        jax.value_and_grad(lambda x, y: -jnp.take_along_axis(
            jax.nn.log_softmax(x), y[..., None], -1).mean()),
        d.ordinary((*b, c), dtype="float32"),
        d.array(b, dtype="int32", low=0, high=c - 1)))(d.shape(1, 2, 1), d.integer(1, 9)),
}  # fmt: skip
