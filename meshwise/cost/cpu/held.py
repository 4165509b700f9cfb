"""What a program holds beside arguments and results in either order of XLA on CPU.

By default what is ready is run at once, and what is gathered is gathered at once. In the order that
is told to hold least it waits for its reader. But so do gradients of weights, which nobody but the
results want: they come last, and all that they are made of is held until then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwise._jax import ClosedJaxpr, Jaxpr
from meshwise.cost.cpu.kernels import cpu_kernels_of
from meshwise.cost.cpu.mistaken import may_err
from meshwise.cost.cpu.orders import as_ready, as_wanted, to_hold_least
from meshwise.cost.cpu.packing import temporaries
from meshwise.cost.kernels import KernelProgram
from meshwise.cost.steps import steps_of

# So many times less held is worth another order than XLA's own: of what is counted nearly alike,
# less is held in one or in the other, and programs of XLA's partitioners run in its own.
LESS = 1.03


@dataclass(frozen=True)
class Held:
    """Bytes of temporaries where kernels run as soon as they can, and where as late as they may.

    The library of kernels is given `products_alone` where it may err with more.
    """

    at_once: int
    waiting: int
    products_alone: bool = False

    @property
    def is_less_as_wanted(self) -> bool:
        """Whether it is worth it to wait until what a kernel makes is wanted."""
        return self.at_once > 0 and LESS * self.waiting <= self.at_once


@dataclass(frozen=True, eq=False)
class Holding:
    """The kernels of a program, whose bytes are counted for the orders that are asked about."""

    program: KernelProgram
    products_alone: bool

    @cached_property
    def at_once(self) -> int:
        """Bytes of temporaries where kernels run as soon as they can."""
        return self._bytes(as_ready(self.program))

    @cached_property
    def waiting(self) -> int:
        """The same where they run as late as they may."""
        return self._bytes(to_hold_least(self.program))

    @property
    def held(self) -> Held:
        """What it holds in either order."""
        return Held(self.at_once, self.waiting, self.products_alone)

    def in_order_of(self, other: Held) -> int:
        """Bytes in the order in which another program is compiled."""
        return self.waiting if other.is_less_as_wanted else self.at_once

    def _bytes(self, order: Sequence[int]) -> int:
        return temporaries(self.program, order, self._wanted)

    @cached_property
    def _wanted(self) -> dict[int, int]:
        return {k: n for n, k in enumerate(as_wanted(self.program))}


def holding_of(
    jaxpr: ClosedJaxpr | Jaxpr, axis_sizes: Mapping[str, int], products_alone: bool | None = None
) -> Holding:
    """The kernels of a per-device program, of which nothing is counted yet.

    Whether the library is given `products_alone` may be known of what computes the same.
    """
    steps = steps_of(jaxpr, axis_sizes)
    products_alone = may_err(steps) if products_alone is None else products_alone
    return Holding(cpu_kernels_of(steps, products_alone), products_alone)
