"""Arguments brought to where a program wants them, and as it wants them, or refused."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding

from meshwise import _jax
from meshwise.errors import ArgumentError, MeshError, also, message
from meshwise.run.placement import OF_PARTS, show_devices, way_to
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
                way_to(
                    devices,
                    "Move it with jax.device_put(x, NamedSharding(mesh, spec)), or make the mesh"
                    " of the devices it is on.",
                ),
            )
        )


def refuse_no_devices(name: str, mesh: Any) -> None:
    """MeshError for a program that is to run on a mesh without devices."""
    if isinstance(mesh, AbstractMesh):
        raise MeshError(
            message(
                f"{name} is to run on a mesh without devices",
                [f"it was partitioned for {mesh}"],
                "A program for an AbstractMesh can be read, priced and simulated.",
                "Partition it for a jax.sharding.Mesh to run or compile it; its StableHLO is "
                'had by .trace(...).lower(lowering_platforms=("tpu",)).',
            )
        )


def refuse_own_of_each(
    name: str, names: Sequence[str], args: Sequence[Any], shardings: Sequence[Any]
) -> None:
    """ArgumentError, a ValueError too, for arrays of NumPy that are to lie in shards.

    Each of several processes has its own, and nobody knows whether they are equal; JAX refuses
    those that `in_shardings` shard.
    """
    offenders = [
        f"{path} is an array of NumPy, to be sharded by {sharding.spec}"
        for path, arg, sharding in zip(names, args, shardings, strict=True)
        if isinstance(arg, np.ndarray) and not sharding.is_fully_replicated
    ]
    if offenders:
        refusal = ArgumentError(
            message(
                f"{name} was called on the devices of several processes with arrays of one",
                offenders,
                "Each process would cut its shards out of an array of its own: of its own batch "
                "a part would be left out.",
                OF_PARTS,
            )
        )
        raise also(refusal, ValueError)
