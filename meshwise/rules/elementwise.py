"""Operators that treat every element alone: arithmetic, comparisons, casts, and identities.

The rule is the same for all: `"i j, i j -> i j"`; a scalar operand has no dims, and an operand
dim of size one against a larger one is written `1`. What differs is through which operands an
unreduced sum may pass.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.numpy import issubdtype

from meshwise._jax import is_on_host
from meshwise.rules.factoring import Factoring, shapes, stretched, total_size
from meshwise.rules.registry import Application, LocalContext, OpRule, register

# Functions that a library computes for one number after another where vector units have none of
# them, and how many sines each takes as long as (measured on CPU, float32).
_CALLED = {
    **dict.fromkeys(("asinh", "acosh", "atanh", "bessel_i0e", "bessel_i1e", "erfc"), 0.7),
    **dict.fromkeys(("cos", "erf_inv", "sin", "sinh"), 1.0),
    **dict.fromkeys(("atan", "pow", "rem"), 2.0),
    **dict.fromkeys(("cbrt", "tan"), 2.5),
    **dict.fromkeys(("acos", "asin", "atan2", "digamma", "lgamma"), 3.5),
    **dict.fromkeys(("igamma", "igammac"), 12.0),
}

Linear = tuple[tuple[int, ...], ...]

_NONLINEAR = """
abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh
digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac
integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min ne nextafter
not one_minus_square or polygamma population_count pow reduce_precision regularized_incomplete_beta
rem round rsqrt shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
tan tanh xor zeros_like zeta philox2x32 philox4x32 threefry2x32 threefry4x32
""".split()

# Identities that stay in the per-device program: `name` marks a value for rematerialisation.
_KEPT = "copy name stage stop_gradient xla_metadata_value".split()

# Identities that say where a value lies, which is decided by now.
_PLACING = """
layout_constraint pvary reduced_vary_cast reduced_vary_cast_p reshard sharding_constraint
""".split()


def _elementwise(application: Application, linear: Linear = ()) -> OpRule:
    results = application.results
    factors = stretched(shapes(application.operands), tuple(results[0].shape), len(results))
    size = total_size(results)
    calls = _CALLED.get(application.eqn.primitive.name, 0.0) * size
    return OpRule(factors, linear=linear, flops=size, calls=calls)


@register(*_NONLINEAR)
def _elementwise_rule(application: Application) -> OpRule:
    return _elementwise(application)


@register("polynomial")
def _polynomial_rule(application: Application) -> OpRule:
    """Horner's rule: a product and a sum for each coefficient but the last. Linear in all these."""
    coefficients = tuple(range(1, len(application.operands)))
    rule = _elementwise(application, (coefficients,))
    return replace(rule, flops=2 * (len(coefficients) - 1) * rule.flops)


# An unreduced sum passes where the operator is linear in a set of operands taken together.


@register("add", "add_any", "sub", "complex")
def _add_rule(application: Application) -> OpRule:
    return _elementwise(application, ((0, 1),))


@register("neg", "real", "imag", "conj", "shift_left", *_KEPT)
def _linear_rule(application: Application) -> OpRule:
    return _elementwise(application, ((0,),))


@register("mul")
def _mul_rule(application: Application) -> OpRule:
    return _elementwise(application, ((0,), (1,)) if keeps_sums(application) else ())


@register("div")
def _div_rule(application: Application) -> OpRule:
    exact = issubdtype(application.results[0].dtype, np.inexact)
    return _elementwise(application, ((0,),) if exact else ())


@register("convert_element_type")
def _convert_rule(application: Application) -> OpRule:
    linear = casts_sums(application.operands[0].dtype, application.results[0].dtype)
    return _elementwise(application, ((0,),) if linear else ())


@register("select_n")
def _select_rule(application: Application) -> OpRule:
    cases = range(1, len(application.operands))
    zeros = [c for c in cases if application.is_zero(c)]
    alone = [(c,) for c in cases if all(z in zeros for z in cases if z != c)]
    together = tuple(cases)
    return _elementwise(application, (together, *(a for a in alone if a != together)))


@register("to_edtype", "from_edtype")
def _edtype_rule(application: Application) -> OpRule:
    return _elementwise(application)


@register("optimization_barrier")
def _barrier_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = [factoring.dims(shape) for shape in shapes(application.operands)]
    return OpRule(factoring.rule(dims, dims), linear=(tuple(range(len(dims))),), moves=True)


def _identity(context: LocalContext, *operands: Any) -> list[Any]:
    return list(operands)


@register(*_PLACING)
def _placing_rule(application: Application) -> OpRule:
    return replace(_barrier_rule(application), local=_identity)


@register("device_put")
def _device_put_rule(application: Application) -> OpRule:
    return replace(_barrier_rule(application), local=_to_memory)


def _to_memory(context: LocalContext, *operands: Any) -> list[Any]:
    """Of where values are put, only to which memory: on which devices is decided by now."""
    kept = []
    for array, var in zip(operands, context.eqn.outvars, strict=True):
        space = jax.memory.Space.Host if is_on_host(var.aval) else jax.memory.Space.Device
        is_there = is_on_host(jax.typeof(array)) == is_on_host(var.aval)
        kept.append(array if is_there else jax.device_put(array, space))
    return kept


@register("mulhi")
def _high_product_rule(application: Application) -> OpRule:
    return replace(_elementwise(application), local=_high_product)


def _high_product(context: LocalContext, x: Any, y: Any) -> list[Any]:
    """The upper half of the bits of a product, by products of halves.

    XLA compiles its own operator for one device only, under `jax.jit` too. (Hacker's Delight, 8-2.)
    """
    half = np.iinfo(x.dtype).bits // 2
    bits, mask = np.asarray(half, x.dtype), np.asarray((1 << half) - 1, x.dtype)
    x_low, y_low, x_high, y_high = x & mask, y & mask, x >> bits, y >> bits
    carried = x_high * y_low + lax.shift_right_logical(
        x_low * y_low, jnp.broadcast_to(bits, x.shape)
    )
    across = x_low * y_high + (carried & mask)
    return [x_high * y_high + (carried >> bits) + (across >> bits)]


@register("tie")
def _tie_rule(application: Application) -> OpRule:
    factoring = Factoring()
    first, second = (factoring.dims(shape) for shape in shapes(application.operands))
    return OpRule(factoring.rule([first, second], [second]), linear=((1,),))


def keeps_sums(application: Application) -> bool:
    """Whether a product may be summed after it instead of before.

    True for floats. Integers wrap around at their own width, so a wider result would see terms
    that have not wrapped yet; booleans do not add.
    """
    result = application.results[0].dtype
    if issubdtype(result, np.inexact):
        return all(issubdtype(o.dtype, np.inexact) for o in application.operands)
    return result != np.bool_ and all(o.dtype == result for o in application.operands)


def casts_sums(old: Any, new: Any) -> bool:
    """Whether a cast may be done before a sum: it must lose nothing.

    A cast to fewer bits rounds every term instead of their sum, so a sum is taken before it.
    Integers wrap around, which a narrower one does in the same way.
    """
    if issubdtype(old, np.integer) and issubdtype(new, np.integer):
        return jnp.iinfo(new).bits <= jnp.iinfo(old).bits
    if not (issubdtype(old, np.inexact) and issubdtype(new, np.inexact)):
        return False
    return _holds(jnp.finfo(old), jnp.finfo(new))


def _holds(old: Any, new: Any) -> bool:
    return new.nmant >= old.nmant and new.maxexp >= old.maxexp and new.minexp <= old.minexp
