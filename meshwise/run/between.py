"""Move arrays between meshes of other devices, of more or fewer, or in another order."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.cost.hardware import LARGE_ARRAYS
from meshwise.ir.mesh import Mesh, refine_mesh
from meshwise.ir.sharding import Sharding, padded_shape
from meshwise.reshard.exchange import Parcel, apply_rounds, travel_key
from meshwise.reshard.remesh import RemeshPlan, plan_remesh
from meshwise.reshard.tiles import Tiles, tiles_of
from meshwise.run.placement import partition_spec, refined_jax_mesh
from meshwise.run.transfers import (
    KEPT_PROGRAMS,
    SMALL_BYTES,
    Array,
    Limits,
    Transfer,
    as_before,
    as_travelling,
    data_of,
    of_shards,
    wrapped_as,
)

_AXIS = "devices"


@lru_cache(KEPT_PROGRAMS)
def plan_between(transfer: Transfer, limits: Limits) -> RemeshPlan | None:
    """The plan over the devices of both; None where it would take too many rounds.

    Devices of an AbstractMesh are the numbers from 0 on.

    Raises MemoryLimitError where none that fits in `max_bytes` is found.
    """
    mesh, target = _refined(transfer.target, transfer.rank)
    union = devices_of_both(transfer)
    place_of = {device: i for i, device in enumerate(union)}
    places = [place_of[d] for d in _devices(transfer.target)]
    source = _source_tiles(transfer, union)
    hardware = limits.hardware or LARGE_ARRAYS
    return plan_remesh(source, transfer.itemsize, mesh, target, places, hardware, limits.max_bytes)


def devices_of_both(transfer: Transfer) -> tuple[Any, ...]:
    """All devices of both placements, in the order of their numbers."""
    both = {*_devices(transfer.source), *_devices(transfer.target)}
    return tuple(sorted(both, key=lambda device: getattr(device, "id", device)))


def _devices(sharding: Any) -> list[Any]:
    """The devices of a placement: in the order of its mesh where it has one."""
    if not isinstance(sharding, NamedSharding):
        return list(sharding.device_set)
    if isinstance(sharding.mesh, AbstractMesh):
        return list(range(sharding.mesh.size))
    return list(sharding.mesh.devices.flat)


def _refined(sharding: NamedSharding, rank: int) -> tuple[Mesh, Sharding]:
    mesh = refine_mesh(sharding.mesh.axis_names, sharding.mesh.axis_sizes)
    return mesh, Sharding(tuple(mesh.refine(axes) for axes in _jax.axes_of(sharding.spec, rank)))


def _source_tiles(transfer: Transfer, union: Sequence[Any]) -> Tiles:
    """Which device holds what now, for any kind of sharding."""
    sharding, padded = transfer.source, transfer.padded
    block = sharding.shard_shape(padded)
    if isinstance(sharding, NamedSharding):
        mesh, dims = _refined(sharding, transfer.rank)
        held = tiles_of(transfer.shape, block, dims.dims, mesh.axis_size).starts
        starts = dict(zip(_devices(sharding), held, strict=True))
    else:
        starts = {
            device: tuple(part.start or 0 for part in index)
            for device, index in sharding.devices_indices_map(padded).items()
        }
    return Tiles(transfer.shape, tuple(block), tuple(starts.get(d) for d in union))


def move_between(
    arrays: Sequence[Array],
    transfers: Sequence[Transfer],
    limits: Limits,
) -> list[tuple[jax.Array, Transfer]]:
    """What is fetched of each array, by one program, and the transfer that is left to do.

    All transfers have the same devices.
    """
    union = devices_of_both(transfers[0])
    program = _program(tuple(transfers), limits)
    flat = NamedSharding(_flat_mesh(union), PartitionSpec(_AXIS))
    with _jax.moving():
        operands = [_on_all(as_travelling(data_of(a)), union, flat) for a in arrays]
        fetched = program(*operands)
        return [_fetched(x, t, limits) for x, t in zip(fetched, transfers, strict=True)]


@lru_cache(KEPT_PROGRAMS)
def _program(transfers: tuple[Transfer, ...], limits: Limits) -> Any:
    """The compiled rounds of some transfers between the same devices."""
    union = devices_of_both(transfers[0])
    mesh = Mesh((_AXIS,), (len(union),), ((_AXIS, (_AXIS,)),))
    flat = _flat_mesh(union)
    plans = [_plan(t, limits) for t in transfers]
    together: dict[Any, list[int]] = defaultdict(list)
    for i, (transfer, plan) in enumerate(zip(transfers, plans, strict=True)):
        is_small = transfer.moved_bytes < SMALL_BYTES
        key = (transfer.data_dtype, travel_key(plan.rounds)) if is_small else i
        together[key].append(i)

    def per_device(*local: jax.Array) -> list[jax.Array]:
        outs: list[Any] = [None] * len(local)
        for members in together.values():
            parcels = []
            for i in members:
                array = local[i].reshape(*plans[i].source.block, *transfers[i].item)
                parcels.append(Parcel(array, plans[i].rounds, plans[i].source, plans[i].fetched))
            for i, out in zip(members, apply_rounds(parcels, (_AXIS,), mesh), strict=True):
                outs[i] = out.reshape(out.shape or (1,))
        return outs

    spec = PartitionSpec(_AXIS)
    mapped = jax.shard_map(per_device, mesh=flat, in_specs=spec, out_specs=spec, check_vma=False)
    structs = []
    for t, plan in zip(transfers, plans, strict=True):
        local = (*plan.source.block, *t.item) or (1,)
        structs.append(jax.ShapeDtypeStruct((len(union) * local[0], *local[1:]), t.data_dtype))
    lies = NamedSharding(flat, spec)
    with _jax.moving():
        moved = jax.jit(mapped, in_shardings=lies, out_shardings=lies).lower(*structs).compile()
    return _jax.mover(moved, [struct.dtype for struct in structs])


def _plan(transfer: Transfer, limits: Limits) -> RemeshPlan:
    plan = plan_between(transfer, limits)
    assert plan is not None, transfer
    return plan


def _flat_mesh(devices: Sequence[Any]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))


def _on_all(array: jax.Array, devices: Sequence[Any], flat: NamedSharding) -> jax.Array:
    """The shards of all devices as one array, zeros from devices that hold none."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    local = array.sharding.shard_shape(array.shape) or (1,)
    here = [d for d in devices if d.process_index == jax.process_index()]
    buffers = [
        _shaped(shards[d], local)
        if d in shards
        else jax.device_put(np.zeros(local, array.dtype), d)
        for d in here
    ]
    shape = len(devices) * local[0], *local[1:]
    return of_shards(shape, flat, buffers, array.dtype)


def _shaped(shard: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A shard of a scalar as a row of one, or back: by way of the host, which compiles nothing."""
    if shard.shape == shape:
        return shard
    return jax.device_put(np.asarray(shard).reshape(shape), shard.device)


def _fetched(held: jax.Array, transfer: Transfer, limits: Limits) -> tuple[jax.Array, Transfer]:
    """The fetched tiles as an array on the target's mesh, and what is left to do with it."""
    plan = _plan(transfer, limits)
    mesh, _ = _refined(transfer.target, transfer.rank)
    sharding = plan.then.source
    lies = NamedSharding(refined_jax_mesh(mesh, transfer.target.mesh), partition_spec(sharding))
    padded = padded_shape(transfer.shape, sharding, mesh)
    on_device = {shard.device: shard.data for shard in held.addressable_shards}
    local = (*plan.fetched.block, *transfer.item)
    buffers = [_shaped(on_device[d], local) for d in _devices(lies) if d in on_device]
    shape = *padded, *transfer.item
    array = of_shards(shape, lies, buffers, held.dtype)
    is_key = jax.numpy.issubdtype(transfer.dtype, jax.dtypes.prng_key)
    array = wrapped_as(array, transfer.dtype) if is_key else as_before(array, transfer.dtype)
    return array, replace(transfer, padded=padded, source=lies)
