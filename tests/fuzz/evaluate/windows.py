"""Windows that run over an array: convolutions, pooling and its gradients."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fuzz.evaluate.elementwise import Function
from tests.fuzz.evaluate.shape import highest, lowest, pad


def windows(
    x: np.ndarray, sizes: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> np.ndarray:
    """`[.., spatial]` to `[.., windows, positions in a window]`; all last dims are spatial."""
    rank = len(sizes)
    first = x.ndim - rank
    for k, (size, stride, gap) in enumerate(zip(sizes, strides, dilation, strict=True)):
        dim = first + k
        reach = (size - 1) * gap + 1
        count = max((x.shape[dim] - reach) // stride + 1, 0)
        index = np.arange(count)[:, None] * stride + np.arange(size)[None, :] * gap
        x = np.take(x, index.reshape(-1), dim) if count else np.take(x, [], dim)
        x = x.reshape((*x.shape[:dim], count, size, *x.shape[dim + 1 :]))
        x = np.moveaxis(x, dim + 1, -1)
    return x


def _widened(x: np.ndarray, value: Any, padding: Sequence[Any], base: Sequence[int]) -> np.ndarray:
    inner = [b - 1 for b in base]
    return pad(x, value, [(low, high, i) for (low, high), i in zip(padding, inner, strict=True)])


def convolution(params: Any, x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Any convolution that lax has."""
    numbers = params["dimension_numbers"]
    wanted = params.get("preferred_element_type")
    if wanted is not None and np.dtype(wanted).kind in "iufc":
        x, kernel = x.astype(wanted), kernel.astype(wanted)
    x, kernel = x.transpose(numbers.lhs_spec), kernel.transpose(numbers.rhs_spec)
    rank = x.ndim - 2
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    padding = [(0, 0), (0, 0), *params["padding"]]
    x = _widened(x, x.dtype.type(0), padding, (1, 1, *params["lhs_dilation"]))
    sizes = kernel.shape[2:]
    x = windows(x, sizes, params["window_strides"], params["rhs_dilation"])
    spatial = x.shape[2 : 2 + rank]
    count = int(np.prod(spatial))
    taps = int(np.prod(sizes))
    x = x.reshape(x.shape[0], x.shape[1], count, taps)
    if batches > 1:  # groups of the batch become groups of features
        n, features = x.shape[0] // batches, x.shape[1]
        x = x.reshape(batches, n, features, count, taps).swapaxes(0, 1)
        x = x.reshape(n, batches * features, count, taps)
    groups = max(groups, batches)
    n, out = x.shape[0], kernel.shape[0]
    x = x.reshape(n, groups, x.shape[1] // groups, count, taps)
    kernel = kernel.reshape(groups, out // groups, kernel.shape[1], taps)
    found = np.einsum("ngcst,goct->ngos", x, kernel, optimize=True)
    found = found.reshape(n, out, *spatial)
    return found.transpose(np.argsort(numbers.out_spec))


def _pool(ufunc: np.ufunc, initial: Any) -> Function:
    def pool(params: Any, x: np.ndarray) -> np.ndarray:
        first = initial(x.dtype)
        base = params.get("base_dilation") or (1,) * x.ndim
        gaps = params.get("window_dilation") or (1,) * x.ndim
        x = _widened(x, first, params["padding"], base)
        found = windows(x, params["window_dimensions"], params["window_strides"], gaps)
        axes = tuple(range(x.ndim, 2 * x.ndim))
        options = {} if ufunc.identity is None else {"dtype": x.dtype}
        return ufunc.reduce(found, axis=axes, initial=first, **options)

    return pool


def _identity(value: int) -> Any:
    return lambda dtype: dtype.type(value)


def _flat_windows(params: Any, x: np.ndarray, fill: Any) -> tuple[np.ndarray, np.ndarray]:
    """Windows of numbers and of their flat positions (-1: padding), each `[windows, taps]`."""
    gaps = (1,) * x.ndim
    at = np.arange(x.size).reshape(x.shape)
    found = []
    for array, value in ((x, fill), (at, -1)):
        wide = _widened(array, value, params["padding"], gaps)
        cut = windows(wide, params["window_dimensions"], params["window_strides"], gaps)
        found.append(cut.reshape(int(np.prod(cut.shape[: x.ndim])), -1))
    return found[0], found[1]


def _chosen(params: Any, x: np.ndarray) -> np.ndarray:
    """Flat position of the element that wins each window: the first that is not beaten."""
    largest = "ge" in str(params["select_prim"])
    numbers, at = _flat_windows(params, x, 0)
    numbers = np.where(at < 0, lowest(x.dtype) if largest else highest(x.dtype), numbers)
    # What is in the window comes before padding that is as small.
    outside = at < 0
    best = np.full(len(numbers), -1)
    for row in range(len(numbers)):
        for tap in range(numbers.shape[1]):
            if outside[row, tap]:
                continue
            if best[row] < 0:
                best[row] = tap
                continue
            old, new = numbers[row, best[row]], numbers[row, tap]
            if not (old >= new if largest else old <= new):
                best[row] = tap
    found = at[np.arange(len(at)), np.maximum(best, 0)]
    return np.where(best < 0, -1, found)


def _select_and_scatter(params: Any, source: np.ndarray, x: np.ndarray) -> np.ndarray:
    chosen = _chosen(params, x)
    out = np.zeros(x.size, source.dtype)
    inside = chosen >= 0
    np.add.at(out, chosen[inside], source.reshape(-1)[inside])
    return out.reshape(x.shape)


def _select_and_gather(params: Any, tangents: np.ndarray, x: np.ndarray) -> np.ndarray:
    widths = params["window_dimensions"], params["window_strides"]
    wide = _widened(x, x.dtype.type(0), params["padding"], (1,) * x.ndim)
    shape = windows(wide, *widths, (1,) * x.ndim).shape[: x.ndim]
    chosen = _chosen(params, x)
    found = tangents.reshape(-1)[np.maximum(chosen, 0)] if tangents.size else np.zeros(0)
    return np.where(chosen < 0, 0, found).astype(tangents.dtype).reshape(shape)


WINDOWS: dict[str, Function] = {
    "conv_general_dilated": convolution,
    "reduce_window_sum": _pool(np.add, _identity(0)),
    "reduce_window_max": _pool(np.maximum, lowest),
    "reduce_window_min": _pool(np.minimum, highest),
    "select_and_scatter_add": _select_and_scatter,
    "select_and_gather_add": _select_and_gather,
}
