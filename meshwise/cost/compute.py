"""Flops and memory traffic of equations and of a whole per-device program.

Loops count once a trip, a `while` loop once in all. Of a choice each figure is the largest of any
branch's. Memory traffic is that of the kernels, which `kernels.py` makes of equations: what is
read and written inside a kernel counts nothing. Traffic of collectives counts too.
"""

from collections.abc import Mapping

from meshwise._jax import ClosedJaxpr, Jaxpr
from meshwise.cost.kernels import kernels_of
from meshwise.cost.work import Work


def program_work(
    jaxpr: ClosedJaxpr | Jaxpr, axis_sizes: Mapping[str, int], *, fuses: bool = True
) -> Work:
    """Flops, bytes read and bytes written by one device in one call of a per-device program.

    Without `fuses`, each equation is a kernel by itself: what an interpreter would read and write.
    """
    return kernels_of(jaxpr, axis_sizes, fuses).work
