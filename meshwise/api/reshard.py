"""`mw.reshard` and `mw.reshard_plan`: from one sharding to another, by hand."""

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import describe
from meshwise.api.deleted import refuse_gone
from meshwise.api.specs import Described, broadcast_specs
from meshwise.cost.hardware import Hardware
from meshwise.errors import ArgumentError, HintError, MeshError, message
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.numbers import whole_number
from meshwise.reshard.plan import ReshardPlan
from meshwise.reshard.remesh import RemeshPlan
from meshwise.run.between import plan_between
from meshwise.run.transfer import transfer_all
from meshwise.run.transfers import (
    KEPT_ANSWERS,
    KEPT_PROGRAMS,
    Array,
    Limits,
    Transfer,
    held_by,
    shown_as,
    transfer_between,
)
from meshwise.run.within import plan_within, program_of_one
from meshwise.trace import Problems, read_hint


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
        function under `mw.jit` or `jax.jit` it is a constraint, at which the value is resharded.

    Raises:
        HintError, TreeError, ArgumentError, MeshError: for what does not fit.
        MemoryLimitError: where no way within `max_bytes` is found; it says the least found.

    >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> rows = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    >>> reshard(rows, PartitionSpec()).sharding.spec
    PartitionSpec()
    """
    limits = _limits("mw.reshard", max_bytes, hardware)
    is_traced = _jax.is_tracing()
    if isinstance(sharding, NamedSharding) and isinstance(x, jax.Array):
        program = None if is_traced or donate else _program(x, sharding, limits)
        if program is not None:
            return program(x)[0]
    leaves, tree = jax.tree.flatten(x)
    specs = broadcast_specs("mw.reshard", "sharding", sharding, Described(tree, "x"))
    paths = ["x" + jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(x)[0]]
    _check_arrays(leaves, paths)
    refuse_gone("mw.reshard", leaves, lambda: paths)
    is_traced |= any(isinstance(leaf, _jax.Tracer) for leaf in leaves)
    targets = _targets(leaves, specs, paths, is_traced)
    if is_traced:
        return jax.tree.unflatten(tree, _constrained(leaves, specs, max_bytes))
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
    if _named(target, None, shape, "x")[1] or isinstance(target.mesh, AbstractMesh):
        return None
    return program_of_one(transfer_between(shape, shape, dtype, source, target), limits)


def _constrained(leaves: Sequence[Any], specs: Sequence[Any], max_bytes: int | None) -> list[Any]:
    """Traced values, each behind a constraint at which it is resharded."""
    params = {"reshards": True} | ({} if max_bytes is None else {"max_bytes": max_bytes})
    return [
        leaf if s is None else _jax.hint_p.bind(jax.numpy.asarray(leaf), sharding=s, **params)
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

    >>> mesh = AbstractMesh((2, 4), ("x", "y"))
    >>> plan = reshard_plan((64, 64), "int8", mesh, PartitionSpec("x"), PartitionSpec(None, "y"))
    >>> for step in plan.steps:
    ...     print(step)
    slice y.0*y.1 on dim 1: [32, 64] -> [32, 16]
    all_gather x of dim 0: [32, 16] -> [64, 16], 512 bytes
    """
    limits = _limits("mw.reshard_plan", max_bytes, hardware)
    shape, number = _array_type(shape, dtype)
    ends, problems = [], []
    for name, spec in (("src", src), ("dst", dst)):
        own, found = _named(spec, mesh, shape, name)
        ends.append(own)
        problems += found
    _refuse(problems, "mw.reshard_plan was given shardings that do not fit")
    source, target = ends
    padded = transfer_between(shape, shape, number, source, source).target_padded
    transfer = transfer_between(shape, padded, number, source, target)
    plan = plan_within(transfer, limits)
    return plan or _remesh(transfer, limits)


def _array_type(shape: Any, dtype: Any) -> tuple[tuple[int, ...], Any]:
    """A shape and a type of numbers, checked."""
    problems = []
    try:
        sizes = tuple(map(operator.index, shape))
        if min(sizes, default=0) < 0:
            problems.append(f"shape={shape!r}")
    except TypeError:
        sizes = ()
        problems.append(f"shape={shape!r}")
    number = _number_type(dtype)
    if number is None:
        problems.append(f"dtype={dtype!r}")
    if problems:
        raise ArgumentError(
            message(
                "mw.reshard_plan was asked about no array",
                problems,
                "A shape is whole numbers, none below zero; a dtype is one of NumPy's or JAX's.",
                "Give those of an array: x.shape, x.dtype. Of PRNG keys give those of their data.",
            )
        )
    return sizes, number


def _number_type(dtype: Any) -> Any:
    """The type of an array's elements, None for what no array has."""
    if dtype is None:  # to NumPy that is float64
        return None
    try:
        found = jax.numpy.dtype(dtype)
    except TypeError:
        return None
    is_number = any(jax.numpy.issubdtype(found, kind) for kind in (np.number, np.bool_))
    return found if is_number else None


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


def _named(
    spec: Any, mesh: Any, shape: tuple[int, ...], path: str, may_be_open: bool = False
) -> tuple[NamedSharding, list[str]]:
    """A sharding with its mesh, and what is wrong with it."""
    own = spec.mesh if isinstance(spec, NamedSharding) else mesh
    if not isinstance(own, Mesh | AbstractMesh):
        raise MeshError(
            message(
                f"{path} = {spec} has no mesh",
                [f"mesh={mesh!r}"],
                "A PartitionSpec is on a mesh, a NamedSharding names its own.",
                "Give a jax.sharding.Mesh or AbstractMesh, or NamedShardings.",
            )
        )
    is_sharding = isinstance(spec, NamedSharding | PartitionSpec)  # others may have no hash
    read = _read_once if is_sharding else _read
    return read(spec, own, shape, path, may_be_open)


def _read(
    spec: Any, own: Any, shape: tuple[int, ...], path: str, may_be_open: bool
) -> tuple[NamedSharding, list[str]]:
    """The same, on a mesh that is known."""
    refined = refine_mesh(own.axis_names, own.axis_sizes)
    wrong = Problems()
    hint, problems = read_hint(spec, shape, refined, path, "", wrong), wrong.misfits
    if hint is not None and None in hint.dims and not may_be_open:
        problems = [f"{path}: {spec} leaves a dim open; here is nothing to complete it from"]
    if not problems and _is_elsewhere(spec, own):
        problems = [f"{path}: {spec} is not in the memory of the devices, where arrays are moved"]
    bare = spec.spec if isinstance(spec, NamedSharding) else spec
    return NamedSharding(own, PartitionSpec() if problems else bare), problems


_read_once = lru_cache(KEPT_ANSWERS)(_read)


def _is_elsewhere(spec: Any, mesh: Any) -> bool:
    """Whether a sharding names a memory other than that in which devices compute."""
    kind = getattr(spec, "memory_kind", None)
    if kind is None or isinstance(mesh, AbstractMesh):
        return False
    return kind != mesh.devices.flat[0].default_memory().kind


def _limits(name: str, max_bytes: Any, hardware: Any) -> Limits:
    """What plans are held to, checked."""
    problems = []
    most = whole_number(max_bytes)
    if max_bytes is not None and (most is None or most <= 0):
        problems.append(f"max_bytes={max_bytes!r}")
    if not isinstance(hardware, Hardware | None):
        problems.append(f"hardware={hardware!r}")
    if problems:
        raise ArgumentError(
            message(
                f"{name} was given limits that are none",
                problems,
                "max_bytes is a positive whole number of bytes a device, hardware is of the class "
                "in meshwise.cost.hardware.",
                "Leave out what is not to be limited.",
            )
        )
    return Limits(hardware, most)


def _targets(
    leaves: Sequence[Any], specs: Sequence[Any], paths: Sequence[str], is_traced: bool
) -> list[NamedSharding | None]:
    """Where every array is to go; None for those that stay."""
    found: list[NamedSharding | None] = []
    problems: list[str] = []
    for leaf, spec, path in zip(leaves, specs, paths, strict=True):
        if spec is None:
            found.append(None)
            continue
        lies = None if isinstance(leaf, _jax.Tracer) else getattr(leaf, "sharding", None)
        mesh = lies.mesh if isinstance(lies, NamedSharding) else _jax.context_mesh()
        if not isinstance(spec, NamedSharding | PartitionSpec):
            problems.append(f"{path}: {spec!r} is neither a PartitionSpec nor a NamedSharding")
            continue
        if isinstance(spec, PartitionSpec) and mesh is None:
            problems.append(f"{path} lies on no mesh, so {spec} says nothing of it")
            continue
        named, wrong = _named(spec, mesh, np.shape(leaf), path, is_traced)
        found.append(named)
        problems += wrong
        if not wrong and isinstance(named.mesh, AbstractMesh) and not is_traced:
            problems.append(f"{path}: {spec} is on a mesh without devices")
    _refuse(problems, "mw.reshard was given shardings that do not fit")
    return found


def _refuse(problems: Sequence[str], asked: str) -> None:
    if problems:
        raise HintError(
            message(
                asked,
                problems,
                "A sharding has at most one entry per dim and names only axes of its mesh, each "
                "once.",
                "Give a NamedSharding on a mesh with devices, or a PartitionSpec for an array that "
                "lies on one.",
            )
        )


def _check_arrays(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    strangers = [
        f"{path} is {describe(leaf)}"
        for leaf, path in zip(leaves, paths, strict=True)
        if isinstance(leaf, jax.ShapeDtypeStruct) or _jax.array_type(leaf) is None
    ]
    if strangers:
        raise ArgumentError(
            message(
                "mw.reshard was given values that are no arrays",
                strangers,
                "Only arrays have parts to send.",
                "Leave others out of the tree; mw.reshard_plan takes a shape and a dtype.",
            )
        )
