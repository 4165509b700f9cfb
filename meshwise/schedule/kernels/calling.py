"""How kernels are called: compiled on a TPU, interpreted elsewhere."""

from typing import Any, TypeAlias

import jax

from meshwise._jax import pallas_tpu as pltpu

Interpret: TypeAlias = "bool | pltpu.InterpretParams | None"

# What a kernel may use of a core's fast memory, and what blocks are planned to use of it.
VMEM_LIMIT_BYTES = 64 * 2**20
VMEM_BLOCK_BYTES = 8 * 2**20


def interpreter(interpret: Interpret) -> Any:
    """What `pallas_call` takes: False compiles a kernel, parameters interpret it."""
    if interpret is None:
        interpret = jax.default_backend() != "tpu"
    return pltpu.InterpretParams() if interpret is True else interpret
