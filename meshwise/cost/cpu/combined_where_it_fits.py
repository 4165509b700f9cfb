"""Which collectives travel together on CPU: as many as no more memory is held for."""

from collections.abc import Mapping

from meshwise._jax import ClosedJaxpr, combine_collectives
from meshwise.cost.cpu.held import Held, holding_of

# The most that is laid end to end, from what is sent in the time that another collective takes.
MOST_BYTES = (2**18, 2**16, 2**14, 2**12)
# What is held beside arguments and results in any case, as nobody minds; and a part of it.
LITTLE_BYTES = 2**12
LITTLE_PART = 512


def combined_where_it_fits(
    jaxpr: ClosedJaxpr, axis_sizes: Mapping[str, int]
) -> tuple[ClosedJaxpr, Held]:
    """The same per-device jaxpr with fewer collectives, and what it holds: hardly more than it did.

    By what kernels here hold, in the order in which it would be compiled as it is: where XLA copies
    what came, it may be a little more.
    """
    holding = holding_of(jaxpr, axis_sizes)
    apart = holding.held
    held_apart = holding.in_order_of(apart)
    most = max(held_apart + held_apart // LITTLE_PART, LITTLE_BYTES)
    for most_bytes in MOST_BYTES:
        found = combine_collectives(jaxpr, axis_sizes, most_bytes)
        if found is jaxpr:
            break
        holding = holding_of(found, axis_sizes, apart.products_alone)
        if holding.in_order_of(apart) <= most:
            return found, holding.held
    return jaxpr, apart
