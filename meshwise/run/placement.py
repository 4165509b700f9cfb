"""Refined meshes and shardings as JAX's own objects on real (or abstract) devices."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.ir.mesh import Axes, Mesh, refine_mesh
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.sharding import Sharding

_SHOWN_DEVICES = 8


def refined_jax_mesh(mesh: Mesh, user_mesh: Any) -> Any:
    """The user's mesh with the same devices in the same order, over the refined axes."""
    auto = (AxisType.Auto,) * len(mesh.names)
    if isinstance(user_mesh, AbstractMesh):
        return AbstractMesh(mesh.sizes, mesh.names, axis_types=auto)
    return jax.sharding.Mesh(user_mesh.devices.reshape(mesh.sizes), mesh.names, axis_types=auto)


def on_devices_of(theirs: Any, ours: Any) -> Any:
    """A mesh without devices on those of another, in their order; as it is where that has none."""
    if not isinstance(theirs, AbstractMesh) or isinstance(ours, AbstractMesh):
        return theirs
    placed = ours.devices.reshape(theirs.axis_sizes)
    return jax.sharding.Mesh(placed, theirs.axis_names, axis_types=theirs.axis_types)


def named_sharding(sharding: Sharding, mesh: Mesh, user_mesh: Any) -> NamedSharding:
    """A sharding over the user's mesh where its axes are whole, else over prime sub-axes.

    Those are the same in all programs for a mesh, whichever of them a plan has joined.
    """
    restored = [mesh.restore(axes) for axes in sharding.dims]
    if None not in restored:
        whole = tuple([axes for axes in restored if axes is not None])
        return NamedSharding(user_mesh, partition_spec(Sharding(whole)))
    primes = refine_mesh(user_mesh.axis_names, user_mesh.axis_sizes)
    joined = primes.under(mesh.names, mesh.sizes)
    assert joined is not None, "axes of a plan are joined of those of its mesh"
    dims = tuple([joined.refine(axes) for axes in sharding.dims])
    return NamedSharding(refined_jax_mesh(primes, user_mesh), partition_spec(Sharding(dims)))


def in_mesh(
    mesh: Any, placements: Sequence[NamedSharding], found: Sequence[Sharding]
) -> list[NamedSharding]:
    """Placements in the words of one mesh of JAX's over refined axes."""
    return [
        NamedSharding(mesh, partition_spec(lies), memory_kind=placement.memory_kind)
        for placement, lies in zip(placements, found, strict=True)
    ]


def partition_spec(sharding: Sharding) -> PartitionSpec:
    """The dims of a sharding as JAX writes them, without trailing None."""
    entries: list[Any] = [axes[0] if len(axes) == 1 else axes or None for axes in sharding.dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def without_explicit_type(value: Any) -> Any:
    """The same value, its type without axes of an Explicit mesh. Moves nothing."""
    mesh = jax.typeof(value).sharding.mesh
    if not _jax.is_explicit(mesh):
        return value
    auto = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    with _jax.with_mesh(auto):
        return jax.sharding.reshard(value, PartitionSpec())


def explicit_sharding(
    sharding: Sharding, mesh: Mesh, user_mesh: Any, shape: Sequence[int]
) -> NamedSharding:
    """What a type over the user's mesh can say of a sharding: whole axes of dims that divide."""
    dims: list[Axes] = []
    for size, axes in zip(shape, sharding.dims, strict=True):
        prefixes = (axes[:n] for n in range(len(axes), -1, -1) if size % mesh.size(axes) == 0)
        dims.append(next((w for p in prefixes if (w := mesh.restore(p)) is not None), ()))
    return NamedSharding(user_mesh, partition_spec(Sharding(tuple(dims))))


def on_whole_axes(values: Sequence[Any], program: PerDeviceProgram, user_mesh: Any) -> list[Any]:
    """A program's results in a trace, as an enclosing `jax.jit` can say where they lie.

    It says so in axes of the user's mesh, and fails where a part of one is in use: such dims are
    gathered, and those that do not divide, as XLA may lay them over a part of an axis.
    """
    mesh, auto = program.mesh, jax.sharding.Mesh(user_mesh.devices, user_mesh.axis_names)

    def can_say(value: Any, sharding: Sharding) -> bool:
        return all(
            mesh.restore(axes) is not None and size % mesh.size(axes) == 0
            for size, axes in zip(value.shape, sharding.dims, strict=True)
        )

    return [
        value
        if can_say(value, sharding)
        else jax.lax.with_sharding_constraint(
            value, explicit_sharding(sharding, mesh, auto, value.shape)
        )
        for value, sharding in zip(values, program.out_shardings, strict=True)
    ]


def off_mesh(jaxpr: _jax.ClosedJaxpr) -> _jax.ClosedJaxpr:
    """The same jaxpr without a trace of the meshes its function was traced or closed over in.

    Constants that lie on a mesh are copied to the host: `jax.device_put` to one device would
    leave the mesh in their type.
    """
    with _jax.without_mesh():
        consts = [value_off_mesh(c) for c in jaxpr.consts]
    return _jax.ClosedJaxpr(_jax.without_context_mesh(jaxpr.jaxpr), consts)


def value_off_mesh(const: Any) -> Any:
    """A constant that lies on no mesh; one that does is copied to the host."""
    if not isinstance(const, jax.Array) or jax.typeof(const).sharding.mesh.empty:
        return const
    if not jax.numpy.issubdtype(const.dtype, _jax.extended):
        return np.asarray(const)
    raw = np.asarray(jax.random.key_data(const))
    return jax.random.wrap_key_data(jax.numpy.asarray(raw), impl=jax.random.key_impl(const))


def platforms_of(mesh: Any) -> set[str]:
    """What kinds of devices a mesh has, by JAX's names; none if it is abstract."""
    return set() if isinstance(mesh, AbstractMesh) else {d.platform for d in mesh.devices.flat}


# How arrays of single processes become one on the devices of all.
OF_PARTS = (
    "Make it of the parts with jax.make_array_from_process_local_data, or, where all processes "
    "have the same, with jax.make_array_from_callback."
)


def way_to(devices: Iterable[Any], here: str) -> str:
    """How an array gets to devices that was put on others; `here` where all are of one process."""
    if count_processes(devices) <= 1:
        return here
    is_one = "Move what is one array in all processes with mw.reshard(x, NamedSharding(mesh, spec))"
    return f"{is_one}. What each has for itself: {OF_PARTS[0].lower()}{OF_PARTS[1:]}"


def count_processes(devices: Iterable[Any]) -> int:
    """How many processes some devices belong to."""
    return len({device.process_index for device in devices})


def other_processes(devices: Iterable[Any]) -> list[int]:
    """The processes besides this one that some devices belong to."""
    away = {d.process_index for d in devices if d.process_index != d.client.process_index()}
    return sorted(away)


def show_devices(devices: Iterable[Any]) -> str:
    """Devices by their numbers; a set of them in the order of these, others in their own."""
    ordered = list(devices)
    if isinstance(devices, set | frozenset):
        ordered.sort(key=lambda d: d.id)
    numbers = ", ".join(str(d.id) for d in ordered[:_SHOWN_DEVICES])
    more = ", ..." if len(ordered) > _SHOWN_DEVICES else ""
    platform = ordered[0].platform if ordered else "no"
    return f"{platform} device{'s' * (len(ordered) != 1)} {numbers}{more}"
