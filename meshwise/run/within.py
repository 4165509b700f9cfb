"""Move arrays between placements on one mesh, or on two that refine to one."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from meshwise import _jax
from meshwise.cost.hardware import LARGE_ARRAYS, OF_PLATFORM
from meshwise.ir.mesh import Axes
from meshwise.ir.sharding import Sharding
from meshwise.reshard.emit import apply_steps
from meshwise.reshard.meshes import CommonMesh, common_mesh
from meshwise.reshard.plan import Reshard, ReshardPlan
from meshwise.reshard.search import plan_reshard, plan_within_shards
from meshwise.run.placement import (
    partition_spec,
    platforms_of,
    refined_jax_mesh,
)
from meshwise.run.transfers import (
    KEPT_PROGRAMS,
    SMALL_BYTES,
    Array,
    Limits,
    Transfer,
    as_before,
    as_travelling,
    held_by,
    placed_anew,
    shown_as,
)


def plan_within(transfer: Transfer, limits: Limits) -> ReshardPlan | None:
    """The plan on the mesh that both placements have in common; None where there is none.

    Raises MemoryLimitError where none that fits in `max_bytes` is found.
    """
    common = common_mesh_of(transfer.source, transfer.target)
    if common is None:
        return None
    return _plan(transfer, common, limits)


def _plan(transfer: Transfer, common: CommonMesh, limits: Limits, stacked: int = 0) -> ReshardPlan:
    """The plan for an array, or with `stacked` for so many laid on one another."""
    source, target = ends_on(common, transfer)
    shape = transfer.shape
    if stacked:
        shape = (stacked, *shape)
        source, target = (Sharding(((), *s.dims)) for s in (source, target))

    hardware = limits.hardware or OF_PLATFORM.get(transfer.platform, LARGE_ARRAYS)
    asked = Reshard(shape, transfer.itemsize, common.mesh, source, target, hardware)
    if limits.max_bytes is None:
        return plan_within_shards(asked)
    return plan_reshard(asked, limits.max_bytes)


def common_mesh_of(source: Any, target: NamedSharding) -> CommonMesh | None:
    """The mesh that both refine to; None where devices differ, or their order, or no mesh is."""
    if not isinstance(source, NamedSharding):
        return None
    a, b = source.mesh, target.mesh
    if isinstance(a, Mesh) and isinstance(b, Mesh) and list(a.devices.flat) != list(b.devices.flat):
        return None
    axes = [tuple(zip(m.axis_names, m.axis_sizes, strict=True)) for m in (a, b)]
    return common_mesh(*axes)


def ends_on(common: CommonMesh, transfer: Transfer) -> tuple[Sharding, Sharding]:
    """Both placements on the common mesh."""
    source = _on(common.source_axes, transfer.source, transfer.rank)
    return source, _on(common.target_axes, transfer.target, transfer.rank)


def _on(names: Sequence[tuple[str, Axes]], sharding: Any, rank: int) -> Sharding:
    sub_axes = dict(names)
    dims = _jax.axes_of(sharding.spec, rank)
    return Sharding(tuple(tuple(sub for axis in dim for sub in sub_axes[axis]) for dim in dims))


@lru_cache(KEPT_PROGRAMS)
def program_of_one(
    transfer: Transfer, limits: Limits
) -> Callable[[jax.Array], list[jax.Array]] | None:
    """The program that moves one array; None where it is uneven or has no mesh in common."""
    is_uneven = not transfer.shape == transfer.padded == transfer.target_padded
    if is_uneven or 0 in transfer.shape or transfer.stays or plan_within(transfer, limits) is None:
        return None
    return _program((transfer,), limits)


def move_within(
    arrays: Sequence[Array],
    transfers: Sequence[Transfer],
    limits: Limits,
) -> list[Array]:
    """Arrays in their new placements, by one program."""
    program = _program(tuple(transfers), limits)
    moved = program(*map(held_by, arrays))
    return [
        shown_as(
            held if held.sharding == t.target else placed_anew(held, t.target_padded, t.target),
            t.shape,
        )
        for held, t in zip(moved, transfers, strict=True)
    ]


@lru_cache(KEPT_PROGRAMS)
def _program(transfers: tuple[Transfer, ...], limits: Limits) -> Any:
    """The program of some transfers on one mesh."""
    common = common_mesh_of(transfers[0].source, transfers[0].target)
    assert common is not None, transfers[0]
    ends = [ends_on(common, t) for t in transfers]
    alike: dict[Transfer, list[int]] = defaultdict(list)
    for i, transfer in enumerate(transfers):
        alike[transfer].append(i)

    def per_device(*arrays: jax.Array) -> list[jax.Array]:
        local = [as_travelling(x) for x in arrays]
        outs: list[Any] = [None] * len(local)
        for transfer, members in alike.items():
            if len(members) > 1 and transfer.moved_bytes < SMALL_BYTES:
                stacked = jnp.stack([local[i] for i in members])
                plan = _plan(transfer, common, limits, stacked=len(members))
                for i, out in zip(members, apply_steps(stacked, plan, common.mesh), strict=True):
                    outs[i] = out
                continue
            plan = _plan(transfer, common, limits)
            for i in members:
                outs[i] = apply_steps(local[i], plan, common.mesh)
        return [as_before(out, x.dtype) for out, x in zip(outs, arrays, strict=True)]

    source: Any = transfers[0].source
    is_on_tpu = "tpu" in platforms_of(source.mesh)
    mapped = jax.shard_map(
        _jax.as_tpu_runs(per_device) if is_on_tpu else per_device,
        mesh=refined_jax_mesh(common.mesh, source.mesh),
        in_specs=tuple(partition_spec(s) for s, _ in ends),
        out_specs=[partition_spec(t) for _, t in ends],
        check_vma=False,
    )
    jitted = jax.jit(
        mapped if common.mesh.names else per_device,
        in_shardings=tuple(t.source for t in transfers),
        out_shardings=[t.target for t in transfers],
    )

    if _jax.is_explicit(source.mesh):
        # Types of arguments name the user's axes, which the program's mesh has not: leave them out.
        structs = [jax.ShapeDtypeStruct(t.padded, t.dtype) for t in transfers]
        with _jax.moving():
            jitted = jitted.lower(*structs).compile()
    return _jax.mover(jitted, [t.dtype for t in transfers])
