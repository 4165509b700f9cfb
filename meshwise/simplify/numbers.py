"""Numbers of a flat program that are known while tracing, computed where somebody asks for them.

Positions are mostly made of `arange` and constants, by arithmetic of integers: `(i + 1) % n` for a
neighbour, `i // 2` for what is repeated. Those of `jax.image.resize` are rounded from floats.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise._jax import JaxprEqn, Literal, Var, strides_of
from meshwise.ir.program import shape_of, type_of

MOST_POSITION = np.iinfo(np.int64).max
MOST_NUMBERS = 1 << 20  # elements of what is computed
MOST_CASES = 8
MOST_WHOLE = 1 << 24  # what is less is a whole number in every float that is computed here


def as_positions(array: Any) -> np.ndarray | None:
    """Integers as positions; None where one is beyond all of them, as a `uint64` may be."""
    array = np.asarray(array)
    is_beyond = array.dtype == np.uint64 and array.size and array.max() > MOST_POSITION
    return None if is_beyond else array.astype(np.int64)


class Numbers:
    """Arrays of a flat program that depend on nothing but constants; computed once each.

    What is spread along dims is kept as a view, and takes no memory for it. Of floats only those
    are known that every compiler makes alike: no sums of products; and quotients, or products of
    products, only by powers of two, or where they are rounded and are not near to a whole number.
    """

    def __init__(self, makers: Mapping[Var, JaxprEqn], constants: Mapping[Var, Any]) -> None:
        self._makers, self._constants = makers, constants
        self._known: dict[Var, np.ndarray | None] = {}
        self._inexact: set[Var] = set()

    def of(self, atom: Any) -> np.ndarray | None:
        """The numbers of a value; None where they are not known, or too many."""
        if isinstance(atom, Literal):
            return _of_literal(atom)
        waiting = [atom]
        while waiting:
            if (var := waiting[-1]) in self._known:
                waiting.pop()
                continue
            missing = [v for v in self._made_of(var) if v not in self._known]
            waiting += missing
            if not missing:
                self._known[var] = self._computed(var)
        return None if atom in self._inexact else self._known[atom]

    def _made_of(self, var: Var) -> list[Var]:
        """What numbers are computed of; of what is not known for others nothing is asked."""
        eqn = self._makers.get(var)
        if var in self._constants or eqn is None or not _has_rule(eqn):
            return []
        return [a for a in _operands(eqn, var) if not isinstance(a, Literal)]

    def _computed(self, var: Var) -> np.ndarray | None:
        if var in self._constants:
            return _fitting(self._constants[var])
        eqn = self._makers.get(var)
        if eqn is None or not _has_rule(eqn) or self._may_contract(eqn):
            return None
        atoms = _operands(eqn, var)
        operands = [_of_literal(a) if isinstance(a, Literal) else self._known[a] for a in atoms]
        known = [x for x in operands if x is not None]
        if len(known) < len(operands) or max((x.size for x in known), default=0) > MOST_NUMBERS:
            return None
        if not self._inexact.isdisjoint(a for a in atoms if not isinstance(a, Literal)):
            if not (_rounds(eqn) and all(map(_is_far_from_whole, known))):
                return None
        elif _is_float(var) and self._may_be_scaled_otherwise(eqn, known):
            self._inexact.add(var)
        with np.errstate(all="ignore"):
            found = _RULES[eqn.primitive.name](eqn, *known)
        if found is None:
            return None
        return np.asarray(found, type_of(var).dtype).reshape(shape_of(var))

    def _may_be_scaled_otherwise(self, eqn: JaxprEqn, known: Sequence[np.ndarray]) -> bool:
        """Whether it scales floats by what compilers may make a reciprocal, or one of two factors.

        By powers of two all of that is the same, to the last digit.
        """
        name = eqn.primitive.name
        if name not in _SCALES or any(map(_is_power_of_two, known[name == "div" :])):
            return False
        makers = [self._makers.get(a) for a in eqn.invars if not isinstance(a, Literal)]
        return name == "div" or any(m and m.primitive.name in _SCALES for m in makers)

    def _may_contract(self, eqn: JaxprEqn) -> bool:
        """Whether it adds to a product of floats, which compilers may round once and not twice."""
        if eqn.primitive.name not in ("add", "sub") or not _is_float(eqn.outvars[0]):
            return False
        makers = [self._makers.get(a) for a in eqn.invars if not isinstance(a, Literal)]
        return any(m is not None and m.primitive.name not in _EXACT for m in makers)


def _of_literal(literal: Literal) -> np.ndarray | None:
    """The number in its type: a weak one JAX keeps as Python has it, in twice the length."""
    return _fitting(np.asarray(literal.val, type_of(literal).dtype))


def _fitting(array: Any) -> np.ndarray | None:
    if getattr(array, "size", 1) > MOST_NUMBERS or not getattr(array, "is_fully_addressable", True):
        return None
    array = np.asarray(array)
    return array if array.dtype.kind in "iubf" else None


def _operands(eqn: JaxprEqn, var: Var) -> Sequence[Any]:
    """What a result is computed of; behind a barrier, only what it is itself."""
    if eqn.primitive is lax.optimization_barrier_p:
        return [eqn.invars[eqn.outvars.index(var)]]
    return eqn.invars


def _has_rule(eqn: JaxprEqn) -> bool:
    """Whether it makes, in a known way, integers, booleans or floats of NumPy."""
    if eqn.primitive.name not in _RULES:
        return False
    dtype = type_of(eqn.outvars[0]).dtype
    if eqn.primitive is lax.optimization_barrier_p:
        return True
    return isinstance(dtype, np.dtype) and (dtype.kind in "iub" or dtype in _FLOATS)


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(type_of(var).dtype, jnp.floating)


# A quotient of floats may be made as a product with a reciprocal, and differ by so much of it.
NEAR = 1e-5
_SCALES = ("mul", "div")
# What makes floats of integers, which no sum is contracted with.
_EXACT = ("iota", "convert_element_type")
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

Rule = Callable[..., Any]


def _elementwise(function: Callable[..., Any]) -> Rule:
    return lambda eqn, *operands: function(*operands)


def _rounds(eqn: JaxprEqn) -> bool:
    """Whether it makes whole numbers of floats."""
    is_cast = eqn.primitive.name == "convert_element_type"
    return eqn.primitive.name in ("floor", "ceil") or (is_cast and not _is_float(eqn.outvars[0]))


def _is_far_from_whole(x: np.ndarray) -> bool:
    """Whether it is rounded to the same integers though its last digits may be others."""
    return bool(np.all(np.abs(x - np.rint(x)) > NEAR * (np.abs(x) + 1)))


def _is_power_of_two(x: np.ndarray) -> bool:
    """Whether to divide by it is to multiply by its reciprocal, to the last digit."""
    return bool(np.all(np.abs(np.frexp(x)[0]) == 0.5))


def _divided(eqn: JaxprEqn, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """A quotient, of integers rounded towards zero; None where a divisor is zero."""
    if not np.all(y):
        return None
    return x / y if x.dtype.kind == "f" else (x - np.fmod(x, y)) // y


def _remaining(eqn: JaxprEqn, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    return np.fmod(x, y) if x.dtype.kind in "iu" and np.all(y) else None


def _iota(eqn: JaxprEqn) -> np.ndarray | None:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    if shape[dim] > MOST_NUMBERS:
        return None
    row = np.arange(shape[dim]).astype(eqn.params["dtype"])
    return np.broadcast_to(row.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def _converted(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    """Floats become integers where these hold them; what is too large does as the device does."""
    dtype = np.dtype(eqn.params["new_dtype"])
    if x.dtype.kind == "f" and dtype.kind in "iu":
        info = np.iinfo(dtype)
        whole = np.trunc(x)
        if not np.all(np.isfinite(x)) or np.any(whole < info.min) or np.any(whole >= info.max):
            return None
    return x.astype(dtype)


def _spread(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    shape = eqn.params["shape"]
    sizes = [1] * len(shape)
    for d, n in zip(eqn.params["broadcast_dimensions"], x.shape, strict=True):
        sizes[d] = n
    return np.broadcast_to(x.reshape(sizes), shape)


def _cut(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    return x[tuple(map(slice, starts, limits, strides_of(eqn)))]


def _reshaped(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    """With its dims in the order that is asked for; all results are given their shape."""
    order = eqn.params["dimensions"]
    return x if order is None else x.transpose(order)


def _reduced(function: Callable[..., Any]) -> Rule:
    """What is the same in any order: of floats without a NaN, and without zeros of both signs."""

    def reduce(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
        if x.dtype.kind == "f" and (np.any(np.isnan(x)) or np.any((x == 0) & np.signbit(x))):
            return None
        return function(x, axis=eqn.params["axes"]) if x.size else None

    return reduce


def _summed(x: np.ndarray, axis: tuple[int, ...]) -> np.ndarray | None:
    """A sum; of floats only of whole numbers, so few that no digit is lost."""
    is_float = x.dtype.kind == "f"
    if is_float and not (np.all(x == np.rint(x)) and np.abs(x).sum() < MOST_WHOLE):
        return None
    return np.sum(x, axis=axis, dtype=x.dtype)


def _selected(eqn: JaxprEqn, which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    """Of two cases or of a few more, as NumPy has a bound; none of those that are not there."""
    places = which.astype(np.intp)
    if len(cases) > MOST_CASES or np.any((places < 0) | (places >= len(cases))):
        return None
    return np.choose(places, cases)


_RULES: Mapping[str, Rule] = {
    "iota": _iota,
    "add": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "mul": _elementwise(np.multiply),
    "neg": _elementwise(np.negative),
    "abs": _elementwise(np.abs),
    "sign": _elementwise(np.sign),
    "floor": _elementwise(np.floor),
    "ceil": _elementwise(np.ceil),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "clamp": _elementwise(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "div": _divided,
    "rem": _remaining,
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "and": _elementwise(np.bitwise_and),
    "or": _elementwise(np.bitwise_or),
    "xor": _elementwise(np.bitwise_xor),
    "not": _elementwise(np.invert),
    "select_n": _selected,
    "convert_element_type": _converted,
    "broadcast_in_dim": _spread,
    "reshape": _reshaped,
    "squeeze": _elementwise(lambda x: x),
    "expand_dims": _elementwise(lambda x: x),
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "slice": _cut,
    "concatenate": lambda eqn, *parts: np.concatenate(parts, eqn.params["dimension"]),
    "reduce_sum": _reduced(_summed),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_and": _reduced(np.bitwise_and.reduce),
    "reduce_or": _reduced(np.bitwise_or.reduce),
    "copy": _elementwise(lambda x: x),
    "hint": _elementwise(lambda x: x),
    "optimization_barrier": _elementwise(lambda x: x),
}
