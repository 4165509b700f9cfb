"""What moves elements: reshapes, slices, joins, pads; and reductions, products, orders."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fuzz.evaluate.elementwise import Function, bits_as


def _broadcast(params: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape = params["shape"]
    sizes = [1] * len(shape)
    for dim, n in zip(params["broadcast_dimensions"], x.shape, strict=True):
        sizes[dim] = n
    return np.broadcast_to(x.reshape(sizes), shape)


def _reshape(params: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    order = params["dimensions"]
    return np.reshape(x if order is None else np.transpose(x, order), params["new_sizes"])


def _squeeze(params: Any, x: np.ndarray) -> np.ndarray:
    return np.squeeze(x, tuple(params["dimensions"]))


def _iota(params: Any, *_: Any) -> np.ndarray:
    shape, dim = params["shape"], params["dimension"]
    sizes = [n if d == dim else 1 for d, n in enumerate(shape)]
    along = np.arange(shape[dim]).astype(params["dtype"])
    return np.broadcast_to(along.reshape(sizes), shape)


def pad(x: np.ndarray, value: Any, config: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Padding as XLA has it: between elements, around them, and negative."""
    for dim, (low, high, inner) in enumerate(config):
        n = x.shape[dim]
        if inner and n > 1:
            wider = np.full((*x.shape[:dim], n + (n - 1) * inner, *x.shape[dim + 1 :]), value)
            wider = wider.astype(x.dtype)
            wider[(slice(None),) * dim + (slice(None, None, inner + 1),)] = x
            x, n = wider, wider.shape[dim]
        if low > 0 or high > 0:
            size = n + max(low, 0) + max(high, 0)
            wider = np.full((*x.shape[:dim], size, *x.shape[dim + 1 :]), value).astype(x.dtype)
            wider[(slice(None),) * dim + (slice(max(low, 0), max(low, 0) + n),)] = x
            x = wider
        if low < 0 or high < 0:
            stop = x.shape[dim] + min(high, 0)
            x = x[(slice(None),) * dim + (slice(-min(low, 0), max(stop, -min(low, 0))),)]
    return x


def _pad(params: Any, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    return pad(x, value, params["padding_config"])


def _slice(params: Any, x: np.ndarray) -> np.ndarray:
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, starts, limits, strides))]


def _reverse(params: Any, x: np.ndarray) -> np.ndarray:
    return np.flip(x, tuple(params["dimensions"]))


def _clamped(starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [min(max(int(s), 0), n - k) for s, n, k in zip(starts, shape, sizes, strict=True)]


def _dynamic_slice(params: Any, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = params["slice_sizes"]
    begin = _clamped(starts, x.shape, sizes)
    return x[tuple(slice(b, b + k) for b, k in zip(begin, sizes, strict=True))]


def _dynamic_update(params: Any, x: np.ndarray, update: np.ndarray, *starts: Any) -> np.ndarray:
    begin = _clamped(starts, x.shape, update.shape)
    out = x.copy()
    out[tuple(slice(b, b + k) for b, k in zip(begin, update.shape, strict=True))] = update
    return out


def _split(params: Any, x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])


def _unstack(params: Any, x: np.ndarray) -> list[np.ndarray]:
    return list(np.moveaxis(x, params["axis"], 0))


def _reduction(ufunc: np.ufunc, initial: Any = None) -> Function:
    def reduce(params: Any, x: np.ndarray) -> np.ndarray:
        axes = tuple(params["axes"])
        first = initial(x.dtype) if initial else ufunc.identity
        options = {} if ufunc.identity is None else {"dtype": x.dtype}
        return ufunc.reduce(x, axis=axes, initial=first, **options)

    return reduce


def lowest(dtype: np.dtype) -> Any:
    """What no number of a type is below."""
    if dtype == np.bool_:
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def highest(dtype: np.dtype) -> Any:
    """What no number of a type is above."""
    if dtype == np.bool_:
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _running(ufunc: np.ufunc) -> Function:
    def accumulate(params: Any, x: np.ndarray) -> np.ndarray:
        axis = params["axis"]
        x = np.flip(x, axis) if params["reverse"] else x
        options = {"dtype": x.dtype} if ufunc in (np.add, np.multiply) else {}
        found = ufunc.accumulate(x, axis, **options) if x.size else x
        return np.flip(found, axis) if params["reverse"] else found

    return accumulate


def _position(function: Any) -> Function:
    return lambda params, x: function(x, params["axes"][0])


def product(params: Any, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Batch, free and contracted dims, as one product of stacks of matrices."""
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
    wanted = params.get("preferred_element_type")
    if wanted is not None and np.dtype(wanted).kind in "iufc":
        left, right = left.astype(wanted), right.astype(wanted)
    left_free = [d for d in range(left.ndim) if d not in (*left_sum, *left_batch)]
    right_free = [d for d in range(right.ndim) if d not in (*right_sum, *right_batch)]
    batch = [left.shape[d] for d in left_batch]
    rows, columns = [left.shape[d] for d in left_free], [right.shape[d] for d in right_free]
    summed = int(np.prod([left.shape[d] for d in left_sum]))
    one = left.transpose([*left_batch, *left_free, *left_sum])
    two = right.transpose([*right_batch, *right_sum, *right_free])
    one = one.reshape([*batch, int(np.prod(rows)), summed])
    two = two.reshape([*batch, summed, int(np.prod(columns))])
    return np.matmul(one, two).reshape([*batch, *rows, *columns])


def _sort(params: Any, *operands: np.ndarray) -> list[np.ndarray]:
    dim = params["dimension"]
    if not operands[0].size:
        return list(operands)
    keys = operands[: params["num_keys"]]
    order = np.lexsort(keys[::-1], axis=dim)
    return [np.take_along_axis(x, order, dim) for x in operands]


def _ranks(x: np.ndarray) -> np.ndarray:
    """Integers in the order that top_k knows: a NaN with a sign is below all numbers."""
    if x.dtype != np.float32:
        return x
    bits = np.ascontiguousarray(x).view(np.int32)
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _largest(params: Any, x: np.ndarray) -> list[np.ndarray]:
    axis = params.get("axis", x.ndim - 1) % x.ndim
    n = x.shape[axis]
    ranks = np.flip(_ranks(x), axis)
    order = n - 1 - np.flip(np.argsort(ranks, axis, kind="stable"), axis)
    order = order[(slice(None),) * axis + (slice(0, params["k"]),)]
    return [np.take_along_axis(x, order, axis), order]


def _fourier(params: Any, x: np.ndarray) -> np.ndarray:
    kind = getattr(params["fft_type"], "name", str(params["fft_type"])).upper()
    lengths = params["fft_lengths"]
    axes = tuple(range(x.ndim - len(lengths), x.ndim))
    if not x.size or 0 in lengths:
        raise NotImplementedError("fft of nothing")
    if kind == "IRFFT":
        return np.fft.irfftn(x, lengths, axes)
    return {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn}[kind](x, axes=axes)


def _ragged(params: Any, left: np.ndarray, right: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """A dim of the left is in groups, each with a matrix, or a sum, of its own."""
    numbers = params["ragged_dot_dimension_numbers"]
    pairs = numbers.dot_dimension_numbers
    (left_sum, right_sum), (left_batch, right_batch) = [[tuple(d) for d in pair] for pair in pairs]
    (dim,) = numbers.lhs_ragged_dimensions
    if dim in left_batch:
        return product({**params, "dimension_numbers": pairs}, left, right)
    is_summed = dim in left_sum
    left = _in_groups(left, dim, left_batch, left_sum if is_summed else (), left_sum, sizes)
    one, other = _later(left_sum), _later(left_batch)
    if is_summed:
        place = right_sum[left_sum.index(dim)]
        right = _in_groups(right, place, right_batch, right_sum, right_sum, sizes)
        dims = (one, _later(right_sum)), ((0, *other), (0, *_later(right_batch)))
    else:
        dims = ((0, *one), (*numbers.rhs_group_dimensions, *right_sum)), (other, right_batch)
    return product({**params, "dimension_numbers": dims}, left, right)


def _later(dims: Sequence[int]) -> tuple[int, ...]:
    """The same dims behind a new first one."""
    return tuple(d + 1 for d in dims)


def _in_groups(
    x: np.ndarray,
    dim: int,
    batch: Sequence[int],
    among: Sequence[int],
    summed: Sequence[int],
    sizes: np.ndarray,
) -> np.ndarray:
    """`[groups, *x]`: of each group its places along `dim`, and zeros at those of the others.

    Groups are of a size for each place along the batch, and along those of `among`, or of the free
    dims where it is empty, that come before `dim`.
    """
    among = among or [d for d in range(x.ndim) if d not in (*batch, *summed)]
    before = [*batch, *among[: list(among).index(dim)]]
    each = np.broadcast_to(sizes, [*(x.shape[d] for d in before), sizes.shape[-1]])
    ends = np.cumsum(each, -1)
    place = np.arange(x.shape[dim]).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    missing = [d + 1 for d in range(x.ndim) if d not in before]
    order = [len(before), *np.argsort(before).astype(int)]
    starts, ends = (np.expand_dims(a.transpose(order), missing) for a in (ends - each, ends))
    return np.where((starts <= place) & (place < ends), x, np.zeros((), x.dtype))


SHAPE: dict[str, Function] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "unstack": _unstack,
    "tile": lambda params, x: np.tile(x, params["reps"]),
    "iota": _iota,
    "pad": _pad,
    "slice": _slice,
    "rev": _reverse,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "bitcast_convert_type": bits_as,
    "reduce_sum": _reduction(np.add),
    "reduce_prod": _reduction(np.multiply),
    "reduce_max": _reduction(np.maximum, lowest),
    "reduce_min": _reduction(np.minimum, highest),
    "reduce_and": _reduction(np.bitwise_and, lambda dtype: np.array(-1).astype(dtype)),
    "reduce_or": _reduction(np.bitwise_or),
    "reduce_xor": _reduction(np.bitwise_xor),
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
    "cumsum": _running(np.add),
    "cumprod": _running(np.multiply),
    "cummax": _running(np.maximum),
    "cummin": _running(np.minimum),
    "cumlogsumexp": _running(np.logaddexp),
    "dot_general": product,
    "ragged_dot_general": _ragged,
    "sort": _sort,
    "top_k": _largest,
    "fft": _fourier,
}
