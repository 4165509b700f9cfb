"""What each element of a result is: arithmetic, comparisons, casts."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

Function = Callable[..., Any]


def of_operands(function: Callable[..., Any]) -> Function:
    """A primitive without parameters that matter."""
    return lambda params, *operands: function(*operands)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "iu":
        return x / y
    safe = np.where(y == 0, np.ones((), y.dtype), y)
    quotient = x // safe
    inexact = (x % safe != 0) & ((x < 0) != (y < 0))
    return np.where(y == 0, np.full((), -1).astype(x.dtype), quotient + inexact.astype(x.dtype))


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "iu":
        return np.fmod(x, y)
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, np.ones((), y.dtype), y)))


def _shift(left: bool, arithmetic: bool) -> Function:
    def shift(params: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        bits = x.dtype.itemsize * 8
        unsigned = np.dtype(f"uint{bits}")
        amount = y.astype(unsigned)
        inside = amount < bits
        amount = np.minimum(amount, unsigned.type(bits - 1))
        if arithmetic:
            return x >> amount.astype(x.dtype)
        words = x.astype(unsigned)
        moved = words << amount if left else words >> amount
        return np.where(inside, moved, unsigned.type(0)).astype(x.dtype)

    return shift


def _sign(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind != "c":
        return np.sign(x)
    size = np.abs(x)
    return np.where(size == 0, 0, x / np.where(size == 0, 1, size))


def _round(params: Any, x: np.ndarray) -> np.ndarray:
    if int(params["rounding_method"]) == 1:
        return np.rint(x)
    return np.trunc(x + np.copysign(np.float32(0.5), x))


def _select(params: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if which.dtype == np.bool_:
        return np.where(which, cases[-1], cases[0])
    return np.choose(np.clip(which, 0, len(cases) - 1), cases)


def cast(x: np.ndarray, dtype: Any) -> np.ndarray:
    """As XLA casts: integers saturate, NaN becomes zero, the imaginary part is dropped."""
    dtype = np.dtype(dtype)
    if x.dtype.kind == "c" and dtype.kind != "c":
        x = x.real
    if dtype == np.bool_:
        return x != 0
    if x.dtype.kind == "f" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        wide = np.clip(
            np.nan_to_num(x.astype(np.float64), posinf=2.0**70, neginf=-(2.0**70)),
            float(limits.min),
            float(limits.max),
        )
        return wide.astype(np.int64 if dtype.itemsize < 8 else dtype).astype(dtype)
    return x.astype(dtype)


def _less_precise(params: Any, x: np.ndarray) -> np.ndarray:
    if x.dtype != np.float32 or params["exponent_bits"] != 8:
        raise NotImplementedError("reduce_precision")
    drop = 23 - params["mantissa_bits"]
    if drop <= 0:
        return x
    bits = np.array(x).view(np.uint32)
    half = np.uint32((1 << (drop - 1)) - 1) + ((bits >> np.uint32(drop)) & np.uint32(1))
    kept = (bits + half) & np.uint32(0xFFFFFFFF ^ ((1 << drop) - 1))
    return np.where(np.isnan(x), x, kept.view(np.float32))


def _power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind in "iu":
        return np.power(x.astype(np.int64), np.maximum(y.astype(np.int64), 0)).astype(x.dtype)
    return np.power(x, y)


def _integer_power(params: Any, x: np.ndarray) -> np.ndarray:
    y = params["y"]
    return 1 / x**-y if y < 0 else x**y


def _count(x: np.ndarray) -> np.ndarray:
    unsigned = x.astype(np.dtype(f"uint{x.dtype.itemsize * 8}")).astype(np.uint64)
    total = np.zeros(x.shape, np.uint64)
    for k in range(x.dtype.itemsize * 8):
        total += (unsigned >> np.uint64(k)) & np.uint64(1)
    return total


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    bits = x.dtype.itemsize * 8
    words = x.astype(np.dtype(f"uint{bits}")).astype(np.uint64)
    total = np.full(x.shape, bits)
    for k in range(bits):
        total -= (words >> np.uint64(k)) != 0
    return total


def _not(x: np.ndarray) -> np.ndarray:
    return ~x


def _clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(x, low), high)


def _arctan2(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.arctan2(x, y)


FUNCTIONS = {
    "neg": np.negative, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh,
    "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "exp": np.exp,
    "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt,
    "cbrt": np.cbrt, "rsqrt": lambda x: 1 / np.sqrt(x), "square": np.square, "abs": np.abs,
    "floor": np.floor, "ceil": np.ceil, "sign": _sign, "is_finite": np.isfinite, "not": _not,
    "real": np.real, "imag": np.imag, "conj": np.conj, "erf": special.erf,
    "erfc": special.erfc, "erf_inv": special.erfinv, "lgamma": special.gammaln,
    "digamma": special.digamma, "logistic": special.expit, "population_count": _count,
    "clz": _leading_zeros, "add": np.add, "add_any": np.add, "sub": np.subtract,
    "mul": np.multiply, "div": _divide, "rem": _remainder, "max": np.maximum,
    "min": np.minimum, "pow": _power, "atan2": _arctan2, "nextafter": np.nextafter,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "eq": np.equal,
    "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "complex": lambda x, y: x + 1j * y, "clamp": _clamp,
    "log2": np.log2, "bessel_i0e": special.i0e, "bessel_i1e": special.i1e,
    "igamma": special.gammainc, "igammac": special.gammaincc, "zeta": special.zeta,
    "regularized_incomplete_beta": special.betainc, "polygamma": special.polygamma,
}  # fmt: skip


def _same(params: Any, *operands: np.ndarray) -> Any:
    return operands


SAME = (
    "copy", "copy_p", "stop_gradient", "optimization_barrier", "hint", "sharding_constraint",
    "pvary", "random_clone",
)  # fmt: skip
ELEMENTWISE: dict[str, Function] = {
    **{name: of_operands(function) for name, function in FUNCTIONS.items()},
    **dict.fromkeys(SAME, _same),
    "shift_left": _shift(True, False),
    "shift_right_logical": _shift(False, False),
    "shift_right_arithmetic": _shift(False, True),
    "select_n": _select,
    "convert_element_type": lambda params, x: cast(x, params["new_dtype"]),
    "reduce_precision": _less_precise,
    "integer_pow": _integer_power,
    "round": _round,
}


def bits_as(params: Any, x: np.ndarray) -> np.ndarray:
    """The same bits as another type: a dim more or less where sizes differ."""
    dtype = np.dtype(params["new_dtype"])
    old, new = x.dtype.itemsize, dtype.itemsize
    shape = x.shape
    if new < old:
        shape = (*shape, old // new)
    elif new > old:
        shape = shape[:-1]
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    return np.ascontiguousarray(x).reshape(-1).view(dtype).reshape(shape)
