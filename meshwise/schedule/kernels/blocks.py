"""Equations on blocks of rows: what each primitive becomes, and which cannot be done in blocks.

A *blocked* value has the rows of a tile along its first dim, and only a block of them is at hand;
a *whole* value is small and all at hand. Both are held as arrays of at least two dims that
broadcast to the value: (1, 1) is a scalar, and a dim that a broadcast made is 1 still, so a scalar
spread over a tile costs nothing. A blocked vector is a column (rows, 1), or, where all blocked
values are vectors, cut in rows of 128 lanes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshwise import _jax
from meshwise._jax import JaxprEqn
from meshwise.ir.program import shape_of, type_of

LANES = 128

# What Mosaic, the compiler of TPU kernels, has for blocks; a slow test compiles each.
ELEMENTWISE = frozenset(
    """abs add add_any and atan2 ceil clamp convert_element_type copy cos div eq erf exp exp2 floor
    ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square
    sub tan tanh xor pvary stop_gradient reshard""".split()
)


def _sum(x: Any, **how: Any) -> Any:
    """A sum in the type of its terms; `jnp.sum` makes longer integers of short ones."""
    return jnp.sum(x, **how).astype(x.dtype)


# A reduction, how two partial results join, and what changes nothing.
REDUCTIONS: Mapping[str, tuple[Callable[..., Any], Callable[[Any, Any], Any]]] = {
    "reduce_sum": (_sum, jnp.add),
    "reduce_max": (jnp.max, jnp.maximum),
    "reduce_min": (jnp.min, jnp.minimum),
}


@dataclass(frozen=True)
class Value:
    """A value at hand: `array` broadcasts to it; `shape` is its whole shape, all rows included."""

    array: Any
    shape: tuple[int, ...]
    is_blocked: bool


@dataclass(frozen=True)
class Blocks:
    """How tiles of `rows` rows are cut: into rows of lanes, where all tiles are vectors."""

    rows: int
    in_lanes: bool

    @property
    def block_rows(self) -> int:
        """Rows of a tile as it is held: a vector in lanes has 128 elements a row."""
        return self.rows // LANES if self.in_lanes else self.rows


def whole(array: Any) -> Value:
    """A value all at hand."""
    padded = array.reshape((1,) * (2 - array.ndim) + array.shape) if array.ndim < 2 else array
    return Value(padded, array.shape, False)


def spread(value: Value, blocks: Blocks) -> Any:
    """All elements of a whole value, in its own shape."""
    array = value.array
    if len(value.shape) < 2:
        array = array.reshape(array.shape[2 - len(value.shape) :])
    return jnp.broadcast_to(array, value.shape)


def apply_to_wholes(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> list[Value]:
    """Any equation, outside of a kernel, on values that are all at hand."""
    name = eqn.primitive.name
    if name in ELEMENTWISE or name == "broadcast_in_dim":
        return apply(eqn, operands, blocks)
    results = _jax.bind(eqn, [spread(v, blocks) for v in operands])
    return [whole(r) for r in results]


def apply(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> list[Value]:
    """An equation that reduces no rows, on blocks."""
    name = eqn.primitive.name
    if name in _SMALL and not any(v.is_blocked for v in operands):
        return [whole(r) for r in _jax.bind(eqn, [spread(v, blocks) for v in operands])]
    rule = _elementwise if name in ELEMENTWISE else _RULES.get(name)
    if rule is None:
        raise unable(eqn, "kernels have no rule for it")
    result = rule(eqn, operands, blocks)
    shape = shape_of(eqn.outvars[0])
    return [Value(result, shape, any(v.is_blocked for v in operands))]


def reduces_rows(eqn: JaxprEqn, is_blocked: Sequence[bool]) -> bool:
    """Whether an equation adds up (or takes the largest of) what lies in different rows."""
    if not any(is_blocked):
        return False
    if eqn.primitive.name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0]
        return any(b and 0 in dims for b, dims in zip(is_blocked, contracted, strict=True))
    return eqn.primitive.name in REDUCTIONS and 0 in eqn.params["axes"]


def partial(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    """What one block adds to an equation that reduces rows, held as the whole result is."""
    if eqn.primitive.name == "dot_general":
        return _partial_product(eqn, operands, blocks)
    return _reduce(eqn, operands[0], blocks)


def join(eqn: JaxprEqn) -> Callable[[Any, Any], Any]:
    """How the partial results of two blocks become one."""
    return REDUCTIONS.get(eqn.primitive.name, REDUCTIONS["reduce_sum"])[1]


def neutral(eqn: JaxprEqn) -> Any:
    """The partial result of no block at all."""
    dtype = type_of(eqn.outvars[0]).dtype
    if join(eqn) is jnp.add:
        return 0
    is_float = jnp.issubdtype(dtype, jnp.floating)
    largest = jnp.inf if is_float else jnp.iinfo(dtype).max
    smallest = -jnp.inf if is_float else jnp.iinfo(dtype).min
    return smallest if join(eqn) is jnp.maximum else largest


def unable(eqn: JaxprEqn, why: str) -> ValueError:
    """The error of an equation that no kernel can do."""
    shapes = ", ".join(str(v.aval) for v in eqn.invars)
    return ValueError(
        f"{eqn.primitive.name} of {shapes} ({_jax.source_summary(eqn)}) cannot be done in a kernel:"
        f" {why}. Compute it before or after the kernel, or leave this part to XLA"
    )


def _elementwise(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    if any(v.is_blocked for v in operands):
        _check_rows(eqn, operands, blocks)
    if eqn.primitive.name in ("pvary", "copy", "stop_gradient", "reshard"):
        return operands[0].array
    shape = jnp.broadcast_shapes(*(v.array.shape for v in operands))
    return _jax.bind(eqn, [jnp.broadcast_to(v.array, shape) for v in operands])[0]


def _check_rows(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> None:
    """Rows of a whole value cannot meet rows of a block: which rows these are is not known."""
    for value in operands:
        if value.is_blocked or not value.shape:
            continue
        rows = value.array.shape[-1] if len(value.shape) == 1 else value.array.shape[0]
        if rows != 1:
            raise unable(eqn, f"an operand of {value.shape} is not cut in rows; give it as a tile")


def _broadcast(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    (value, *_), dims = operands, eqn.params["broadcast_dimensions"]
    shape = shape_of(eqn.outvars[0])
    if value.is_blocked and (not dims or dims[0] != 0):
        raise unable(eqn, "rows must stay the first dim")
    if value.is_blocked and blocks.in_lanes:
        raise unable(eqn, "tiles are vectors here, and matrices cannot be made of them")
    sizes = _own_sizes(value, blocks)
    made = [1] * len(shape)
    for size, dim in zip(sizes, dims, strict=True):
        made[dim] = size
    return value.array.reshape(_held(made, value.is_blocked))


def _own_sizes(value: Value, blocks: Blocks) -> tuple[int, ...]:
    """The sizes at hand of a value's own dims, without those added to make two."""
    if len(value.shape) >= 2:
        return value.array.shape
    if not value.shape:
        return ()
    return (value.array.shape[0],) if value.is_blocked else (value.array.shape[-1],)


def _held(sizes: Sequence[int], is_blocked: bool) -> tuple[int, ...]:
    """The shape in which a value of these sizes is held."""
    if len(sizes) == 1 and is_blocked:
        return (sizes[0], 1)
    return (1,) * (2 - len(sizes)) + tuple(sizes)


def _reshape(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    value = operands[0]
    shape = shape_of(eqn.outvars[0])
    if value.shape == shape:
        return value.array
    if not value.is_blocked:
        return whole(spread(value, blocks).reshape(shape)).array
    if blocks.in_lanes or not shape or shape[0] != value.shape[0]:
        raise unable(eqn, "rows must stay the first dim")
    rows = value.array.shape[0]
    inner = _filled(value, range(1, len(value.shape)))
    return inner.reshape(_held((rows, *shape[1:]), True))


def _filled(value: Value, dims: Any) -> Any:
    """The array at hand with some dims (not rows) as large as they are, where broadcasts left 1."""
    if len(value.shape) < 2:
        return value.array
    sizes = list(value.array.shape)
    for dim in dims:
        sizes[dim] = value.shape[dim]
    return jnp.broadcast_to(value.array, sizes)


def _reduce(eqn: JaxprEqn, value: Value, blocks: Blocks) -> Any:
    """A reduction over the rows at hand, or over other dims."""
    axes = tuple(eqn.params["axes"])
    function = REDUCTIONS[eqn.primitive.name][0]
    if not value.is_blocked:
        return whole(function(spread(value, blocks), axis=axes)).array
    if len(value.shape) == 1:
        return function(value.array, axis=(0, 1), keepdims=True)
    array = _filled(value, [d for d in axes if d])
    reduced = function(array, axis=axes, keepdims=True)
    kept = [size for dim, size in enumerate(reduced.shape) if dim not in axes]
    return reduced.reshape(_held(kept, 0 not in axes))


def _reduction(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    return _reduce(eqn, operands[0], blocks)


def _partial_product(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    """The inner product of two vectors of rows, as norms use it."""
    if not all(v.is_blocked and len(v.shape) == 1 for v in operands):
        raise unable(eqn, "it adds over the rows of a matrix")
    dtype = eqn.params["preferred_element_type"] or operands[0].array.dtype
    left, right = (v.array.astype(dtype) for v in operands)
    return jnp.sum(left * right, axis=(0, 1), keepdims=True)


def _product(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    """Rows of a matrix times a matrix that is whole."""
    left, right = operands
    ((left_contracted, right_contracted), (batch, _)) = eqn.params["dimension_numbers"]
    plain = len(left.shape) == len(right.shape) == 2 and not batch
    if not (plain and left.is_blocked and not right.is_blocked and left_contracted == (1,)):
        raise unable(eqn, "only rows of a matrix times a whole matrix are")
    filled = Value(_filled(left, [1]), left.shape, True)
    dims = ((left_contracted, right_contracted), ((), ()))
    made = type_of(eqn.outvars[0]).dtype
    is_float = jnp.issubdtype(made, jnp.floating)
    # The matrix unit adds up in long numbers only.
    wide = jnp.promote_types(made, jnp.float32 if is_float else jnp.int32)
    product = lax.dot_general(
        filled.array,
        spread(right, blocks),
        dims,
        precision=eqn.params["precision"],
        preferred_element_type=wide,
    )
    return product.astype(made)


def _slice(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    value, params = operands[0], eqn.params
    strides = params["strides"] or (1,) * len(value.shape)
    keeps_rows = params["start_indices"][0] == 0 and params["limit_indices"][0] == value.shape[0]
    if len(value.shape) < 2 or not keeps_rows or set(strides) != {1}:
        raise unable(eqn, "rows must stay as they are, and strides be 1")
    array = _filled(value, range(1, len(value.shape)))
    starts, limits = params["start_indices"][1:], params["limit_indices"][1:]
    return array[(slice(None), *(slice(a, b) for a, b in zip(starts, limits, strict=True)))]


def _concatenate(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    dim = eqn.params["dimension"]
    if not all(v.is_blocked and len(v.shape) >= 2 for v in operands) or dim == 0:
        raise unable(eqn, "only tiles can be joined, and not along their rows")
    arrays = [_filled(v, range(1, len(v.shape))) for v in operands]
    return jnp.concatenate(arrays, dim)


def _roll(eqn: JaxprEqn, operands: Sequence[Value], blocks: Blocks) -> Any:
    value, dim = operands[0], eqn.params["dimension"]
    if not value.is_blocked or dim == 0:
        raise unable(eqn, "rows must stay where they are")
    return jnp.roll(_filled(value, [dim]), eqn.params["shift"], dim)


# What takes small arrays, such as norms, together and apart; Pallas has these as they are.
_SMALL = frozenset({"concatenate", "slice", "stack", "unstack"})
_Rule = Callable[[JaxprEqn, Sequence[Value], Blocks], Any]
_RULES: Mapping[str, _Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "dot_general": _product,
    "slice": _slice,
    "concatenate": _concatenate,
    "roll": _roll,
    **dict.fromkeys(REDUCTIONS, _reduction),
}


def literal(atom: Any) -> Value:
    """A number written in an equation."""
    return whole(jnp.asarray(_jax.literal_value(atom), type_of(atom).dtype))


def at_hand(value: Value, shape: Sequence[int]) -> Any:
    """A value's array, spread to the shape in which a block of it is stored."""
    if math.prod(value.array.shape) == math.prod(shape):
        return value.array.reshape(shape)
    return jnp.broadcast_to(value.array, shape)
