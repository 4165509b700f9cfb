"""Fourier transforms. The batch passes through; a transform over one dim may be split along it.

A transform of length `N = N1 * N2` is `N2` transforms of length `N1`, twiddle factors, and `N1`
transforms of length `N2` (Cooley and Tukey 1965; Bailey 1990 for the order of steps when data
lies in blocks). With `n = N2 * n1 + n2` and `k = k1 + N1 * k2`:

    X[k1 + N1 k2] = sum over n2 of w_N2^(n2 k2) * w_N^(n2 k1) * sum over n1 of w_N1^(n1 k1) x[n]

Three all_to_alls, each of the data once: blocks of `n` to columns `n2`, columns `n2` to rows `k1`,
rows `k1` to blocks of `k`. Blocks that begin inside a row of the `N1 * N2` matrix send the rows
that they touch, so blocks need not divide; `N` need, and a prime `N` is declined.

Of a real transform only `k1 <= N1 / 2` are computed, as the rest are their conjugates, and the
first exchange is of real numbers. Its inverse is its transpose, with weights.

Transforms over several dims are split into those by `propagate/transforms.py` where a transformed
dim is sharded.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.lax import FftType

from meshwise.ir.collectives import CollectiveKind, wire_bytes
from meshwise.ir.mesh import Axes
from meshwise.rules.factoring import Dim, Factoring
from meshwise.rules.registry import (
    Application,
    Exchange,
    LocalContext,
    OpRule,
    register,
    shard_index,
)

MOST_WASTE = 6  # what may be sent instead of the data, in its own size; 3 without any padding


@register("fft")
def _fft_rule(application: Application) -> OpRule:
    lengths = application.params["fft_lengths"]
    (before,), (after,) = (
        [t.shape for t in ts] for ts in (application.operands, application.results)
    )
    batch = len(before) - len(lengths)
    factoring = Factoring()
    shared = factoring.dims(before[:batch])
    transformed = factoring.dims(before[batch:], "permute")
    results: list[Dim] = [
        d if n != 1 else () for d, n in zip(transformed, after[batch:], strict=True)
    ]
    elements = math.prod(before[:batch]) * math.prod(lengths)
    return OpRule(
        factoring.rule([shared + transformed], [shared + results]),
        linear=((0,),),
        local=_fft_local,
        exchanges=_fft_exchanges,
        flops=5.0 * elements * math.log2(max(2, math.prod(lengths))),
    )


@dataclass(frozen=True)
class FourSteps:
    """The transform of one dim over some shards: `length = first * second`.

    `before` and `after` are the rows of a shard of the operand and of the result; `is_real` says
    that the operand is real and the result half.
    """

    length: int
    first: int
    second: int
    shards: int
    before: int
    after: int
    is_real: bool

    @property
    def columns(self) -> int:
        """Columns of the matrix that a shard transforms along the first dim."""
        return -(-self.second // self.shards)

    @property
    def frequencies(self) -> int:
        """How many results of the first transforms are kept."""
        return self.first // 2 + 1 if self.is_real else self.first

    @property
    def rows(self) -> int:
        """Of these, how many a shard transforms along the second dim."""
        return -(-self.frequencies // self.shards)

    @cached_property
    def before_rows(self) -> int:
        """Rows of the matrix that a shard's block touches before."""
        return _touched(self.before, self.second, self.shards)

    @cached_property
    def after_rows(self) -> int:
        """Rows of the matrix of results that a shard's block touches."""
        return _touched(self.after, self.first, self.shards)

    @property
    def sent(self) -> tuple[int, int, int]:
        """Elements of the local operands of the three all_to_alls."""
        halves = 2 if self.is_real else 1
        return (
            self.shards * self.before_rows * self.columns,
            self.shards * self.rows * self.columns,
            self.shards * self.rows * self.after_rows * halves,
        )

    @property
    def cost(self) -> float:
        """What is sent, in complex elements."""
        a, b, c = self.sent
        return (a / 2 if self.is_real else a) + b + c


def _touched(block: int, row: int, shards: int) -> int:
    """The most rows of so many elements that a block touches."""
    starts = np.arange(shards, dtype=np.int64) * block
    return int(((starts + block - 1) // row - starts // row).max()) + 1


@lru_cache(maxsize=1 << 12)
def four_steps(length: int, shards: int, before: int, after: int, real: bool) -> FourSteps | None:
    """The factors of a length that send least; None where they would send far too much."""
    small = [d for d in range(2, math.isqrt(length) + 1) if length % d == 0]
    pairs = sorted({(d, length // d) for s in small for d in (s, length // s)}, key=max)
    ways = [FourSteps(length, *p, shards, before, after, real) for p in pairs if p[1] <= before]
    best = min(ways, key=lambda way: way.cost, default=None)
    data = length / 2 / shards if real else length / shards
    if best is None or length >= 1 << 31 or best.cost > data * max(MOST_WASTE, shards):
        return None
    return best


def _factor(context: LocalContext) -> int | None:
    """The factor of a transformed dim that is sharded, if any."""
    rank = len(context.params["fft_lengths"])
    dims = context.rule.operands[0][-rank:]
    return next((d[0] for d in dims if context.is_split(d)), None)


def _steps(context: LocalContext, factor: int) -> FourSteps | None:
    """How a split transform is computed; None where it is not."""
    if len(context.params["fft_lengths"]) != 1:
        return None
    before, after = context.local_shape(0)[-1], context.local_result_shape(0)[-1]
    kind, (length,) = context.params["fft_type"], context.params["fft_lengths"]
    if kind == FftType.IRFFT:
        before, after = after, before
    real = kind in (FftType.RFFT, FftType.IRFFT)
    return four_steps(length, context.shards(factor), before, after, real)


def _fft_exchanges(context: LocalContext) -> list[Exchange] | None:
    factor = _factor(context)
    if factor is None or 0 in context.local_shape(0):
        return []
    steps = _steps(context, factor)
    if steps is None:
        return None
    batch = math.prod(context.local_shape(0)[:-1])
    sides: list[Any] = [context.eqn.invars[0].aval, context.eqn.outvars[0].aval]
    number = max(side.dtype.itemsize for side in sides)
    sizes = (number // 2 if steps.is_real else number, number, number)
    sent = [batch * n * size for n, size in zip(steps.sent, sizes, strict=True)]
    kind = CollectiveKind.ALL_TO_ALL
    return [Exchange(kind, sum(wire_bytes(kind, n, n, steps.shards) for n in sent), len(sent))]


def _fft_local(context: LocalContext, x: Any) -> Sequence[Any]:
    factor = _factor(context)
    if factor is None:
        return context.bind(x)
    if 0 in x.shape:
        return _empty(context)
    steps = _steps(context, factor)
    assert steps is not None, context.strategy
    kind = context.params["fft_type"]
    split = _Split(context, factor, steps)
    transform = split.inverse_real if kind == FftType.IRFFT else split.transform
    found = transform(lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])))
    return [lax.reshape(found, context.local_result_shape(0))]


@dataclass(frozen=True)
class _Split:
    """The four steps on one device's part, `[batch, block]`."""

    context: LocalContext
    factor: int
    steps: FourSteps

    @property
    def axes(self) -> Axes:
        """The axes of the transformed dim, major to minor."""
        return self.context.axes(self.factor)

    @property
    def index(self) -> Any:
        """Which shard this device holds."""
        return shard_index(self.axes, self.context.mesh)

    def transform(self, x: Any) -> Any:
        """The device's block of the transform."""
        inverse = self.context.params["fft_type"] == FftType.IFFT
        kind = FftType.IFFT if inverse else FftType.FFT
        real = FftType.RFFT if self.steps.is_real else kind
        z = self._fft(self._columns(x), real, self.steps.first)
        z = lax.mul(z, self._twiddles(z, 1.0 if inverse else -1.0))
        return self._blocks(self._fft(self._rows(z), kind, self.steps.second))

    def inverse_real(self, x: Any) -> Any:
        """The inverse of a real transform: its transpose, of weighted conjugates.

        Each frequency stands for itself and for its conjugate, but those that are real.
        """
        steps = self.steps
        block = lax.broadcasted_iota(np.int32, x.shape, 1)
        k = lax.add(lax.full_like(block, lax.mul(self.index, np.int32(steps.after))), block)
        halves = (0, steps.length // 2) if steps.length % 2 == 0 else (0,)
        single = functools.reduce(lax.bitwise_or, [lax.eq(k, lax.full_like(k, h)) for h in halves])
        weights = lax.select(single, *(lax.full_like(x, w / steps.length) for w in (1, 2)))
        inside = lax.le(k, lax.full_like(k, steps.length // 2))
        y = lax.select(inside, lax.mul(lax.conj(x), weights), lax.full_like(x, 0))
        real = jax.ShapeDtypeStruct((x.shape[0], steps.before), x.real.dtype)
        return jax.linear_transpose(self.transform, real)(y)[0]

    def _fft(self, x: Any, kind: FftType, length: int) -> Any:
        return self.context.bind(x, fft_type=kind, fft_lengths=(length,))[0]

    def _columns(self, x: Any) -> Any:
        """From `[batch, block]` to `[batch, own columns, first]`."""
        steps, batch = self.steps, x.shape[0]
        touched, second = steps.before_rows, steps.second
        if steps.before % second:  # blocks begin inside rows
            begin = lax.rem(lax.mul(self.index, np.int32(steps.before)), np.int32(second))
            x = _padded(x, 1, max(steps.before, touched * second), before=second - 1)
            start = lax.sub(np.int32(second - 1), begin)
            x = _sliced(x, start, touched * second)
        x = _padded(lax.reshape(x, (batch, touched, second)), 2, steps.shards * steps.columns)
        x = lax.reshape(x, (batch, touched, steps.shards, steps.columns))
        x = lax.all_to_all(x, self.axes, split_axis=2, concat_axis=1, tiled=True)
        x = lax.reshape(x, (batch, steps.shards * touched, steps.columns))
        return lax.transpose(self._assembled(x), (0, 2, 1))

    def _assembled(self, x: Any) -> Any:
        """All rows of some columns, from the rows that each block touches.

        A row is no longer than a block, so it lies in one block or in two that are neighbours.
        """
        steps = self.steps
        if steps.before % steps.second == 0:
            return lax.slice_in_dim(x, 0, steps.first, axis=1)
        row = np.arange(steps.first, dtype=np.int64)
        blocks = row * steps.second // steps.before, ((row + 1) * steps.second - 1) // steps.before
        first, last = (
            _rows_at(x, b * steps.before_rows + row - b * steps.before // steps.second)
            for b in blocks
        )
        is_one = lax.broadcast_in_dim(blocks[0] == blocks[1], first.shape, (1,))
        return lax.select(is_one, first, lax.add(first, last))

    def _twiddles(self, z: Any, sign: float) -> Any:
        """Powers of the root of unity; exponents are whole numbers until the last moment."""
        steps, shape = self.steps, z.shape[1:]
        column = lax.add(
            lax.full(shape, lax.mul(self.index, np.int32(steps.columns)), np.int32),
            lax.broadcasted_iota(np.int32, shape, 0),
        )
        exponent = lax.mul(column, lax.broadcasted_iota(np.int32, shape, 1))
        late = lax.gt(exponent, lax.full_like(exponent, steps.length // 2))
        centred = lax.sub(exponent, lax.full_like(exponent, steps.length))
        exponent = lax.convert_element_type(lax.select(late, centred, exponent), z.real.dtype)
        angle = lax.mul(exponent, lax.full_like(exponent, sign * 2 * math.pi / steps.length))
        return lax.broadcast(lax.complex(lax.cos(angle), lax.sin(angle)), (z.shape[0],))

    def _rows(self, z: Any) -> Any:
        """From `[batch, own columns, frequencies]` to `[batch, own rows, second]`."""
        z = _padded(lax.transpose(z, (0, 2, 1)), 1, self.steps.shards * self.steps.rows)
        z = lax.all_to_all(z, self.axes, split_axis=1, concat_axis=2, tiled=True)
        return lax.slice_in_dim(z, 0, self.steps.second, axis=2)

    def _blocks(self, z: Any) -> Any:
        """From `[batch, own rows, second]` to `[batch, block]`.

        Rows of the matrix of results are `[first]`, a dim that all devices have a part of here.
        """
        steps, batch = self.steps, z.shape[0]
        touched, halves = steps.after_rows, 2 if steps.is_real else 1
        z = lax.transpose(z, (0, 2, 1))
        parts = [self._touched(z)] + ([self._touched(lax.rev(z, (1,)))] if steps.is_real else [])
        z = lax.concatenate([lax.expand_dims(part, (3,)) for part in parts], 3)
        z = lax.all_to_all(z, self.axes, split_axis=1, concat_axis=4, tiled=True)
        z = lax.reshape(z, (batch, touched, halves, steps.shards * steps.rows))
        direct = lax.index_in_dim(z, 0, 2, keepdims=False)
        direct = lax.slice_in_dim(direct, 0, steps.frequencies, axis=2)
        if steps.is_real:
            mirrored = lax.index_in_dim(z, 1, 2, keepdims=False)
            rest = lax.slice_in_dim(mirrored, 1, steps.first - steps.frequencies + 1, axis=2)
            direct = lax.concatenate([direct, lax.conj(lax.rev(rest, (2,)))], 2)
        found = lax.reshape(direct, (batch, touched * steps.first))
        if steps.after % steps.first == 0:
            return found
        begin = lax.rem(lax.mul(self.index, np.int32(steps.after)), np.int32(steps.first))
        return _sliced(found, begin, steps.after)

    def _touched(self, z: Any) -> Any:
        """For each shard the rows that its block touches: `[batch, shards, touched, own]`."""
        steps = self.steps
        shape = (z.shape[0], steps.shards, steps.after_rows, z.shape[2])
        if steps.after % steps.first == 0:
            rows = steps.shards * steps.after_rows
            z = _padded(lax.slice_in_dim(z, 0, min(rows, steps.second), axis=1), 1, rows)
            return lax.reshape(z, shape)
        starts = np.arange(steps.shards, dtype=np.int64)[:, None] * steps.after // steps.first
        rows = np.minimum(starts + np.arange(steps.after_rows), steps.second - 1)
        return lax.reshape(_rows_at(z, rows.ravel()), shape)


def _empty(context: LocalContext) -> list[Any]:
    aval: Any = context.eqn.outvars[0].aval
    return [lax.full(context.local_result_shape(0), 0, aval.dtype)]


def _padded(x: Any, dim: int, size: int, before: int = 0) -> Any:
    """Zeros behind a dim, up to a size, and perhaps some before it."""
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (before, size - x.shape[dim], 0)
    return lax.pad(x, np.zeros((), x.dtype), config)


def _sliced(x: Any, start: Any, size: int) -> Any:
    return lax.dynamic_slice_in_dim(x, start, size, 1, allow_negative_indices=False)


def _rows_at(x: Any, rows: Any) -> Any:
    """Some rows of `[batch, rows, columns]`, by number."""
    numbers = lax.GatherDimensionNumbers((0, 2), (1,), (1,))
    index = np.asarray(rows, np.int32)[:, None]
    sizes = (x.shape[0], 1, x.shape[2])
    return lax.gather(x, index, numbers, sizes, mode=lax.GatherScatterMode.CLIP)
