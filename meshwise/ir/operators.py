"""Kinds of JAX's primitives, by name, where a pass asks no more of an equation than its kind.

What an operator means is its rule (`rules/`); here stand those that compute nothing, sorted by what
they do with the elements, and the others that more than one pass looks for. A table in a pass
says what that pass alone knows, in these words where it can.
"""

from meshwise._jax import JaxprEqn, Var

# All elements in their order, under other dims.
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
# Each element once or oftener, along new dims.
SPREADS = frozenset({"broadcast_in_dim"})
# All elements in another order.
TURNS = frozenset({"transpose", "rev"})
# Some of the elements, in their order.
CUTS = frozenset({"slice", "dynamic_slice", "split"})
# The elements of several arrays.
JOINS = frozenset({"concatenate", "pad"})
# The same array, and the same bits.
COPIES = frozenset({"copy", "copy_p"})
RECASTS = frozenset({"bitcast_convert_type"})
# Others each time they are run, which counts for no effect.
DRAWING = frozenset({"rng_uniform"})
# Places along a dim, or of a device.
PLACES = frozenset({"iota", "axis_index"})

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
# Of two terms.
ADDITIONS = frozenset({"add", "add_any", "sub"})
# Each element of those in its place, of arrays of one shape and of numbers.
ELEMENTWISE = ADDITIONS | frozenset(
    """
    abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type
    copy copy_p cos cosh div eq erf erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le
    log log1p log2 logistic lt max min mul ne neg not one_minus_square or pow real rem round rsqrt
    select_n sign sin sinh sqrt square tan tanh xor
    """.split()
)
# Of all elements along dims, in any order.
REDUCTIONS = frozenset(
    {
        "reduce_sum",
        "reduce_prod",
        "reduce_max",
        "reduce_min",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
    }
)


def is_among(eqn: JaxprEqn, kind: frozenset[str]) -> bool:
    """Whether an equation's operator is of a kind."""
    return eqn.primitive.name in kind


def adds_to(eqn: JaxprEqn, value: Var) -> bool:
    """Whether all that an equation does is to add something to a value, or to take it off that."""
    if not is_among(eqn, ADDITIONS) or sum(a is value for a in eqn.invars) != 1:
        return False
    return eqn.primitive.name != "sub" or eqn.invars[0] is value
