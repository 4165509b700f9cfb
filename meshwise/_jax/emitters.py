"""Which of XLA's two makers of kernels compiles a small per-device program on CPU.

Until JAX 0.11 XLA has two. The newer writes each kernel in MLIR and takes 15 to 20 ms for it, but
once only for kernels that are equal. The older writes LLVM at once, many kernels in one module, and
takes half as long or less. What it makes of short arrays is as fast; long ones it sums, moves and
scatters slower. Of numbers of two bits it cannot make all kernels, and ends the process; nor can it
clamp booleans.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import core as _core
from jax._src import dtypes as _dtypes

from meshwise._jax.cuts import group_size
from meshwise._jax.jaxprs import JaxprEqn, opened

# Arrays over which a kernel of either maker takes no longer than a collective takes to begin.
SHORT_BYTES = 2**18
_SCATTERS = (
    lax.scatter_p,
    lax.scatter_add_p,
    lax.scatter_mul_p,
    lax.scatter_min_p,
    lax.scatter_max_p,
)
# Equations whose kernels are compiled together: modules are compiled beside each other, each anew.
TOGETHER = 32


def emitter_options(jaxpr: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Options by which XLA on CPU compiles a per-device jaxpr over axes of some sizes sooner.

    None where the pieces of exchanges, which are equal kernels, are more than the equations, and
    where the older maker cannot make all kernels or makes slower ones.
    """
    if jax.__version_info__ >= (0, 11):  # where the older one is gone
        return {}
    eqns = list(_all_equations(jaxpr))
    pieces = sum(group_size(eqn, sizes) for eqn in eqns if eqn.primitive is lax.all_to_all_p)
    arrays = (atom for eqn in eqns for atom in (*eqn.invars, *eqn.outvars))
    is_for_newer = any(map(_array_is_for_newer, arrays)) or any(map(_equation_is_for_newer, eqns))
    if pieces > len(eqns) or is_for_newer:
        return {}
    return {
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1 + len(eqns) // TOGETHER,
    }


def _all_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of all bodies in it."""
    for eqn in opened(jaxpr).eqns:
        yield eqn
        for body in _core.jaxprs_in_params(eqn.params):
            yield from _all_equations(body)


def _array_is_for_newer(atom: Any) -> bool:
    """Whether an array is long, of numbers that share a byte, or of floats of one."""
    aval = atom.aval
    dtype = getattr(aval, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype == jax.dtypes.float0:
        return False
    bits = _dtypes.itemsize_bits(dtype)
    is_short_float = bits == 8 and jax.numpy.issubdtype(dtype, np.floating)
    return aval.size * dtype.itemsize > SHORT_BYTES or bits < 8 or is_short_float


def _equation_is_for_newer(eqn: JaxprEqn) -> bool:
    """Whether the older refuses it, as clamps of booleans, or is slower, as with all scatters."""
    if eqn.primitive is lax.clamp_p:
        clamped: Any = eqn.outvars[0].aval
        return clamped.dtype == np.bool_
    return eqn.primitive in _SCATTERS
