"""Element by element: one array, or several that broadcast."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.drop_in.drawing import Call, Dice, Scalar

Row = Callable[[Dice], Call]


def unary(function: Any, kinds: str, **numbers: Any) -> Row:
    return lambda d: d.call(function, d.array(kinds=kinds, **numbers))


def nary(function: Any, count: int, kinds: str, scalars: bool = True, **numbers: Any) -> Row:
    """Arrays that broadcast, of types that promote; sometimes one is a Python number."""

    def row(d: Dice) -> Call:
        arrays: list[Any] = [d.array(s, kinds, **numbers) for s in d.together(count)]
        if scalars and d.flag(0.2):
            arrays[d.integer(0, count - 1)] = d.pick(Scalar(3.0), 2)
        return d.call(function, *arrays)

    return row


def same(function: Any, count: int, kinds: str, **numbers: Any) -> Row:
    """Arrays of one shape and one type, as `lax` wants them."""

    def row(d: Dice) -> Call:
        shape, dtype = d.shape(), d.dtype(kinds)
        return d.call(function, *[d.array(shape, dtype=dtype, **numbers) for _ in range(count)])

    return row


def rows(prefix: str, module: Any, names: str, make: Callable[[Any], Row]) -> dict[str, Row]:
    """A row for each function of a module that this JAX has."""
    found = [(n, getattr(module, n)) for n in names.split() if hasattr(module, n)]
    return {f"{prefix}.{name}": make(function) for name, function in found}


def made(*function: Any) -> Callable[..., Callable[[Any], Row]]:
    return partial


def _of(make: Callable[..., Row], *args: Any, **kwargs: Any) -> Callable[[Any], Row]:
    return lambda function: make(function, *args, **kwargs)


NUMBERS: dict[str, Row] = {
    **rows("jnp", jnp, (
        "abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan"
        " atanh conj conjugate cos cosh deg2rad exp exp2 expm1 i0 imag isfinite isinf isnan log"
        " log10 log1p log2 negative positive real reciprocal rint sign sin sinc sinh sqrt square"
        " tan tanh iscomplex isreal sort_complex real_if_close"
    ), _of(unary, "fffcib")),
    **rows("jnp", jnp, (
        "cbrt ceil degrees fabs fix floor isneginf isposinf modf rad2deg radians signbit spacing"
        " trunc frexp"
    ), _of(unary, "ffi")),
    **rows("jnp", jnp, (
        "bitwise_count bitwise_invert bitwise_not invert"
    ), _of(unary, "iub")),
    **rows("jnp", jnp, (
        "astype logical_not nan_to_num ndim size shape iscomplexobj isrealobj isscalar"
    ), lambda f: lambda d: d.call(
        *([f, d.array(kinds="fibc")] + ([d.dtype("fib")] if f is jnp.astype else [])))),
    **rows("jnp", jnp, (
        "add subtract multiply divide true_divide power float_power equal not_equal logical_and"
        " logical_or logical_xor"
    ), _of(nary, 2, "ffiubc")),
    **rows("jnp", jnp, (
        "maximum minimum less less_equal greater greater_equal fmax fmin floor_divide"
        " remainder mod fmod"
    ), _of(nary, 2, "ffiu")),
    **rows("jnp", jnp, (
        "arctan2 atan2 copysign hypot logaddexp logaddexp2 heaviside nextafter"
    ), _of(nary, 2, "ffi")),
    **rows("jnp", jnp, "divmod", _of(nary, 2, "fiu")),
    **rows("jnp", jnp, (
        "bitwise_and bitwise_or bitwise_xor"
    ), _of(nary, 2, "iub", scalars=False)),
    **rows("jnp", jnp, "gcd lcm", _of(nary, 2, "iu", scalars=False)),
    **rows("jnp", jnp, (
        "bitwise_left_shift bitwise_right_shift left_shift right_shift"
    ), _of(nary, 2, "iu", scalars=False, low=0, high=7)),
    "jnp.pow": nary(jnp.pow, 2, "ffic"),
    "jnp.pow of integers": nary(jnp.pow, 2, "iu", low=0, high=4),
    "jnp.power of a constant": lambda d: d.call(
        lambda x, n: x**n, d.array(kinds="ficu"), d.pick(0, 1, 2, 3, 5)),
    "jnp.ldexp": lambda d: (lambda s: d.call(
        jnp.ldexp, d.array(s[0]), d.array(s[1], "i")))(d.together(2)),
    "jnp.isclose": lambda d: (lambda s: d.call(
        jnp.isclose, d.array(s[0], "fic"), d.array(s[1], "fi"), rtol=d.pick(0.1, 1.0),
        equal_nan=d.flag()))(d.together(2)),
    **rows("jnp", jnp, "allclose", lambda f: lambda d: (lambda s: d.call(
        f, d.array(s[0]), d.array(s[1]), equal_nan=d.flag()))(d.together(2))),
    **rows("jnp", jnp, "array_equal array_equiv", lambda f: lambda d: (lambda x: d.call(
        f, x, d.pick(x, x.copy(), d.array(x.shape))))(d.array(kinds="fi"))),
    "jnp.where": lambda d: (lambda s: d.call(
        jnp.where, d.array(s[0], "bbf"), d.array(s[1], "fibc"),
        d.pick(d.array(s[2], "fib"), Scalar(0.5), 2)))(d.together(3)),
    "jnp.clip": lambda d: (lambda s: d.call(
        jnp.clip, d.array(s[0], "fiu"), d.pick(None, d.array(s[1], "fi"), Scalar(-1.0), -1),
        d.pick(None, d.array(s[2], "fi"), 2)))(d.together(3)),
    "jnp.select": lambda d: (lambda s: d.call(
        jnp.select, [d.array(s[0], "b"), d.array(s[1], "b")],
        [d.array(s[2], "fi"), d.array(s[3], "fi")], d.pick(0, 1.5)))(d.together(4)),
    "jnp.piecewise": lambda d: (lambda x: d.call(
        lambda x: jnp.piecewise(x, [x < 0, x > 2], [lambda v: -v, 3, jnp.sin]), x))(d.array()),
    "jnp.choose": lambda d: (lambda s: d.call(
        jnp.choose, d.array(s[0], dtype="int32", low=0, high=1 if (m := d.flag()) else 5),
        [d.array(s[1], "fi"), d.array(s[2], "fi")], mode="clip" if not m or d.flag() else "wrap",
    ))(d.together(3)),
    **rows("jnp", jnp, "round around", lambda f: lambda d: d.call(
        f, d.array(kinds="ffc"), d.integer(-1, 2))),
    "jnp.round of integers": lambda d: d.call(jnp.round, d.array(kinds="iu")),
    "jnp.polyval": lambda d: d.call(
        jnp.polyval, d.ordinary(d.shape(1, 1)), d.ordinary(d.shape(0, 3))),
    "jnp.interp": lambda d: (lambda n: d.call(
        jnp.interp, d.ordinary(dtype="float32"), np.sort(d.ordinary((n,), dtype="float32")),
        d.ordinary((n,), dtype="float32"), left=d.pick(None, 0.0), right=d.pick(None, 9.0),
        ))(d.integer(1, 9)),
    "jnp.unwrap": lambda d: (lambda s: d.call(
        jnp.unwrap, d.ordinary(s, dtype="float32", low=-20, high=20), axis=d.axis(s)))(
            d.shape(1)),
    "jnp.vectorize": lambda d: (lambda b: d.call(
        jnp.vectorize(lambda x, y: x @ y, signature="(n,m),(m)->(n)"),
        d.ordinary((*b, 3, 4), dtype="float32"), d.ordinary((4,), dtype="float32")))(d.batch()),
    "jnp.frompyfunc": lambda d: (lambda s: d.call(
        jnp.frompyfunc(lambda x, y: x * y + 1, 2, 1, identity=None),
        d.ordinary(s[0], dtype="float32"), d.ordinary(s[1], dtype="float32")))(d.together(2)),
    "jnp.real of arithmetic": lambda d: (lambda s: d.call(
        lambda x, y: (x + y, x - y * 2, x / 3, 1 / x, x @ jnp.ones((*s[-1:], 2)), -x, x * 1j),
        d.ordinary(s, "fc"), d.ordinary(s, "fc")))(d.shape(1, 3, 1)),
    **rows("lax", lax, (
        "abs neg sign square"
    ), _of(unary, "fic")),
    **rows("lax", lax, (
        "acos acosh asin asinh atan atanh cos cosh exp exp2 expm1 log log1p logistic reciprocal"
        " rsqrt sin sinh sqrt tan tanh"
    ), _of(unary, "ffc")),
    **rows("lax", lax, (
        "bessel_i0e bessel_i1e cbrt ceil digamma erf erf_inv erfc floor lgamma is_finite"
    ), _of(unary, "f")),
    **rows("lax", lax, "conj real imag", _of(unary, "c")),
    **rows("lax", lax, "bitwise_not population_count clz", lambda f: unary(f, "iu")),
    "lax.round": lambda d: d.call(lax.round, d.array(), d.pick(*lax.RoundingMethod)),
    "lax.integer_pow": lambda d: d.call(lax.integer_pow, d.array(kinds="fic"), d.integer(0, 4)),
    "lax.reduce_precision": lambda d: d.call(lax.reduce_precision, d.array(), 5, 3),
    **rows("lax", lax, "add sub mul eq ne", _of(same, 2, "fiuc")),
    **rows("lax", lax, "div max min ge gt le lt", _of(same, 2, "fiu")),
    **rows("lax", lax, "rem atan2 nextafter", lambda f: same(f, 2, "f")),
    "lax.rem of integers": same(lax.rem, 2, "iu", low=1),
    "lax.complex": same(lax.complex, 2, "f") if False else lambda d: (lambda s: d.call(
        lax.complex, d.array(s, dtype="float32"), d.array(s, dtype="float32")))(d.shape()),
    **rows("lax", lax, "bitwise_and bitwise_or bitwise_xor", _of(same, 2, "iub")),
    **rows("lax", lax, "mulhi", lambda f: lambda d: (lambda s: d.call(
        f, d.array(s, dtype="int32", low=-2**31, high=2**31 - 1),
        d.array(s, dtype="int32", low=-2**31, high=2**31 - 1)))(d.shape())),
    **rows("lax", lax, (
        "shift_left shift_right_arithmetic shift_right_logical"
    ), _of(same, 2, "iu", low=0, high=9)),
    "lax.pow": lambda d: (lambda s: d.call(
        lax.pow, d.array(s, dtype="float32"), d.pick(d.array(s, dtype="float32"), 3)))(d.shape()),
    "lax.igamma": same(lax.igamma, 2, "f", low=0.2, high=4),
    "lax.igammac": same(lax.igammac, 2, "f", low=0.2, high=4),
    "lax.betainc": lambda d: (lambda s: d.call(
        lax.betainc, *[d.array(s, dtype="float32", low=0.2, high=0.9) for _ in range(3)]))(
            d.shape(0, 2)),
    "lax.polygamma": lambda d: (lambda s: d.call(
        lax.polygamma, np.asarray(d.rng.integers(1, 4, s), np.float32),
        d.array(s, dtype="float32", low=0.3, high=5)))(d.shape(0, 2)),
    "lax.zeta": lambda d: (lambda s: d.call(
        lax.zeta, d.array(s, dtype="float32", low=1.5, high=5),
        d.array(s, dtype="float32", low=0.3, high=5)))(d.shape(0, 2)),
    "lax.igamma_grad_a": lambda d: (lambda s: d.call(
        lax.igamma_grad_a, *[d.array(s, dtype="float32", low=0.3, high=5) for _ in range(2)]))(
            d.shape(0, 2)),
    "lax.random_gamma_grad": lambda d: (lambda s: d.call(
        lax.random_gamma_grad, *[d.array(s, dtype="float32", low=0.3, high=5) for _ in range(2)]))(
            d.shape(0, 2)),
    "lax.clamp": lambda d: (lambda s, t: d.call(
        lax.clamp, d.array(d.pick((), s), dtype=t), d.array(s, dtype=t),
        d.array(d.pick((), s), dtype=t)))(d.shape(), d.dtype("fiu")),
    "lax.select": lambda d: (lambda s, t: d.call(
        lax.select, d.array(d.pick((), s), "b"), d.array(s, dtype=t), d.array(s, dtype=t)))(
            d.shape(), d.dtype("fiubc")),
    "lax.select_n": lambda d: (lambda s, t: d.call(
        lax.select_n, d.array(d.pick((), s), dtype="int32", low=0, high=2),
        *[d.array(s, dtype=t) for _ in range(3)]))(d.shape(), d.dtype("fiubc")),
    "lax.convert_element_type": lambda d: d.call(
        lax.convert_element_type, d.ordinary(kinds="fiub"), d.dtype("fiubc")),
    "lax.bitcast_convert_type": lambda d: d.call(
        lax.bitcast_convert_type, d.array(
            (*d.shape(0, 3), 2), dtype=d.pick("float32", "int32", "uint8", "bfloat16")),
        d.pick(jnp.int32, jnp.uint8, jnp.float16, jnp.uint32)),
    "lax.nextafter": same(lax.nextafter, 2, "f"),
    "lax.stop_gradient": unary(lax.stop_gradient, "fib"),
    "lax.optimization_barrier": lambda d: d.call(
        lax.optimization_barrier, (d.array(), d.array(kinds="i"))),
}  # fmt: skip
