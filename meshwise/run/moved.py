"""Arguments brought to where a program wants them, and as it wants them."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding

from meshwise import _jax
from meshwise.errors import MeshError, message
from meshwise.run.placement import show_devices
from meshwise.run.uneven import UnevenArray


def in_type(arg: Any, dtype: Any) -> Any:
    """An argument of 64 bits as one of 32 where these are set, as `jax.jit` takes it."""
    if not isinstance(arg, jax.Array | UnevenArray) or arg.dtype == dtype:
        return arg
    if isinstance(arg, UnevenArray):
        return UnevenArray(in_type(arg.padded, dtype), arg.shape)
    with jax.enable_x64(True):
        return lax.convert_element_type(arg, dtype)


def moved(arg: Any, sharding: NamedSharding) -> Any:
    """An argument where it is wanted, as itself if it lies there."""
    if isinstance(arg, UnevenArray):
        return jax.device_put(arg.value, sharding)
    if is_committed(arg) and not arg.sharding.is_equivalent_to(sharding, arg.ndim):
        return jax.device_put(arg, sharding)
    return arg


def is_committed(arg: Any) -> bool:
    """Whether an array was put on its devices on purpose."""
    if isinstance(arg, UnevenArray):
        return True
    return isinstance(arg, jax.Array) and not isinstance(arg, _jax.Tracer) and arg.committed


def refuse_other_devices(
    name: str, names: Sequence[str], args: Sequence[Any], devices: Collection[Any]
) -> None:
    """MeshError for arguments that were put on other devices than those of a program."""
    offenders = [
        f"{path} is on {show_devices(arg.sharding.device_set)}"
        for path, arg in zip(names, args, strict=True)
        if is_committed(arg) and arg.sharding.device_set != devices
    ]
    if offenders:
        raise MeshError(
            message(
                f"Arguments of {name} are on other devices than its mesh ({show_devices(devices)})",
                offenders,
                "An array that was put on devices on purpose is not moved to others.",
                "Move it with jax.device_put(x, NamedSharding(mesh, spec)), or make the mesh"
                " of the devices it is on.",
            )
        )
