"""Random numbers: the same bits on many devices as on one.

With `jax_threefry_partitionable` (JAX's default) a threefry bit depends only on the key and on
the position of the element, so each device makes exactly the bits of its own part. Other
generators, and threefry without that flag, make their bits from one running counter: the dims
they fill are whole. Keys are handled one by one by threefry; other generators may mix the keys
of an array, so there its dims are whole as well.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from meshwise._jax import bits_by_position, gamma_of_keys, key_impl_name, threefry2x32_p
from meshwise.rules.factoring import Factoring, Kind, shapes, stretched, total_size
from meshwise.rules.registry import Application, LocalContext, OpRule, register, shard_index

THREEFRY = "threefry2x32"
_KEYS_ONE_BY_ONE = (THREEFRY, "rbg")  # these fold numbers into each key by threefry

_GAMMA_FLOPS = 1000.0  # a few rounds of rejection, each with several hashes
_THREEFRY_FLOPS = 100.0  # additions, rotations and exclusive ors for one pair of words


@register("random_bits", "random_split")
def _bits_rule(application: Application) -> OpRule:
    """The dims of the keys, then those of `shape`."""
    (keys,) = application.operands
    threefry = key_impl_name(keys) == THREEFRY
    factoring = Factoring()
    kind: Kind = None if threefry else "whole"
    outer = factoring.dims(keys.shape, kind)
    partitionable = threefry and bits_by_position(application.eqn)
    inner = factoring.dims(application.params["shape"], None if partitionable else "whole")
    return OpRule(
        factoring.rule([outer], [outer + inner]),
        local=_bits_local,
        flops=_THREEFRY_FLOPS * total_size(application.results),
    )


def _bits_local(context: LocalContext, keys: Any) -> list[Any]:
    inner = context.rule.results[0][keys.ndim :]
    if not any(map(context.is_split, inner)):
        return context.bind(keys)
    high, low = global_counts(context, context.params["shape"], inner)
    first, second = _threefry(keys, high, low)
    if context.eqn.primitive.name == "random_split":
        return [_keys_of((first, second))]
    width = context.params["bit_width"]
    if width == 64:
        high, low = (lax.convert_element_type(w, np.uint64) for w in (first, second))
        return [lax.bitwise_or(lax.shift_left(high, np.uint64(32)), low)]
    return [lax.convert_element_type(lax.bitwise_xor(first, second), np.dtype(f"uint{width}"))]


def _threefry(keys: Any, high: Any, low: Any) -> list[Any]:
    """Hash 64-bit counts with every key: the dims of the keys, then those of the counts."""
    data = jax.random.key_data(keys)
    last, rank = keys.ndim, keys.ndim + high.ndim
    words = []
    for i in range(2):
        word = lax.squeeze(lax.slice_in_dim(data, i, i + 1, axis=last), (last,))
        words.append(lax.expand_dims(word, range(last, rank)) if last else word)
    counts = [lax.expand_dims(c, range(last)) if last else c for c in (high, low)]
    return threefry2x32_p.bind(*words, *counts)


def global_counts(
    context: LocalContext, shape: Sequence[int], dims: Sequence[tuple[int, ...]]
) -> tuple[Any, Any]:
    """Row-major positions of this device's elements in the global shape, as two words."""
    sizes, offsets = [], []
    for n, dim in zip(shape, dims, strict=True):
        sizes.append(context.local_size(dim[0]) if dim else n)
        axes = context.axes(dim[0]) if dim else ()
        index = lax.convert_element_type(shard_index(axes, context.mesh), np.uint32)
        offsets.append(lax.mul(index, np.uint32(sizes[-1])) if axes else None)
    return counts_at(shape, sizes, offsets)


def counts_at(
    shape: Sequence[int], sizes: Sequence[int], offsets: Sequence[Any]
) -> tuple[Any, Any]:
    """Row-major positions in `shape` of a box of some sizes at some offsets (None for zero).

    The high and low words of 64 bits, computed in words because 64-bit integers may be off.
    """
    high, low = None, None
    wide = math.prod(shape) > 2**32
    for d, offset in enumerate(offsets):
        index = lax.broadcasted_iota(np.uint32, tuple(sizes), d)
        if offset is not None:
            index = lax.add(index, offset)
        stride = math.prod(shape[d + 1 :])
        part = lax.mul(index, np.uint32(stride % 2**32)) if stride != 1 else index
        carry = None
        if low is not None:
            total = lax.add(low, part)
            carry = lax.convert_element_type(lax.lt(total, part), np.uint32)
            part = total
        low = part
        if wide:
            upper = _high_word(index, stride)
            for term in (high, carry):
                upper = upper if term is None else lax.add(upper, term)
            high = upper
    if low is None:
        low = lax.full((), 0, np.uint32)
    return (high if high is not None else lax.full_like(low, 0)), low


def _high_word(index: Any, stride: int) -> Any:
    """Bits 32 to 63 of a word times a constant, by halves of words."""

    def low_half(word: Any) -> Any:
        return lax.bitwise_and(word, np.uint32(0xFFFF))

    def high_half(word: Any) -> Any:
        return lax.shift_right_logical(word, np.uint32(16))

    factor = stride % 2**32
    lower, upper = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    cross = lax.add(lax.mul(high_half(index), lower), high_half(lax.mul(low_half(index), lower)))
    other = lax.add(lax.mul(low_half(index), upper), low_half(cross))
    word = lax.add(lax.mul(high_half(index), upper), lax.add(high_half(cross), high_half(other)))
    return lax.add(word, lax.mul(index, np.uint32((stride >> 32) % 2**32)))


@register("iota_2x32_shape")
def _counts_rule(application: Application) -> OpRule:
    factoring = Factoring()
    dims = factoring.dims(application.params["shape"])
    flops = total_size(application.results)
    return OpRule(factoring.rule([], [dims, dims]), local=_counts_local, flops=flops)


def _counts_local(context: LocalContext) -> list[Any]:
    return list(global_counts(context, context.params["shape"], context.rule.results[0]))


@register("random_seed", "random_clone")
def _key_rule(application: Application) -> OpRule:
    factors = stretched(shapes(application.operands), tuple(application.results[0].shape), 1)
    return OpRule(factors, flops=total_size(application.results))


@register("random_fold_in")
def _fold_in_rule(application: Application) -> OpRule:
    operands, (result,) = shapes(application.operands), shapes(application.results)
    flops = _THREEFRY_FLOPS * total_size(application.results)
    if key_impl_name(application.results[0]) in _KEYS_ONE_BY_ONE:
        return OpRule(stretched(operands, result, 1), flops=flops)
    factoring = Factoring()
    dims = [factoring.dims(shape, "whole") for shape in (*operands, result)]
    return OpRule(factoring.rule(dims[:2], dims[2:]), flops=flops)


@register("random_wrap", "random_unwrap")
def _wrap_rule(application: Application) -> OpRule:
    """A key is a few words: the dims that hold them are whole."""
    (operand,), (result,) = shapes(application.operands), shapes(application.results)
    factoring = Factoring()
    dims = factoring.dims(min(operand, result, key=len))
    before = dims + factoring.dims(operand[len(dims) :], "whole")
    after = dims + factoring.dims(result[len(dims) :], "whole")
    return OpRule(factoring.rule([before], [after]))


@register("random_gamma")
def _gamma_rule(application: Application) -> OpRule:
    """The dims of the keys, then those for which each key is split by position."""
    keys, shape = application.operands
    threefry = key_impl_name(keys) == THREEFRY
    partitionable = threefry and bits_by_position(application.eqn)
    factoring = Factoring()
    outer = factoring.dims(keys.shape, None if threefry else "whole")
    inner = factoring.dims(shape.shape[len(outer) :], None if partitionable else "whole")
    return OpRule(
        factoring.rule([outer, outer + inner], [outer + inner]),
        local=_gamma_local,
        flops=_GAMMA_FLOPS * total_size(application.results),
    )


def _gamma_local(context: LocalContext, keys: Any, alphas: Any) -> list[Any]:
    shape = context.global_shape(1)[keys.ndim :]
    inner = context.rule.results[0][keys.ndim :]
    if not any(map(context.is_split, inner)):
        return context.bind(keys, alphas)
    words = _threefry(keys, *global_counts(context, shape, inner))
    return [gamma_of_keys(_keys_of(words), alphas, context.params["log_space"])]


def _keys_of(words: Sequence[Any]) -> Any:
    last = words[0].ndim
    data = lax.concatenate([lax.expand_dims(word, (last,)) for word in words], last)
    return jax.random.wrap_key_data(data, impl=THREEFRY)


@register("rng_bit_generator")
def _generator_rule(application: Application) -> OpRule:
    """One running counter for all elements: whole."""
    factoring = Factoring()
    operands = [factoring.dims(shape, "whole") for shape in shapes(application.operands)]
    results = [factoring.dims(shape, "whole") for shape in shapes(application.results)]
    return OpRule(factoring.rule(operands, results), flops=total_size(application.results))
