"""A machine of round figures, and the timeline of a function on it."""

import jax
import jax.numpy as jnp

from meshwise._jax import make_jaxpr_over_axes
from meshwise.cost.hardware import Hardware
from meshwise.cost.timeline import timeline

SIZES = {"a": 2, "b": 4}

# One flop and one byte of memory a nanosecond, a byte of wire in ten; a launch of a microsecond for
# a collective, half of one for a kernel.
MACHINE = Hardware("test", 1e8, 1e-6, 1e9, 1e9, "made up", kernel_s=0.5e-6)
NS = 1e-9
# What a ring of four sends.
SHIFT = [(i, (i + 1) % 4) for i in range(4)]


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def traced(function, *args):
    return make_jaxpr_over_axes(function, list(SIZES.items()), args)


def run(function, *args, hardware=MACHINE, overlaps=True):
    return timeline(traced(function, *args), SIZES, hardware, overlaps=overlaps)


def shown(found):
    """Events as (first word of the name, resource, start, end) in nanoseconds."""
    return [
        (e.name.split()[0], e.resource, round(e.start_s / NS), round(e.end_s / NS))
        for e in found.events
    ]


X = array(8, 8)  # 256 bytes, 64 elements
PRODUCT = 500 + 1024  # ns: 2 * 8 * 8 * 8 flops take longer than 768 bytes
ELEMENTS = 500 + 512  # ns: of one operand, read and written
REDUCE_A = 1000 + 10 * 256  # ns: 2 * 1/2 * 256 bytes over two devices
REDUCE_B = 1000 + 10 * 384  # ns: 2 * 3/4 * 256 bytes over four
