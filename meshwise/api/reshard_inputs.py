"""What `mw.reshard` and `mw.reshard_plan` are given, checked."""

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwise import _jax
from meshwise.api.arguments import describe
from meshwise.api.options import check_is_mesh
from meshwise.cost.hardware import Hardware
from meshwise.errors import ArgumentError, HintError, MeshError, message
from meshwise.ir.mesh import refine_mesh
from meshwise.ir.numbers import number_of_bytes
from meshwise.run.transfers import KEPT_ANSWERS, Limits
from meshwise.trace import Problems, read_hint

# What is wrong with a sharding: of which kind, and a line that says it.
Misfit = tuple[str, str]

# Of each kind the rule and the way out.
_SAID_OF = {
    "kind": (
        "A sharding is a NamedSharding, or a PartitionSpec on the mesh where the array lies.",
        "Give one of these; jax.device_put puts an array on one device.",
    ),
    "spec": (
        "A sharding has at most one entry per dim and names only axes of its mesh, each once.",
        "Give a NamedSharding on a mesh with devices, or a PartitionSpec for an array that lies on"
        " one.",
    ),
    "open": (
        "Dims are left open inside of programs alone, where completion fills them.",
        "Name the axes of every dim; None keeps one whole on each device.",
    ),
    "uneven": (
        "Over Explicit axes shardings are part of types, and a type's shards are equal.",
        "Pad the array, give another sharding, or make the mesh of Auto axes.",
    ),
    "memory": (
        "Collectives go from one memory of devices' own to another.",
        "Leave memory_kind out; jax.device_put brings an array to another memory.",
    ),
}


def array_type(shape: Any, dtype: Any) -> tuple[tuple[int, ...], Any]:
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


def named(
    name: str, spec: Any, mesh: Any, shape: tuple[int, ...], path: str, may_be_open: bool = False
) -> tuple[NamedSharding, list[Misfit]]:
    """A sharding with its mesh, and what is wrong with it; `name` is what it was given to."""
    own = spec.mesh if isinstance(spec, NamedSharding) else mesh
    check_is_mesh(own, name)
    is_sharding = isinstance(spec, NamedSharding | PartitionSpec)  # others may have no hash
    read = _read_once if is_sharding else _read
    return read(spec, own, shape, path, may_be_open)


def refuse_no_mesh(specs: Mapping[str, Any], mesh: Any) -> None:
    """An error for specs, by their names, that are on no mesh."""
    bare = [f"{k} = {s}" for k, s in specs.items() if not isinstance(s, NamedSharding)]
    if bare and not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(
            message(
                f"{' and '.join(bare)} {'have' if len(bare) > 1 else 'has'} no mesh",
                [f"mesh={mesh!r}"],
                "A PartitionSpec is on a mesh, a NamedSharding names its own.",
                "Give a jax.sharding.Mesh or AbstractMesh, or NamedShardings.",
            )
        )


def _read(
    spec: Any, own: Any, shape: tuple[int, ...], path: str, may_be_open: bool
) -> tuple[NamedSharding, list[Misfit]]:
    """The same, on a mesh that is known."""
    refined = refine_mesh(own.axis_names, own.axis_sizes)
    wrong = Problems()
    hint = read_hint(spec, shape, refined, path, "", wrong)
    kind = "spec" if isinstance(spec, NamedSharding | PartitionSpec) else "kind"
    problems = [(kind, line) for line in wrong.misfits]
    is_open = hint is not None and None in hint.dims
    if is_open and not may_be_open:
        line = f"{path}: {spec} leaves a dim open; here is nothing to complete it from"
        problems = [("open", line)]
    if not problems and _is_elsewhere(spec, own):
        line = f"{path}: {spec} is not in the memory of the devices, where arrays are moved"
        problems = [("memory", line)]
    bare = spec.spec if isinstance(spec, NamedSharding) else spec
    own = _jax.auto_twin(own) if is_open else own  # no other may be open
    return NamedSharding(own, PartitionSpec() if problems else bare), problems


_read_once = lru_cache(KEPT_ANSWERS)(_read)


def _is_elsewhere(spec: Any, mesh: Any) -> bool:
    """Whether a sharding names a memory other than that in which devices compute."""
    kind = getattr(spec, "memory_kind", None)
    if kind is None or isinstance(mesh, AbstractMesh):
        return False
    return kind != mesh.devices.flat[0].default_memory().kind


def limits_of(name: str, max_bytes: Any, hardware: Any) -> Limits:
    """What plans are held to, checked."""
    problems = []
    most = number_of_bytes(max_bytes)
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


def targets_of(
    leaves: Sequence[Any], specs: Sequence[Any], paths: Sequence[str], is_traced: bool
) -> list[NamedSharding | None]:
    """Where every array is to go; None for those that stay."""
    found: list[NamedSharding | None] = []
    problems: list[Misfit] = []
    for leaf, spec, path in zip(leaves, specs, paths, strict=True):
        if spec is None:
            found.append(None)
            continue
        mesh = _mesh_of(leaf)
        if not isinstance(spec, NamedSharding | PartitionSpec):
            problems.append(
                ("kind", f"{path}: {spec!r} is neither a PartitionSpec nor a NamedSharding")
            )
            continue
        if isinstance(spec, PartitionSpec) and mesh is None:
            problems.append(("spec", f"{path} lies on no mesh, so {spec} says nothing of it"))
            continue
        own, wrong = named("mw.reshard", spec, mesh, np.shape(leaf), path, is_traced)
        if is_traced and not wrong and _jax.is_in_no_type(leaf, spec):
            wrong = [("uneven", f"{path}: {spec} does not divide {np.shape(leaf)}")]
        found.append(own)
        problems += wrong
        if not wrong and isinstance(own.mesh, AbstractMesh) and not is_traced:
            problems.append(("spec", f"{path}: {spec} is on a mesh without devices"))
    refuse_misfits("mw.reshard", problems)
    return found


def _mesh_of(leaf: Any) -> Any:
    """The mesh that a bare spec of an array is on: its own, that of its type, or the context's."""
    if isinstance(leaf, _jax.Tracer):
        typed = _jax.type_mesh(jax.typeof(leaf))
        return _jax.context_mesh() if typed.empty else typed
    lies = getattr(leaf, "sharding", None)
    return lies.mesh if isinstance(lies, NamedSharding) else _jax.context_mesh()


def refuse_misfits(name: str, problems: Sequence[Misfit]) -> None:
    """An error for what does not fit, with the rules that it breaks and no other."""
    if problems:
        rules, ways = zip(*[_SAID_OF[k] for k in _SAID_OF if k in dict(problems)], strict=True)
        raise HintError(
            message(
                f"{name} was given shardings that do not fit",
                [line for _, line in problems],
                " ".join(rules),
                " ".join(ways),
            )
        )


def check_arrays(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """An error for leaves that are no arrays."""
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
