"""Arguments brought to where a program wants them, and as it wants them."""

from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from meshwise import _jax
from meshwise.run.uneven import UnevenArray


def moved(arg: Any, sharding: NamedSharding, dtype: Any) -> Any:
    """An argument where it is wanted, as itself if it lies there.

    Of 64 bits that are now taken for 32, as `jax.jit` takes them, only those.
    """
    if isinstance(arg, UnevenArray):
        return jax.device_put(arg.value, sharding)
    if isinstance(arg, jax.Array) and arg.dtype != dtype:
        with jax.enable_x64(True):
            arg = lax.convert_element_type(arg, dtype)
    if is_committed(arg) and not arg.sharding.is_equivalent_to(sharding, arg.ndim):
        return jax.device_put(arg, sharding)
    return arg


def is_committed(arg: Any) -> bool:
    """Whether an array was put on its devices on purpose."""
    if isinstance(arg, UnevenArray):
        return True
    return isinstance(arg, jax.Array) and not isinstance(arg, _jax.Tracer) and arg.committed
