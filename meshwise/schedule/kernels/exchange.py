"""Sums of small arrays over a ring's devices, inside a kernel.

Every device writes its term into its place in every other device's memory, and all add up the
terms in the order of the devices: the same sum, bit for bit, on each.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwise._jax import pallas_tpu as pltpu
from meshwise.schedule.kernels.blocks import LANES
from meshwise.schedule.kernels.ring import Ring

_ROWS = 8

Join = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Buffers:
    """Where the terms of one exchange meet: references to `scratch_of`'s memory."""

    terms: Sequence[Any]
    sent: Any
    arrived: Any


def scratch_of(exchange: Sequence[jax.ShapeDtypeStruct], ring: Ring) -> list[Any]:
    """The scratch memory of one exchange: the terms of all devices, semaphores of their copies."""
    if not exchange:
        return []
    terms = [
        pltpu.VMEM((ring.size, *_padded(term.shape)), _wire_type(term.dtype)) for term in exchange
    ]
    semaphores = pltpu.SemaphoreType.DMA
    return [terms, semaphores((len(terms),)), semaphores((len(terms), ring.size))]


def _padded(shape: Sequence[int]) -> tuple[int, ...]:
    """Whole register tiles."""
    *outer, rows, columns = shape
    return (*outer, -(-rows // _ROWS) * _ROWS, -(-columns // LANES) * LANES)


def _wire_type(dtype: Any) -> Any:
    """Short numbers are added as long ones."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.promote_types(dtype, jnp.int32)


def exchange_terms(
    ring: Ring, buffers: Buffers, terms: Sequence[Any], joins: Sequence[Join]
) -> list[Any]:
    """The terms of all devices joined. The ring's devices must all have entered the kernel."""
    here = ring.index()
    for buffer, term in zip(buffers.terms, terms, strict=True):
        buffer[here] = _pad(term.astype(buffer.dtype), buffer.shape[1:])

    def copy(number: int, place: Any, offset: Any) -> Any:
        buffer = buffers.terms[number]
        return pltpu.make_async_remote_copy(
            buffer.at[place],
            buffer.at[place],
            buffers.sent.at[number],
            buffers.arrived.at[number, place],
            device_id=ring.device(offset),
        )

    numbers = range(len(terms))
    for number in numbers:
        for offset in range(1, ring.size):
            copy(number, here, offset).start()
    for number in numbers:
        for offset in range(1, ring.size):
            copy(number, ring.position(offset), offset).wait_recv()
            copy(number, here, offset).wait_send()
    return [
        _join(buffer, term, join)
        for buffer, term, join in zip(buffers.terms, terms, joins, strict=True)
    ]


def _pad(term: Any, shape: Sequence[int]) -> Any:
    """A term in whole register tiles; what lies beside it is never read."""
    if term.shape == (1, 1):
        return jnp.broadcast_to(term, shape)
    widths = [(0, large - small) for small, large in zip(term.shape, shape, strict=True)]
    return jnp.pad(term, widths) if any(w for _, w in widths) else term


def _join(buffer: Any, term: Any, join: Join) -> Any:
    total = functools.reduce(join, [buffer[i] for i in range(buffer.shape[0])])
    inside = tuple(slice(size) for size in term.shape)
    return total[inside].astype(term.dtype)
