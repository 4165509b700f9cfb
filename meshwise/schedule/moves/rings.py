"""Rings of devices: what each holds goes round, and is used while the next is on its way.

The two loops under `overlap` (CoCoNeT, section 3.2; decomposed collectives, ASPLOS 2023). In both,
a ring of n devices sends n - 1 times, and no product waits for the send that is issued beside it.
With both directions of the links, half of it goes each way, in n / 2 steps.

Up to `UNROLLED` devices the steps are written out, so that each send is an equation that a compiler
can start early. Beyond, they are a loop of the same step: a program's size stays what it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from meshwise.ir.mesh import Axes, Mesh
from meshwise.rules.registry import shard_index

UNROLLED = 16
LOOP_UNROLL = 2  # so that a step's buffers need not be copied into the next one's


@dataclass(frozen=True)
class Ring:
    """The devices of a group in a circle, by their number over `axes`, major to minor.

    What is sent is named by `scope`, in loops too, which begin their names anew.
    """

    axes: Axes
    mesh: Mesh
    scope: str

    @property
    def size(self) -> int:
        """How many devices."""
        return self.mesh.size(self.axes)

    def send(self, x: jax.Array, by: int) -> jax.Array:
        """What the device `by` places before this one holds (all send theirs on)."""
        numbers = self.mesh.permute_numbers(self.axes)
        pairs = [(numbers[i], numbers[(i + by) % self.size]) for i in range(self.size)]
        named = self.mesh.permute_order(self.axes)
        with jax.named_scope(self.scope):
            return lax.ppermute(x, named[0] if len(named) == 1 else named, pairs)

    def place(self, offset: Any) -> jax.Array:
        """The number of the device some places (more than -n, no more than n) after this one."""
        if isinstance(offset, int):
            offset = np.int32(offset % self.size)
        else:
            offset = lax.add(offset, np.int32(self.size))
        return lax.rem(lax.add(shard_index(self.axes, self.mesh), offset), np.int32(self.size))

    def hops(self, bidirectional: bool) -> tuple[int, int]:
        """How many times what a device holds is sent upwards, and how many times downwards."""
        ups = self.size // 2 if bidirectional else self.size - 1
        return ups, self.size - 1 - ups


def visit(
    ring: Ring,
    tile: jax.Array,
    use: Callable[[Any, jax.Array, Any], Any],
    state: Any,
    bidirectional: bool,
) -> Any:
    """The state after `use(state, tile, owner)` of every device's tile.

    Each tile is sent on before it is used, and the two do not wait for each other.
    """
    ups, downs = ring.hops(bidirectional)

    def step(
        carry: Any, t: Any, is_up: bool = True, is_down: bool = True, uses: bool = True
    ) -> Any:
        """Tiles that came t places; `is_up`, `is_down`: sent on; `uses`: two came, not one."""
        up, down, state = carry
        next_up = ring.send(up, 1) if is_up else None
        next_down = ring.send(down, -1) if downs and is_down else None
        state = use(state, up, ring.place(-t))
        if downs and uses:
            state = use(state, down, ring.place(t))
        return next_up, next_down, state

    carry = step((tile, tile, state), 0, uses=False)
    last = downs or ups
    carry = _repeat(ring, step, carry, 1, last)
    for t in range(last, ups + 1):
        carry = step(carry, t, t < ups, t < downs, t <= downs)
    return carry[2]


def collect(ring: Ring, term: Callable[[Any], jax.Array], bidirectional: bool) -> jax.Array:
    """The sum over devices of their terms of this device's chunk; `term(chunk)` computes one.

    Device i begins with the chunk that is farthest away: a partial sum of a chunk passes all
    devices, each adds its term, and it ends where it belongs.
    """
    ups, downs = ring.hops(bidirectional)

    def step(carry: Any, t: Any, is_down: bool = True) -> Any:
        up, down = carry
        up = _added(ring, up, 1, term(ring.place(ups - t)))
        if downs and is_down:
            down = _added(ring, down, -1, term(ring.place(t - ups)))
        return up, down

    carry: Any = (None, None)
    first = ups - downs + 1 if downs else 1
    for t in range(first):
        carry = step(carry, t, t >= ups - downs)
    up, down = _repeat(ring, step, carry, first, ups)
    found = _added(ring, up, 1, term(ring.place(0)))
    return found if down is None else lax.add(found, ring.send(down, -1))


def _added(ring: Ring, sum_: jax.Array | None, by: int, term: jax.Array) -> jax.Array:
    """A partial sum that comes from a neighbour, and this device's term."""
    return term if sum_ is None else lax.add(ring.send(sum_, by), term)


def _repeat(ring: Ring, step: Callable[[Any, Any], Any], carry: Any, first: int, last: int) -> Any:
    """The carry after the steps from `first` up to `last`."""
    if ring.size <= UNROLLED:
        for t in range(first, last):
            carry = step(carry, t)
        return carry
    steps = np.arange(first, last, dtype=np.int32)
    return lax.scan(lambda c, t: (step(c, t), None), carry, steps, unroll=LOOP_UNROLL)[0]


def part_at(x: jax.Array, dim: int, number: Any, size: int) -> jax.Array:
    """The part of an array along a dim, of parts of a size the one of a number."""
    starts: list[Any] = [np.int32(0)] * x.ndim
    starts[dim] = lax.mul(number, np.int32(size))
    sizes = [size if d == dim else n for d, n in enumerate(x.shape)]
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def with_part(x: jax.Array, part: jax.Array, dim: int, number: Any) -> jax.Array:
    """An array whose part of a number along a dim is another one."""
    starts: list[Any] = [np.int32(0)] * x.ndim
    starts[dim] = lax.mul(number, np.int32(part.shape[dim]))
    return lax.dynamic_update_slice(x, part, starts, allow_negative_indices=False)


def filled_from(x: jax.Array, dim: int, number: Any, size: int, filler: Any) -> jax.Array:
    """The part of a number, its elements beyond `size` of the whole replaced by `filler`."""
    start = lax.mul(number, np.int32(x.shape[dim]))
    position = lax.add(lax.broadcasted_iota(np.int32, x.shape, dim), lax.broadcast(start, x.shape))
    inside = lax.lt(position, lax.full_like(position, size))
    return lax.select(inside, x, lax.broadcast(filler, x.shape))
