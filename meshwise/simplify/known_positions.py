"""Rows at positions that are known while tracing: cut, turned round, repeated, laid side by side.

`x[(arange(n) + 1) % n]` are the neighbours' rows, `x[arange(2 * n) // 2]` an image made larger,
`x[hop * arange(m)[:, None] + arange(size)]` the frames of a signal. As gathers they would read rows
from anywhere, of which every device needs all. As slices they send what crosses a border. So do
their gradients, which are sums of the same rows put back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwise._jax import JaxprEqn, Var
from meshwise.ir.program import shape_of, type_of
from meshwise.simplify.borders.equations import equations_of
from meshwise.simplify.numbers import Numbers, as_positions

# Runs of rows that are laid side by side, and slices that make windows which overlap.
MOST_RUNS, MOST_SLICES = 4, 8

Cut = Callable[[Any, int], Any]


@dataclass(frozen=True)
class _Part:
    """What is read along one dim of an operand: `cut(x, dim)` has other dims in its place.

    These are dims of the result, by number, None for one that it has not. Where it `is_run` it is
    one slice, forwards.
    """

    cut: Cut
    dims: tuple[int | None, ...]
    is_run: bool = True


def cut_known_positions(eqns: Sequence[JaxprEqn], constants: Mapping[Var, Any]) -> list[JaxprEqn]:
    """The equations, with gathers at known positions and sums into such as slices and joins."""
    numbers = Numbers({v: eqn for eqn in eqns for v in eqn.outvars}, constants)
    found: list[JaxprEqn] = []
    for eqn in eqns:
        make = _MADE_OF.get(eqn.primitive.name)
        made = None if make is None else make(eqn, numbers)
        found += [eqn] if made is None else made
    return found


def _read(eqn: JaxprEqn, numbers: Numbers) -> list[JaxprEqn] | None:
    """A gather as slices of its operand."""
    names = eqn.params["dimension_numbers"]
    rows = _Rows(
        eqn.invars[1],
        shape_of(eqn.invars[0]),
        tuple(eqn.params["slice_sizes"]),
        shape_of(eqn.outvars[0]),
        names.start_index_map,
        names.collapsed_slice_dims,
        names.offset_dims,
        names.operand_batching_dims,
        eqn.params["mode"],
    )
    parts = rows.parts(numbers)
    if parts is None:
        return None
    return equations_of(eqn, eqn.invars[:1], lambda x: rows.read(x, parts))


def _added(eqn: JaxprEqn, numbers: Numbers) -> list[JaxprEqn] | None:
    """A sum into rows as the transpose of reading these; `borders/updates.py` has single runs."""
    names, (operand, indices, updates) = eqn.params["dimension_numbers"], eqn.invars
    if not jnp.issubdtype(type_of(operand).dtype, jnp.inexact):
        return None
    shape, sizes = shape_of(operand), shape_of(updates)
    windows = iter([sizes[d] for d in names.update_window_dims])
    single = (*names.inserted_window_dims, *names.operand_batching_dims)
    rows = _Rows(
        indices,
        shape,
        tuple(1 if d in single else next(windows) for d in range(len(shape))),
        sizes,
        names.scatter_dims_to_operand_dims,
        names.inserted_window_dims,
        names.update_window_dims,
        names.operand_batching_dims,
        eqn.params["mode"],
    )
    parts = rows.parts(numbers)
    if parts is None or (all(part.is_run for part in parts) and not rows.spreads(parts)):
        return None

    def added(x: Any, new: Any) -> Any:
        # Less the negative, so that rows to which nothing is added keep the sign of a zero.
        (put_back,) = jax.linear_transpose(lambda x: rows.read(x, parts), x)(lax.neg(new))
        return lax.sub(x, put_back)

    return equations_of(eqn, [operand, updates], added)


_MADE_OF: Mapping[str, Callable[[JaxprEqn, Numbers], list[JaxprEqn] | None]] = {
    "gather": _read,
    "scatter-add": _added,
}


@dataclass(frozen=True)
class _Rows:
    """The rows that index vectors stand for, in the words of a gather.

    Of an operand of a `shape` windows of some `sizes` are read, which begin at `indices` in the
    dims `mapped`. In the `result` those `collapsed` are missing, and the other dims are its dims
    `kept`. Where dims are a `batch` of both nothing is known.
    """

    indices: Any
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    result: tuple[int, ...]
    mapped: tuple[int, ...]
    collapsed: tuple[int, ...]
    kept: tuple[int, ...]
    batch: tuple[int, ...]
    mode: Any

    def parts(self, numbers: Numbers) -> list[_Part] | None:
        """What is read along each dim, where that is known, and each dim's has its own way."""
        known = None if self.batch else numbers.of(self.indices)
        vectors = None if known is None else as_positions(known)
        if vectors is None or 0 in (*self.shape, *self.result, *self.sizes):
            return None
        stays = [d for d in range(len(self.shape)) if d not in self.collapsed]
        kept = dict(zip(stays, self.kept, strict=True))
        given = [d for d in range(len(self.result)) if d not in self.kept]
        found: list[_Part] = []
        for d, (n, size) in enumerate(zip(self.shape, self.sizes, strict=True)):
            starts = np.zeros((1,) * len(given), np.int64)
            if d in self.mapped:
                starts = vectors[..., self.mapped.index(d)]
            if lax.GatherScatterMode.from_any(self.mode) == lax.GatherScatterMode.CLIP:
                starts = np.clip(starts, 0, n - size)
            if starts.min() < 0 or starts.max() > n - size:
                return None
            part = _part(starts, size, given, kept.get(d))
            if part is None:
                return None
            found.append(part)
        own = [d for part in found for d in part.dims if d is not None]
        return found if len(own) == len(set(own)) else None

    def spreads(self, parts: Sequence[_Part]) -> bool:
        """Whether the same rows are read again along some dim of the result."""
        own = {d for part in parts for d in part.dims}
        return any(n > 1 and d not in own for d, n in enumerate(self.result))

    def read(self, x: Any, parts: Sequence[_Part]) -> Any:
        """The rows of an operand."""
        for d in reversed(range(len(parts))):
            x = parts[d].cut(x, d)
        dims = [d for part in parts for d in part.dims]
        x = lax.squeeze(x, [k for k, d in enumerate(dims) if d is None])
        own = [d for d in dims if d is not None]
        x = lax.transpose(x, np.argsort(own).tolist()) if own != sorted(own) else x
        if x.shape == self.result:
            return x
        return lax.broadcast_in_dim(x, self.result, sorted(own))


def _part(starts: np.ndarray, size: int, given: Sequence[int], kept: int | None) -> _Part | None:
    """What is read along one dim in windows of a size, which is the result's dim `kept`.

    `starts` are for each index vector, whose dims are the result's dims `given`.
    """
    moving = [d for d in range(starts.ndim) if _moves(starts, d)]
    row = starts[tuple(slice(None) if d in moving else 0 for d in range(starts.ndim))]
    if not moving:
        return _Part(_run(int(row), 1, size), (kept,))
    if len(moving) == 1 and size == 1:
        cut, is_run = _rows(row)
        own = (given[moving[0]], *([] if kept is None else [kept]))
        return cut and _Part(_before_single(cut, kept), own, is_run)
    if len(moving) == 1 and kept is not None:
        row = row[:, None] + np.arange(size)
        moving, places = [0, 1], [given[moving[0]], kept]
    elif len(moving) == 2 and size == 1 and kept is None:
        places = [given[d] for d in moving]
    else:
        return None
    cut, is_turned = _windows(row)
    own = tuple(reversed(places) if is_turned else places)
    return cut and _Part(cut, own, is_run=False)


def _moves(starts: np.ndarray, d: int) -> bool:
    """Whether anything changes along a dim."""
    return not np.array_equal(starts[(slice(None),) * d + (slice(1, None),)],
                              starts[(slice(None),) * d + (slice(-1),)])  # fmt: skip


def _before_single(cut: Cut, kept: int | None) -> Cut:
    """With a dim of one behind it, where the result has that."""
    return cut if kept is None else lambda x, d: lax.expand_dims(cut(x, d), (d + 1,))


def _rows(positions: np.ndarray) -> tuple[Cut | None, bool]:
    """Single rows of a dim, and whether they are one slice."""
    count, first = len(positions), positions[0]
    again = np.flatnonzero(positions[1:] == first) + 1
    others = np.flatnonzero(positions != first)
    times = int(others[0]) if len(others) else count
    if times > 1 and _is_repeated(positions.reshape(-1, times) if count % times == 0 else None):
        cut, _ = _rows(positions[::times])
        return cut and _repeated(cut, times, behind=True), False
    period = int(again[0]) if len(again) and times == 1 else 0
    if period and count % period == 0 and _is_repeated(positions.reshape(-1, period).T):
        cut, _ = _rows(positions[:period])
        return cut and _repeated(cut, count // period, behind=False), False
    runs = _runs(positions)
    if runs is None or len(runs) > MOST_RUNS or not _are_regular(runs):
        return None, False
    cuts = [_run(*run) for run in runs]
    if len(cuts) == 1:
        return cuts[0], runs[0][1] > 0
    return lambda x, d: lax.concatenate([cut(x, d) for cut in cuts], d), False


def _are_regular(runs: Sequence[tuple[int, int, int]]) -> bool:
    """Whether most rows follow others; any two are a step apart, and are picked of anywhere."""
    following = [count for _, step, count in runs if count > 2 or (count == 2 and abs(step) <= 1)]
    count = sum(count for _, _, count in runs)
    return count == 1 or 2 * sum(following) >= count


def _is_repeated(rows: np.ndarray | None) -> bool:
    """Whether each row is the same number again and again."""
    return rows is not None and bool(np.all(rows == rows[:, :1]))


def _repeated(cut: Cut, times: int, behind: bool) -> Cut:
    """Every row so many times, one `behind` the other or all of them again."""

    def repeated(x: Any, d: int) -> Any:
        x = cut(x, d)
        at = d + 1 if behind else d
        shape = (*x.shape[:at], times, *x.shape[at:])
        x = lax.broadcast_in_dim(x, shape, [k for k in range(len(shape)) if k != at])
        return lax.reshape(x, (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]))

    return repeated


def _runs(positions: np.ndarray) -> list[tuple[int, int, int]] | None:
    """Rows as runs (first, step, count), the longest first taken out; None of very many."""
    if len(positions) <= 1:
        return [(int(p), 1, 1) for p in positions]
    steps = np.diff(positions)
    ends = np.flatnonzero(np.diff(steps)) + 1
    if len(ends) > 2 * MOST_RUNS:
        return None
    bounds = np.array([0, *ends, len(steps)])
    longest = int(np.argmax(np.diff(bounds)))
    a, b = int(bounds[longest]), int(bounds[longest + 1])
    before, behind = _runs(positions[:a]), _runs(positions[b + 1 :])
    if before is None or behind is None:
        return None
    return [*before, (int(positions[a]), int(steps[a]), b - a + 1), *behind]


def _run(first: int, step: int, count: int) -> Cut:
    """Rows a fixed step apart; backwards where it is negative."""
    low, high = sorted((first, first + step * (count - 1)))

    def run(x: Any, d: int) -> Any:
        x = lax.slice_in_dim(x, low, high + 1, abs(step) or 1, d)
        if step == 0 and count > 1:
            return lax.broadcast_in_dim(
                x, (*x.shape[:d], count, *x.shape[d + 1 :]), range(x.ndim)
            )  # fmt: skip
        return lax.rev(x, (d,)) if step < 0 else x

    return run


def _windows(positions: np.ndarray) -> tuple[Cut | None, bool]:
    """Windows of rows that begin a fixed step apart, and whether the cut has its dims in turn."""
    first, (count, size) = int(positions[0, 0]), positions.shape
    step, along = int(positions[1, 0]) - first, int(positions[0, 1]) - first
    if not np.array_equal(
        positions, first + step * np.arange(count)[:, None] + along * np.arange(size)
    ):
        return None, False
    if along != 1 and step == 1:
        cut, _ = _windows(positions.T)
        return cut, True
    if along != 1 or step < 1 or -(-size // step) > MOST_SLICES:
        return None, False
    offsets = range(0, size, step)

    def windows(x: Any, d: int) -> Any:
        parts = [_blocks(x, d, first + k, step, count, min(step, size - k)) for k in offsets]
        return lax.concatenate(parts, d + 1) if len(parts) > 1 else parts[0]

    return windows, False


def _blocks(x: Any, d: int, first: int, step: int, count: int, size: int) -> Any:
    """The first rows of each block of `step` rows, in two dims."""
    cut = lax.slice_in_dim(x, first, first + (count - 1) * step + size, axis=d)
    missing = [(0, (step - size) * (k == d), 0) for k in range(x.ndim)]
    cut = lax.pad(cut, np.zeros((), x.dtype), missing) if step > size else cut
    blocks = lax.reshape(cut, (*x.shape[:d], count, step, *x.shape[d + 1 :]))
    return lax.slice_in_dim(blocks, 0, size, axis=d + 1)
