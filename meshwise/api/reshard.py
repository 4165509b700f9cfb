"""`mw.reshard` and `mw.reshard_plan`: from one sharding to another, by hand."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from meshwise import _jax
from meshwise.api.deleted import refuse_gone
from meshwise.api.options import check_flags
from meshwise.api.reshard_inputs import (
    array_type,
    check_arrays,
    limits_of,
    named,
    refuse_misfits,
    refuse_no_mesh,
    targets_of,
)
from meshwise.api.specs import Described, broadcast_specs
from meshwise.cost.hardware import Hardware
from meshwise.errors import HintError, MeshError, message
from meshwise.reshard.plan import ReshardPlan
from meshwise.reshard.remesh import RemeshPlan
from meshwise.run.between import plan_between
from meshwise.run.transfer import transfer_all
from meshwise.run.transfers import (
    KEPT_PROGRAMS,
    Array,
    Limits,
    Transfer,
    held_by,
    shown_as,
    transfer_between,
)
from meshwise.run.within import plan_within, program_of_one


@_jax.hides_frames
def reshard(
    x: Any,
    sharding: Any,
    *,
    max_bytes: int | None = None,
    donate: bool = False,
    hardware: Hardware | None = None,
) -> Any:
    """Bring arrays to other shardings: the cheapest sequence of collectives that fits in memory.

    Every device ends with its part of the same array, bit for bit. The method is that of Rink
    et al. (arXiv 2112.01075), with pieces sent straight where that sends less
    (docs/redistribution.md).

    Args:
        x: an array or a tree of them (`jax.Array`, `mw.UnevenArray`, NumPy). Several are moved by
            one program, small ones together.
        sharding: a `NamedSharding`, or a `PartitionSpec` on the mesh where the array lies, or a
            tree of them (a prefix of the tree `x`); None leaves arrays where they are. The mesh may
            be another one: of the same devices, of others, of more or of fewer.
        max_bytes: the most bytes of an array that a device may hold on the way, its shards before
            and after included. By default the larger of these two wherever there is a way.
        donate: free the buffers of `x` as soon as they have been read.
        hardware: figures of the devices by which plans are priced. By default as few bytes are sent
            as can be, in the way that is fastest on the platform.

    Returns:
        The tree with the same values; `mw.UnevenArray` where a dim does not divide. Inside a
        function under `mw.jit` or `jax.jit` it is a constraint, at which the value is resharded;
        over Explicit axes so is its type, as by `jax.sharding.reshard`.

    Raises:
        HintError, TreeError, ArgumentError, MeshError: for what does not fit.
        MemoryLimitError: where no way within `max_bytes` is found; it says the least found.

    >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> P = jax.sharding.PartitionSpec
    >>> rows = jax.device_put(jax.numpy.arange(8.0), NamedSharding(mesh, P("x")))
    >>> reshard(rows, P()).is_fully_replicated
    True
    """
    limits = limits_of("mw.reshard", max_bytes, hardware)
    check_flags("mw.reshard", donate=donate)
    is_traced = _jax.is_tracing()
    if isinstance(sharding, NamedSharding) and isinstance(x, jax.Array):
        program = None if is_traced or donate else _program(x, sharding, limits)
        if program is not None:
            return program(x)[0]
    leaves, tree = jax.tree.flatten(x)
    whole, stays = Described(tree, "x"), "None leaves one where it lies"
    specs = broadcast_specs("mw.reshard", "sharding", sharding, whole, stays)
    paths = ["x" + jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(x)[0]]
    check_arrays(leaves, paths)
    refuse_gone("mw.reshard", leaves, lambda: paths)
    is_traced |= any(isinstance(leaf, _jax.Tracer) for leaf in leaves)
    targets = targets_of(leaves, specs, paths, is_traced)
    if is_traced:
        return jax.tree.unflatten(tree, _constrained(leaves, specs, limits.max_bytes))
    return jax.tree.unflatten(tree, _moved(leaves, targets, limits, donate))


@_jax.def_eager_reshard
def _reshard_eagerly(x: Any, sharding: NamedSharding, max_bytes: int | None) -> Any:
    return reshard(x, sharding, max_bytes=max_bytes)


def _program(x: jax.Array, target: NamedSharding, limits: Limits) -> Any:
    """The program for one array, found by its type alone; None for what is less plain."""
    return (
        None
        if isinstance(x, _jax.Tracer) or x.is_deleted() or _jax.is_weak(x)
        else _program_of_type(x.shape, x.dtype, x.sharding, target, limits)
    )


@lru_cache(KEPT_PROGRAMS)
def _program_of_type(
    shape: tuple[int, ...], dtype: Any, source: Any, target: NamedSharding, limits: Limits
) -> Any:
    if named("mw.reshard", target, None, shape, "x")[1] or isinstance(target.mesh, AbstractMesh):
        return None
    return program_of_one(transfer_between(shape, shape, dtype, source, target), limits)


def _constrained(leaves: Sequence[Any], specs: Sequence[Any], max_bytes: int | None) -> list[Any]:
    """Traced values, each behind a constraint at which it is resharded."""
    params = {"reshards": True} | ({} if max_bytes is None else {"max_bytes": max_bytes})
    return [
        leaf if s is None else _jax.hinted(leaf, s, **params)
        for leaf, s in zip(leaves, specs, strict=True)
    ]


def _moved(
    leaves: Sequence[Any], targets: Sequence[NamedSharding | None], limits: Limits, donate: bool
) -> list[Any]:
    """Arrays where they are to go; those without a target as they are."""
    places = {
        i: target
        for i, target in enumerate(targets)
        if target is not None and getattr(leaves[i], "dtype", None) != jax.dtypes.float0
    }
    _refuse_terms(leaves, places)
    arrays = [x if isinstance(x := leaves[i], Array) else jax.numpy.asarray(x) for i in places]
    kept = [x for i, x in enumerate(leaves) if i not in places and isinstance(x, Array)]
    moved = transfer_all(arrays, list(places.values()), limits, donate, kept)
    are_weak = [_jax.is_weak(x) for x in arrays]
    moved = [_weakened(x) if weak else x for x, weak in zip(moved, are_weak, strict=True)]
    new = dict(zip(places, moved, strict=True))
    return [new.get(i, leaf) for i, leaf in enumerate(leaves)]


def _refuse_terms(leaves: Sequence[Any], places: Mapping[int, NamedSharding]) -> None:
    """An error for what is a sum over its own mesh still, and is to go to another one."""
    problems = [
        f"x, leaf {i}, lies as {x.sharding.spec}"
        for i, target in places.items()
        if (x := leaves[i]) is not None
        and getattr(getattr(getattr(x, "sharding", None), "spec", None), "unreduced", None)
        and x.sharding.mesh != target.mesh
    ]
    if problems:
        raise HintError(
            message(
                "mw.reshard was given terms of a sum, and another mesh",
                problems,
                "Terms are added up on the mesh that they lie on.",
                "Reshard it there first, to a sharding without unreduced axes.",
            )
        )


def _weakened(x: Array) -> Array:
    """What moved of a weak type, which programs that move do not know of."""
    return x if _jax.is_weak(x) else shown_as(_jax.with_weak_type(held_by(x), True), x.shape)


@_jax.hides_frames
def reshard_plan(
    shape: Sequence[int],
    dtype: Any,
    mesh: Any,
    src: Any,
    dst: Any,
    max_bytes: int | None = None,
    *,
    hardware: Hardware | None = None,
) -> ReshardPlan | RemeshPlan:
    """How an array gets from one sharding to another, as data; print it. Needs no devices.

    Args:
        shape: global.
        dtype: type of the elements.
        mesh: `jax.sharding.Mesh` or `AbstractMesh` for those of `src` and `dst` that are a
            `PartitionSpec`; None where both name their own.
        src: `PartitionSpec` or `NamedSharding`.
        dst: the same; on another mesh it may be of other, more or fewer devices (those of an
            `AbstractMesh` are numbered from 0).
        max_bytes: the most bytes of the array that a device may hold on the way.
        hardware: figures of the devices by which plans are priced, as for `reshard`; without
            devices the default counts bytes, then launches.

    Returns:
        Steps, each with its collective, axes, local shapes and bytes; `wire_bytes`, `launches`,
        `peak_bytes` (of one device) and `seconds` of the whole.

    Raises:
        HintError, MeshError: for what does not fit.
        MemoryLimitError: where no plan within `max_bytes` is found.

    >>> mesh, P = AbstractMesh((2, 4), ("x", "y")), jax.sharding.PartitionSpec
    >>> plan = reshard_plan((64, 64), "int8", mesh, P("x"), P(None, "y"))
    >>> for step in plan.steps:
    ...     print(step)
    slice y.0*y.1 on dim 1: [32, 64] -> [32, 16]
    all_gather x of dim 0: [32, 16] -> [64, 16], 512 bytes
    """
    limits = limits_of("mw.reshard_plan", max_bytes, hardware)
    shape, number = array_type(shape, dtype)
    ends, problems = [], []
    refuse_no_mesh({"src": src, "dst": dst}, mesh)
    for name, spec in (("src", src), ("dst", dst)):
        own, found = named("mw.reshard_plan", spec, mesh, shape, name)
        ends.append(own)
        problems += found
    refuse_misfits("mw.reshard_plan", problems)
    source, target = ends
    padded = transfer_between(shape, shape, number, source, source).target_padded
    transfer = transfer_between(shape, padded, number, source, target)
    plan = plan_within(transfer, limits)
    return plan or _remesh(transfer, limits)


def _remesh(transfer: Transfer, limits: Limits) -> RemeshPlan:
    plan = plan_between(transfer, limits)
    if plan is None:
        raise MeshError(
            message(
                f"mw.reshard_plan was asked for {list(transfer.shape)} from {transfer.source} to "
                f"{transfer.target}",
                ["it would take more rounds of pieces than a program may have"],
                "Between meshes each device gets the pieces of its shard from those who hold them.",
                "Go by way of a sharding over more axes on either mesh.",
            )
        )
    return plan
