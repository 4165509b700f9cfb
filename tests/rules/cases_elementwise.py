"""Element-wise operators: every one of them, and the ways their operands can be stretched."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from meshwise._jax import threefry2x32_p
from tests.rules.case import Case

ONE, TWO, THREE = "i j -> i j", "i j, i j -> i j", "i j, i j, i j -> i j"
ROUNDS = "0: rounding of terms is not rounding of their sum, though close"

# primitive: where the numbers come from
UNARY = {
    "abs": "", "acos": "u", "acosh": "+", "asin": "u", "asinh": "", "atan": "", "atanh": "u",
    "bessel_i0e": "", "bessel_i1e": "", "cbrt": "", "ceil": "", "cos": "", "cosh": "",
    "digamma": "+", "erf": "", "erf_inv": "u", "erfc": "", "exp": "", "exp2": "", "expm1": "",
    "floor": "", "is_finite": "", "lgamma": "+", "log": "+", "log1p": "+", "logistic": "",
    "round": "", "rsqrt": "+", "sign": "", "sin": "", "sinh": "", "sqrt": "+", "square": "",
    "tan": "", "tanh": "",
}  # fmt: skip
# Since some 0.11; before, quotients of two logs and differences from one.
UNARY |= {n: s for n, s in {"log2": "+", "one_minus_square": ""}.items() if hasattr(lax, n)}
BINARY = {
    "atan2": "", "eq": "", "ge": "", "gt": "", "igamma": "+", "igammac": "+", "le": "", "lt": "",
    "max": "", "min": "", "ne": "", "pow": "+", "rem": "", "zeta": "+",
    "igamma_grad_a": "+",
}  # fmt: skip
INTEGER = {
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "shift_left": "shift_left",
    "shift_right_arithmetic": "shift_right_arithmetic",
    "shift_right_logical": "shift_right_logical", "rem": "rem", "mulhi": "mulhi",
}  # fmt: skip


def _function(name: str):
    if name == "igamma_grad_a":  # the function of this name computes more
        return getattr(primitives, f"{name}_p").bind
    return getattr(lax, name)


CASES = [
    *(Case(n, n, _function(n), f"f32[7]{s}", "i -> i") for n, s in UNARY.items()),
    *(Case(n, n, _function(n), f"f32[7]{s} f32[7]{s}", "i, i -> i") for n, s in BINARY.items()),
    *(Case(f"{n} of integers", n, getattr(lax, f), "u32[7]<9 u32[7]<9", "i, i -> i")
      for n, f in INTEGER.items()),
    *(Case(f"{n} of integers", n, getattr(lax, f), "i32[7]", "i -> i")
      for n, f in {"not": "bitwise_not", "population_count": "population_count",
                   "clz": "clz"}.items()),
    Case("nextafter", "nextafter", lax.nextafter, "f32[5,6] f32[5,6]", TWO,
         unclaimed="0 0,1: a neighbour is the same to a tolerance"),
    Case("polygamma", "polygamma", lambda x: lax.polygamma(np.float32(2), x), "f32[5,6]+",
         ", i j -> i j"),
    Case("add", "add", lax.add, "f32[5,6] f32[5,6]", TWO),
    Case("add of a scalar", "add", lambda x: lax.add(x, 2.5), "f32[5,6]", "i j,  -> i j"),
    Case("add of a stretched row", "add", lax.add, "f32[5,6] f32[1,6]", "i j, 1 j -> i j"),
    Case("add of a stretched column", "add", lax.add, "f32[5,1] f32[5,6]", "i 1, i j -> i j"),
    Case("add of scalars", "add", lax.add, "f32[] f32[]", ",  -> "),
    Case("add of integers", "add", lax.add, "i8[5,6] i8[5,6]", TWO),
    Case("add of an empty array", "add", lax.add, "f32[0,6] f32[0,6]", TWO),
    Case("add of one row", "add", lax.add, "f32[1,6] f32[1,6]", "1 i, 1 i -> 1 i"),
    Case("add in bfloat16", "add", lax.add, "bf16[5,6] bf16[5,6]", TWO),
    Case("sub", "sub", lax.sub, "f32[5,6] f32[5,6]", TWO),
    Case("mul", "mul", lax.mul, "f32[5,6] f32[5,6]", TWO),
    Case("mul of complex", "mul", lax.mul, "c64[5,6] c64[5,6]", TWO),
    Case("mul of integers", "mul", lax.mul, "i8[5,6] i8[5,6]", TWO),
    Case("mul to wider integers", "mul",
         lambda x, y: lax.mul(x, y, out_dtype=jnp.int32), "i8[5,6] i8[5,6]", TWO),
    Case("div", "div", lax.div, "f32[5,6] f32[5,6]", TWO),
    Case("div of integers", "div", lax.div, "i32[5,6] i32[5,6]", TWO),
    Case("neg", "neg", lax.neg, "f32[5,6]", ONE),
    Case("complex", "complex", lax.complex, "f32[5,6] f32[5,6]", TWO),
    Case("real", "real", lax.real, "c64[5,6]", ONE),
    Case("imag", "imag", lax.imag, "c64[5,6]", ONE),
    Case("conj", "conj", lax.conj, "c64[5,6]", ONE),
    Case("integer_pow", "integer_pow", lambda x: lax.integer_pow(x, 3), "f32[5,6]", ONE),
    Case("clamp", "clamp", lax.clamp, "f32[5,6]+ f32[5,6] f32[5,6]+", THREE),
    Case("clamp by scalars", "clamp",
         lambda x: lax.clamp(np.float32(-1.5), x, np.float32(1.5)), "f32[5,6]", ", i j,  -> i j"),
    Case("select_n", "select_n", lax.select_n, "bool[5,6] f32[5,6] f32[5,6]", THREE),
    Case("select_n of three", "select_n", lax.select_n, "i32[11]<3 f32[11] f32[11] f32[11]",
         "i, i, i, i -> i"),
    Case("select_n by a scalar", "select_n", lax.select_n, "bool[] f32[5,6] f32[5,6]",
         ", i j, i j -> i j", unclaimed="2: which case is taken is data"),
    Case("select_n or zero", "select_n", lambda p, x: lax.select_n(p, x, np.float32(0)),
         "bool[] f32[]", ", ,  -> "),
    Case("convert up", "convert_element_type",
         lambda x: lax.convert_element_type(x, jnp.float32), "bf16[5,6]", ONE),
    Case("convert down", "convert_element_type",
         lambda x: lax.convert_element_type(x, jnp.bfloat16), "f32[5,6]", ONE, unclaimed=ROUNDS),
    Case("convert to a wider integer", "convert_element_type",
         lambda x: lax.convert_element_type(x, jnp.int32), "i8[5,6]~100", ONE),
    Case("convert to a narrower integer", "convert_element_type",
         lambda x: lax.convert_element_type(x, jnp.int8), "i32[5,6]~999", ONE),
    Case("convert to bool", "convert_element_type",
         lambda x: lax.convert_element_type(x, jnp.bool_), "i32[5,6]", ONE),
    Case("convert to complex", "convert_element_type",
         lambda x: lax.convert_element_type(x, jnp.complex64), "f32[5,6]", ONE),
    Case("convert to float8", "convert_element_type",
         lambda x: lax.convert_element_type(x, jnp.float8_e4m3fn), "f32[5,6]", ONE),
    Case("reduce_precision", "reduce_precision",
         lambda x: lax.reduce_precision(x, 5, 10), "f32[5,6]", ONE, unclaimed=ROUNDS),
    Case("regularized_incomplete_beta", "regularized_incomplete_beta", lax.betainc,
         "f32[5,6]+ f32[5,6]+ f32[5,6]u", THREE),
    Case("copy", "copy", lax.copy_p.bind, "f32[5,6]", ONE),
    Case("name", "name", lambda x: checkpoint_name(x, "x"), "f32[5,6]", ONE),
    Case("stop_gradient", "stop_gradient", lax.stop_gradient, "f32[5,6]", ONE),
    Case("device_put", "device_put", jax.device_put, "f32[5,6]", ONE),
    Case("add_any", "add_any", jax.grad(lambda x: lax.sin(x).sum() + lax.cos(x).sum()),
         "f32[5,6]", TWO),
    Case("optimization_barrier", "optimization_barrier",
         lambda x, y: lax.optimization_barrier((x, y)), "f32[5] f32[5,6]", "i, j k -> i, j k"),
    Case("optimization_barrier of one", "optimization_barrier", lax.optimization_barrier,
         "f32[5,6]", ONE),
    Case("threefry2x32", "threefry2x32", threefry2x32_p.bind,
         "u32[] u32[] u32[5,6] u32[5,6]", ", , i j, i j -> i j, i j"),
]  # fmt: skip
if hasattr(lax, "polynomial"):  # since 0.12
    CASES += [
        Case("polynomial", "polynomial", lambda x, *a: lax.polynomial(x, a),
             "f32[5,6] f32[5,6] f32[5,6] f32[1,6]", "i j, i j, i j, 1 j -> i j"),
        Case("polynomial of known numbers", "polynomial",
             lambda x: lax.polynomial(x, [1.0, -0.5, 0.25]), "f32[5,6]", "i j, , ,  -> i j"),
    ]  # fmt: skip
